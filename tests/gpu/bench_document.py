"""Benchmark documents (``docs/report.md``) from what a GPU program measured."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernseal.export.bench import Document, read

Chart = dict[str, Any]


def can_write() -> bool:
    """Whether the reader that checks a document has what it needs."""
    return importlib.util.find_spec("jsonschema") is not None


def bars(
    title: str, measures: str, unit: str, label: str, values: Mapping[str, float], *, log: bool = False
) -> Chart:
    """A chart of one lower-is-better value for each name, in the given order."""
    series = {"median": [[name, value] for name, value in values.items()]}
    chart = {"title": title, "measures": measures, "unit": unit, "better": "lower", "log": log}
    return {**chart, "x": {"label": label}, "series": series}


def write(
    path: Path,
    title: str,
    stamp: Mapping[str, Any],
    command: str,
    charts: Sequence[Chart],
    versions: Mapping[str, str],
) -> Document:
    """Write a document and read it as ``kernseal report`` would.

    Args:
        stamp: what ``gpu.provenance.provenance`` gave. A tree of which is not known whether it was clean counts as dirty.
        command: what measured.
        versions: what else took part, by name.

    Raises:
        Malformed: it does not fit, for example because there was no device.
    """
    provenance = {name: stamp.get(name) for name in ("device", "driver", "commit")}
    provenance |= {"dirty": stamp["dirty"] is not False, "date": stamp["date"].replace("+00:00", "Z")}
    provenance |= {"command": command, "versions": dict(versions)}
    document = {"schema": 1, "title": title, "provenance": provenance, "charts": list(charts)}
    path.write_text(json.dumps(document, indent=1) + "\n")
    return read(path)
