"""Attention over selected KV blocks in float64, one query token at a time: the oracle of the tests. Slow on purpose."""

from __future__ import annotations

import torch


def visible(
    block_indices: torch.Tensor,
    position: int,
    *,
    block_size: int,
    count_current: bool = True,
) -> list[int]:
    """Positions that a query token sees, in order and each once, with its row [block_topk] of selected blocks."""
    bound = (position + int(count_current)) // block_size
    selected = set(block_indices[: min(len(block_indices), bound)].tolist())
    blocks = sorted(b for b in selected if 0 <= b < bound)
    found = [b * block_size + i for b in blocks for i in range(block_size)]
    return found + list(range(bound * block_size, position + 1))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_indices: torch.Tensor,
    block_table: torch.Tensor,
    token_to_request: torch.Tensor,
    query_positions: torch.Tensor,
    *,
    block_size: int,
    max_seq_len: int,
    scale: float,
    out_scale: float = 1.0,
    count_current: bool = True,
) -> torch.Tensor:
    """The output [T, Hq, D] in float64. How tokens are grouped into routes does not matter.

    Args:
        q: [T, Hq, D].
        k, v: [pages, Hkv, page_size, D], of any element type and strides.
        block_indices: [T, block_topk] of block numbers.
        block_table: [requests, pages of one] of page numbers.
        token_to_request, query_positions: [T]. A row whose request or position is out of range is NaN: it means nothing.
    """
    heads, page_size = k.shape[1:3]
    out = torch.full(q.shape, torch.nan, dtype=torch.float64, device=q.device)
    for t, (request, position) in enumerate(
        zip(token_to_request.tolist(), query_positions.tolist(), strict=True)
    ):
        if not (0 <= request < len(block_table) and 0 <= position < max_seq_len):
            continue
        seen = visible(block_indices[t], position, block_size=block_size, count_current=count_current)
        at = torch.tensor(seen, device=q.device)
        pages = block_table[request].long()[at // page_size]
        keys, values = (x[pages, :, at % page_size].double() for x in (k, v))
        queries = q[t].double().view(heads, -1, q.shape[-1])
        weights = torch.softmax(scale * torch.einsum("hgd,nhd->hgn", queries, keys), dim=-1)
        out[t] = out_scale * torch.einsum("hgn,nhd->hgd", weights, values).reshape(q.shape[1:])
    return out
