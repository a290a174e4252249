"""What the kernel benchmarks have in common: their options, a tree that can be named, and their documents."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from gpu.bench_document import Chart, can_write, write
from gpu.bundles import BUNDLES, folder
from gpu.provenance import not_clean, provenance, versions

PACKAGES = ("torch", "triton", "fla-core", "flashinfer-python", "nvidia-cutlass-dsl")
NAME_LENGTH = 80


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", type=Path, help="write every number here")
    made.add_argument("--document", type=Path, help="write charts for `kernseal report --bench` here")
    made.add_argument("--quick", action="store_true", help="a representative part of the grid")
    made.add_argument("--trial", action="store_true", help="measure whatever is there; the report says so")
    return made


def stamp(trial: bool) -> dict[str, Any]:
    """Provenance and versions. Ends the program unless this is a clean commit or a trial."""
    made = provenance() | {"trial": trial, "versions": versions(PACKAGES), "command": command()}
    if not trial and (why := not_clean(made)):
        print(f"refused: {why}")
        raise SystemExit(2)
    return made


def use_gpu() -> None:
    """Everything is measured on device 0. Ends the program where there is none."""
    import torch

    if not torch.cuda.is_available():
        print(f"refused: no GPU: torch {torch.__version__} sees none")
        raise SystemExit(2)
    torch.cuda.set_device(0)


def bundles_here() -> list[str]:
    """Names of the bundles that there are. Ends the program where there is none."""
    found = [name for name in BUNDLES if folder(name).is_dir()]
    if not found:
        print(f"refused: no bundle among {', '.join(BUNDLES.values())}")
        raise SystemExit(2)
    return found


def command() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return " ".join(["python", "-m", spec.name if spec else "?", *sys.argv[1:]])[:400]


def save(options: argparse.Namespace, title: str, report: dict[str, Any], charts: list[Chart]) -> None:
    """Write what was asked for. Numbers come first: a document that does not fit must not lose them."""
    write_numbers(options, report)
    write_charts(options, title, report, charts)


def write_numbers(options: argparse.Namespace, report: dict[str, Any]) -> None:
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")


def write_charts(
    options: argparse.Namespace, title: str, report: dict[str, Any], charts: list[Chart]
) -> None:
    if not options.document:
        return
    if not can_write():
        print("no document: jsonschema, which checks it, is not installed")
    elif not charts:
        print("no document: nothing to draw")
    else:
        write(options.document, title, report, report["command"], charts, report["versions"])


def lines(
    title: str,
    measures: str,
    unit: str,
    x: str,
    series: dict[str, list[tuple[float, float]]],
    *,
    better: str = "lower",
    log: bool = False,
) -> list[Chart]:
    """A chart of lines over a logarithmic x, or none where no line has a point."""
    drawn = {
        name[:NAME_LENGTH]: [list(point) for point in points] for name, points in series.items() if points
    }
    chart = {"title": title, "measures": measures, "unit": unit, "better": better, "log": log}
    return [{**chart, "x": {"label": x, "log": True}, "series": drawn}] if drawn else []
