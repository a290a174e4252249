"""The tables of QSA metadata, route by route, in plain Python: the oracle of the tests."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

from kernseal.kernels.qsa_attention.reference import visible


@dataclass(frozen=True)
class Route:
    """One route's rows of the tables, as far as they are written.

    Attributes:
        entries: of page_indices.
        members: for each entry, the tokens of the route that see it, as bits.
        kv_len: its kv_lens.
    """

    entries: list[int]
    members: list[int]
    kv_len: int


NOTHING = Route([-1], [0], 1)
"""A route that attention sees nothing of."""


def routes(
    qo_indptr: torch.Tensor,
    block_indices: torch.Tensor,
    block_table: torch.Tensor,
    token_to_request: torch.Tensor,
    query_positions: torch.Tensor,
    *,
    group: int,
    block_size: int,
    page_size: int,
    max_seq_len: int,
    count_current: bool = True,
    flat_kv_heads: int = 0,
) -> list[Route]:
    """Every route; shapes as in ``kernel.yaml``."""
    ends = qo_indptr.tolist()
    found = []
    for first, end in itertools.pairwise(ends):
        requests = token_to_request[first:end].tolist()
        positions = query_positions[first:end].tolist()
        consecutive = [positions[0] + i for i in range(len(positions))] if positions else []
        usable = (
            0 < end - first <= group
            and len(set(requests)) == 1
            and 0 <= requests[0] < len(block_table)
            and positions == consecutive
            and positions[0] >= 0
            and positions[-1] < max_seq_len
        )
        if not usable:
            found.append(NOTHING)
            continue
        seen = [
            visible(block_indices[first + i], p, block_size=block_size, count_current=count_current)
            for i, p in enumerate(positions)
        ]
        found.append(
            _route(seen, positions[-1], block_table[requests[0]], block_size, page_size, flat_kv_heads)
        )
    return found


def _route(
    seen: list[list[int]], last: int, table: torch.Tensor, block_size: int, page_size: int, flat_kv_heads: int
) -> Route:
    fragment = math.gcd(block_size, page_size)
    stride = page_size // fragment * max(flat_kv_heads, 1)
    blocks = sorted({p // block_size for positions in seen for p in positions})
    entries, members = [], []
    for block in blocks:
        for begin in range(block * block_size, (block + 1) * block_size, fragment):
            page = int(table[begin // page_size]) if begin <= last else -1
            entries.append(page * stride + begin % page_size // fragment if page >= 0 else -1)
            see = [i for i, positions in enumerate(seen) if begin in positions]
            members.append(sum(1 << i for i in see) if page >= 0 else 0)
    tail = (last + 1) % block_size
    return Route(entries, members, len(blocks) * block_size - (block_size - tail if tail else 0))
