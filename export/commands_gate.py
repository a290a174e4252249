"""``kernseal gate``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from kernseal.export import files, output, progress, spec
from kernseal.loader.errors import InvalidArgument, PinsDiffer


@click.command()
@output.building
@click.option(
    "--update", is_flag=True, help="Write the pins that were found: for the reviewer, who commits them."
)
@click.option(
    "--summary", type=click.Path(path_type=Path), help="Also write a Markdown summary to this file."
)
def gate(
    sm: str,
    retarget: str | None,
    only: tuple[str, ...],
    jobs: int,
    source: Path | None,
    scheduler: str | None,
    no_cache: bool,
    update: bool,
    summary: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Build and compare every hash with the committed pins; say which input moved which artifact.

    \b
    Examples:
      kernseal gate --sm 120 --summary gate.md
      kernseal gate --sm all --update        (the reviewer accepts the new hashes)
    """
    from kernseal.export import build as building
    from kernseal.export import gate as gating

    if update and only:
        raise InvalidArgument("--update with --variant: pins are of whole bundles; leave --variant out")
    options = building.Options("default", only, jobs, source, None, not no_cache, scheduler=scheduler)
    report = progress.reporter(quiet or as_json)
    ops = spec.load_ops()
    results = [gating.gate(ops, target, options, report, update) for target in output.targets(sm, retarget)]
    if summary is not None:
        files.write_atomic(summary, gating.markdown(results).encode())
    data = [
        {
            "target": r.target.name,
            "ok": r.ok,
            "compared": r.compared,
            "partial": r.partial,
            "moves": [m.to_json() for m in r.moves],
            "written": r.written,
        }
        for r in results
    ]

    def people() -> None:
        for result in results:
            state = "as pinned" if result.ok else f"{len(result.moves)} differences"
            state += ", pins written" if result.written else ""
            click.echo(f"{result.target.name}: {result.compared} variants: {state}")
            if result.moves:
                rows = [(m.artifact, m.what, m.reason) for m in result.moves]
                output.table("", ("artifact", "what moved", "because"), rows)

    output.show(data, as_json, people)
    sys.exit(0 if update or all(r.ok for r in results) else PinsDiffer.exit_code)
