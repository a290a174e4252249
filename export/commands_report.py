"""``kernseal report``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kernseal.export import output
from kernseal.loader.errors import InvalidArgument


@click.command()
@click.argument("path", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("report.html"),
    show_default=True,
    help="The page to write.",
)
@click.option(
    "--pins",
    type=click.Path(path_type=Path),
    help="A lock file, or a folder of them, to trust and to compare with.  [default: the committed ones]",
)
@click.option(
    "--key",
    "keys",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A public key file, or a folder of them, to trust.",
)
@click.option(
    "--bench",
    "benches",
    multiple=True,
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="A benchmark document to plot, or a folder of them; may be repeated. Needs kernseal[report].",
)
@click.option(
    "--svg",
    type=click.Path(path_type=Path),
    help="Also write each plot into this folder, as FILE-TITLE.svg.",
)
@output.as_json
def report(
    path: Path,
    out: Path,
    pins: Path | None,
    keys: tuple[Path, ...],
    benches: tuple[Path, ...],
    svg: Path | None,
    as_json: bool,
) -> None:
    """Write one HTML page about a bundle or a folder of them: trust, coverage, kernels, sizes, changes, benchmarks.

    Whom to trust is as with verify-bundle. The page shows a refused bundle as refused; it vouches for nothing itself.

    \b
    Examples:
      kernseal report dist
      kernseal report dist --out report.html --bench launch.json --svg docs/pictures
    """
    from kernseal.export import bench, files, paths, report_bundle, report_changes
    from kernseal.export import report as reporting
    from kernseal.loader.policy import Policy

    folders = report_bundle.find(path)
    _keep_out(folders, [out, *([svg / "x"] if svg else [])])
    locks = report_changes.read_locks(pins or paths.manifests())
    policy = Policy.from_options(pins, keys)
    documents = [bench.read(file) for each in benches for file in _documents(each)]
    bundles = [report_bundle.read(folder, policy, locks) for folder in folders]
    drawn = reporting.draw(documents)
    pictures = _pictures(drawn, svg) if svg else {}
    html = reporting.page(report_bundle.folder_name(path), bundles, drawn)
    for target, text in {**pictures, out: html}.items():
        files.write_atomic(target, text)
    data = {
        "report": str(out),
        "sha256": files.sha256_bytes(html),
        "svg": [str(picture) for picture in pictures],
        "bundles": [reporting.summary(bundle) for bundle in bundles],
    }

    def people() -> None:
        refused = [bundle.name for bundle in bundles if not bundle.accepted]
        told = f"; refused: {', '.join(refused)}" if refused else ""
        many = "bundle" if len(bundles) == 1 else "bundles"
        click.echo(
            f"{output.folder(out)}: {len(bundles)} {many}, {len(bundles) - len(refused)} verified{told}"
        )
        for picture in pictures:
            click.echo(output.folder(picture))

    output.show(data, as_json, people)


def _documents(path: Path) -> list[Path]:
    """A file as it is; of a folder, its documents in the order of their names."""
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.json"))
    if not found:
        raise InvalidArgument(
            f"--bench {path}: no *.json in it; supported is a document, or a folder of them"
        )
    return found


def _keep_out(bundles: Sequence[Path], outputs: Sequence[Path]) -> None:
    """Nothing is written into a bundle: a file that its manifest does not name would have it refused."""
    for target in outputs:
        for bundle in bundles:
            if target.resolve().is_relative_to(bundle.resolve()):
                raise InvalidArgument(
                    f"{target}: inside of the bundle {bundle}; write elsewhere, with --out or --svg"
                )


def _pictures(benches: Sequence[Any], folder: Path) -> dict[Path, bytes]:
    """What to write where; the name is the same as long as the document's file and the chart's title are."""
    found: dict[Path, bytes] = {}
    for bench in benches:
        for drawn in bench.drawn:
            title = f"{Path(bench.document.file).stem} {drawn.chart.title}".lower()
            name = re.sub(r"[^a-z0-9]+", "-", title).strip("-") or drawn.id
            target = folder / f"{name}.svg"
            if target in found:
                raise InvalidArgument(
                    f"--svg: two charts would both be {target}; give one another title or file"
                )
            found[target] = drawn.svg.encode()
    return found
