"""Attention over selected positions: a cache that is NaN where no row looks, a call through the loader, and the oracle."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernseal.kernels.qsa_selected.reference import attention

OP = "qsa_selected"
D = 256
CACHE = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
INDEX = {"i32": torch.int32, "i64": torch.int64}
SCALE = D**-0.5
DESCALES = 0.5, 1.5
LIMIT = 1e-2
"""Largest ||error|| / ||reference|| of one head: probabilities and outputs are rounded to bf16."""
LSE_LIMIT = 1e-3


def axes_of(variant: Any) -> dict[str, Any]:
    """Config of a variant of a bundle."""
    axes = dict(variant.axes)
    return {**axes, "tile_q": int(axes["tile_q"]), "lse": axes["lse"] in ("1", "true", "True")}


@dataclass
class Problem:
    """Tensors of one call, in the words of ``kernel.yaml``."""

    axes: Mapping[str, Any]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    token_to_request: torch.Tensor
    selected_positions: torch.Tensor
    query_positions: torch.Tensor
    k_descale: torch.Tensor | None
    v_descale: torch.Tensor | None

    @property
    def rows(self) -> int:
        return self.q.shape[0]

    def chosen(self, rows: Sequence[int]) -> Problem:
        """The same rows in another call."""
        names = ("q", "token_to_request", "selected_positions", "query_positions")
        return replace(self, **{name: getattr(self, name)[list(rows)].contiguous() for name in names})

    def tensors(self) -> dict[str, Any]:
        names = ("block_table", "token_to_request", "selected_positions", "query_positions")
        return {n: getattr(self, n) for n in ("q", "k", "v", "k_descale", "v_descale", *names)}

    def outputs(self) -> dict[str, Any]:
        """What no kernel would write."""
        heads = self.q.shape[1]
        lse = torch.full((self.rows, heads), torch.nan, device=self.q.device) if self.axes["lse"] else None
        return {"o": torch.full_like(self.q, torch.nan), "lse": lse}

    def check(self, out: Mapping[str, Any]) -> float:
        """The largest error of a head, after the rows that see nothing."""
        k_scale, v_scale = DESCALES if self.axes["kv_dtype"] == "e4m3" else (1.0, 1.0)
        tables = (
            self.selected_positions,
            self.block_table,
            self.token_to_request,
            self.query_positions,
        )
        want, lse = attention(
            self.q, self.k.float(), self.v.float(), *tables, scale=SCALE, k_descale=k_scale, v_descale=v_scale
        )
        empty = lse[:, 0] == -torch.inf
        assert out["o"][empty].eq(0).all(), "a row that sees nothing is not zero"
        if out["lse"] is not None:
            assert out["lse"][empty].eq(-torch.inf).all()
            torch.testing.assert_close(out["lse"][~empty].double(), lse[~empty], rtol=0, atol=LSE_LIMIT)
        error = (out["o"].double() - want)[~empty].norm(dim=-1) / want[~empty].norm(dim=-1)
        return float(error.max()) if len(error) else 0.0


def make(
    axes: Mapping[str, Any],
    counts: Sequence[int],
    *,
    width: int,
    heads: tuple[int, int] = (12, 1),
    page_size: int = 16,
    length: int = 300,
    requests: int = 3,
    seed: int = 0,
    device: str = "cuda",
) -> Problem:
    """Rows that see ``counts`` positions each (as many as there are at most), among entries that count for nothing.

    Cache and pages hold NaN, and tables numbers of pages that do not exist, wherever no row looks.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    pages_each = -(-length // page_size)
    table = torch.tensor(rng.sample(range(requests * pages_each + 5), requests * pages_each))
    table = table.view(requests, pages_each)
    shape = (requests * pages_each + 5, page_size, heads[1], D)
    caches = [torch.full(shape, torch.nan) for _ in range(2)]
    selected, positions, owners = [], [], []
    looked: set[tuple[int, int]] = set()
    for count in counts:
        owner, position = rng.randrange(requests), rng.randrange(max(count - 1, 0), length)
        seen = rng.sample(range(position + 1), min(count, position + 1, width))
        other = [-1, -(2**31), position + 1, length + 7, 2**31 - 1]
        row = seen + [rng.choice(other) for _ in range(width - len(seen))]
        rng.shuffle(row)
        looked |= {(owner, j) for j in seen}
        selected.append(row)
        positions.append(position)
        owners.append(owner)
    places = torch.tensor(sorted(looked), dtype=torch.long).view(-1, 2)
    pages, offsets = table[places[:, 0], places[:, 1] // page_size], places[:, 1] % page_size
    for cache in caches:
        cache[pages, offsets] = torch.randn(len(places), heads[1], D, generator=generator)
    kept = {(request, j // page_size) for request, j in looked}
    nowhere = [-1, 2**31 - 1, shape[0], -(2**31)]
    for request in range(requests):
        for page in range(pages_each):
            if (request, page) not in kept:
                table[request, page] = rng.choice(nowhere)
    kind = CACHE[axes["kv_dtype"]]
    fp8 = axes["kv_dtype"] == "e4m3"
    k, v = (cache.to(kind).to(device) for cache in caches)
    return Problem(
        axes,
        torch.randn(len(counts), heads[0], D, generator=generator).to(torch.bfloat16).to(device),
        k,
        v,
        table.to(torch.int32).to(device),
        torch.tensor(owners, dtype=INDEX[axes["request_dtype"]], device=device),
        torch.tensor(selected, dtype=torch.int32, device=device),
        torch.tensor(positions, dtype=torch.int64, device=device),
        torch.tensor([DESCALES[0]], device=device) if fp8 else None,
        torch.tensor([DESCALES[1]], device=device) if fp8 else None,
    )


def same_bits(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    pairs = [(a[n], b[n]) for n in ("o", "lse") if a[n] is not None]
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)
