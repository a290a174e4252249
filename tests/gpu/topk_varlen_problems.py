"""Top-k problems of a decode step on a GPU: NaN where a row has no scores, a call through the loader, and the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from gpu.topk_regions_problems import DTYPES, POISON, SMEM, on_host

from kernseal.kernels.topk_regions.reference import keys
from kernseal.kernels.topk_varlen.reference import decode, row_lengths

OP = "topk_varlen"


@dataclass
class Problem:
    """Tensors and numbers of one call."""

    variant: Any
    scores: torch.Tensor
    max_len: int
    seq_lens: torch.Tensor
    top_k: int
    call: dict[str, int] = field(default_factory=dict)

    @property
    def values(self) -> bool:
        return bool(int(self.variant.axes["values"]))


def held(variant: Any) -> int:
    """About as many scores as a thread block holds."""
    return (SMEM[variant.class_name] - 2400) // DTYPES[variant.axes["dtype"]].itemsize


def make(
    variant: Any,
    tokens: Sequence[int],
    max_len: int,
    top_k: int,
    *,
    row_stride: int | None = None,
    begin: int = 0,
    seed: int = 0,
    levels: int = 0,
    **call: int,
) -> Problem:
    """Normal scores, or whole numbers below ``levels``; ``begin`` elements into an allocation."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    dtype, next_n = DTYPES[variant.axes["dtype"]], call.get("next_n", 1)
    rows, stride = len(tokens) * next_n, row_stride or max_len
    memory = torch.full((rows * stride + begin,), float("nan"), dtype=dtype, device="cuda")
    scores = memory[begin:].view(rows, stride)
    if levels:
        scores.copy_(torch.randint(levels, (rows, stride), generator=generator, device="cuda"))
    else:
        scores.copy_(torch.randn(rows, stride, generator=generator, device="cuda"))
    seq_lens = torch.tensor(tokens, dtype=torch.int32, device="cuda")
    lengths = row_lengths(seq_lens, next_n, call.get("compress_ratio", 1), max_len)
    outside = torch.arange(stride, device="cuda") >= torch.tensor(lengths, device="cuda")[:, None]
    scores[outside] = float("nan")
    return Problem(variant, scores, max_len, seq_lens, top_k, call)


class Runner:
    """One prepared variant with semaphores that are zeroed once and used for every call."""

    def __init__(self, bundle: Any, variant: Any, semaphores: torch.Tensor | None = None) -> None:
        self.op = bundle.prepare(OP, dtype=variant.axes["dtype"], values=bool(int(variant.axes["values"])))
        if semaphores is None:
            semaphores = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
        self.semaphores = semaphores

    def arguments(self, p: Problem, out: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {
            "scores": p.scores[:, : p.max_len],
            "row_stride": p.scores.stride(0),
            "seq_lens": p.seq_lens,
            "top_k": p.top_k,
            "semaphores": self.semaphores,
            "stream": torch.cuda.current_stream(),
            **p.call,
            **out,
        }

    def run(self, p: Problem) -> dict[str, torch.Tensor]:
        out = outputs(p)
        self.op.run(**self.arguments(p, out))
        torch.cuda.synchronize()
        return out


def outputs(p: Problem) -> dict[str, torch.Tensor]:
    shape = (p.scores.shape[0], p.top_k)
    made = {"indices": torch.full(shape, POISON, dtype=torch.int32, device="cuda")}
    if p.values:
        made["values"] = torch.full(shape, float("nan"), dtype=p.scores.dtype, device="cuda")
    return made


def wrong(p: Problem, out: dict[str, torch.Tensor]) -> str:
    """What is wrong with a launch's output, or nothing: each row has the oracle's scores in some order, each index once."""
    p, out = replace(p, scores=p.scores.cpu(), seq_lens=p.seq_lens.cpu()), on_host(out)
    expected, values = decode(p.scores[:, : p.max_len], p.seq_lens, p.top_k, **p.call)
    for r in range(p.scores.shape[0]):
        found, wanted = out["indices"][r].long(), expected[r].long()
        live = wanted >= 0
        if not bool(live.all()) and not torch.equal(found, wanted):
            return f"row {r}: a row that is not filled"
        if found[live].unique().numel() != int(live.sum()) or bool((found[live] < 0).any()):
            return f"row {r}: an index twice, or none"
        if bool((found >= p.max_len).any()):
            return f"row {r}: an index outside"
        chosen = keys(p.scores[r, found[live]])
        if not torch.equal(chosen.sort().values, keys(p.scores[r, wanted[live]]).sort().values):
            return f"row {r}: other scores than the largest"
        if p.values:
            mine = keys(out["values"][r])
            if not torch.equal(mine[live], chosen) or not torch.equal(mine[~live], keys(values[r][~live])):
                return f"row {r}: values are not those of the indices"
    return ""
