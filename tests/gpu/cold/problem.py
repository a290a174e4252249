"""The problem that every child of ``bench_cold`` solves, in a folder, and what the children have in common.

``problem.json`` has, by op, the axes of the variant, the sizes of the call, and type and shape of its inputs and outputs;
``OP.NAME`` is an input's bytes, ``OP.NAME.expected`` an output's float64 result, rounded to float32. Needs no packages.
"""

from __future__ import annotations

import json
import math
import time
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LIMIT = 3e-2
"""Largest ||error|| / ||reference|| of a right output: several times what 16 bits cost, and far from anything wrong."""
OPS = ("gdn_prefill", "xqa_decode")
MODEL = "model"
"""Both ops in one process and, where that is a step of its own, every other variant that a model needs prepared, too."""


class Laps:
    """Milliseconds of one part after the other, printed as one line when the first result is in host memory."""

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, part: str) -> None:
        now = time.perf_counter()
        self._parts[f"{part}_ms"] = round((now - self._last) * 1e3, 4)
        self._last = now

    def show(self) -> None:
        print(json.dumps(self._parts), flush=True)


def asked(what: str) -> tuple[str, ...]:
    """The ops of a child's argument."""
    return OPS if what == MODEL else (what,)


def definition(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "problem.json").read_text())
    return found


def inputs(folder: Path, op: str, names: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: (folder / f"{op}.{name}").read_bytes() for name in names}


def require_right(folder: Path, op: str, of: Mapping[str, Any], outputs: Mapping[str, bytes]) -> None:
    """End the process with what is wrong where an output is not the expected one; ``of`` says what they are."""
    for name, said in of.items():
        expected = array("f", (folder / f"{op}.{name}.expected").read_bytes())
        error = relative_error(_numbers(outputs[name], said["dtype"]), expected)
        if not error < LIMIT:
            raise SystemExit(f"{op}: {name} is off by {error:.3g}, at most {LIMIT} is right")


def relative_error(got: Sequence[float], want: Sequence[float]) -> float:
    """||got - want|| / ||want||; NaN where a number is none."""
    error = sum((a - b) ** 2 for a, b in zip(got, want, strict=True))
    return math.sqrt(error / sum(b * b for b in want))


def _numbers(data: bytes, dtype: str) -> array[float]:
    if dtype == "f32":
        return array("f", data)
    assert dtype == "bf16", dtype
    return array("f", array("I", (half << 16 for half in array("H", data))).tobytes())
