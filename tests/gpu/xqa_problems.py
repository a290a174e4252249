"""XQA decode problems on a GPU: a paged cache with scattered pages, a call through the loader, and the float64 oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kernseal.kernels.xqa_decode.reference import decode, fp4_values

DTYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "i8": torch.int8,
    "nvfp4": torch.uint8,
}
KV_SCALE = {"e4m3": 0.25, "i8": 0.01, "nvfp4": 0.5}
RCP_OUT_SCALE = 16.0
"""Lifts outputs of long sequences out of the subnormals of e4m3."""
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000, 3001]
"""Around the edges of pages (16 to 128), of what a warp takes (64) and of a tile (256, or 64 with fp8_math)."""
LIMIT = {"exact": 1e-2, "e4m3": 6e-2}
"""Largest ||error|| / ||reference|| of one head of one row: in 16 bits, and where e4m3 rounds the result or its weights."""
BOOLEANS = ("sliding_window", "spec_decode", "fp8_math")
NUMBERS = ("head_dim", "group_size", "page_size")
E4M3_HALF_STEP = 2.0**-10

Axes = Mapping[str, Any]


@dataclass
class Problem:
    """Tensors of one call.

    Attributes:
        axes: config of the variant.
        k, v: the cache as the op takes it.
        q_lens: query tokens of each sequence.
        call: further arguments of the call, by field.
    """

    axes: Axes
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    q_lens: list[int]
    call: dict[str, Any] = field(default_factory=dict)

    @property
    def kv_heads(self) -> int:
        return int(self.k.shape[2])

    def begins(self) -> list[int]:
        """First row of q of each sequence, and the number of rows."""
        ends = [0]
        for count in self.q_lens:
            ends.append(ends[-1] + count)
        return ends

    def rows_of(self, chosen: Sequence[int]) -> torch.Tensor:
        """Numbers of the rows of q that belong to these sequences, in their order."""
        begins = self.begins()
        numbers = [row for b in chosen for row in range(begins[b], begins[b + 1])]
        return torch.tensor(numbers, dtype=torch.long, device=self.q.device)

    def rows(self, chosen: Sequence[int]) -> Problem:
        """The same requests in another batch."""
        index = torch.tensor(chosen, dtype=torch.long, device=self.q.device)
        rows, call = self.rows_of(chosen), dict(self.call)
        if "mask" in call:
            call["mask"] = call["mask"][rows]
        made = replace(
            self,
            q=self.q[rows],
            page_table=self.page_table[index],
            seq_lens=self.seq_lens[index],
            q_lens=[self.q_lens[b] for b in chosen],
            call=call,
        )
        if "q_cu_lens" in call:
            call["q_cu_lens"] = torch.tensor(made.begins(), dtype=torch.int32, device=self.q.device)
        return made

    def values(self, which: str) -> torch.Tensor:
        """K or V as numbers."""
        cache: torch.Tensor = getattr(self, which)
        return fp4_values(cache, self.call[f"{which}_scales"]) if self.axes["kv_dtype"] == "nvfp4" else cache


def axes_of(variant: Any) -> dict[str, Any]:
    """Config of a variant of a bundle."""
    axes = {name: int(v) if name in NUMBERS else v for name, v in variant.axes.items()}
    return {name: v == "1" if name in BOOLEANS else v for name, v in axes.items()}


def name_of(axes: Axes) -> str:
    flags = "".join(f"-{name}" for name in BOOLEANS if axes[name])
    types = "-".join(axes[name] for name in ("dtype", "kv_dtype", "out_dtype"))
    return f"{types}-d{axes['head_dim']}-g{axes['group_size']}-p{axes['page_size']}{flags}"


def limit_of(axes: Axes) -> float:
    return LIMIT["e4m3" if axes["fp8_math"] or axes["out_dtype"] == "e4m3" else "exact"]


def causal_mask(q_lens: Sequence[int], words: int) -> torch.Tensor:
    """[R, words]: each draft sees itself and those before it."""
    rows = [
        [_bits(2 ** (i + 1) - 1, word) for word in range(words)] for count in q_lens for i in range(count)
    ]
    return torch.tensor(rows, dtype=torch.int64, device="cuda").view(-1, words).to(torch.int32)


def random_mask(q_lens: Sequence[int], words: int, generator: torch.Generator) -> torch.Tensor:
    """[R, words]: each draft sees itself and any others."""
    masks = torch.randint(-(2**31), 2**31, (sum(q_lens), words), generator=generator, device="cuda")
    own = torch.tensor([i for count in q_lens for i in range(count)], device="cuda")
    masks[torch.arange(len(own), device="cuda"), own // 32] |= 1 << (own % 32)
    return masks.to(torch.int32)


def _bits(number: int, word: int) -> int:
    return (number >> (32 * word)) & 0xFFFFFFFF


def make(
    axes: Axes,
    lengths: Sequence[int],
    kv_heads: int = 2,
    seed: int = 0,
    pages: int = 0,
    q_lens: Sequence[int] | None = None,
    tree: bool = False,
) -> Problem:
    """Random tensors; every sequence has pages of its own, in random places, and -1 in the rest of its table.

    With drafts, ``q_lens`` of one value are a uniform call and others a ragged one; None is 5 each.
    """
    generator = torch.Generator(device="cuda").manual_seed(seed)
    size, dim, kv_dtype = axes["page_size"], axes["head_dim"], axes["kv_dtype"]
    columns = max(pages, *(-(-max(length, 1) // size) for length in lengths))
    used = [-(-max(length, 0) // size) for length in lengths]
    pool = sum(used) + 5
    counts = list(q_lens or [5] * len(lengths)) if axes["spec_decode"] else [1] * len(lengths)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    def cache() -> torch.Tensor:
        if kv_dtype == "nvfp4":
            shape = (pool, size, kv_heads, dim // 2)
            return torch.randint(0, 256, shape, generator=generator, device="cuda").to(torch.uint8)
        values = normal(pool, size, kv_heads, dim) / KV_SCALE.get(kv_dtype, 1.0)
        if kv_dtype == "i8":
            values = values.round().clamp(-127, 127)
        return values.to(DTYPES[kv_dtype])

    def scales() -> torch.Tensor:
        exponents = torch.rand(pool, size, kv_heads, dim // 16, generator=generator, device="cuda")
        return (0.25 + exponents).to(torch.float8_e4m3fn)

    numbers = torch.randperm(pool, generator=generator, device="cuda").to(torch.int32)
    table = torch.full((len(lengths), columns), -1, dtype=torch.int32, device="cuda")
    at = 0
    for row, count in enumerate(used):
        table[row, :count] = numbers[at : at + count]
        at += count
    call: dict[str, Any] = {}
    if kv_dtype in KV_SCALE:
        call["kv_scale"] = KV_SCALE[kv_dtype]
    if kv_dtype == "nvfp4":
        call |= {"k_scales": scales(), "v_scales": scales()}
    if axes["out_dtype"] == "e4m3":
        call["rcp_out_scale"] = RCP_OUT_SCALE
    if axes["sliding_window"]:
        call["window"] = 200
    q = normal(sum(counts), kv_heads * axes["group_size"], dim).to(DTYPES[axes["dtype"]])
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    made = Problem(axes, q, cache(), cache(), table, seq_lens, counts, call)
    if axes["spec_decode"]:
        words = -(-max(counts) // 32)
        call["q_len"] = max(counts)
        call["mask"] = random_mask(counts, words, generator) if tree else causal_mask(counts, words)
        if len(set(counts)) > 1:
            call["q_cu_lens"] = torch.tensor(made.begins(), dtype=torch.int32, device="cuda")
    return made


class Runner:
    """One prepared variant with scratch and semaphores that are used again and again."""

    def __init__(self, bundle: Any, axes: Axes) -> None:
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
    names = ("window", "sinks", "q_scale", "kv_scale", "mask")
    known = {name: call[name] for name in names if name in call}
    # What fp8_math does to q is part of the op's definition, what it does to the weights is error.
    q = p.q.to(torch.float8_e4m3fn).to(p.q.dtype) if p.axes["fp8_math"] else p.q
    out = decode(q, p.values("k"), p.values("v"), p.page_table, p.seq_lens, q_lens=p.q_lens, **known)
    return out * call.get("rcp_out_scale", 1.0)


def worst_row(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest ||error|| / ||reference|| of a row and head; NaN counts as infinite. 0 for no row.

    Of an e4m3 output, half a step of its subnormals in every element is no error.
    """
    error = (out.to(torch.float32).double() - expected).norm(dim=-1)
    if out.dtype == torch.float8_e4m3fn:
        error = (error - E4M3_HALF_STEP * out.shape[-1] ** 0.5).clamp_min(0)
    relative = error / expected.norm(dim=-1).clamp_min(1e-12)
    return float(relative.nan_to_num(float("inf")).max()) if relative.numel() else 0.0


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
