"""GDN prefill beside Triton (fla-core), the ways to pass an HKV state, and what opening, preparing and calling cost.

``PYTHONPATH=tests python -m gpu.bench_gdn_prefill --json FILE``. Refuses a tree that is not a clean commit, unless told
that it is a ``--trial``. Without fla-core the comparison is left out and the report says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu.bundles import BUNDLES, folder, open_by_name, policy
from gpu.problems import SCALE, Case, call_args, ends, make_inputs, prepare, relative_error, workspace
from gpu.provenance import provenance
from gpu.timing import Call, compare, per_call_us

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
    values = op._binder.values(numbers)
    record = op._layout.pack(op._fields(values))
    x = make_inputs(case)
    offsets = ends(case.lengths)
    use_bundle(bundle)
    report = {
        "c_us": per_call_us(lambda: op._run(op._handle, record)),
        "addresses_us": per_call_us(lambda: op.run(**numbers)),
        "tensors_us": per_call_us(call_of(op, case)),
        "torch_api_us": per_call_us(
            lambda: chunk_gated_delta_rule(
                x.q,
                x.k,
                x.v,
                x.alpha,
                x.beta,
                initial_state=x.state,
                output_final_state=True,
                cu_seqlens=offsets,
            )
        ),
    }
    assert kept
    return report


def triton_call(case: Case) -> tuple[Call, Callable[[], torch.Tensor]] | None:
    """fla-core's call on the same numbers and its output, or None where it is not installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as triton
    except ImportError:
        return None
    x = make_inputs(case)
    q, k, v, g, beta = x.q[None], x.k[None], x.v[None], x.alpha.log()[None], x.beta[None].bfloat16()
    state = x.state.transpose(-1, -2).contiguous()
    offsets = ends(case.lengths)

    def call() -> Any:
        with torch.no_grad():
            return triton(
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

    return call, lambda: call()[0][0]


def against_triton(bundles: dict[str, Bundle]) -> list[dict[str, Any]]:
    rows = []
    for label, lengths in LENGTHS.items():
        case = Case(lengths=lengths, heads=HEADS)
        contenders: dict[str, Call] = {name: call_of(prepare(b, case), case) for name, b in bundles.items()}
        row: dict[str, Any] = {"lengths": label, "tokens": case.tokens}
        made = triton_call(case)
        if made is not None:
            contenders["triton"], output = made
            first = next(iter(bundles.values()))
            args = call_args(case, make_inputs(case))
            op = prepare(first, case)
            op.run(**args, workspace=workspace(op, **args), stream=torch.cuda.current_stream())
            row["triton_differs_by"] = relative_error(output(), args["o"])
            row["triton_scratch_bytes"] = peak_bytes(contenders["triton"])
        row["times"] = compare(contenders)
        rows.append(row)
    return rows


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--trial", action="store_true", help="measure whatever is there; the report says so")
    options = parser.parse_args()
    report = provenance() | {"trial": options.trial, "heads": HEADS, "head_dim": 128, "dtype": "bf16"}
    if not options.trial and (report["commit"] is None or report["dirty"] is not False):
        print(
            "refused: not a clean commit (KERNSEAL_COMMIT and KERNSEAL_DIRTY say so where there is no git); --trial"
        )
        return 2
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    names = [name for name in BUNDLES if folder(name).is_dir()]
    if not names:
        print(f"refused: no bundle among {', '.join(BUNDLES.values())}")
        return 2
    report["startup"] = {name: startup(name) for name in names}
    bundles = {name: open_by_name(name) for name in names}
    report["host_overhead"] = {name: host_overhead(bundle) for name, bundle in bundles.items()}
    report["prefill"] = against_triton(bundles)
    report["hkv"] = {name: hkv_ways(bundle) for name, bundle in bundles.items()}
    torch.cuda.synchronize()
    for bundle in bundles.values():
        bundle.close()
    options.json.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    print(
        json.dumps(
            {key: report[key] for key in ("device", "driver", "commit", "dirty", "startup", "host_overhead")},
            indent=1,
        )
    )
    table("GDN prefill", report["prefill"])
    for name, rows in report["hkv"].items():
        table(f"HKV, {name}", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
