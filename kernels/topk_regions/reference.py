"""Top-k over rows in plain PyTorch, one row at a time: the oracle of the tests. Slow and plain on purpose."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

THREADS = 1024
_SIGN = {
    torch.float32: (torch.int32, 31),
    torch.bfloat16: (torch.int16, 15),
    torch.float16: (torch.int16, 15),
}


class Selected(NamedTuple):
    """What a launch writes.

    Attributes:
        indices: [R, k] int32.
        values: [R, k] of the scores' type.
        raw_indices: [R, k] int32, before offsets and page tables.
    """

    indices: torch.Tensor
    values: torch.Tensor
    raw_indices: torch.Tensor


def keys(scores: torch.Tensor) -> torch.Tensor:
    """int64 numbers in the order of the scores' bit patterns: -NaN, -inf, .., -0, +0, .., inf, NaN."""
    integer, sign = _SIGN[scores.dtype]
    bits = scores.contiguous().view(integer).to(torch.int64)
    return torch.where(bits < 0, -1 - (bits & ((1 << sign) - 1)), bits)


def select(row: torch.Tensor, k: int, chunk: int) -> torch.Tensor:
    """Indices of the k largest scores of a row in the order of the deterministic kernel; rising, if there are at most k.

    Args:
        row: [length].
        chunk: scores that one thread block holds.
    """
    columns = torch.arange(row.numel(), device=row.device)
    if row.numel() <= k:
        return columns
    keyed = keys(row)
    pivot = keyed.sort(descending=True).values[k - 1]
    column, thread = columns % chunk, columns % chunk % THREADS
    order = ((columns // chunk) * THREADS + thread) * chunk + column
    taken = order.sort().indices
    above, equal = taken[keyed[taken] > pivot], taken[keyed[taken] == pivot]
    return torch.cat([above, equal])[:k]


def regions(
    scores: torch.Tensor,
    k: int,
    *,
    chunk: int,
    lengths: torch.Tensor | None = None,
    row_starts: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    page_size: int = 1,
    row_to_request: torch.Tensor | None = None,
    page_table_starts: torch.Tensor | None = None,
    max_len: int | None = None,
) -> Selected:
    """What the deterministic kernel writes, bit for bit. Arguments as in ``kernel.yaml``; ``chunk`` as for ``select``."""
    rows = scores.shape[0]
    max_len = scores.shape[1] if max_len is None else max_len
    raw = torch.full((rows, k), -1, dtype=torch.int32, device=scores.device)
    indices, values = raw.clone(), torch.full_like(scores[:1], -torch.inf)[:, :1].repeat(rows, k)
    for r in range(rows):
        length = max_len if lengths is None else min(max(int(lengths[r]), 0), max_len)
        start = 0 if row_starts is None else int(row_starts[r])
        row = scores[r, start : start + length]
        chosen = select(row, k, chunk)
        raw[r, : chosen.numel()] = chosen.int()
        values[r, : chosen.numel()] = row[chosen]
        if page_table is None:
            found = chosen + (0 if offsets is None else int(offsets[r]))
        else:
            first = start if page_table_starts is None else int(page_table_starts[r])
            pages = page_table[r if row_to_request is None else int(row_to_request[r])]
            found = pages[first + chosen // page_size].long() * page_size + chosen % page_size
        indices[r, : chosen.numel()] = found.int()
    return Selected(indices, values, raw)


def chunk_of(
    max_len: int,
    row_stride: int,
    dtype: torch.dtype,
    *,
    row_starts: bool,
    deterministic: bool,
    smem_per_block: int,
) -> int:
    """Scores that one thread block holds; ``smem_per_block`` is that of the variant's class."""
    size = dtype.itemsize
    vector = 1 if row_starts else math.gcd(16 // size, row_stride)
    scan = 256 if deterministic else 0
    blocks = 1
    while True:
        chunk = -(-max_len // blocks)
        chunk += -chunk % vector
        if 2080 + chunk * size + scan + (0 if blocks == 1 else 16) <= smem_per_block:
            return chunk
        blocks += 1
