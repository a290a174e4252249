"""Benchmark documents: numbers that say what they are of (``export/schemas/bench.schema.json``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from kernseal.loader.errors import Malformed
from kernseal.loader.safe_read import printable, read_path

SCHEMA = Path(__file__).with_name("schemas") / "bench.schema.json"
MAX_BYTES = 16 << 20
X = float | str


@dataclass(frozen=True)
class Provenance:
    """What numbers are of. ``dirty``: the tree was not the commit, so that they are of none."""

    device: str
    driver: str
    commit: str
    dirty: bool
    date: str
    command: str
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Chart:
    """Values over x: numbers, or names of which each is a group of bars.

    Attributes:
        measures: what was measured, and what a point is.
        unit: of the values.
        better: ``lower`` or ``higher``.
        log, x_log: which axes are logarithmic.
        series: by name, its points in the order of x.
    """

    title: str
    measures: str
    unit: str
    better: str
    log: bool
    x_label: str
    x_log: bool
    series: Mapping[str, Sequence[tuple[X, float]]] = field(hash=False)

    @property
    def xs(self) -> list[X]:
        """Every x of a series: numbers ascending, names as they come."""
        found = list(dict.fromkeys(x for points in self.series.values() for x, _ in points))
        return found if self.named else sorted(found, key=float)

    @property
    def named(self) -> bool:
        return any(isinstance(x, str) for points in self.series.values() for x, _ in points)


@dataclass(frozen=True)
class Document:
    """One file of charts that were measured together."""

    file: str
    title: str
    provenance: Provenance
    charts: tuple[Chart, ...]


def read(path: Path) -> Document:
    """Read and check one document.

    Raises:
        Malformed: it does not fit; the message names file and field.
        VerificationFailed: it is not there, or no file.
    """
    data = _parse(path)
    charts = tuple(_chart(f"{path}: charts.{index}", each) for index, each in enumerate(data["charts"]))
    return Document(printable(path.name), data["title"], Provenance(**data["provenance"]), charts)


def _parse(path: Path) -> Any:
    import jsonschema

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number of JSON")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
        return found

    try:
        text = read_path(path, limit=MAX_BYTES).decode()
        data = json.loads(text, parse_constant=refuse, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{path}: no JSON: {error}") from None
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    found = sorted(validator.iter_errors(data), key=lambda error: [str(part) for part in error.absolute_path])
    if found:
        where = ".".join(str(part) for part in found[0].absolute_path) or "top level"
        raise Malformed(f"{path}: {where}: {found[0].message[:300]}")
    return data


def _chart(where: str, data: Mapping[str, Any]) -> Chart:
    chart = Chart(
        data["title"],
        data["measures"],
        data["unit"],
        data["better"],
        data.get("log", False),
        data["x"]["label"],
        data["x"].get("log", False),
        {name: [(x, y) for x, y in points] for name, points in data["series"].items()},
    )
    for name, points in chart.series.items():
        for index, (x, y) in enumerate(points):
            _check_point(f"{where}.series.{name}.{index}", chart, x, y)
        if len({x for x, _ in points}) < len(points):
            raise Malformed(f"{where}.series.{name}: an x is there twice; supported is each once")
    if chart.named and chart.x_log:
        raise Malformed(f"{where}.x.log: true, and the x are names")
    return chart if chart.named else replace(chart, series={k: sorted(v) for k, v in chart.series.items()})


def _check_point(where: str, chart: Chart, x: X, y: float) -> None:
    """What a schema cannot say: numbers that can be drawn, and x of one kind."""
    if isinstance(x, str) != chart.named:
        raise Malformed(
            f"{where}.0: {x!r}, while other x of this chart are {'names' if chart.named else 'numbers'}"
        )
    for at, value, log in ((0, x, chart.x_log), (1, y, chart.log)):
        if isinstance(value, str):
            continue
        if not abs(value) <= 1e300 or (log and not value >= 1e-300):
            raise Malformed(
                f"{where}.{at}: {value!r}: supported on its axis is {'more than 0' if log else 'a finite number'}"
            )
