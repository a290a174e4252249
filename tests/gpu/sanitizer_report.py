"""From the log of the four compute-sanitizer tools to a report: ``python -m gpu.sanitizer_report LOG JSON``.

Fails unless every tool ran to its end, on every bundle, with zero findings. ``--merge JSON REPORT...`` makes one of several:
what a later report has run to its end counts instead of an earlier one's, and each run says its commit.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu.provenance import provenance

_START = re.compile(r"^== (\w+) (\w+)$")
_END = re.compile(r"^== \w+ \w+: exit (\d+)")
_SUMMARY = re.compile(r"^========= (?:ERROR|RACECHECK) SUMMARY: (\d+)")
_CALLS = re.compile(r"^(\d+) calls, all as the oracle has them")


def parse(log: str) -> list[dict[str, Any]]:
    """One record a tool and bundle: findings and calls are None where the log does not tell."""
    runs: list[dict[str, Any]] = []
    for line in log.splitlines():
        if start := _START.match(line):
            runs.append({"tool": start[1], "bundle": start[2], "findings": None, "calls": None, "exit": None})
        elif runs and (end := _END.match(line)):
            runs[-1]["exit"] = int(end[1])
        elif runs and (summary := _SUMMARY.match(line)):
            runs[-1]["findings"] = int(summary[1])
        elif runs and (calls := _CALLS.match(line)):
            runs[-1]["calls"] = int(calls[1])
    return runs


def merged(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of several reports about one program, earliest first."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for report in reports:
        for run in report["runs"]:
            key = run["bundle"], run["tool"]
            if run["calls"] or key not in found:
                found[key] = {"commit": report["commit"], **run}
    return {**reports[-1], "runs": list(found.values()), "clean": all(map(clean, found.values()))}


def clean(run: Mapping[str, Any]) -> bool:
    return run["findings"] == 0 and bool(run["calls"]) and run["exit"] == 0


def main() -> None:
    if sys.argv[1] == "--merge":
        reports = [json.loads(Path(name).read_text()) for name in sys.argv[3:]]
        Path(sys.argv[2]).write_text(json.dumps(merged(reports), indent=1, sort_keys=True) + "\n")
        return
    log, target = map(Path, sys.argv[1:])
    runs = parse(log.read_text())
    report = {**provenance(), "clean": bool(runs) and all(map(clean, runs)), "runs": runs}
    target.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    for r in runs:
        print(
            f"{r['tool']:10} {r['bundle']:14} findings {r['findings']}, calls {r['calls']}, exit {r['exit']}"
        )
    raise SystemExit(0 if report["clean"] else 1)


if __name__ == "__main__":
    main()
