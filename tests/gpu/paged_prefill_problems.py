"""Paged prefill problems on a GPU: a pool of scattered pages with NaN wherever no key is, a planned call, and the float64
oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from gpu import fa2_problems
from gpu.fa2_problems import DTYPES, Batch, ends_of, i32

from kernseal.kernels.paged_prefill.reference import prefill

SPARE = 3
"""Rows of q past the last sequence, and pages of no sequence: NaN."""
GARBAGE = (-1, 2**31 - 1, -(2**31))
"""Entries of the page table that no key needs."""
LAYOUTS = ("NHD", "HND", "one tensor", "layers")


def div_up(n: int, unit: int) -> int:
    return -(-n // unit)


@dataclass
class Problem(Batch):
    """Tensors of one call.

    Attributes:
        lengths: query rows and keys of each sequence.
        k, v: [pages, page_size, Hkv, D] whatever the layout.
        tables: the page table of each sequence, with entries that no key needs at its end.
        call: further arguments of the call, by field.
    """

    axes: Mapping[str, Any]
    lengths: list[tuple[int, int]]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tables: list[list[int]]
    call: dict[str, Any] = field(default_factory=dict)

    @property
    def kv_lens(self) -> list[int]:
        return [keys for _, keys in self.lengths]

    @property
    def page_indptr(self) -> list[int]:
        return ends_of([len(table) for table in self.tables])

    @property
    def page_size(self) -> int:
        return int(self.k.shape[1])

    @property
    def page_indices(self) -> list[int]:
        """With an entry past the last sequence."""
        return [*(entry for table in self.tables for entry in table), GARBAGE[0]]

    def only(self, chosen: Sequence[int]) -> Problem:
        """The same sequences in another batch, on the same pool."""
        qo, spare = self.qo, torch.full_like(self.q[:SPARE], float("nan"))
        q = torch.cat([*(self.q[qo[b] : qo[b + 1]] for b in chosen), spare])
        tables, lengths = [self.tables[b] for b in chosen], [self.lengths[b] for b in chosen]
        return replace(self, q=q, tables=tables, lengths=lengths, call=dict(self.call))

    def laid_out(self, layout: str) -> Problem:
        """The same pool in another layout."""
        k, v = pools(layout, tuple(self.k.shape), self.k.dtype)
        return replace(self, k=k.copy_(self.k), v=v.copy_(self.v))

    def unused(self) -> torch.Tensor:
        """[pages, page_size]: which rows of the pool hold no key."""
        found = torch.ones(self.k.shape[:2], dtype=torch.bool)
        for table, keys in zip(self.tables, self.kv_lens, strict=True):
            for at in range(div_up(keys, self.page_size)):
                found[table[at], : keys - at * self.page_size] = False
        return found.cuda()


def axes_of(variant: Any) -> dict[str, Any]:
    """Config of a variant of a bundle."""
    axes = variant.axes
    return {
        "dtype": axes["dtype"],
        "head_dim": int(axes["head_dim"]),
        "causal": axes["causal"] in (True, "1", 1),
    }


def name_of(axes: Mapping[str, Any]) -> str:
    return f"{axes['dtype']}-d{axes['head_dim']}-{'causal' if axes['causal'] else 'full'}"


def pools(layout: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v of ``shape``, [pages, page_size, Hkv, D], full of NaN; none of what lies between is theirs."""
    pages, size, heads, dim = shape

    def full(*sizes: int) -> torch.Tensor:
        return torch.full(sizes, float("nan"), dtype=dtype, device="cuda")

    if layout == "NHD":
        return full(*shape), full(*shape)
    if layout == "HND":
        k, v = full(pages, heads, size, dim), full(pages, heads, size, dim)
        return k.transpose(1, 2), v.transpose(1, 2)
    if layout == "one tensor":
        k, v = full(pages, 2, size, heads, dim).unbind(1)
        return k, v
    both = full(pages, 3, heads + 1, size, 2, dim)[:, 1, 1:].transpose(1, 2)  # the middle one of three layers
    k, v = both.unbind(3)
    return k, v


def make(
    axes: Mapping[str, Any],
    lengths: Sequence[tuple[int, int]],
    heads: tuple[int, int] = (8, 2),
    page_size: int = 16,
    layout: str = "NHD",
    seed: int = 0,
) -> Problem:
    """Random tensors: of one seed the same queries, keys and values whatever the pages are. ``heads``: of q and of k."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    rows, keys = (sum(pair[i] for pair in lengths) for i in (0, 1))
    dtype, dim = DTYPES[axes["dtype"]], axes["head_dim"]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    q = normal(rows + SPARE, heads[0], dim)
    q[rows:] = float("nan")
    used = [div_up(count, page_size) for _, count in lengths]
    numbers = torch.randperm(sum(used) + SPARE, generator=torch.Generator().manual_seed(seed)).tolist()
    k, v = pools(layout, (len(numbers), page_size, heads[1], dim), dtype)
    tables, slots, at = [], [torch.empty(0, dtype=torch.long)], 0
    for b, ((_, count), pages) in enumerate(zip(lengths, used, strict=True)):
        mine = numbers[at : at + pages]
        at += pages
        token = torch.arange(count)
        slots.append(torch.tensor(mine, dtype=torch.long)[token // page_size] * page_size + token % page_size)
        tables.append(mine + [GARBAGE[i % len(GARBAGE)] for i in range(b % 4)])
    where = torch.cat(slots).cuda()
    for pool in (k, v):
        pool[where // page_size, where % page_size] = normal(keys, heads[1], dim)
    return Problem(axes, list(lengths), q, k, v, tables, {"sm_scale": dim**-0.5})


class Runner(fa2_problems.Runner):
    OP = "paged_prefill"
    SCRATCH = 256 << 20

    def lengths(self, p: Problem) -> dict[str, torch.Tensor]:
        return {"qo_indptr": i32(p.qo), "page_indptr": i32(p.page_indptr), "kv_lens": i32(p.kv_lens)}

    def keys(self, p: Problem) -> dict[str, torch.Tensor]:
        return {"page_indices": i32(p.page_indices).cuda()}


def oracle(p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    return prefill(
        p.q,
        p.k,
        p.v,
        p.qo,
        p.page_indptr,
        p.page_indices,
        p.kv_lens,
        sm_scale=p.call["sm_scale"],
        causal=p.axes["causal"],
    )
