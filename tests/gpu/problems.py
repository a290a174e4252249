"""GDN prefill problems: what to compute, its inputs, and a run of it through the loader's generic call."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from kernseal.kernels.gdn_prefill.reference import Result, gated_delta_rule
from kernseal.loader.bundle import Bundle
from kernseal.loader.op import Op

D = 128
SCALE = 1 / math.sqrt(D)
DTYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "i32": torch.int32,
    "i64": torch.int64,
}
RAGGED = (100, 0, 1, 65, 0, 128, 200)
POOL_SPARE = 3
"""Rows of a pool that no sequence uses."""


@dataclass(frozen=True)
class Case:
    """One problem: sizes, the variant's axes, and a seed."""

    lengths: tuple[int, ...] = RAGGED
    heads: tuple[int, int, int] = (16, 16, 32)
    dtype: str = "bf16"
    state_dtype: str = "f32"
    state_layout: str = "hvk"
    index_dtype: str = "i64"
    initial_state: bool = True
    pooled: bool = False
    alpha: bool = True
    beta: bool = True
    checkpoint_every: int = 0
    seed: int = 0

    @property
    def out_heads(self) -> int:
        return max(self.heads[0], self.heads[2])

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def axes(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "state_dtype": self.state_dtype,
            "state_layout": self.state_layout,
            "index_dtype": self.index_dtype,
            "initial_state": self.initial_state,
            "pooled": self.pooled,
            "alpha": self.alpha,
            "beta": self.beta,
            "checkpoints": self.checkpoint_every > 0,
        }


KINDS = list(
    dict.fromkeys(
        [
            Case(),
            *(
                Case(dtype=d, state_layout=s, pooled=p)
                for d in ("bf16", "f16")
                for s in ("hvk", "hkv")
                for p in (False, True)
            ),
            *(
                Case(index_dtype="i32", state_layout=s, pooled=p)
                for s in ("hvk", "hkv")
                for p in (False, True)
            ),
            *(Case(initial_state=False, state_layout=s) for s in ("hvk", "hkv")),
            *(Case(state_dtype="bf16", state_layout=s, pooled=True) for s in ("hvk", "hkv")),
            *(Case(checkpoint_every=64, pooled=p) for p in (False, True)),
        ]
    )
)
"""Every value of every axis that both prefills have, with what it may depend on."""


@dataclass
class Inputs:
    """Inputs on the device. ``state`` is [N, H, V, K] of the state's type, also for cases that do not pass it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    alpha: torch.Tensor
    beta: torch.Tensor
    state: torch.Tensor


@dataclass
class Outputs:
    """What a run wrote: states as [N, H, V, K]; ``pool`` is the whole pool in logical order, None when packed."""

    output: torch.Tensor
    state: torch.Tensor
    checkpoints: torch.Tensor | None = None
    pool: torch.Tensor | None = None


def make_inputs(case: Case, device: str = "cuda", made_on: str = "cpu") -> Inputs:
    """The same numbers for the same sizes and seed, on any device and whatever the layout.

    ``made_on="cuda"``: other numbers, in no time. The host takes seconds for a long sequence.
    """
    rng = torch.Generator(device=made_on).manual_seed(1000 * case.seed + 7 * case.tokens + sum(case.heads))
    hq, hk, hv = case.heads
    tokens, heads, dtype = case.tokens, case.out_heads, DTYPES[case.dtype]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, device=made_on)

    def unit(*shape: int) -> torch.Tensor:
        return torch.nn.functional.normalize(normal(*shape), dim=-1)

    made = Inputs(
        q=unit(tokens, hq, D).to(dtype),
        k=unit(tokens, hk, D).to(dtype),
        v=normal(tokens, hv, D).to(dtype),
        alpha=torch.exp(-0.1 * torch.rand((tokens, heads), generator=rng, device=made_on)),
        beta=torch.sigmoid(normal(tokens, heads)),
        state=(0.1 * normal(len(case.lengths), heads, D, D)).to(DTYPES[case.state_dtype]),
    )
    return Inputs(**{name: tensor.to(device) for name, tensor in vars(made).items()})


def ends(lengths: Sequence[int], index_dtype: str = "i64", device: str = "cuda") -> torch.Tensor:
    """``cu_seqlens``."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=DTYPES[index_dtype]).to(device)


@lru_cache(maxsize=64)
def _oracle(case: Case) -> Result:
    x = make_inputs(case)
    return gated_delta_rule(
        x.q,
        x.k,
        x.v,
        case.lengths,
        scale=SCALE,
        alpha=x.alpha if case.alpha else None,
        beta=x.beta if case.beta else None,
        initial_state=x.state if case.initial_state else None,
        checkpoint_every=case.checkpoint_every,
    )


def oracle(case: Case) -> Result:
    """The float64 result; the layout, pooling and index type change nothing in it, so they share one computation."""
    return _oracle(Case(**{**vars(case), "state_layout": "hvk", "index_dtype": "i64", "pooled": False}))


def in_layout(state: torch.Tensor, layout: str) -> torch.Tensor:
    """[.., V, K] to a new contiguous tensor of that memory order; its own inverse."""
    return (state.transpose(-1, -2) if layout == "hkv" else state).contiguous()


def rows_of(case: Case) -> list[int]:
    """A pool row for each sequence: unique, out of order, some rows unused."""
    count = len(case.lengths)
    return random.Random(count).sample(range(count + POOL_SPARE), count)


def prepare(bundle: Bundle, case: Case) -> Op:
    return bundle.prepare("gdn_prefill", device=0, **case.axes)


def workspace(op: Op, **sizes: Any) -> torch.Tensor:
    """Scratch full of garbage, so that nothing depends on its contents."""
    return torch.full((op.workspace_size(**sizes),), 0xAB, dtype=torch.uint8, device="cuda")


def blank(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory in which an element that was not written shows."""
    return torch.full(shape, math.nan, dtype=dtype, device="cuda")


def flashinfer_args(case: Case, x: Inputs) -> dict[str, Any]:
    """Arguments of FlashInfer's ``chunk_gated_delta_rule`` that also ask for the final state."""
    given = {"q": x.q, "k": x.k, "v": x.v, "g": x.alpha, "beta": x.beta, "initial_state": x.state}
    return {**given, "output_final_state": True, "cu_seqlens": ends(case.lengths)}


def call_args(case: Case, x: Inputs) -> dict[str, Any]:
    """Every argument of ``Op.run`` but workspace and stream, with fresh outputs."""
    state_dtype, n, heads = DTYPES[case.state_dtype], len(case.lengths), case.out_heads
    args: dict[str, Any] = {
        "q": x.q,
        "k": x.k,
        "v": x.v,
        "o": blank(case.tokens, heads, D, dtype=DTYPES[case.dtype]),
        "cu_seqlens": ends(case.lengths, case.index_dtype),
        "scale": SCALE,
    }
    if case.alpha:
        args["alpha"] = x.alpha
    if case.beta:
        args["beta"] = x.beta
    if case.pooled:
        rows = rows_of(case)
        pool = blank(n + POOL_SPARE, heads, D, D, dtype=state_dtype)
        pool[rows] = in_layout(x.state, case.state_layout)
        args |= {"initial_state": pool, "final_state": pool}
        args["state_indices"] = torch.tensor(rows, dtype=DTYPES[case.index_dtype]).to("cuda")
    else:
        args["final_state"] = blank(n, heads, D, D, dtype=state_dtype)
        if case.initial_state:
            args["initial_state"] = in_layout(x.state, case.state_layout)
    if case.checkpoint_every:
        counts = [length // case.checkpoint_every for length in case.lengths]
        args["checkpoints"] = blank(sum(counts), heads, D, D, dtype=state_dtype)
        args["checkpoint_cu_starts"] = ends(counts, case.index_dtype)
        args["checkpoint_every"] = case.checkpoint_every
    return args


def launch(op: Op, args: dict[str, Any]) -> None:
    """One call on torch's current stream."""
    op.run(**args, workspace=workspace(op, **args), stream=torch.cuda.current_stream())


def results(case: Case, args: dict[str, Any]) -> Outputs:
    """The outputs among ``args``, in logical order."""
    states = in_layout(args["final_state"], case.state_layout)
    if not case.pooled:
        return Outputs(args["o"], states, args.get("checkpoints"))
    rows = args.get("output_state_indices", args["state_indices"]).long()
    return Outputs(args["o"], states[rows], args.get("checkpoints"), states)


def run(bundle: Bundle, case: Case, x: Inputs | None = None) -> Outputs:
    """Prepare, run and wait."""
    args = call_args(case, x or make_inputs(case))
    launch(prepare(bundle, case), args)
    torch.cuda.synchronize()
    return results(case, args)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want|| in float64; 0 for empty tensors, infinite where something is not finite."""
    if want.numel() == 0:
        return 0.0
    got = got.double()
    if not bool(got.isfinite().all()):
        return math.inf
    norm = float(want.double().norm())
    error = float((got - want.double()).norm())
    return error / norm if norm else error
