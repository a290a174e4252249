"""``kernseal wheel``, ``push`` and ``pull``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kernseal.export import output
from kernseal.export.compressed import Sizes
from kernseal.export.trust_options import trusting
from kernseal.loader.policy import Policy


def transport_options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = (
        click.option("--plain-http", is_flag=True, help="The registry has no TLS. Never assumed."),
        click.option(
            "--ca",
            type=click.Path(path_type=Path),
            help="PEM certificates to believe instead of the system's.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("dist"),
    show_default=True,
    help="Folder for the wheel.",
)
@trusting
@output.as_json
def wheel(
    bundle: Path,
    out: Path,
    policy: Policy,
    as_json: bool,
) -> None:
    """Pack a bundle that verifies as a wheel; kernseal.loader.installed.find_bundle finds it once installed.

    \b
    Example:
      kernseal wheel dist/sm_120a-linux-x86_64 --out dist
    """
    from kernseal.export import wheel as packing

    made = packing.write(bundle, out, policy)
    data = {"wheel": str(made.path), "sha256": made.sha256, **asdict(made.sizes)}
    told = f"{output.folder(made.path)}  sha256 {made.sha256}\n{_told(made.sizes)}"
    output.show(data, as_json, lambda: click.echo(told))


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("reference", metavar="REF")
@transport_options
@trusting
@output.as_json
def push(
    bundle: Path,
    reference: str,
    plain_http: bool,
    ca: Path | None,
    policy: Policy,
    as_json: bool,
) -> None:
    """Upload a bundle that verifies to an OCI registry, as HOST[:PORT]/NAME:TAG. Credentials are those of docker login.

    \b
    Example:
      kernseal push dist/sm_120a-linux-x86_64 registry.example.com/kernels/sm_120a:0.1.0
    """
    from kernseal.export import registry

    transport = registry.Transport(plain_http, ca)
    pushed = registry.push(bundle, reference, policy, transport)
    data = {"reference": reference, "digest": pushed.digest, **asdict(pushed.sizes)}
    told = f"{reference}  {pushed.digest}\n{_told(pushed.sizes)}"
    output.show(data, as_json, lambda: click.echo(told))


@click.command()
@click.argument("reference", metavar="REF")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--sm", help="The SM that the bundle must be for.")
@transport_options
@trusting
@output.as_json
def pull(
    reference: str,
    folder: Path,
    sm: str | None,
    plain_http: bool,
    ca: Path | None,
    policy: Policy,
    as_json: bool,
) -> None:
    """Download a bundle from an OCI registry; DIR appears once pins or trusted signatures have vouched for it.

    REF is HOST[:PORT]/NAME:TAG, or HOST[:PORT]/NAME@sha256:... for one manifest and no other.

    \b
    Example:
      kernseal pull registry.example.com/kernels/sm_120a:0.1.0 bundles/sm_120a --sm 120
    """
    from kernseal.export import registry

    wanted = output.targets(sm)[0].name if sm else None
    transport = registry.Transport(plain_http, ca)
    pulled = registry.pull(reference, folder, policy, transport, wanted)
    found = pulled.bundle
    data = {
        "reference": reference,
        "bundle": str(folder),
        "target": found.target,
        "manifest_sha256": found.manifest_sha256,
        "trusted_by": list(found.trusted_by),
        **asdict(pulled.sizes),
    }
    told = f"{folder}: {found.target}, vouched for by {', '.join(found.trusted_by)}\n{_told(pulled.sizes)}"
    output.show(data, as_json, lambda: click.echo(told))


def _told(sizes: Sizes) -> str:
    """How large a bundle is, and how little of it travels."""
    return f"  {sizes.files} files of {output.size(sizes.bytes)} bytes, {output.size(sizes.compressed)} compressed"
