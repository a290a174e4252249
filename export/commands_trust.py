"""``kernseal verify-source``, ``verify-bundle``, ``keygen``, ``sign`` and ``doctor``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from kernseal.export import files, output, source
from kernseal.export import verify_source as verifying
from kernseal.export.trust_options import trusting
from kernseal.loader.errors import InvalidArgument, SourceInvalid
from kernseal.loader.policy import Policy


@click.command(name="verify-source")
@click.argument("path", required=False, type=click.Path(path_type=Path))
@output.as_json
def verify_source(path: Path | None, as_json: bool) -> None:
    """Check a FlashInfer wheel, unpacked wheel or checkout against the pins, file by file. Default: the pinned wheel.

    \b
    Examples:
      kernseal verify-source
      kernseal verify-source ../flashinfer
    """
    pin = source.upstream()
    given = path or source.fetch_wheel(pin)
    wanted = {**source.all_wanted(), **pin.licences}
    findings = verifying.verify(given, pin, wanted, source.listing())
    data = {
        "source": str(given),
        "pinned": pin.purl,
        "accepted": not findings,
        "files": len({**source.listing(), **wanted}),
        "findings": [finding.to_json() for finding in findings],
    }

    def people() -> None:
        for finding in findings:
            click.echo(str(finding))
        click.echo(
            f"{given}: {'not ' if findings else ''}the pinned source ({pin.purl}, {data['files']} files pinned)"
        )

    output.show(data, as_json, people)
    sys.exit(SourceInvalid.exit_code if findings else 0)


@click.command(name="verify-bundle")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--sm", help="The SM that the bundle must be for.")
@trusting
@output.as_json
def verify_bundle(path: Path, sm: str | None, policy: Policy, as_json: bool) -> None:
    """Check every file of a bundle against pins or trusted signatures. Offline, no sources needed.

    Without --pins or --key, the pins and keys of the installed package are trusted. What vouched is shown.

    \b
    Examples:
      kernseal verify-bundle dist/sm_120a-linux-x86_64
      kernseal verify-bundle /srv/bundle --sm 120 --key release.json
      kernseal verify-bundle /srv/bundle --both --min-version 0.2.0
    """
    from kernseal.loader.verify import verify_report

    wanted = output.targets(sm)[0].name if sm else None
    report = verify_report(path, policy=policy, sm=wanted)

    def people() -> None:
        for found in report["violations"]:
            click.echo(
                f"{found['status']}: {found['path']}: found {found['found']}; expected {found['expected']}"
            )
        if report["accepted"]:
            click.echo(
                f"accepted: {path} is {report['target']}, the {report['files']} files that its"
                f" manifest names, vouched for by {', '.join(report['trusted_by'])}"
            )
        else:
            click.echo(f"refused: {path}: {report['status']}")

    output.show(report, as_json, people)
    sys.exit(report["exit_code"])


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--name", help="What the public key is called. Default: the file's name.")
@output.as_json
def keygen(path: Path, name: str | None, as_json: bool) -> None:
    """Make an Ed25519 key pair: the private key at PATH (mode 0600), the public key beside it.

    \b
    Example:
      kernseal keygen ~/.config/kernseal/release.pem --name release-2027
    """
    from kernseal.export import signing

    public = signing.keygen(path, name)
    data = {"private": str(path), "public": str(public), "keyid": signing.read_private(path).keyid}
    output.show(
        data,
        as_json,
        lambda: click.echo(f"private key {path} (keep it), public key {public}, keyid {data['keyid']}"),
    )


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--key",
    type=click.Path(path_type=Path),
    help="Private key (PEM). Default: KERNSEAL_SIGNING_KEY, else the developer key.",
)
@click.option("--pins", type=click.Path(path_type=Path), help="A lock file, or a folder of them, to trust.")
@click.option(
    "--trust",
    "keys",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A public key file, or a folder of them, to trust.",
)
@output.as_json
def sign(bundle: Path, key: Path | None, pins: Path | None, keys: tuple[Path, ...], as_json: bool) -> None:
    """Add a signature to a bundle that pins or a trusted key already vouch for.

    The signature also vouches for the commit that the manifest names, which pins cannot cover.

    \b
    Example:
      kernseal sign dist/sm_120a-linux-x86_64 --key second.pem
    """
    from kernseal.export import signing
    from kernseal.loader.envelope import FILE

    if not bundle.is_dir():
        raise InvalidArgument(f"{bundle}: not a bundle's folder")
    signer = signing.find_key(key)
    envelope, statement = signing.endorse(bundle, signer, Policy.from_options(pins, keys))
    files.write_atomic(bundle / FILE, envelope)
    state = f"commit {statement.commit or 'unknown'}{' (dirty)' if statement.dirty else ''}"
    data = {
        "bundle": str(bundle),
        "keyid": signer.keyid,
        "signed_by": signer.origin,
        "commit": statement.commit,
        "dirty": statement.dirty,
    }
    output.show(
        data, as_json, lambda: click.echo(f"{bundle}, {state}: signed with {signer.origin} ({signer.keyid})")
    )


@click.command()
@output.as_json
def doctor(as_json: bool) -> None:
    """Check this machine: Python, pinned tools, cache, disk, driver.

    \b
    Example:
      kernseal doctor
    """
    from dataclasses import asdict

    from kernseal.export.doctor import doctor as examine
    from kernseal.loader.errors import ToolchainInvalid

    checks = examine()
    rows = [("ok" if c.ok else "NO", c.name, c.detail, c.hint) for c in checks]
    output.show(
        [asdict(c) for c in checks],
        as_json,
        lambda: output.table("doctor", ("", "check", "found", "what to do"), rows),
    )
    sys.exit(0 if all(c.ok for c in checks) else ToolchainInvalid.exit_code)
