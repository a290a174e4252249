"""XQA MLA problems on a GPU: a latent cache with scattered pages, a call through the loader, and the float64 oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kernseal.kernels.xqa_mla.reference import decode

DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
HEADS, ROW, LATENT = 128, 576, 512
Q_SCALE = 192**-0.5
KV_SCALE = {"bf16": 1.0, "e4m3": 0.25}
LENGTHS = [
    1,
    15,
    16,
    17,
    31,
    32,
    33,
    63,
    64,
    65,
    95,
    96,
    97,
    127,
    128,
    129,
    191,
    192,
    193,
    255,
    257,
    1000,
    8192,
]
"""Around the edges of pages (from 16), of a tile (32 or 64), and of a round of the cluster (4 tiles)."""


@dataclass
class Problem:
    """Tensors of one call.

    Attributes:
        axes: config of the variant.
        call: further arguments of the call, by field.
    """

    axes: Mapping[str, Any]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    call: dict[str, Any] = field(default_factory=dict)

    def rows(self, chosen: Sequence[int]) -> Problem:
        """The same requests in another batch."""
        index = torch.tensor(chosen, dtype=torch.long, device=self.q.device)
        return Problem(
            self.axes,
            self.q[index],
            self.k,
            self.v,
            self.page_table[index],
            self.seq_lens[index],
            dict(self.call),
        )

    def unused(self) -> torch.Tensor:
        """Which rows of the pool no sequence has, [pages, page_size]."""
        size = self.axes["page_size"]
        free = torch.ones(self.k.shape[:2], dtype=torch.bool, device=self.k.device)
        for row, length in enumerate(self.seq_lens.tolist()):
            positions = torch.arange(length, device=self.k.device)
            free[self.page_table[row, positions // size].long(), positions % size] = False
        return free

    def fill_unused(self, value: float) -> None:
        """Put ``value`` into every element of the pool that no sequence has."""
        pools = [self.k] if self.k.data_ptr() == self.v.data_ptr() else [self.k, self.v]
        for pool in pools:
            filled = torch.where(self.unused().unsqueeze(-1), value, pool.to(torch.float32))
            pool.copy_(filled.to(pool.dtype))


def axes_of(variant: Any) -> dict[str, Any]:
    """Config of a variant of a bundle."""
    return {"dtype": variant.axes["dtype"], "page_size": int(variant.axes["page_size"])}


def make(axes: Mapping[str, Any], lengths: Sequence[int], seed: int = 0, pages: int = 0) -> Problem:
    """Random tensors; every sequence has pages of its own, in random places, and -1 in the rest of its table. What no
    sequence has of the pool is NaN."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    size, scale = axes["page_size"], KV_SCALE[axes["dtype"]]
    columns = max(pages, *(-(-max(length, 1) // size) for length in lengths))
    used = [-(-max(length, 0) // size) for length in lengths]
    count = sum(used) + 5

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    numbers = torch.randperm(count, generator=generator, device="cuda").to(torch.int32)
    table = torch.full((len(lengths), columns), -1, dtype=torch.int32, device="cuda")
    at = 0
    for row, taken in enumerate(used):
        table[row, :taken] = numbers[at : at + taken]
        at += taken
    pool = (normal(count, size, ROW) / scale).to(DTYPES[axes["dtype"]])
    q = normal(len(lengths), HEADS, ROW).to(DTYPES[axes["dtype"]])
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    made = Problem(axes, q, pool, pool, table, seq_lens, {"q_scale": Q_SCALE, "kv_scale": scale})
    made.fill_unused(float("nan"))
    return made


class Runner:
    """One prepared variant with scratch that is used again and again."""

    def __init__(self, bundle: Any, axes: Mapping[str, Any]) -> None:
        self.op = bundle.prepare("xqa_mla", **axes)
        self.workspace = torch.empty(0, dtype=torch.uint8, device="cuda")

    def arguments(self, p: Problem, out: torch.Tensor, **changes: Any) -> dict[str, Any]:
        """Arguments of ``run``, with a workspace that is large enough and full of NaN."""
        args = {
            "q": p.q,
            "k": p.k,
            "v": p.v,
            "o": out,
            "page_table": p.page_table,
            "seq_lens": p.seq_lens,
            "stream": torch.cuda.current_stream(),
            **p.call,
            **changes,
        }
        needed = self.op.workspace_size(**args)
        if self.workspace.numel() < needed:
            self.workspace = torch.full((needed,), 0xFF, dtype=torch.uint8, device="cuda")
        return {**args, "workspace": self.workspace}

    def run(self, p: Problem, **changes: Any) -> torch.Tensor:
        """The output, in memory that held NaN before."""
        out = output(p)
        self.op.run(**self.arguments(p, out, **changes))
        torch.cuda.synchronize()
        return out


def output(p: Problem) -> torch.Tensor:
    """Memory for o, full of NaN."""
    shape = (p.q.shape[0], HEADS, LATENT)
    return torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda")


def oracle(p: Problem, rounded: bool = False, **changes: Any) -> torch.Tensor:
    scales = {name: {**p.call, **changes}[name] for name in ("q_scale", "kv_scale")}
    return decode(p.q, p.k, p.v, p.page_table, p.seq_lens, rounded=rounded, **scales)


def errors_of(out: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """||error|| / ||reference|| of each head of each sequence; NaN counts as infinite."""
    error = (out.to(torch.float32).double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-12)
    return error.nan_to_num(float("inf"))


def worst_row(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float(errors_of(out, expected).max())
