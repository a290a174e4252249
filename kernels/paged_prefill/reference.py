"""Attention over a paged KV cache in float64, one sequence at a time: the oracle of the tests. Slow and plain on purpose."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def gathered(pool: torch.Tensor, pages: Sequence[int], length: int) -> torch.Tensor:
    """The first ``length`` rows [length, Hkv, head_dim] of the sequence with these pages; no other page is looked at."""
    size, rows = pool.shape[1], torch.arange(length, device=pool.device)
    numbers = torch.tensor(pages[: -(-length // size)], dtype=torch.long, device=pool.device)
    return pool[numbers[rows // size], rows % size]


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: Sequence[int],
    page_indptr: Sequence[int],
    page_indices: Sequence[int],
    kv_lens: Sequence[int],
    *,
    sm_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [rows, Hq, head_dim] and lse [rows, Hq] (base 2) in float64; rows of no sequence are NaN.

    Args:
        q: [rows, Hq, head_dim].
        k, v: [num_pages, page_size, Hkv, head_dim], of any element type and strides.
        qo_indptr: where the rows of each sequence begin, and where the last one's end.
        page_indptr: likewise in ``page_indices``, the pages of each sequence.
        kv_lens: keys of each sequence, which may be fewer than its pages hold.
        sm_scale: multiplies the logits.
        causal: whether row i of a sequence sees its first kv_len - qo_len + i + 1 keys alone.
    """
    rows, heads, _ = q.shape
    group = heads // k.shape[2]
    out = torch.full(q.shape, math.nan, dtype=torch.float64, device=q.device)
    lse = torch.full((rows, heads), math.nan, dtype=torch.float64, device=q.device)
    for b, length in enumerate(kv_lens):
        mine = slice(qo_indptr[b], qo_indptr[b + 1])
        pages = page_indices[page_indptr[b] : page_indptr[b + 1]]
        queries = q[mine].double().transpose(0, 1)
        keys, values = (
            gathered(x, pages, length).double().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v)
        )
        logits = queries @ keys.transpose(1, 2) * sm_scale
        seen = torch.ones(logits.shape[1:], dtype=torch.bool, device=q.device)
        if causal:
            seen = seen.tril(length - logits.shape[1])
        logits = logits.masked_fill(~seen, -math.inf)
        weights = torch.where(
            seen.any(-1, keepdim=True), logits.softmax(-1), 0.0
        )  # not 0 / 0 where nothing is seen
        out[mine] = (weights @ values).transpose(0, 1)
        lse[mine] = logits.logsumexp(-1).transpose(0, 1) / math.log(2)
    return out, lse
