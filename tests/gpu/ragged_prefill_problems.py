"""Ragged prefill problems on a GPU: packed sequences with NaN around them, a planned call, and the float64 oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu import fa2_problems
from gpu.fa2_problems import DTYPES, Batch, ends_of, i32

from kernseal.kernels.ragged_prefill.reference import prefill

SPARE = 3
"""Rows of q, k and v past the last sequence: NaN."""
HEADS = ((4, 4), (8, 2), (7, 1), (12, 4))
"""Of q and of k: groups of 1, 4, 7 and 3, so that tiles end within a row's heads."""


@dataclass
class Problem(Batch):
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


class Runner(fa2_problems.Runner):
    OP = "ragged_prefill"
    SCRATCH = 4 << 30

    def lengths(self, p: Problem) -> dict[str, torch.Tensor]:
        return {"qo_indptr": i32(p.qo), "kv_indptr": i32(p.kv)}


def oracle(p: Problem, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scale = {**p.call, **changes}["sm_scale"]
    return prefill(p.q, p.k, p.v, p.qo, p.kv, sm_scale=scale, causal=p.axes["causal"])
