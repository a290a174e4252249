"""Attention over selected positions in float64, one row at a time: the oracle of the tests. Slow on purpose."""

from __future__ import annotations

import torch


def seen(
    selected: torch.Tensor, pages: torch.Tensor, position: int, *, page_size: int, num_pages: int
) -> torch.Tensor:
    """Rows of the flattened cache that a query token sees, in the order they were selected.

    Args:
        selected: [W] of positions.
        pages: the request's row of the block table.
    """
    wanted = selected.to(torch.int64)
    wanted = wanted[(wanted >= 0) & (wanted <= position) & (wanted < len(pages) * page_size)]
    page = pages.to(torch.int64)[wanted // page_size]
    rows = page * page_size + wanted % page_size
    return rows[(page >= 0) & (page < num_pages)]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    selected_positions: torch.Tensor,
    block_table: torch.Tensor,
    token_to_request: torch.Tensor,
    query_positions: torch.Tensor,
    *,
    scale: float,
    k_descale: float = 1.0,
    v_descale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [T, Hq, D] and the lse [T, Hq], in float64.

    Args:
        q: [T, Hq, D].
        k, v: [pages, page_size, Hkv, D], of any element type and strides.
        selected_positions: [T, W].
        block_table: [requests, pages of one].
        token_to_request, query_positions: [T].
    """
    num_pages, page_size, heads, dim = k.shape
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64, device=q.device)
    keys, values = (t.to(torch.float64).reshape(num_pages * page_size, heads, dim) for t in (k, v))
    for t, request in enumerate(token_to_request.tolist()):
        if not 0 <= request < len(block_table):
            continue
        position = int(query_positions[t])
        sizes = {"page_size": page_size, "num_pages": num_pages}
        rows = seen(selected_positions[t], block_table[request], position, **sizes)
        if len(rows) == 0:
            continue
        grouped = q[t].to(torch.float64).reshape(heads, -1, dim)
        logits = torch.einsum("hgd,nhd->hgn", grouped, keys[rows] * k_descale) * scale
        mixed = torch.einsum("hgn,nhd->hgd", logits.softmax(-1), values[rows] * v_descale)
        out[t], lse[t] = mixed.reshape(-1, dim), logits.logsumexp(-1).reshape(-1)
    return out, lse
