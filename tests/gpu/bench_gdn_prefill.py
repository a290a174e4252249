"""GDN prefill beside Triton (fla-core) and FlashInfer's own JIT, the ways to pass an HKV state, and what opening, preparing
and calling cost.

``PYTHONPATH=tests python -m gpu.bench_gdn_prefill --json FILE [--document FILE] [--quick]``. Refuses a tree that is not a
clean commit, unless told that it is a ``--trial``. Whoever is absent, raises or computes something else is left out of a
row, and the report says why. ``--quick``: a part of the grid and nothing else.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from gpu.bench_document import Chart
from gpu.bench_options import bundles_here, lines, parser, save, stamp, use_gpu
from gpu.bundles import folder, open_by_name, policy
from gpu.contenders import Contender, Contenders
from gpu.cp_rule import Point, verdict
from gpu.left_out import reasons
from gpu.problems import (
    SCALE,
    Case,
    Inputs,
    call_args,
    ends,
    flashinfer_args,
    make_inputs,
    prepare,
    workspace,
)
from gpu.timing import CLOCKS, DEVICE, Call, compare, per_call_us

from kernseal.kernels.gdn_prefill.torch_api import chunk_gated_delta_rule, use_bundle
from kernseal.loader.bundle import Bundle
from kernseal.loader.op import Op
from kernseal.loader.verify import verify_bundle

HEADS = (16, 16, 32)
LENGTHS: dict[str, tuple[int, ...]] = {
    "128": (128,),
    "512": (512,),
    "2048": (2048,),
    "8192": (8192,),
    "32768": (32768,),
    "16 x 1024": (1024,) * 16,
    "ragged 64..4096": (64, 128, 4096, 256, 1000, 2048, 333, 64),
}
TOKENS = tuple(2**i for i in range(7, 18))
"""Of each sequence: 128 .. 131,072."""
SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
QUICK_TOKENS, QUICK_SEQUENCES = (128, 2048, 8192, 32768, 131072), (1, 8, 64)
MOST_TOKENS = 131072
"""Of all sequences together: bounds time and memory."""
ROUNDS, SAMPLES = 3, 4
"""Of the grid: 24 measurements of device time a contender and row."""
LIMIT = 3e-2
"""Largest relative difference between two contenders' outputs."""
LONG = 2048
"""Tokens of a sequence from which the speed-up over Triton is a claim."""


def grid(quick: bool) -> list[tuple[int, int]]:
    """Sequences and tokens of each."""
    tokens, sequences = (QUICK_TOKENS, QUICK_SEQUENCES) if quick else (TOKENS, SEQUENCES)
    return [(count, length) for length in tokens for count in sequences if count * length <= MOST_TOKENS]


def milliseconds(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return round((time.perf_counter() - start) * 1e3, 3)


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def startup(name: str) -> dict[str, Any]:
    """Costs of a process that opens this bundle first and prepares a variant."""
    opened: list[Bundle] = []
    report: dict[str, Any] = {
        "verify_ms": milliseconds(lambda: verify_bundle(folder(name), policy=policy())),
        "open_ms": milliseconds(lambda: opened.append(open_by_name(name))),
        "open_again_ms": milliseconds(lambda: open_by_name(name).close()),
    }
    with opened[0] as bundle:
        before = used_bytes()
        report["prepare_ms"] = milliseconds(lambda: prepare(bundle, Case(heads=HEADS)))
        report["prepare_another_ms"] = milliseconds(
            lambda: prepare(bundle, Case(heads=HEADS, state_layout="hkv"))
        )
        report["prepare_same_ms"] = milliseconds(lambda: prepare(bundle, Case(heads=HEADS)))
        op = prepare(bundle, Case(heads=HEADS))
        run_once(op, Case(heads=HEADS))
        report["device_bytes_of_two_variants"] = used_bytes() - before
        report["workspace_bytes"] = op.workspace_size()
        report["variants"] = len(bundle.variants())
    return report


def run_once(op: Op, case: Case) -> None:
    call_of(op, case)()
    torch.cuda.synchronize()


def call_of(op: Op, case: Case) -> Call:
    """A call with everything allocated beforehand."""
    args = call_args(case, make_inputs(case))
    scratch = workspace(op, **args)
    stream = torch.cuda.current_stream().cuda_stream
    return lambda: op.run(**args, workspace=scratch, stream=stream)


def addresses_of(op: Op, case: Case) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The same call with nothing but numbers, and the tensors to keep."""
    args = call_args(case, make_inputs(case))
    args["workspace"] = workspace(op, **args)
    numbers = {k: v.data_ptr() if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    hq, hk, hv = case.heads
    sizes = {"num_q_heads": hq, "num_k_heads": hk, "num_v_heads": hv, "head_dim": 128}
    sizes |= {
        "total_tokens": case.tokens,
        "num_seqs": len(case.lengths),
        "workspace_bytes": args["workspace"].numel(),
    }
    stream = torch.cuda.current_stream().cuda_stream
    return {**numbers, **sizes, "stream": stream}, [v for v in args.values() if isinstance(v, torch.Tensor)]


def host_overhead(bundle: Bundle) -> dict[str, float]:
    """Host time of one call by way of calling. The first is the C function through cffi and nothing else."""
    case = Case(lengths=(1,), heads=(1, 1, 1))
    op = prepare(bundle, case)
    numbers, kept = addresses_of(op, case)
    record = op._layout.pack(op._binder.row(numbers))
    asked = flashinfer_args(case, make_inputs(case))
    use_bundle(bundle)
    report = {
        "c_us": per_call_us(lambda: op._run(op._handle, record)),
        "addresses_us": per_call_us(lambda: op.run(**numbers)),
        "tensors_us": per_call_us(call_of(op, case)),
        "torch_api_us": per_call_us(lambda: chunk_gated_delta_rule(**asked)),
    }
    assert kept
    return report


def ours(bundle: Bundle, op_name: str, case: Case, x: Inputs, **cut: int) -> Contender:
    """``gdn_prefill``, or ``gdn_prefill_cp`` that cuts sequences so."""
    axes, args = dict(case.axes), call_args(case, x) | cut
    if op_name == "gdn_prefill_cp":
        del axes["alpha"], axes["beta"]
    op = bundle.prepare(op_name, device=0, **axes)
    scratch, stream = workspace(op, **args), torch.cuda.current_stream().cuda_stream
    return Contender(
        lambda: op.run(**args, workspace=scratch, stream=stream), lambda: args["o"], scratch.numel()
    )


def flashinfer(case: Case, x: Inputs, use_cp: bool) -> Contender:
    """FlashInfer's own function, which compiles the same kernel where it is called."""
    from flashinfer.gdn_prefill import chunk_gated_delta_rule as upstream

    args = call_args(case, x)

    def call() -> Any:
        return upstream(
            x.q,
            x.k,
            x.v,
            x.alpha,
            x.beta,
            scale=SCALE,
            initial_state=args["initial_state"],
            output_final_state=True,
            cu_seqlens=args["cu_seqlens"],
            output=args["o"],
            output_state=args["final_state"],
            use_cp=use_cp,
            max_seqlen=max(case.lengths),
        )

    return Contender(call, lambda: args["o"], peak_bytes(call))


def triton(case: Case, x: Inputs) -> Contender:
    """fla-core's function on the same numbers."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as chunked

    q, k, v, g, beta = x.q[None], x.k[None], x.v[None], x.alpha.log()[None], x.beta[None].bfloat16()
    state = x.state.transpose(-1, -2).contiguous()
    offsets = ends(case.lengths)

    def call() -> Any:
        with torch.no_grad():
            return chunked(
                q,
                k,
                v,
                g,
                beta,
                scale=SCALE,
                initial_state=state,
                output_final_state=True,
                cu_seqlens=offsets,
            )

    results = x.q.element_size() * case.tokens * case.out_heads * x.v.shape[-1] + state.nbytes
    return Contender(call, lambda: call()[0][0], peak_bytes(call) - results)


def contenders_of(bundles: Mapping[str, Bundle], case: Case, given_up: dict[str, str]) -> Contenders:
    found, x = Contenders(LIMIT, given_up), make_inputs(case, made_on="cuda")
    for name, bundle in bundles.items():
        found.add(name, functools.partial(ours, bundle, "gdn_prefill", case, x))
    for name, bundle in bundles.items():
        cut = {"max_seqlen": max(case.lengths)}  # the library's choice of chunks
        found.add(f"{name} cp", functools.partial(ours, bundle, "gdn_prefill_cp", case, x, **cut))
    found.add("flashinfer", functools.partial(flashinfer, case, x, False))
    found.add("flashinfer cp", functools.partial(flashinfer, case, x, True))
    found.add("triton", functools.partial(triton, case, x))
    return found


def measured(
    bundles: Mapping[str, Bundle], case: Case, given_up: dict[str, str], **how: Any
) -> dict[str, Any]:
    """All contenders of one problem in one run."""
    found = contenders_of(bundles, case, given_up)
    return {
        "tokens": case.tokens,
        "times": compare(found.calls, **how),
        "differs_by": found.differs_by,
        "scratch_bytes": found.scratch_bytes,
        "left_out": found.left_out,
    }


def by_length(bundles: Mapping[str, Bundle]) -> list[dict[str, Any]]:
    """With all three clocks, ragged lengths among them."""
    given_up: dict[str, str] = {}
    return [
        {"lengths": label, **measured(bundles, Case(lengths=lengths, heads=HEADS), given_up, clocks=CLOCKS)}
        for label, lengths in LENGTHS.items()
    ]


def over_grid(bundles: Mapping[str, Bundle], cells: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    rows, given_up = [], dict[str, str]()
    for index, (count, length) in enumerate(cells, 1):
        case, start = Case(lengths=(length,) * count, heads=HEADS), time.perf_counter()
        row = measured(bundles, case, given_up, rounds=ROUNDS, samples=SAMPLES, clocks=DEVICE)
        rows.append({"sequences": count, "length": length, **row})
        taken = ", ".join(f"{name} {us:.0f}" for name, us in device_us(row).items())
        print(
            f"{index}/{len(cells)} {count} x {length}: {taken} us; {time.perf_counter() - start:.1f} s",
            flush=True,
        )
        torch.cuda.empty_cache()
    return rows


def device_us(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: clocks["device_us"]["median"] for name, clocks in row["times"].items()}


def best_of(row: Mapping[str, Any], bundle: str) -> float | None:
    """Device time of the faster of a bundle's two ops."""
    times = device_us(row)
    return min((times[name] for name in (bundle, f"{bundle} cp") if name in times), default=None)


def ratios(
    rows: Sequence[Mapping[str, Any]], bundle: str, other: str, own: str = ""
) -> list[tuple[Mapping[str, Any], float]]:
    """Device time of ``other`` over that of ``own``, or of the faster op, in the rows that have both."""
    found = []
    for row in rows:
        times = device_us(row)
        mine = times.get(own) if own else best_of(row, bundle)
        if mine and other in times:
            found.append((row, times[other] / mine))
    return found


def claims(rows: Sequence[Mapping[str, Any]], bundle: str, sms: int) -> list[str]:
    """What the rows say about the claims: a line each with the worst case, and the rule for the context-parallel op."""
    said = []
    long = [row for row in rows if row["length"] >= LONG]
    if found := ratios(long, bundle, "triton"):
        row, least = min(found, key=lambda pair: pair[1])
        said.append(
            f"{bundle}: at least {least:.2f} x Triton from {LONG} tokens on, at {row['sequences']} x {row['length']}"
        )
    for own, other in ((bundle, "flashinfer"), (f"{bundle} cp", "flashinfer cp")):
        if found := ratios(rows, bundle, other, own):
            row, least = min(found, key=lambda pair: pair[1])
            said.append(
                f"{own}: at most {1 / least:.3f} x {other}'s time, at {row['sequences']} x {row['length']}"
            )
    for own in (bundle, f"{bundle} cp"):
        shares = [
            (row["scratch_bytes"][own] / row["scratch_bytes"]["triton"], row)
            for row in rows
            if own in row["scratch_bytes"] and row["scratch_bytes"].get("triton", 0) > 0
        ]
        if shares:
            share, row = max(shares, key=lambda pair: pair[0])
            said.append(
                f"{own}: scratch at most {100 * share:.2f} % of Triton's, at {row['sequences']} x {row['length']}"
            )
    if points := points_of(rows, bundle):
        said.append(f"{bundle}: {verdict(points, sms)}")
    return said


def points_of(rows: Sequence[Mapping[str, Any]], bundle: str) -> list[Point]:
    """Rows that have both ops."""
    times = [(row, device_us(row)) for row in rows]
    heads = max(HEADS)
    return [
        Point(row["sequences"] * heads, row["length"], us[bundle], us[f"{bundle} cp"])
        for row, us in times
        if bundle in us and f"{bundle} cp" in us
    ]


LABELS = {
    "sm90": "kernseal",
    "sm90 cp": "kernseal, context-parallel",
    "sm120_on_sm90": "kernseal, SM120's source",
    "sm120_on_sm90 cp": "the same, context-parallel",
    "flashinfer": "FlashInfer",
    "flashinfer cp": "FlashInfer, context-parallel",
    "triton": "Triton (fla-core)",
}
"""Contenders in charts."""


def charts(rows: Sequence[Mapping[str, Any]], bundle: str) -> list[Chart]:
    how = f"Device time between two events, median of {2 * ROUNDS * SAMPLES} runs, all sides in turn in one process; "
    how += "heads 16/16/32, D = 128, bf16."
    one = [row for row in rows if row["sequences"] == 1]
    x = "tokens of a sequence"
    names = dict.fromkeys(name for row in one for name in row["times"])
    time_of = {
        LABELS[name]: [(row["length"], device_us(row)[name]) for row in one if name in row["times"]]
        for name in names
    }
    counts = sorted({row["sequences"] for row in rows})
    faster = {
        f"{n} sequence{'s' * (n > 1)}": [
            (row["length"], round(ratio, 3))
            for row, ratio in ratios([r for r in rows if r["sequences"] == n], bundle, "triton")
        ]
        for n in counts
    }
    scratch = {
        LABELS[name]: [
            (row["length"], row["scratch_bytes"][name] / 1e6)
            for row in one
            if row["scratch_bytes"].get(name, 0) > 0
        ]
        for name in names
    }
    return [
        *lines("GDN prefill, one sequence", how, "µs", x, time_of, log=True),
        *lines(
            "GDN prefill: speed-up over Triton",
            f"Device time of fla-core's Triton over that of the faster of gdn_prefill and gdn_prefill_cp. {how}",
            "times as fast",
            x,
            faster,
            better="higher",
        ),
        *lines(
            "GDN prefill: scratch, one sequence",
            "Device memory that one call takes beyond its results.",
            "MB",
            x,
            scratch,
            log=True,
        ),
    ]


def peak_bytes(call: Call) -> int:
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def hkv_ways(bundle: Bundle) -> list[dict[str, Any]]:
    """HVK beside the two ways to give the kernel an HKV state: packed with strides, pooled with indices."""
    rows = []
    for label in ("128", "2048", "8192", "ragged 64..4096"):
        contenders = {}
        for layout in ("hvk", "hkv"):
            for pooled in (False, True):
                case = Case(lengths=LENGTHS[label], heads=HEADS, state_layout=layout, pooled=pooled)
                contenders[f"{layout} {'pooled' if pooled else 'packed'}"] = call_of(
                    prepare(bundle, case), case
                )
        rows.append({"lengths": label, "times": compare(contenders)})
    return rows


def table(title: str, rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row["times"]))
    print(f"\n{title}: median microseconds, wall / device / host")
    print(f"{'lengths':>18} " + " ".join(f"{name:>24}" for name in names))
    for row in rows:
        cells = []
        for name in names:
            clocks = row["times"].get(name)
            parts = (
                [f"{clocks[c]['median']:.0f}" for c in ("wall_us", "device_us", "host_us")]
                if clocks
                else ["-"]
            )
            cells.append(f"{' / '.join(parts):>24}")
        print(f"{row['lengths']:>18} " + " ".join(cells))


def parts(bundles: Mapping[str, Bundle]) -> dict[str, Any]:
    """What the grid leaves out."""
    return {
        "host_overhead": {name: host_overhead(bundle) for name, bundle in bundles.items()},
        "prefill": by_length(bundles),
        "hkv": {name: hkv_ways(bundle) for name, bundle in bundles.items()},
    }


def main() -> int:
    options = parser(__doc__).parse_args()
    report = stamp(options.trial) | {"heads": HEADS, "head_dim": 128, "dtype": "bf16", "quick": options.quick}
    use_gpu()
    torch.zeros(1, device="cuda")
    names = bundles_here()
    cells = grid(options.quick)
    each = 2 * ROUNDS * SAMPLES
    print(
        f"{len(cells)} rows of up to {2 * len(names) + 3} contenders, {each} measurements of 5 ms or more each"
    )
    if not options.quick:
        report["startup"] = {name: startup(name) for name in names}
    bundles = {name: open_by_name(name) for name in names}
    report["grid"] = over_grid(bundles, cells)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    report["claims"] = [line for name in names for line in claims(report["grid"], name, sms)]
    if not options.quick:
        report |= parts(bundles)
    torch.cuda.synchronize()
    for bundle in bundles.values():
        bundle.close()
    save(options, "GDN prefill", report, charts(report["grid"], names[0]))
    show(report)
    return 0


def show(report: Mapping[str, Any]) -> None:
    known = ("device", "driver", "commit", "dirty", "startup", "host_overhead")
    print(json.dumps({key: report[key] for key in known if key in report}, indent=1))
    if "prefill" in report:
        table("GDN prefill", report["prefill"])
    for name, rows in report.get("hkv", {}).items():
        table(f"HKV, {name}", rows)
    print("\n".join(["", *report["claims"], *reasons([*report["grid"], *report.get("prefill", [])])]))


if __name__ == "__main__":
    sys.exit(main())
