"""Turns the reports of ``run_all.sh`` into the results page.

``PYTHONPATH=tests python -m gpu.results_page build/gpu > docs/results-gdn-prefill.md``
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpu.left_out import reasons

BUNDLES = {"sm90": "SM90 class", "sm120_on_sm90": "SM120 class built for sm_90a"}
INTRODUCTION = """# GDN prefill: what was run, where, with what result

Made by `python -m gpu.results_page` from the reports of `tests/gpu/run_all.sh`; nothing below is typed by hand.
SM120 and SM121 artifacts are the same source built for their own SM, compiled and inspected; the source itself ran as the
retargeted bundle below. SM100 and SM103 are compiled and inspected, and the launches of SM100 compared byte for byte with
those of CuTe's own host object; they were not run. The `evidence` column of every table and manifest says the same.

To repeat it on an H200 or H100: build `make artifacts SM=90` and `make artifacts SM=120 RETARGET=90`, then
`KERNSEAL_COMMIT=$(git rev-parse HEAD) KERNSEAL_DIRTY=0 tests/gpu/run_all.sh` and look in `build/gpu/`.
"""


def table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = list(columns)
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)]) + "\n"


def provenance(report: Mapping[str, Any]) -> str:
    state = "dirty" if report["dirty"] else "clean"
    bundles = ", ".join(
        f"{name} `{report[f'bundle_{key}'][:16]}`"
        for key, name in BUNDLES.items()
        if f"bundle_{key}" in report
    )
    return (
        f"{report['device']}, driver {report['driver']}, torch {report['torch']}, {report['date'][:10]}, commit "
        f"`{report['commit'][:12]}` ({state}); manifests: {bundles}.\n"
    )


def worst(measured: Mapping[str, Mapping[str, Any]], test: str, bundle: str, field: str) -> float:
    found = [v[field] for name, v in measured.items() if name.startswith(f"{test}[{bundle}-") and field in v]
    return max(found, default=float("nan"))


def accuracy(report: Mapping[str, Any]) -> str:
    measured = report["measured"]
    tests = {
        "test_one_sequence": "one sequence, T = 1, 2, 63, 64, 65, 127, 128, 2048",
        "test_head_counts": "head counts 4/4/8, 32/32/32, 8/2/2",
        "test_every_variant": "every variant of the bundle",
        "test_checkpoints_at_several_distances": "checkpoints every 64, 128, 192 tokens",
        "test_agrees_with_transformers": "against transformers' own PyTorch reference",
    }
    rows = []
    for test, words in tests.items():
        cells = [
            f"{worst(measured, test, b, 'output'):.1e} / {worst(measured, test, b, 'state'):.1e}"
            for b in BUNDLES
        ]
        rows.append([words, *cells])
    text = "\n## Accuracy\n\nLargest relative error, output / final state; against a float64 recurrence unless said.\n\n"
    return text + table(["what", *BUNDLES.values()], rows) + tails(measured)


def tails(measured: Mapping[str, Mapping[str, Any]]) -> str:
    prefix = "test_tail_of_16_16_48_has_not_changed"
    rows = [
        [
            name.removeprefix(prefix).strip("[]"),
            f"{v['output']} of {v['of_output']:,}",
            f"{v['state']} of {v['of_state']:,}",
        ]
        for name, v in sorted(measured.items())
        if name.startswith(prefix)
    ]
    text = "\nHeads 16/16/48, the diagnostic case: elements beyond the tail limit. A count that grows fails the test.\n\n"
    return text + table(["bundle and dtype", "output", "state"], rows)


def bitwise(report: Mapping[str, Any]) -> str:
    rows = [
        [
            name.split("[")[1].rstrip("]"),
            "bitwise equal" if v["bitwise"] else f"{v['output']:.1e} / {v['state']:.1e}",
        ]
        for name, v in sorted(report["measured"].items())
        if name.startswith("test_two_calls_with_the_state_carried_are_one_call")
    ]
    return (
        "\n## Bitwise equalities\n\nHKV and HVK after transposing, one sequence alone and in any batch, eager and graph "
        "replay with rewritten buffers, two streams: bitwise equal, in every test of them. Two calls with the state "
        "carried, against one call:\n\n"
        + table(["bundle, tokens of the first call, layout", "one call against two"], rows)
    )


def sanitizers(report: Mapping[str, Any]) -> str:
    rows = [
        [run["tool"], BUNDLES[run["bundle"]], run["calls"], run["findings"], commit_of(run, report)]
        for run in report["runs"]
    ]
    note = "\nThe output tensor is filled before the call: initcheck does not follow bulk tensor stores.\n"
    return (
        "\n## compute-sanitizer\n\n" + table(["tool", "bundle", "calls", "findings", "commit"], rows) + note
    )


def commit_of(run: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """Of one run of a tool: reports may have been merged."""
    return f"`{run.get('commit', report['commit'])[:7]}`"


def speed(report: Mapping[str, Any]) -> str:
    rows = []
    for row in report["prefill"]:
        cells = [clocks_of(row["times"].get(name)) for name in (*BUNDLES, "flashinfer", "triton")]
        scratch = row["scratch_bytes"].get("triton")
        rows.append([row["lengths"], *cells, "-" if scratch is None else f"{scratch / 1e6:.0f} MB"])
    triton = f"Triton (fla-core {report['versions'].get('fla-core', '-')})"
    columns = ["tokens", *BUNDLES.values(), "FlashInfer's JIT", triton, "Triton scratch"]
    text = "\n## Speed\n\nHeads 16/16/32, D = 128, bf16. "
    text += "Median microseconds, wall / device / host, sides alternating in one run.\n\n"
    return text + table(columns, rows) + said(report) + hkv(report) + host(report) + startup(report)


def clocks_of(times: Mapping[str, Any] | None) -> str:
    if times is None:
        return "-"
    return " / ".join(f"{times[kind]['median']:.0f}" for kind in ("wall_us", "device_us", "host_us"))


def said(report: Mapping[str, Any]) -> str:
    """What the grid says about the claims, and who is missing from it or from the table."""
    missing = reasons([*report["grid"], *report["prefill"]])
    text = f"\n{len(report['grid'])} pairs of sequences and tokens, device time:\n\n"
    return text + "\n".join(f"- {line}" for line in [*report["claims"], *missing]) + "\n"


def hkv(report: Mapping[str, Any]) -> str:
    text = "\nState layouts, device microseconds:\n\n"
    rows: list[list[object]] = []
    columns: list[str] = []
    for bundle, entries in report["hkv"].items():
        for entry in entries:
            columns = list(entry["times"])
            cells = [f"{entry['times'][name]['device_us']['median']:.0f}" for name in columns]
            rows.append([BUNDLES[bundle], entry["lengths"], *cells])
    return text + table(["bundle", "tokens", *columns], rows)


def host(report: Mapping[str, Any]) -> str:
    names = {
        "c_us": "C",
        "addresses_us": "Python, addresses",
        "tensors_us": "Python, torch tensors",
        "torch_api_us": "FlashInfer's signature",
    }
    rows = [
        [words, *(f"{report['host_overhead'][b][key]:.1f}" for b in BUNDLES)] for key, words in names.items()
    ]
    text = "\nHost microseconds of one call (later ones: [runtimes.md](runtimes.md#what-a-call-costs-the-host)):\n\n"
    return text + table(["from", *BUNDLES.values()], rows)


def startup(report: Mapping[str, Any]) -> str:
    names = {
        "verify_ms": "verify the bundle",
        "open_ms": "open it, first in the process (verify, map the library, find the driver)",
        "open_again_ms": "open it again",
        "prepare_ms": "prepare a variant (read, hash, load)",
        "prepare_another_ms": "prepare another",
        "prepare_same_ms": "prepare the same again",
    }
    rows = [[words, *(f"{report['startup'][b][key]:.2f}" for b in BUNDLES)] for key, words in names.items()]
    return "\nStart-up, milliseconds:\n\n" + table(["step", *BUNDLES.values()], rows)


def page(folder: Path) -> str:
    tests, sanitizer, bench = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("tests", "sanitizer", "bench")
    )
    counts = (
        f"\n## Tests\n\n{provenance(tests)}\n{tests['tests']} tests collected, exit status {tests['exit']}.\n"
    )
    return (
        INTRODUCTION
        + counts
        + accuracy(tests)
        + bitwise(tests)
        + sanitizers(sanitizer)
        + speed(bench)
        + f"\n{provenance(bench)}"
    )


if __name__ == "__main__":
    sys.stdout.write(page(Path(sys.argv[1])))
