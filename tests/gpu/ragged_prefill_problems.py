"""Ragged prefill problems on a GPU: packed sequences with NaN around them, a planned call, and the float64 oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kernseal.kernels.ragged_prefill.reference import prefill

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
SCRATCH = 4 << 30
"""Bytes, where parts have a fixed length."""
SPARE = 3
"""Rows of q, k and v past the last sequence: NaN."""
LENGTHS = [
    *((1, 1), (1, 300), (1, 0), (0, 7), (3, 2), (15, 15), (16, 16), (17, 64), (31, 65)),
    *((63, 127), (64, 128), (65, 129), (127, 255), (128, 256), (129, 257), (40, 511)),
    *((5, 1025), (200, 70), (300, 10), (7, 0), (513, 513), (2, 4096)),
]
"""Rows of q and of k: around the edges of tiles of query rows (16, 64, 128) and of keys (16 to 256), some without keys and
some with more queries than keys."""
HEADS = ((4, 4), (8, 2), (7, 1), (12, 4))
"""Of q and of k: groups of 1, 4, 7 and 3, so that tiles end within a row's heads."""


def ends_of(lengths: Sequence[int]) -> list[int]:
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return ends


@dataclass
class Problem:
    """Tensors of one call.

    Attributes:
        lengths: rows of q and of k of each sequence.
        call: further arguments of the call, by field.
    """

    axes: Mapping[str, Any]
    lengths: list[tuple[int, int]]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    call: dict[str, Any] = field(default_factory=dict)

    @property
    def qo(self) -> list[int]:
        return ends_of([rows for rows, _ in self.lengths])

    @property
    def kv(self) -> list[int]:
        return ends_of([keys for _, keys in self.lengths])

    def only(self, chosen: Sequence[int]) -> Problem:
        """The same sequences in another batch."""
        qo, kv = self.qo, self.kv

        def cut(tensor: torch.Tensor, ends: list[int]) -> torch.Tensor:
            parts = [tensor[ends[b] : ends[b + 1]] for b in chosen]
            return torch.cat([*parts, torch.full_like(tensor[:SPARE], float("nan"))])

        lengths = [self.lengths[b] for b in chosen]
        return Problem(self.axes, lengths, cut(self.q, qo), cut(self.k, kv), cut(self.v, kv), dict(self.call))

    def rows(self, b: int) -> slice:
        return slice(self.qo[b], self.qo[b + 1])

    def seen(self) -> torch.Tensor:
        """Which rows of the sequences see any key."""
        found = []
        for rows, keys in self.lengths:
            first = max(rows - keys, 0) if self.axes["causal"] else (0 if keys else rows)
            found += [row >= first for row in range(rows)]
        return torch.tensor(found, dtype=torch.bool, device=self.q.device)


def axes_of(variant: Any) -> dict[str, Any]:
    """Config of a variant of a bundle."""
    axes = variant.axes
    numbers = {name: int(axes[name]) for name in ("head_dim", "v_dim")}
    return {"dtype": axes["dtype"], **numbers, "causal": axes["causal"] in (True, "1", 1)}


def name_of(axes: Mapping[str, Any]) -> str:
    return f"{axes['dtype']}-d{axes['head_dim']}-v{axes['v_dim']}-{'causal' if axes['causal'] else 'full'}"


def make(
    axes: Mapping[str, Any],
    lengths: Sequence[tuple[int, int]],
    heads: tuple[int, int] = (8, 2),
    seed: int = 0,
) -> Problem:
    """Random tensors; what is past the last sequence is NaN."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    rows, keys = (sum(pair[i] for pair in lengths) for i in (0, 1))

    def normal(count: int, *shape: int) -> torch.Tensor:
        made = torch.randn(count + SPARE, *shape, generator=generator, device="cuda").to(
            DTYPES[axes["dtype"]]
        )
        made[count:] = float("nan")
        return made

    return Problem(
        axes,
        list(lengths),
        normal(rows, heads[0], axes["head_dim"]),
        normal(keys, heads[1], axes["head_dim"]),
        normal(keys, heads[1], axes["v_dim"]),
        {"sm_scale": axes["head_dim"] ** -0.5},
    )


class Runner:
    """One prepared variant."""

    def __init__(self, bundle: Any, axes: Mapping[str, Any], scratch: int = SCRATCH) -> None:
        """``scratch``: bytes, where sequences are cut into parts of a fixed length."""
        self.axes, self.scratch = axes, scratch
        self.op = bundle.prepare("ragged_prefill", **axes)

    def arguments(self, p: Problem, **changes: Any) -> dict[str, Any]:
        """Arguments of ``run`` with outputs, scratch and a plan that held NaN, and what else they say; not yet planned."""
        rows, heads = p.q.shape[0], p.q.shape[1]
        nan = float("nan")
        args = {
            "q": p.q,
            "k": p.k,
            "v": p.v,
            "o": torch.full((rows, heads, self.axes["v_dim"]), nan, dtype=p.q.dtype, device="cuda"),
            "lse": torch.full((rows, heads), nan, device="cuda"),
            "qo_indptr": torch.tensor(p.qo, dtype=torch.int32),
            "kv_indptr": torch.tensor(p.kv, dtype=torch.int32),
            "stream": torch.cuda.current_stream(),
            **p.call,
            **changes,
        }
        size = self.op.plan(**args)
        # With parts of a fixed length the size for all lengths with these totals is far from what they need.
        scratch = self.scratch if args.get("kv_chunk", 0) > 0 else self.op.workspace_size(**args)
        plan = torch.full((max(size, 1),), 0xFF, dtype=torch.uint8, pin_memory=True)
        workspace = torch.full((scratch,), 0xFF, dtype=torch.uint8, device="cuda")
        return {
            **args,
            "plan": plan,
            "plan_device": torch.full_like(plan, 0xFF, device="cuda"),
            "workspace": workspace,
        }

    def plan(self, args: dict[str, Any]) -> None:
        used = self.op.plan(**args)
        args["plan_device"][:used].copy_(args["plan"][:used], non_blocking=True)

    def run(self, p: Problem, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """o and lse of every row of q, in memory that held NaN before."""
        args = self.arguments(p, **changes)
        self.plan(args)
        self.op.run(**args)
        torch.cuda.synchronize()
        return args["o"], args["lse"]


def oracle(p: Problem, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scale = {**p.call, **changes}["sm_scale"]
    return prefill(p.q, p.k, p.v, p.qo, p.kv, sm_scale=scale, causal=p.axes["causal"])


def worst_row(p: Problem, out: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest ||error|| / ||reference|| of one head of a row that sees a key; NaN counts as infinite."""
    seen = p.seen()
    found, wanted = out[: len(seen)][seen].double(), expected[: len(seen)][seen]
    if found.numel() == 0:
        return 0.0
    error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-12)
    return float(error.nan_to_num(float("inf")).max())


def worst_lse(p: Problem, lse: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference of one head of a row that sees a key."""
    seen = p.seen()
    if not seen.any():
        return 0.0
    error = (lse[: len(seen)][seen].double() - expected[: len(seen)][seen]).abs()
    return float(error.nan_to_num(float("inf")).max())


def unseen_are_zeros(p: Problem, out: torch.Tensor, lse: torch.Tensor) -> bool:
    """Whether rows that see nothing are exact zeros with an lse of -inf, and what is past the sequences was left alone."""
    rows, unseen = len(p.seen()), ~p.seen()
    zeros = out[:rows][unseen].count_nonzero() == 0 and not out[:rows][unseen].isnan().any()
    ends = bool((lse[:rows][unseen] == -torch.inf).all())
    return bool(zeros) and ends and bool(out[rows:].isnan().all()) and bool(lse[rows:].isnan().all())
