"""Top-k problems on a GPU: rows of scores in rows of NaN, a call through the loader, and the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kernseal.kernels.topk_regions.reference import Selected, chunk_of, keys, regions

OP = "topk_regions"
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
SMEM = {"radix_sm90": 232448, "radix_sm120": 101376}
POISON = 0x5A5A5A5A
"""What outputs hold before a launch, as int32."""


@dataclass
class Problem:
    """Tensors of one call.

    Attributes:
        axes: config of the variant.
        smem: shared memory of a thread block of its class.
        scores: [R, row_stride]; the first max_len columns, or windows of that width, are the rows.
        call: further tensors and numbers of the call, by field.
    """

    axes: Mapping[str, Any]
    smem: int
    scores: torch.Tensor
    max_len: int
    top_k: int
    call: dict[str, Any] = field(default_factory=dict)

    @property
    def chunk(self) -> int:
        return chunk_of(
            *(self.max_len, self.scores.stride(0), self.scores.dtype),
            row_starts="row_starts" in self.call,
            deterministic=self.axes["deterministic"],
            smem_per_block=self.smem,
        )

    def rows(self, chosen: Sequence[int]) -> Problem:
        """The same rows in another batch."""
        index = torch.tensor(chosen, dtype=torch.long, device="cuda")
        call = {n: v if n in ("page_table", "page_size") else v[index] for n, v in self.call.items()}
        if "page_table" in call and "row_to_request" not in call:
            call["page_table"] = call["page_table"][index]
        return Problem(self.axes, self.smem, self.scores[index], self.max_len, self.top_k, call)


def axes_of(variant: Any) -> dict[str, Any]:
    """Config of a variant of a bundle."""
    return {
        "dtype": variant.axes["dtype"],
        "paged": variant.axes["paged"] in (True, "1", "true"),
        "deterministic": variant.axes["deterministic"] in (True, "1", "true"),
    }


def make(
    variant: Any,
    lengths: Sequence[int],
    max_len: int,
    top_k: int,
    *,
    row_stride: int | None = None,
    seed: int = 0,
    levels: int = 0,
    **call: Any,
) -> Problem:
    """Normal scores, or whole numbers below ``levels``. What no row has is NaN, which would be selected first."""
    axes = axes_of(variant)
    generator = torch.Generator(device="cuda").manual_seed(seed)
    shape, dtype = (len(lengths), row_stride or max_len), DTYPES[axes["dtype"]]
    if levels:
        scores = torch.randint(levels, shape, generator=generator, device="cuda").to(dtype)
    else:
        scores = torch.randn(shape, generator=generator, device="cuda").to(dtype)
    made = Problem(axes, SMEM[variant.class_name], scores, max_len, top_k)
    made.call["lengths"] = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    made.call |= call
    starts = made.call.get("row_starts", torch.zeros(len(lengths), dtype=torch.int32, device="cuda"))
    columns = torch.arange(shape[1], device="cuda")
    ends = starts + made.call["lengths"].clamp(0, max_len)
    inside = (columns >= starts[:, None]) & (columns < ends[:, None])
    scores[~inside] = float("nan")
    if axes["paged"] and "page_table" not in call:
        made.call |= pages_of(made, call.get("page_size", 16), seed)
    return made


def pages_of(p: Problem, page_size: int, seed: int = 0) -> dict[str, Any]:
    """A page table of random pages, wide enough for every row."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    shape = (p.scores.shape[0], -(-p.scores.shape[1] // page_size) + 3)
    most = (2**31 - 1) // page_size
    table = torch.randint(most, shape, generator=generator, device="cuda", dtype=torch.int32)
    return {"page_table": table, "page_size": page_size}


def outputs(p: Problem) -> dict[str, torch.Tensor]:
    """Memory for what a launch writes."""
    shape = (p.scores.shape[0], p.top_k)
    made = {"indices": torch.full(shape, POISON, dtype=torch.int32, device="cuda")}
    if p.axes["paged"]:
        made["raw_indices"] = torch.full_like(made["indices"], POISON)
    else:
        made["values"] = torch.full(shape, float("nan"), dtype=p.scores.dtype, device="cuda")
    return made


class Runner:
    """One prepared variant with semaphores that are zeroed once and used for every call."""

    def __init__(self, bundle: Any, axes: Mapping[str, Any], semaphores: torch.Tensor | None = None) -> None:
        self.op = bundle.prepare(OP, **axes)
        if semaphores is None:
            semaphores = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
        self.semaphores = semaphores

    def arguments(self, p: Problem, out: Mapping[str, torch.Tensor], **changes: Any) -> dict[str, Any]:
        return {
            "scores": p.scores[:, : p.max_len],
            "row_stride": p.scores.stride(0),
            "stream": torch.cuda.current_stream(),
            "semaphores": self.semaphores,
            "top_k": p.top_k,
            **p.call,
            **out,
            **changes,
        }

    def run(self, p: Problem, **changes: Any) -> dict[str, torch.Tensor]:
        """What was written."""
        out = outputs(p)
        self.op.run(**self.arguments(p, out, **changes))
        torch.cuda.synchronize()
        return out


def on_host(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same on the host, where a row after the other is looked at without waiting for a device."""
    return {name: v.cpu() if isinstance(v, torch.Tensor) else v for name, v in tensors.items()}


def oracle(p: Problem) -> Selected:
    return regions(p.scores, p.top_k, chunk=p.chunk, max_len=p.max_len, **p.call)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, NaN included."""
    return torch.equal(keys(a), keys(b)) if a.dtype.is_floating_point else torch.equal(a, b)


def wrong(p: Problem, out: Mapping[str, torch.Tensor]) -> str:
    """What is wrong with a launch's output, or nothing.

    Deterministic output is the oracle's, bit for bit. Else a row's scores are those of the oracle in some order, and every
    index is one that has the score beside it.
    """
    p, out = replace(p, scores=p.scores.cpu(), call=on_host(p.call)), on_host(out)
    expected = oracle(p)
    if p.axes["deterministic"]:
        names = [name for name, written in out.items() if not same_bits(written, getattr(expected, name))]
        return f"{names} differ from the oracle" if names else ""
    raw = out["raw_indices"] if p.axes["paged"] else out["indices"]
    for r in range(p.scores.shape[0]):
        found, wanted = raw[r].long(), expected.raw_indices[r].long()
        if not p.axes["paged"] and "offsets" in p.call:
            found = torch.where(found == -1, -1, found - p.call["offsets"][r])
        live = wanted >= 0
        start = int(p.call["row_starts"][r]) if "row_starts" in p.call else 0
        if not torch.equal(found >= 0, live) or found[live].unique().numel() != int(live.sum()):
            return f"row {r}: not as many indices as the row has, or one twice"
        chosen = keys(p.scores[r, start + found[live]])
        if not torch.equal(chosen.sort().values, keys(p.scores[r, start + wanted[live]]).sort().values):
            return f"row {r}: other scores than the largest"
        if "values" in out and not torch.equal(keys(out["values"][r][live]), chosen):
            return f"row {r}: values are not those of the indices"
        if p.axes["paged"] and not torch.equal(out["indices"][r].long(), slots(p, r, found)):
            return f"row {r}: slots are not those of the raw indices"
    return ""


def slots(p: Problem, r: int, raw: torch.Tensor) -> torch.Tensor:
    """Where the page table has the raw indices of a row."""
    size, call = p.call["page_size"], p.call
    pages = call["page_table"][int(call["row_to_request"][r]) if "row_to_request" in call else r].long()
    starts = call.get("page_table_starts", call.get("row_starts"))
    first = 0 if starts is None else int(starts[r])
    return torch.where(raw < 0, -1, pages[first + raw.clamp_min(0) // size] * size + raw % size)
