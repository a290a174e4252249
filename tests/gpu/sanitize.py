"""Small GDN prefill calls for compute-sanitizer: ``compute-sanitizer --tool memcheck python -m gpu.sanitize sm90``.

Inputs are made on the host, every buffer is an allocation of its own, and torch launches no kernel here, so whatever
the tool finds is in kernseal's kernels. Ends with the number of calls; results are checked against the oracle.
"""

from __future__ import annotations

import os
import sys
from typing import Any

# One cudaMalloc per tensor: an access past the end of one must not land in another.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch
from gpu.bundles import open_by_name
from gpu.problems import (
    DTYPES,
    POOL_SPARE,
    SCALE,
    Case,
    D,
    ends,
    in_layout,
    make_inputs,
    relative_error,
    rows_of,
)

from kernseal.kernels.gdn_prefill.reference import gated_delta_rule
from kernseal.loader.bundle import Bundle
from kernseal.loader.op import load_spec

PARTIAL = (65, 0, 1, 64, 100)
SMALL = (4, 4, 8)
CASES = [
    Case(lengths=PARTIAL, heads=SMALL),
    Case(lengths=PARTIAL, heads=SMALL, state_layout="hkv"),
    Case(lengths=PARTIAL, heads=SMALL, pooled=True),
    Case(lengths=PARTIAL, heads=SMALL, pooled=True, state_layout="hkv"),
    Case(lengths=PARTIAL, heads=SMALL, pooled=True, state_dtype="bf16"),
    Case(lengths=PARTIAL, heads=SMALL, pooled=True, index_dtype="i32"),
    Case(lengths=PARTIAL, heads=SMALL, initial_state=False),
    Case(lengths=PARTIAL, heads=SMALL, checkpoint_every=64),
    Case(lengths=PARTIAL, heads=SMALL, checkpoint_every=64, pooled=True),
    Case(lengths=PARTIAL, heads=SMALL, alpha=False, beta=False),
    Case(lengths=PARTIAL, heads=SMALL, dtype="f16"),
    Case(lengths=(129,), heads=(8, 2, 2)),
    Case(lengths=(1,), heads=(1, 1, 1)),
    Case(lengths=(0, 0), heads=(1, 1, 2)),
]
LIMIT = 8e-3


def upload(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cuda")


def unwritten(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory that initcheck knows nobody has written."""
    return torch.empty(shape, dtype=dtype, device="cuda")


def call(bundle: Bundle, case: Case, name: str = "gdn_prefill", **more: int) -> tuple[float, float]:
    """Run one case on ``name``, or another op that takes what it takes and ``more``; return the errors of output and
    state."""
    x = make_inputs(case, "cpu")
    heads, n, state_dtype = case.out_heads, len(case.lengths), DTYPES[case.state_dtype]
    gates = {"alpha": x.alpha if case.alpha else None, "beta": x.beta if case.beta else None}
    known = load_spec(name).config_defaults
    op = bundle.prepare(name, device=0, **{axis: value for axis, value in case.axes.items() if axis in known})
    args: dict[str, Any] = {name: upload(getattr(x, name)) for name in ("q", "k", "v")}
    args |= {name: upload(gate) for name, gate in gates.items() if gate is not None}
    args |= more
    # The output leaves by bulk tensor stores, which initcheck does not follow: it would call every byte of it unwritten.
    blank = torch.full((case.tokens, heads, D), float("nan"), dtype=DTYPES[case.dtype])
    args |= {"o": upload(blank), "scale": SCALE}
    args["cu_seqlens"] = ends(case.lengths, case.index_dtype)
    rows = list(range(n))
    if case.pooled:
        rows = rows_of(case)
        pool = torch.zeros((n + POOL_SPARE, heads, D, D), dtype=state_dtype)
        pool[rows] = in_layout(x.state, case.state_layout)
        args["initial_state"] = args["final_state"] = upload(pool)
        args["state_indices"] = upload(torch.tensor(rows, dtype=DTYPES[case.index_dtype]))
    else:
        args["final_state"] = unwritten(n, heads, D, D, dtype=state_dtype)
        if case.initial_state:
            args["initial_state"] = upload(in_layout(x.state, case.state_layout))
    if case.checkpoint_every:
        counts = [length // case.checkpoint_every for length in case.lengths]
        args["checkpoints"] = unwritten(sum(counts), heads, D, D, dtype=state_dtype)
        args["checkpoint_cu_starts"] = ends(counts, case.index_dtype)
        args["checkpoint_every"] = case.checkpoint_every
    size = op.workspace_size(**args)
    op.run(**args, workspace=unwritten(size, dtype=torch.uint8), stream=0)
    torch.cuda.synchronize()
    want = gated_delta_rule(
        x.q,
        x.k,
        x.v,
        case.lengths,
        scale=SCALE,
        initial_state=x.state if case.initial_state else None,
        checkpoint_every=case.checkpoint_every,
        **gates,
    )
    state = in_layout(args["final_state"].cpu(), case.state_layout)[rows]
    if case.checkpoint_every and relative_error(args["checkpoints"].cpu(), want.checkpoints) > LIMIT:
        raise SystemExit(f"wrong checkpoints: {case}")
    return relative_error(args["o"].cpu(), want.output), relative_error(state, want.final_state)


def check(bundle: Bundle, case: Case, *op: str, **more: int) -> None:
    errors = call(bundle, case, *op, **more)
    if not all(error <= LIMIT for error in errors):  # NaN is wrong too
        raise SystemExit(f"wrong result {errors}: {case} {more}")


def main() -> None:
    with open_by_name(sys.argv[1]) as bundle:
        for case in CASES:
            check(bundle, case)
        torch.cuda.synchronize()
    print(f"{len(CASES)} calls, all as the oracle has them")


if __name__ == "__main__":
    main()
