"""Paged decode attention in float64, one sequence at a time: the oracle of the tests. Slow and plain on purpose."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

MASK_BITS = 32
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of E2M1 by code; bit 3 is the sign."""
FP4_GROUP = 16


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
    q_lens: Sequence[int] | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The output [R, Hq, D] in float64; rows over no token, or over more than their row of the table can hold, are zeros.

    Args:
        q: [R, Hq, D].
        k, v: [pages, page_size, Hkv, D], of any element type and strides.
        page_table: [B, max_pages] of page numbers; entries past a row's length are not looked at.
        seq_lens: [B]; drafts count.
        window: last positions that count; 0 for all.
        sinks: [Hq] extra logits, or None.
        q_scale: multiplies the logits, on top of 1/sqrt(D).
        kv_scale: multiplies the elements of k and v.
        q_lens: query tokens of each sequence; None is one each.
        mask: [R, words] of int32: bit j says whether the row sees draft j of its sequence; None is all.
    """
    page_size, kv_heads, dim = k.shape[1:]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    counts = [1] * len(seq_lens) if q_lens is None else list(q_lens)
    end = 0
    for b, (length, drafts) in enumerate(zip(seq_lens.tolist(), counts, strict=True)):
        begin, end = end, end + drafts
        if drafts == 0 or not max(drafts, 1) <= length <= page_table.shape[1] * page_size:
            continue
        positions = torch.arange(length, device=q.device)
        pages = page_table[b, positions // page_size].long()
        keys, values = (
            cache[pages, positions % page_size].to(torch.float32).double() * kv_scale for cache in (k, v)
        )
        seen = _seen(positions, drafts, window, None if mask is None else mask[begin:end])
        grouped = q[begin:end].double().view(drafts, kv_heads, -1, dim)
        logits = torch.einsum("ihgd,nhd->ihgn", grouped, keys) * (q_scale / math.sqrt(dim))
        logits = logits.masked_fill(~seen[:, None, None, :], -math.inf)
        if sinks is not None:
            extra = sinks.double().view(1, kv_heads, -1, 1).expand(drafts, -1, -1, 1)
            weights = torch.cat([logits, extra], -1).softmax(-1)[..., :-1]
        else:
            weights = logits.softmax(-1)
        out[begin:end] = torch.einsum("ihgn,nhd->ihgd", weights, values).reshape(drafts, -1, dim)
    return out


def _seen(positions: torch.Tensor, drafts: int, window: int, mask: torch.Tensor | None) -> torch.Tensor:
    """[drafts, length]: which positions each draft counts."""
    length = len(positions)
    draft = torch.arange(drafts, device=positions.device)
    seen = torch.ones(drafts, length, dtype=torch.bool, device=positions.device)
    if mask is not None:
        bits = mask[:, draft // MASK_BITS].to(torch.int64) >> (draft % MASK_BITS)
        seen[:, length - drafts :] = (bits & 1).bool()
    if window:
        own = length - drafts + draft
        seen &= positions[None, :] > own[:, None] - window
    return seen


def fp4_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[.., D] float32 of an NVFP4 cache: ``codes`` [.., D/2] uint8, low half first, ``scales`` [.., D/16] e4m3."""
    halves = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    magnitudes = torch.tensor(FP4_VALUES, device=codes.device)[halves & 7]
    values = torch.where(halves >= 8, -magnitudes, magnitudes)
    return values * scales.to(torch.float32).repeat_interleave(FP4_GROUP, -1)
