"""Paged decode attention in float64, one sequence at a time: the oracle of the tests. Slow and plain on purpose."""

from __future__ import annotations

import math

import torch


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    q_scale: float = 1.0,
    kv_scale: float = 1.0,
) -> torch.Tensor:
    """The output [B, Hq, D] in float64; rows of length 0, or longer than their row of the table can hold, are zeros.

    Args:
        q: [B, Hq, D].
        k, v: [pages, page_size, Hkv, D], of any element type and strides.
        page_table: [B, max_pages] of page numbers; entries past a row's length are not looked at.
        seq_lens: [B].
        window: last positions that count; 0 for all.
        sinks: [Hq] extra logits, or None.
        q_scale: multiplies the logits, on top of 1/sqrt(D).
        kv_scale: multiplies the elements of k and v.
    """
    page_size, kv_heads, dim = k.shape[1:]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for b, length in enumerate(seq_lens.tolist()):
        if not 0 < length <= page_table.shape[1] * page_size:
            continue
        begin = max(0, length - window) if window else 0
        positions = torch.arange(begin, length, device=q.device)
        pages = page_table[b, positions // page_size].long()
        keys, values = (
            cache[pages, positions % page_size].to(torch.float32).double() * kv_scale for cache in (k, v)
        )
        grouped = q[b].double().view(kv_heads, -1, dim)
        logits = torch.einsum("hgd,nhd->hgn", grouped, keys) * (q_scale / math.sqrt(dim))
        if sinks is not None:
            extra = sinks.double().view(kv_heads, -1, 1)
            weights = torch.cat([logits, extra], -1).softmax(-1)[..., :-1]
        else:
            weights = logits.softmax(-1)
        out[b] = torch.einsum("hgn,nhd->hgd", weights, values).reshape(-1, dim)
    return out
