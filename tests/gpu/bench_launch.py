"""Host time of one call, by way of calling: ``PYTHONPATH=tests python -m gpu.bench_launch --json FILE``.

In one process, in turns A B .. B A: the C function with a struct that is ready, ``Op.launch``, ``Op.run`` with torch
tensors, kernseal's function with FlashInfer's arguments, and FlashInfer's own, where it is installed. ``--native FILE``
takes in what the program ``launch`` of ``build_programs.sh`` printed: a run from C++ beside a bare launch. Refuses a tree
that is not a clean commit, unless told that it is a ``--trial``.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gpu.bench_document import Chart, bars
from gpu.bench_options import bundles_here, parser, save, stamp, use_gpu
from gpu.bundles import open_by_name
from gpu.left_out import reason
from gpu.problems import Case, call_args, flashinfer_args, make_inputs, prepare, workspace
from gpu.timing import Call, calls_us, summary
from gpu.xqa_problems import Runner, make

from kernseal.kernels.gdn_prefill.torch_api import chunk_gated_delta_rule
from kernseal.kernels.xqa_decode.torch_api import xqa
from kernseal.loader.bundle import Bundle
from kernseal.loader.op import Op
from kernseal.loader.serving import use_bundle

CALLS, WARM_UP, ROUNDS, QUICK_ROUNDS = 128, 3, 15, 4
"""Calls in a row that make a sample; the device is waited for between samples."""

C, LAUNCH, RUN = "C function", "Op.launch", "Op.run, torch tensors"
OURS, THEIRS = "kernseal, FlashInfer's arguments", "FlashInfer"
GOAL = 4.0
"""A call from Python over one from C, at most."""


def sample_us(call: Call) -> float:
    """Host time of one call among ``CALLS`` in a row."""
    return calls_us(call, CALLS)


def alternate(contenders: Mapping[str, Call], rounds: int) -> dict[str, dict[str, float]]:
    """Medians of each, in turns."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(WARM_UP + rounds):
        for name in (*contenders, *reversed(list(contenders))):
            sample = sample_us(contenders[name])
            if round_number >= WARM_UP:
                taken[name].append(sample)
    return {name: summary(samples) for name, samples in taken.items()}


def ways(op: Op, args: dict[str, Any]) -> dict[str, Call]:
    """The ways to run an op with these tensors."""
    fields = op._binder.values(args)
    handle, run, record = op._handle, op._run, op._layout.pack(list(fields.values()))
    without_stream = {name: value for name, value in args.items() if name != "stream"}
    return {
        C: lambda: run(handle, record),
        LAUNCH: lambda: op.launch(**fields),
        RUN: lambda: op.run(**without_stream),
    }


def gdn_prefill(bundle: Bundle) -> tuple[dict[str, Call], str, str, dict[str, Any]]:
    case = Case(lengths=(1,), heads=(1, 1, 1))
    op, x = prepare(bundle, case), make_inputs(case)
    args = call_args(case, x)
    args |= {"workspace": workspace(op, **args), "stream": torch.cuda.current_stream()}
    asked = flashinfer_args(case, x)
    calls = ways(op, args) | {OURS: lambda: chunk_gated_delta_rule(**asked)}
    return calls, "flashinfer.gdn_prefill", "chunk_gated_delta_rule", asked


def xqa_decode(bundle: Bundle) -> tuple[dict[str, Call], str, str, dict[str, Any]]:
    axes = {"dtype": "bf16", "kv_dtype": "bf16", "out_dtype": "bf16", "page_size": 16}
    axes |= {
        "head_dim": 128,
        "group_size": 8,
        "sliding_window": False,
        "spec_decode": False,
        "fp8_math": False,
    }
    p = make(axes, [16, 16], kv_heads=1)
    runner, out = Runner(bundle, axes), torch.empty_like(p.q)
    asked = {
        "q": p.q.unsqueeze(1),
        "k_cache": p.k,
        "v_cache": p.v,
        "page_table": p.page_table,
        "output": out.unsqueeze(1),
    }
    asked |= {"seq_lens": p.seq_lens.unsqueeze(1).view(torch.uint32), "num_kv_heads": 1, "page_size": 16}
    asked |= {"workspace_buffer": torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")}
    asked |= {"semaphores": torch.zeros(1 << 16, dtype=torch.uint32, device="cuda")}
    calls = ways(runner.op, runner.arguments(p, out)) | {OURS: lambda: xqa(**asked)}
    return calls, "flashinfer.xqa", "xqa", asked


OPS = {"gdn_prefill": gdn_prefill, "xqa_decode": xqa_decode}


def upstream(module: str, function: str, asked: dict[str, Any]) -> Call:
    """FlashInfer's own function, called once; raises whatever it does where it is not there or cannot compile."""
    found = getattr(importlib.import_module(module), function)
    found(**asked)
    torch.cuda.synchronize()
    return lambda: found(**asked)


def rows_of(bundle: Bundle, name: str, rounds: int) -> list[dict[str, Any]]:
    use_bundle(bundle)
    rows = []
    for op, made in OPS.items():
        calls, module, function, asked = made(bundle)
        row: dict[str, Any] = {"bundle": name, "op": op}
        try:
            calls[THEIRS] = upstream(module, function, asked)
        except Exception as error:  # whatever another package raises, the row says it
            row["left_out"] = {THEIRS: reason(error)}
        row["us"] = alternate(calls, rounds)
        rows.append(row)
        print(line(row), flush=True)
    return rows


def line(row: Mapping[str, Any]) -> str:
    times = {name: clock["median"] for name, clock in row["us"].items()}
    cells = ", ".join(f"{name} {us:.2f}" for name, us in times.items())
    ratios = ", ".join(f"{name} {times[name] / times[C]:.1f}" for name in times if name != C)
    left_out = "".join(f"; left out: {name}: {why}" for name, why in row.get("left_out", {}).items())
    return f"{row['bundle']} {row['op']}: {cells} us a call; of the C function: {ratios} (goal {GOAL:.0f}){left_out}"


def charts(report: Mapping[str, Any]) -> list[Chart]:
    """The charts of the benchmark document."""
    found = []
    for row in report["rows"]:
        samples = max(clock["samples"] for clock in row["us"].values())
        measures = f"Host time of one call of {CALLS} in a row, median of {samples}, ways in turns."
        values = {name: clock["median"] for name, clock in row["us"].items()}
        found.append(bars(f"Calls of {row['op']}, {row['bundle']}", measures, "µs", "way to call", values))
    native = report.get("native")
    if native:
        measures = (
            f"Host time of one of {native['launches']} in a row, median of {2 * native['rounds']}, in turns."
        )
        values = {}
        for row in native["rows"]:
            values |= {
                f"{row['op']}, kseal_*_run": row["run_us"],
                f"{row['op']}, bare launch": row["bare_us"],
            }
        found.append(bars("Runs from C++ beside bare launches", measures, "µs", "call", values))
    return found


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--native", type=Path, help="what the program launch printed")
    options = arguments.parse_args()
    report = stamp(options.trial)
    if options.native:
        report["native"] = json.loads(options.native.read_text())
    use_gpu()
    names = bundles_here()
    report["rows"] = []
    for name in names:
        with open_by_name(name) as bundle:
            report["rows"] += rows_of(bundle, name, QUICK_ROUNDS if options.quick else ROUNDS)
            torch.cuda.synchronize()
    save(options, "What a call costs the host", report, charts(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
