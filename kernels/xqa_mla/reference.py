"""Paged latent attention in float64, one sequence at a time: the oracle of the tests. Slow and plain on purpose."""

from __future__ import annotations

import torch

LATENT = 512
"""Elements of a cache row that are its value."""
TILE, LARGEST = 64, 448.0
"""Positions whose weights are rounded against one maximum, and the largest e4m3 number, which that maximum becomes."""


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    q_scale: float = 1.0,
    kv_scale: float = 1.0,
    rounded: bool = False,
) -> torch.Tensor:
    """The output [B, Hq, 512] in float64; rows of length 0, or longer than their row of the table can hold, are zeros.

    Args:
        q: [B, Hq, 576].
        k, v: [pages, page_size, 576], of any element type and strides; the first 512 elements of a row of v count.
        page_table: [B, max_pages] of page numbers; entries past a row's length are not looked at.
        seq_lens: [B].
        q_scale: multiplies the logits.
        kv_scale: multiplies the elements of k and v.
        rounded: round the softmax weights as the kernel for an e4m3 cache does.
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
        latents = values[:, :LATENT]
        out[b] = _rounded_attention(logits, latents) if rounded else logits.softmax(-1) @ latents
    return out


def _rounded_attention(logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention whose weights, relative to the largest logit so far, are e4m3 numbers."""
    largest = torch.full_like(logits[:, :1], -torch.inf)
    total, out = torch.zeros_like(largest), torch.zeros(logits.shape[0], LATENT).to(values)
    for begin in range(0, logits.shape[1], TILE):
        tile = logits[:, begin : begin + TILE]
        before, largest = largest, torch.maximum(largest, tile.amax(-1, keepdim=True))
        weights = ((tile - largest).exp() * LARGEST).to(torch.float32).to(torch.float8_e4m3fn)
        exact, kept = weights.to(torch.float32).double(), (before - largest).exp()
        out = out * kept + exact @ values[begin : begin + TILE]
        total = total * kept + exact.sum(-1, keepdim=True)
    return out / total
