"""Attention of packed sequences in float64, one sequence at a time: the oracle of the tests. Slow and plain on purpose."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: Sequence[int],
    kv_indptr: Sequence[int],
    *,
    sm_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [rows, Hq, v_dim] and lse [rows, Hq] (base 2) in float64; rows of no sequence are NaN.

    Args:
        q: [rows, Hq, head_dim].
        k, v: [rows, Hkv, head_dim] and [rows, Hkv, v_dim], of any element type and strides.
        qo_indptr, kv_indptr: where each sequence begins, and where the last one ends.
        sm_scale: multiplies the logits.
        causal: whether row i of a sequence sees its first kv_len - qo_len + i + 1 keys alone.
    """
    rows, heads, _ = q.shape
    group = heads // k.shape[1]
    out = torch.full((rows, heads, v.shape[-1]), math.nan, dtype=torch.float64, device=q.device)
    lse = torch.full((rows, heads), math.nan, dtype=torch.float64, device=q.device)
    for b in range(len(qo_indptr) - 1):
        mine, theirs = slice(qo_indptr[b], qo_indptr[b + 1]), slice(kv_indptr[b], kv_indptr[b + 1])
        queries = q[mine].double().transpose(0, 1)
        keys, values = (x[theirs].double().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        logits = queries @ keys.transpose(1, 2) * sm_scale
        qo_len, kv_len = logits.shape[1:]
        seen = torch.ones(qo_len, kv_len, dtype=torch.bool, device=q.device)
        if causal:
            seen = seen.tril(kv_len - qo_len)
        logits = logits.masked_fill(~seen, -math.inf)
        weights = torch.where(
            seen.any(-1, keepdim=True), logits.softmax(-1), 0.0
        )  # not 0 / 0 where nothing is seen
        out[mine] = (weights @ values).transpose(0, 1)
        lse[mine] = logits.logsumexp(-1).transpose(0, 1) / math.log(2)
    return out, lse
