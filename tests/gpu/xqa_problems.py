"""XQA decode problems on a GPU: a paged cache with scattered pages, a call through the loader, and the float64 oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kernseal.kernels.xqa_decode.reference import decode

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn, "i8": torch.int8}
KV_SCALE = {"e4m3": 0.25, "i8": 0.01}
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000, 3001]
"""Around the edges of pages (16), of what a warp takes (64) and of a tile (256)."""


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

    @property
    def kv_heads(self) -> int:
        return int(self.k.shape[2])

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


def axes_of(variant: Any) -> dict[str, Any]:
    """Config of a variant of a bundle."""
    numbers = ("head_dim", "group_size", "page_size")
    axes: dict[str, Any] = {name: int(v) if name in numbers else v for name, v in variant.axes.items()}
    axes["sliding_window"] = axes["sliding_window"] == "1"
    return axes


def make(
    axes: Mapping[str, Any], lengths: Sequence[int], kv_heads: int = 2, seed: int = 0, pages: int = 0
) -> Problem:
    """Random tensors; every sequence has pages of its own, in random places, and -1 in the rest of its table."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    size, dim = axes["page_size"], axes["head_dim"]
    columns = max(pages, *(-(-max(length, 1) // size) for length in lengths))
    used = [-(-max(length, 0) // size) for length in lengths]
    pool = sum(used) + 5

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    def cache() -> torch.Tensor:
        scale = KV_SCALE.get(axes["kv_dtype"], 1.0)
        values = normal(pool, size, kv_heads, dim) / scale
        if axes["kv_dtype"] == "i8":
            values = values.round().clamp(-127, 127)
        return values.to(DTYPES[axes["kv_dtype"]])

    numbers = torch.randperm(pool, generator=generator, device="cuda").to(torch.int32)
    table = torch.full((len(lengths), columns), -1, dtype=torch.int32, device="cuda")
    at = 0
    for row, count in enumerate(used):
        table[row, :count] = numbers[at : at + count]
        at += count
    call: dict[str, Any] = {}
    if axes["kv_dtype"] in KV_SCALE:
        call["kv_scale"] = KV_SCALE[axes["kv_dtype"]]
    if axes["sliding_window"]:
        call["window"] = 200
    q = normal(len(lengths), kv_heads * axes["group_size"], dim).to(DTYPES[axes["dtype"]])
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return Problem(axes, q, cache(), cache(), table, seq_lens, call)


class Runner:
    """One prepared variant with scratch and semaphores that are used again and again."""

    def __init__(self, bundle: Any, axes: Mapping[str, Any]) -> None:
        self.op = bundle.prepare("xqa_decode", **axes)
        self.semaphores = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
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
            "num_kv_heads": p.kv_heads,
            "semaphores": self.semaphores,
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
        out = torch.full(p.q.shape, float("nan"), device="cuda").to(DTYPES[p.axes["out_dtype"]])
        self.op.run(**self.arguments(p, out, **changes))
        torch.cuda.synchronize()
        return out


def oracle(p: Problem, **changes: Any) -> torch.Tensor:
    call = {**p.call, **changes}
    known = {name: call[name] for name in ("window", "sinks", "q_scale", "kv_scale") if name in call}
    return decode(p.q, p.k, p.v, p.page_table, p.seq_lens, **known)


def worst_row(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest ||error|| / ||reference|| of a sequence and head; NaN counts as infinite."""
    error = (out.to(torch.float32).double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-12)
    return float(error.nan_to_num(float("inf")).max())
