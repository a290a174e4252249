"""One self-contained HTML page about bundles and benchmarks: the same bytes for the same inputs, no script."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from kernseal.abi import model
from kernseal.export import bench, charts, output
from kernseal.export.bench import Chart, Document
from kernseal.export.report_bundle import Reported

TEMPLATES = Path(__file__).with_name("templates")
LETTERS = {"ran": "R", "retargeted": "T", "glue": "G", "inspected": "I"}
"""Evidence by a letter, for who does not see its colour."""
CHANGES = {
    "added": "added: in the bundle, not in the pins",
    "removed": "removed: in the pins, not in the bundle",
    "code": "with other machine code",
    "metadata": "with the same machine code and other bytes around it",
    "inputs": "with the same bytes from other inputs",
    "file": "other files of the bundle",
}


@dataclass(frozen=True)
class Drawn:
    """A chart with its picture. ``id`` is its own on the page."""

    id: str
    chart: Chart
    svg: str


@dataclass(frozen=True)
class Bench:
    """A benchmark document with its pictures."""

    document: Document
    drawn: tuple[Drawn, ...]


def draw(documents: Sequence[Document]) -> list[Bench]:
    """Every chart of every document.

    Raises:
        Unsupported: matplotlib is not installed.
    """
    numbers = itertools.count(1)
    made = []
    for document in documents:
        drawn = []
        for chart in document.charts:
            name = f"chart{next(numbers)}"
            drawn.append(Drawn(name, chart, charts.draw(document, chart, name)))
        made.append(Bench(document, tuple(drawn)))
    return made


def evidence() -> list[dict[str, str]]:
    """What the evidence of a variant means, strongest first, in the words of ``abi/types.yaml``."""
    (found,) = [enum for enum in model.load().enums if enum.name == "kseal_evidence"]
    constants = sorted(found.constants, key=lambda constant: -constant.value)
    return [{"name": one.name, "letter": LETTERS[one.name], "doc": one.doc} for one in constants]


def matrix(bundles: Sequence[Reported]) -> dict[str, dict[str, list[str | None]]]:
    """By op and variant, the evidence that each bundle records; None where it has no such variant."""
    found: dict[str, dict[str, list[str | None]]] = {}
    keys = sorted({(variant.op, variant.name) for bundle in bundles for variant in bundle.variants})
    of = [{(each.op, each.name): each.evidence for each in bundle.variants} for bundle in bundles]
    for op, name in keys:
        found.setdefault(op, {})[name] = [known.get((op, name)) for known in of]
    return found


def columns(bundles: Sequence[Reported]) -> list[str]:
    """What each bundle is called in a table: its target, and its folder where that is not enough."""
    many = Counter(bundle.target for bundle in bundles)
    return [
        bundle.target
        if bundle.target and many[bundle.target] == 1
        else f"{bundle.target} {bundle.name}".strip()
        for bundle in bundles
    ]


def summary(bundle: Reported) -> dict[str, Any]:
    """A bundle in numbers."""
    kernels = [kernel for variant in bundle.variants for kernel in variant.kernels]
    return {
        "bundle": bundle.name,
        "target": bundle.target,
        "accepted": bundle.accepted,
        "status": bundle.verdict["status"],
        "trusted_by": list(bundle.verdict["trusted_by"]),
        "variants": len(bundle.variants),
        "kernels": len(kernels),
        "spilling": sum(kernel.spill_bytes > 0 for kernel in kernels),
        "files": sum(size.files for size in bundle.sizes),
        "bytes": sum(size.bytes for size in bundle.sizes),
        "compressed": sum(size.compressed for size in bundle.sizes),
        "lock": bundle.changes.lock if bundle.changes else None,
        "moves": [move.to_json() for move in bundle.changes.moves] if bundle.changes else [],
    }


def page(title: str, bundles: Sequence[Reported], benches: Sequence[Bench]) -> bytes:
    """The page, as UTF-8.

    Args:
        title: what the reported folder is called.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "size": output.size,
        "short_entry": output.short_entry,
        "exact": lambda value: charts.number(value, 7),
        "text": charts.text,
        "breakable": _breakable,
        "by_op": lambda variants: itertools.groupby(variants, key=lambda variant: variant.op),
        "by_what": _by_what,
        "svg": Markup,  # made here, from a checked document
        "table": _table,
    }
    text = environment.get_template("report.html.j2").render(
        title=title,
        bundles=list(zip(bundles, columns(bundles), map(summary, bundles), strict=True)),
        evidence=evidence(),
        letters=LETTERS,
        matrix=matrix(bundles),
        changes=CHANGES,
        benches=benches,
    )
    return text.encode()


def _breakable(name: str) -> Markup:
    """A long name that may break after each underscore."""
    return Markup("_<wbr>").join(escape(part) for part in str(name).split("_"))


def _by_what(moves: Sequence[Any]) -> list[tuple[str, list[Any]]]:
    found = {what: [move for move in moves if move.what == what] for what in CHANGES}
    return [(what, some) for what, some in found.items() if some]


def _table(chart: Chart) -> list[tuple[bench.X, list[float | None]]]:
    """The numbers of a chart: for each x, the value of each series."""
    values = [dict(points) for points in chart.series.values()]
    return [(x, [known.get(x) for known in values]) for x in chart.xs]
