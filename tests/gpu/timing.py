"""Timing on a GPU: contenders take turns A B .. B A, and medians of wall, host and device time are reported."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Call = Callable[[], Any]
SPIN_CYCLES = 8_000_000
"""About 4 ms of a busy device: longer than any contender's host time, so that device time has no gaps in it."""


def wall_us(call: Call) -> float:
    """From the call to the end of its work."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6


def host_us(call: Call) -> float:
    """From the call to its return."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def device_us(call: Call, first: Call = lambda: None) -> float:
    """Between two events around the call, queued behind ``first`` and a device that is kept busy meanwhile."""
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first()
    torch.cuda._sleep(SPIN_CYCLES)
    before.record()
    call()
    after.record()
    torch.cuda.synchronize()
    return float(before.elapsed_time(after)) * 1e3


CLOCKS: Mapping[str, Callable[[Call], float]] = {
    "wall_us": wall_us,
    "host_us": host_us,
    "device_us": device_us,
}
DEVICE: Mapping[str, Callable[[Call], float]] = {"device_us": device_us}


def compare(
    contenders: Mapping[str, Call],
    rounds: int = 4,
    samples: int = 6,
    clocks: Mapping[str, Callable[[Call], float]] = CLOCKS,
) -> dict[str, dict[str, Any]]:
    """Median and 10th and 90th percentile of each clock, for each contender; 2 * rounds * samples measurements each."""
    for call in contenders.values():
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    taken: dict[str, dict[str, list[float]]] = {name: {clock: [] for clock in clocks} for name in contenders}
    order = [*contenders, *reversed(list(contenders))]
    for _ in range(rounds):
        for name in order:
            for clock, measure in clocks.items():
                taken[name][clock] += [measure(contenders[name]) for _ in range(samples)]
    return {
        name: {clock: summary(values) for clock, values in found.items()} for name, found in taken.items()
    }


def summary(values: list[float]) -> dict[str, float]:
    tenths = statistics.quantiles(values, n=10)
    return {
        "median": round(statistics.median(values), 2),
        "p10": round(tenths[0], 2),
        "p90": round(tenths[-1], 2),
        "samples": len(values),
    }


def calls_us(call: Call, calls: int) -> float:
    """Host time of one call among so many in a row."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    taken = (time.perf_counter() - start) / calls * 1e6
    torch.cuda.synchronize()
    return taken


def per_call_us(call: Call, calls: int = 100, loops: int = 30) -> float:
    """Host time of one call among many: the median over loops of back-to-back calls that the device keeps up with."""
    call()
    return round(statistics.median(calls_us(call, calls) for _ in range(loops)), 2)
