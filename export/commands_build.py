"""``kernseal build``, ``list`` and ``inspect``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from kernseal.export import output, progress, spec
from kernseal.loader.errors import InvalidArgument, Malformed
from kernseal.loader.statement import MORE_KERNELS

SHRINK = ("kernel",)
MAX_CUBIN_BYTES = 1 << 30
COLUMNS = ("op", "variant", "kernel", "regs", "spills", "smem st+dyn", "CTAs/SM", "bytes", "evidence")
NUMBERS = COLUMNS[3:8]


def kernel_rows(folder: Path) -> list[tuple[object, ...]]:
    """A row for each kernel that the bundle's manifest has; those after the first of a variant without its name."""
    rows: list[tuple[object, ...]] = []
    for k in kernels_with_occupancy(folder):
        rows.append((k["op"], k["variant"], *_numbers(k), output.size(k["bytes"]), k["evidence"]))
        rows += [("", "", *_numbers(other), "", "") for other in k.get(MORE_KERNELS, ())]
    return rows


def _numbers(kernel: Mapping[str, Any]) -> tuple[object, ...]:
    smem = f"{kernel['static_smem']}+{kernel['dynamic_smem']}"
    ctas = "?" if kernel["ctas_per_sm"] is None else kernel["ctas_per_sm"]
    return output.short_entry(kernel["entry"]), kernel["registers"], kernel["spill_bytes"], smem, ctas


def kernels_with_occupancy(folder: Path) -> list[dict[str, Any]]:
    """The manifest's record of each kernel, with ``ctas_per_sm`` (None where its cubin does not say how large a CTA is)."""
    from kernseal.loader.safe_read import directory, read_all
    from kernseal.loader.statement import FILE, MAX_BYTES, parse_statement

    found = []
    with directory(folder, follow=True) as root:
        statement = parse_statement(read_all(root, FILE, limit=MAX_BYTES))
        for kernel in statement.kernels:
            cubin = read_all(root, kernel.file, limit=MAX_CUBIN_BYTES)
            arch = statement.retarget or statement.sm
            made = _with_occupancy(arch, kernel.record, cubin)
            if MORE_KERNELS in made:
                made[MORE_KERNELS] = [_with_occupancy(arch, other, cubin) for other in made[MORE_KERNELS]]
            found.append(made)
    return found


def _with_occupancy(arch: str, kernel: Mapping[str, Any], cubin: bytes) -> dict[str, Any]:
    from kernseal.export import occupancy

    fits = occupancy.of_kernel(arch, kernel, cubin)
    return {**kernel, "ctas_per_sm": None if fits is None else fits.ctas}


@click.command()
@output.building
@output.host_option
@output.choosing
@click.option(
    "--key",
    type=click.Path(path_type=Path),
    help="Ed25519 private key (PEM). Default: KERNSEAL_SIGNING_KEY, else a developer key.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("dist"),
    show_default=True,
    help="Folder for bundles.",
)
def build(
    sm: str,
    retarget: str | None,
    host: str,
    profile: str | None,
    config: Path | None,
    settings: tuple[str, ...],
    only: tuple[str, ...],
    jobs: int,
    source: Path | None,
    scheduler: str | None,
    key: Path | None,
    out: Path,
    no_cache: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Build, sign and verify the bundle of one or more SMs. No GPU is needed.

    \b
    Examples:
      kernseal build --sm 120
      kernseal build --sm 90,120 --jobs 4 --key release.pem
      kernseal build --sm 120 --model config.json --set page_size=32
      kernseal build --sm all --profile full --scheduler tcp://farm:8786
      kernseal build --sm 120 --retarget 90     (runs the SM120 source on Hopper, for validation)
    """
    from kernseal.export import build as building
    from kernseal.export import signing

    wanted = output.targets(sm, retarget, host)
    ops = spec.load_ops()
    named, model = output.choice(profile, config, settings, ops)
    options = building.Options(named, only, jobs, source, None, not no_cache, out, model, scheduler)
    report = progress.reporter(quiet or as_json)
    signer = signing.find_key(key)
    if signer.created:
        report.note(f"made a developer key for signing: {signer.origin}; nobody else trusts it")
    results = [building.build(ops, target, options, signer, report) for target in wanted]
    data = [
        {
            "target": r.target.name,
            "bundle": str(r.path),
            "built": r.fresh,
            "signed_by": r.signed_by,
            "trusted_by": list(r.trusted_by),
            "kernels": r.statement["predicate"]["buildDefinition"]["internalParameters"]["kernels"],
        }
        for r in results
    ]

    def people() -> None:
        for result in results:
            _print(result)

    output.show(data, as_json, people)


def _print(result: Any) -> None:
    if not result.fresh:
        click.echo(
            f"{result.target.name}: nothing changed; {output.folder(result.path)} is verified"
            f" ({', '.join(result.trusted_by)})"
        )
        return
    rows = kernel_rows(result.path)
    variants = sum(1 for _, variant, *_ in rows if variant)
    title = f"{result.target.name}: {variants} variants, {len(rows)} kernels"
    output.table(title, COLUMNS, rows, NUMBERS, SHRINK)
    click.echo(f"signed with {result.signed_by}; vouched for by {', '.join(result.trusted_by)}")
    click.echo(output.folder(result.path))


@click.command(name="list")
@output.sm_option
@output.retarget_option
@output.choosing
@click.option(
    "--bundle", type=click.Path(path_type=Path), help="Also say whether this bundle has each variant."
)
@output.as_json
def list_variants(
    sm: str,
    retarget: str | None,
    profile: str | None,
    config: Path | None,
    settings: tuple[str, ...],
    bundle: Path | None,
    as_json: bool,
) -> None:
    """List the variants that a profile builds or a model needs, and whether a bundle has them.

    \b
    Examples:
      kernseal list --sm 120 --bundle dist/sm_120a-linux-x86_64
      kernseal list --sm 120 --model config.json --bundle dist/sm_120a-linux-x86_64
    """
    from kernseal.export.build import Options

    ops = spec.load_ops()
    named, model = output.choice(profile, config, settings, ops)
    options = Options(named, model=model)
    there = {f"{k['op']}/{k['variant']}" for k in _statement_kernels(bundle)} if bundle else None
    rows = []
    targets = output.targets(sm, retarget)
    for target in targets:
        for op in ops:
            for variant in options.variants(op, target):
                has = "" if there is None else ("yes" if variant.key in there else "no")
                rows.append(
                    {
                        "sm": target.name,
                        "op": op.name,
                        "class": variant.class_name,
                        "variant": variant.id,
                        "in_bundle": has,
                    }
                )
    columns = ("sm", "op", "class", "variant", "in_bundle")

    def people() -> None:
        output.table(f"{len(rows)} variants", columns, [tuple(row.values()) for row in rows])
        for line in dict.fromkeys(line for target in targets for line in options.left_out(ops, target)):
            click.echo(line)

    output.show(rows, as_json, people)


def _statement_kernels(bundle: Path) -> list[Mapping[str, Any]]:
    from kernseal.loader.safe_read import directory, read_all
    from kernseal.loader.statement import FILE, MAX_BYTES, parse_statement

    with directory(bundle, follow=True) as root:
        return [kernel.record for kernel in parse_statement(read_all(root, FILE, limit=MAX_BYTES)).kernels]


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@output.as_json
def inspect(path: Path, as_json: bool) -> None:
    """Show what a bundle or a single cubin holds. Reads only; it vouches for nothing (see verify-bundle).

    \b
    Examples:
      kernseal inspect dist/sm_120a-linux-x86_64
      kernseal inspect dist/sm_120a-linux-x86_64/cubin/gdn_prefill/bf16_sf32_hvk_i64_init_packed_alpha_beta.cubin
    """
    if not path.exists():
        raise InvalidArgument(f"{path}: not there; give a bundle's folder or a cubin")
    if path.is_file():
        _inspect_cubin(path, as_json)
        return
    output.show(
        kernels_with_occupancy(path),
        as_json,
        lambda: output.table(str(path), COLUMNS, kernel_rows(path), NUMBERS, SHRINK),
    )


def _inspect_cubin(path: Path, as_json: bool) -> None:
    from dataclasses import asdict

    from kernseal.export import elf
    from kernseal.loader.safe_read import read_path

    cubin = elf.read(read_path(path, limit=MAX_CUBIN_BYTES))
    if not cubin.entries:
        raise Malformed(f"{path}: no kernel in it")
    rows: Sequence[tuple[object, ...]] = [
        (
            output.short_entry(e.name),
            e.registers,
            e.frame,
            output.size(e.code_bytes),
            " ".join(f"{p.offset}:{p.size}" for p in e.params),
        )
        for e in cubin.entries.values()
    ]
    columns = ("kernel", "regs", "stack", "code bytes", "parameters offset:size")
    output.show(
        asdict(cubin),
        as_json,
        lambda: output.table(f"{path.name}  code sha256 {cubin.code_sha256}", columns, rows, columns[1:4]),
    )
