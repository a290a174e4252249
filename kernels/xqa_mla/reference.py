"""Paged latent attention in float64, one sequence at a time: the oracle of the tests. Slow and plain on purpose."""

from __future__ import annotations

import torch

LATENT = 512
"""Elements of a cache row that are its value."""


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    q_scale: float = 1.0,
    kv_scale: float = 1.0,
) -> torch.Tensor:
    """The output [B, Hq, 512] in float64; rows of length 0, or longer than their row of the table can hold, are zeros.

    Args:
        q: [B, Hq, 576].
        k, v: [pages, page_size, 576], of any element type and strides; the first 512 elements of a row of v count.
        page_table: [B, max_pages] of page numbers; entries past a row's length are not looked at.
        seq_lens: [B].
        q_scale: multiplies the logits.
        kv_scale: multiplies the elements of k and v.
    """
    page_size = k.shape[1]
    out = torch.zeros(*q.shape[:2], LATENT, dtype=torch.float64, device=q.device)
    for b, length in enumerate(seq_lens.tolist()):
        if not 0 < length <= page_table.shape[1] * page_size:
            continue
        positions = torch.arange(length, device=q.device)
        pages = page_table[b, positions // page_size].long()
        keys, values = (
            cache[pages, positions % page_size].to(torch.float32).double() * kv_scale for cache in (k, v)
        )
        logits = q[b].to(torch.float32).double() @ keys.T * q_scale
        out[b] = logits.softmax(-1) @ values[:, :LATENT]
    return out
