"""Paged MQA logits on a GPU: a pool with scattered pages, a call through the loader, and the float64 oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernseal.kernels.paged_mqa_logits import reference

OP = "paged_mqa_logits"
SEGMENT = 256
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
LENGTHS = [0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 1000, 2049, 8192]
"""Around the edges of pages (from 32), of a tile (128) and of a segment (256)."""
UNTOUCHED = -7.0
"""What logits hold before a call; every type has it."""
NUMBERS = ("num_heads", "head_dim", "next_n", "page_size")


def axes_of(variant: Any) -> dict[str, Any]:
    """Config of a variant of a bundle."""
    axes = dict(variant.axes)
    return {
        **axes,
        **{name: int(axes[name]) for name in NUMBERS},
        "interleaved": axes["interleaved"] in ("1", "true", "True"),
    }


@dataclass
class Problem:
    """Tensors of one call, and what they say in numbers.

    Attributes:
        pages: [pages, page bytes], what the kernel reads.
        k: [pages, page_size, D] float64.
        scales: [pages, page_size] float64, or None.
        queries: [B, next_n, H, D] float64.
    """

    axes: Mapping[str, Any]
    q: torch.Tensor
    q_scales: torch.Tensor | None
    pages: torch.Tensor
    weights: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    queries: torch.Tensor
    k: torch.Tensor
    scales: torch.Tensor | None

    def rows(self, chosen: Sequence[int]) -> Problem:
        """The same requests in another batch."""
        index = torch.tensor(chosen, dtype=torch.long, device=self.q.device)
        next_n = self.axes["next_n"]
        weights = self.weights.unflatten(0, (-1, next_n))[index].flatten(0, 1)
        q_scales = None if self.q_scales is None else self.q_scales[index]
        return Problem(
            self.axes,
            self.q[index],
            q_scales,
            self.pages,
            weights,
            self.page_table[index],
            self.seq_lens[index],
            self.queries[index],
            self.k,
            self.scales,
        )

    def oracle(self, weights: torch.Tensor | None = None) -> list[torch.Tensor]:
        weights = self.weights if weights is None else weights
        lengths = self.seq_lens.tolist()
        return reference.paged_mqa_logits(
            self.queries, self.k, self.scales, weights, self.page_table, lengths
        )


def make(axes: Mapping[str, Any], lengths: Sequence[int], seed: int = 0, columns: int = 0) -> Problem:
    """Random tensors. Every sequence has pages of its own, in random places, and page numbers that do not exist in the rest
    of its table; what no sequence has of the pool is NaN. Page 0 is nobody's: it may be read in place of others."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    size, heads, dim, next_n = (axes[n] for n in ("page_size", "num_heads", "head_dim", "next_n"))
    batch, fp4 = len(lengths), axes["kv_dtype"] == "fp4"
    used = [-(-length // size) for length in lengths]
    width, count = max(columns, 1, *used), sum(used) + 5

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    numbers = 1 + torch.randperm(count - 1, generator=generator, device="cuda").to(torch.int32)
    table = torch.full((batch, width), 2**31 - 1, dtype=torch.int32, device="cuda")
    live = torch.zeros(count, size, dtype=torch.bool, device="cuda")
    at = 0
    for row, taken in enumerate(used):
        table[row, :taken] = numbers[at : at + taken]
        positions = torch.arange(lengths[row], device="cuda")
        live[table[row, positions // size].long(), positions % size] = True
        at += taken

    weights = normal(batch * next_n, heads).to(DTYPES[axes["epi_dtype"]])
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    if fp4:
        return _fp4(axes, generator, live, table, seq_lens, weights)
    values, scales = normal(count, size, dim), normal(count, size).abs() + 0.25
    values[~live] = float("nan")
    scales[~live] = float("nan")
    k, q = values.to(torch.float8_e4m3fn), normal(batch, next_n, heads, dim).to(torch.float8_e4m3fn)
    pages = reference.pack_pages(k, scales)
    numbers_of = k.double(), scales.double()
    return Problem(axes, q, None, pages, weights, table, seq_lens, q.double(), *numbers_of)


def _fp4(
    axes: Mapping[str, Any],
    generator: torch.Generator,
    live: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    weights: torch.Tensor,
) -> Problem:
    heads, dim, next_n = (axes[n] for n in ("num_heads", "head_dim", "next_n"))

    def codes(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8, device="cuda")

    k, powers = codes(*live.shape, dim // 2), codes(*live.shape, 4, low=122, high=130)
    powers[~live] = 255  # NaN
    q, q_scales = (
        codes(len(seq_lens), next_n, heads, dim // 2),
        codes(len(seq_lens), next_n, heads, 4, low=122, high=130),
    )
    stored = reference.interleave(powers) if axes["interleaved"] else powers
    pages = reference.pack_pages(k, stored)
    queries = reference.unpack_fp4(q, q_scales)
    return Problem(
        axes,
        q,
        q_scales,
        pages,
        weights,
        table,
        seq_lens,
        queries,
        reference.unpack_fp4(k, powers),
        None,
    )


class Runner:
    """One prepared variant, and the schedules that it reads."""

    def __init__(self, bundle: Any, axes: Mapping[str, Any]) -> None:
        self.op = bundle.prepare(OP, **axes)
        scheduled = not bundle.statement.sm.startswith("sm_12")
        atoms = 2 if axes["kv_dtype"] == "fp4" and axes["next_n"] == 4 else 1
        self.schedules = bundle.prepare("paged_mqa_schedule", atoms=atoms) if scheduled else None
        ctas = torch.cuda.get_device_properties(0).multi_processor_count
        self.schedule = torch.empty(ctas + 1, 2, dtype=torch.int32, device="cuda")

    def launch(self, p: Problem, out: torch.Tensor, longest: int, **changes: Any) -> None:
        """On the current stream: the schedule, then the logits."""
        stream = torch.cuda.current_stream()
        args: dict[str, Any] = {
            "q": p.q,
            "kv": p.pages,
            "weights": p.weights,
            "page_table": p.page_table,
            "seq_lens": p.seq_lens,
            "logits": out,
            "max_seq_len": longest,
            "stream": stream,
        }
        if p.q_scales is not None:
            args["q_scales"] = p.q_scales
        if self.schedules is not None:
            self.schedules.run(seq_lens=p.seq_lens, schedule=self.schedule, stream=stream)
            args["schedule"] = self.schedule
        self.op.run(**args | changes)

    def run(self, p: Problem, longest: int = 0, **changes: Any) -> torch.Tensor:
        """The logits, in memory that held ``UNTOUCHED`` before."""
        longest = longest or max(1, *p.seq_lens.tolist())
        out = output(p, longest)
        self.launch(p, out, longest, **changes)
        torch.cuda.synchronize()
        return out


def output(p: Problem, longest: int) -> torch.Tensor:
    width = -(-longest // SEGMENT) * SEGMENT
    rows = len(p.seq_lens) * p.axes["next_n"]
    return torch.full((rows, width), UNTOUCHED, dtype=DTYPES[p.axes["out_dtype"]], device="cuda")


def specified(p: Problem, out: torch.Tensor) -> list[torch.Tensor]:
    """The columns of every row that its query sees."""
    next_n, found = p.axes["next_n"], []
    for b, length in enumerate(p.seq_lens.tolist()):
        for t in range(next_n):
            found.append(out[b * next_n + t, : max(0, length - next_n + t + 1)])
    return found


def worst_row(p: Problem, out: torch.Tensor) -> float:
    """The largest ||error|| of a row, over the norm that it would have if no head took from another."""
    worst = 0.0
    sizes = p.oracle(p.weights.abs())
    for have, want, size in zip(specified(p, out), p.oracle(), sizes, strict=True):
        if len(want):
            error = (have.double() - want).norm() / size.norm().clamp_min(1e-30)
            worst = max(worst, float(error.nan_to_num(float("inf"))))
    return worst


def same_bits(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
