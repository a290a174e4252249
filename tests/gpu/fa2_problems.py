"""What problems of ragged and paged prefill have in common: sequences of query rows and keys, a planned call, and how far a
result is off. Used by their ``*_problems``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from gpu.bundles import open_by_name

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
LENGTHS = [
    *((1, 1), (1, 300), (1, 0), (0, 7), (3, 2), (15, 15), (16, 16), (17, 64), (31, 65)),
    *((63, 127), (64, 128), (65, 129), (127, 255), (128, 256), (129, 257), (40, 511)),
    *((5, 1025), (200, 70), (300, 10), (7, 0), (513, 513), (2, 4096)),
]
"""Query rows and keys: around the edges of tiles of query rows (16, 64, 128), of keys (16 to 256) and of pages, some without
keys and some with more queries than keys."""
SPLIT_LIMIT = {"bf16": 1.2e-2, "f16": 2e-3}
"""Largest ||error|| / ||reference|| of one head of a row where sequences are split: their parts are rounded too."""
SANITIZED = [(1, 1), (0, 3), (17, 65), (40, 20), (3, 0), (65, 130), (2, 300)]
SANITIZED_CALLS = ((0, 0), (0, 1), (128, 0), (-1, 1))
"""kv_chunk and fixed_grid."""
SANITIZED_SCRATCH = 64 << 20
"""Bytes: the tools keep some for each byte of the device."""


def ends_of(lengths: Sequence[int]) -> list[int]:
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return ends


def i32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tiles(axes: Mapping[str, Any]) -> tuple[int, ...]:
    """Query rows of the tiles that a variant has a kernel for."""
    return (16, 64, 128) if axes.get("v_dim", axes["head_dim"]) <= 128 else (16, 64)


class Batch:
    """Sequences one after another in q."""

    axes: Mapping[str, Any]
    lengths: list[tuple[int, int]]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    call: dict[str, Any]

    @property
    def qo(self) -> list[int]:
        return ends_of([rows for rows, _ in self.lengths])

    def rows(self, b: int) -> slice:
        return slice(self.qo[b], self.qo[b + 1])

    def seen(self) -> torch.Tensor:
        """Which rows of the sequences see any key."""
        found = []
        for rows, keys in self.lengths:
            first = max(rows - keys, 0) if self.axes["causal"] else (0 if keys else rows)
            found += [row >= first for row in range(rows)]
        return torch.tensor(found, dtype=torch.bool, device=self.q.device)


class Runner:
    """One prepared variant."""

    OP: ClassVar[str]
    SCRATCH: ClassVar[int]

    def __init__(self, bundle: Any, axes: Mapping[str, Any], scratch: int | None = None) -> None:
        """``scratch``: bytes, where sequences are cut into parts of a fixed length."""
        self.axes, self.scratch = axes, self.SCRATCH if scratch is None else scratch
        self.op = bundle.prepare(self.OP, **axes)

    def lengths(self, p: Any) -> dict[str, torch.Tensor]:
        """What plan reads."""
        raise NotImplementedError

    def keys(self, p: Any) -> dict[str, torch.Tensor]:
        """What a run reads besides q, k, v and the plan."""
        return {}

    def arguments(self, p: Any, **changes: Any) -> dict[str, Any]:
        """Arguments of ``run`` with outputs, scratch and a plan that held NaN, and what else they say; not yet planned."""
        rows, nan = p.q.shape[:2], float("nan")
        args = {
            "q": p.q,
            "k": p.k,
            "v": p.v,
            "o": torch.full((*rows, p.v.shape[-1]), nan, dtype=p.q.dtype, device="cuda"),
            "lse": torch.full(rows, nan, device="cuda"),
            "stream": torch.cuda.current_stream(),
            **self.keys(p),
            **self.lengths(p),
            **p.call,
            **changes,
        }
        size = self.op.plan(**args)
        # With parts of a fixed length the size for all lengths with these totals is far from what they need.
        scratch = self.scratch if args.get("kv_chunk", 0) > 0 else self.op.workspace_size(**args)
        plan = torch.full((max(size, 1),), 0xFF, dtype=torch.uint8, pin_memory=True)
        return {
            **args,
            "plan": plan,
            "plan_device": torch.full_like(plan, 0xFF, device="cuda"),
            "workspace": torch.full((scratch,), 0xFF, dtype=torch.uint8, device="cuda"),
        }

    def plan(self, args: dict[str, Any]) -> None:
        used = self.op.plan(**args)
        args["plan_device"][:used].copy_(args["plan"][:used], non_blocking=True)

    def run(self, p: Any, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """o and lse of every row of q, in memory that held NaN before."""
        args = self.arguments(p, **changes)
        self.plan(args)
        self.op.run(**args)
        torch.cuda.synchronize()
        return args["o"], args["lse"]


def worst_row(p: Batch, out: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest ||error|| / ||reference|| of one head of a row that sees a key; NaN counts as infinite."""
    seen = p.seen()
    found, wanted = out[: len(seen)][seen].double(), expected[: len(seen)][seen]
    if found.numel() == 0:
        return 0.0
    error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-12)
    return float(error.nan_to_num(float("inf")).max())


def worst_lse(p: Batch, lse: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference of one head of a row that sees a key."""
    seen = p.seen()
    if not seen.any():
        return 0.0
    error = (lse[: len(seen)][seen].double() - expected[: len(seen)][seen]).abs()
    return float(error.nan_to_num(float("inf")).max())


def unseen_are_zeros(p: Batch, out: torch.Tensor, lse: torch.Tensor) -> bool:
    """Whether rows that see nothing are exact zeros with an lse of -inf, and what is past the sequences was left alone."""
    rows, unseen = len(p.seen()), ~p.seen()
    zeros = out[:rows][unseen].count_nonzero() == 0 and not out[:rows][unseen].isnan().any()
    ends = bool((lse[:rows][unseen] == -torch.inf).all())
    return bool(zeros) and ends and bool(out[rows:].isnan().all()) and bool(lse[rows:].isnan().all())


def sanitize(
    bundle_name: str,
    runner_of: type[Runner],
    axes_of: Callable[[Any], dict[str, Any]],
    problem: Callable[[dict[str, Any]], Any],
    oracle: Callable[[Any], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Every variant, tile and kind of parts for compute-sanitizer; prints how many calls were right.

    Args:
        problem: one for a variant's config, without anything past its sequences.
    """
    calls = 0
    with open_by_name(bundle_name) as bundle:
        for axes in [axes_of(v) for v in bundle.variants() if v.op == runner_of.OP]:
            p, runner = problem(axes), runner_of(bundle, axes, SANITIZED_SCRATCH)
            expected = oracle(p)[0]
            for tile in tiles(axes):
                for chunk, fixed in SANITIZED_CALLS:
                    out, lse = runner.run(p, tile_q=tile, kv_chunk=chunk, fixed_grid=fixed, pdl=calls % 2)
                    right = worst_row(p, out, expected) <= SPLIT_LIMIT[axes["dtype"]]
                    if not (right and unseen_are_zeros(p, out, lse)):
                        raise SystemExit(
                            f"wrong result: {axes}, tile_q={tile}, kv_chunk={chunk}, fixed_grid={fixed}"
                        )
                    calls += 1
    if calls == 0:
        raise SystemExit(f"this bundle has no variant of {runner_of.OP}")
    print(f"{calls} calls, all as the oracle has them")
