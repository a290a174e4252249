"""QSA attention on the fake driver: calls in the words of ``kernel.yaml``, and libraries with or without kernels."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpu.fake_driver.kernseal_library import Kernseal, stub, stub_library
from cpu.fake_driver.xqa import address

from kernseal.export import paths, spec
from kernseal.export.spec import Target

OP = "qsa_attention"
ALWAYS = {"q": 16, "k": 16, "v": 16, "o": 16, "qo_indptr": 4}
SINGLE = {"block_indices": 4, "block_table": 4, "token_to_request": 4, "query_positions": 8}
GROUPED = {"page_indices": 4, "memberships": 4, "kv_lens": 4}
POINTERS = (*ALWAYS, *SINGLE, *GROUPED, "workspace", "stream")
ELEMENT = {"bf16": 2, "f16": 2, "e4m3": 1}


@functools.cache
def op() -> spec.Op:
    return spec.load_op(paths.kernels() / OP)


def axes_of(**changes: Any) -> dict[str, Any]:
    return {**op().data["defaults"], **changes}


def fragment(axes: Mapping[str, Any]) -> int:
    return math.gcd(axes["block_size"], axes["page_size"])


def build(all_axes: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """A library whose variants can be prepared, not run."""
    return stub_library((stub(op(), axes, Target("sm_100a")) for axes in all_axes), "sm_100a", folder)


def library_of(all_axes: Sequence[Mapping[str, Any]], folder: Path) -> Kernseal:
    return Kernseal(build(all_axes, folder))


@dataclass(frozen=True)
class Call:
    """Fields of ``kseal_qsa_attention_args``."""

    axes: Mapping[str, Any]
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.fields.get(name, 0)

    def args(self, library: Kernseal) -> Any:
        return library.args(OP, self.fields, POINTERS)

    @property
    def page_capacity(self) -> int:
        """Columns of ``page_indices``: the fragments that a route can have."""
        axes = self.axes
        blocks = min(self["group"] * (self["block_topk"] + 1), -(-self["max_seq_len"] // axes["block_size"]))
        fragments = blocks * (axes["block_size"] // fragment(axes))
        masks = (
            axes["grouped"] and axes["dtype"] == "e4m3" and axes["block_size"] == 4 and axes["tile_q"] >= 64
        )
        return -(-fragments // 32) * 32 if masks else fragments

    @property
    def kv_capacity(self) -> int:
        """Positions that a route sees at most."""
        axes, block = self.axes, self.axes["block_size"]
        if axes["grouped"]:
            tokens = min(self["group"] * (self["block_topk"] + 1), -(-self["max_seq_len"] // block)) * block
        else:
            tokens = self["block_topk"] * block + block - int(axes["count_current"])
        return int(min(tokens, self["max_seq_len"]))

    @property
    def strides(self) -> tuple[int, int, int]:
        """Of pages, heads and tokens, in elements."""
        head = self.axes["head_dim"] * self.axes["page_size"]
        dense = {"page": head * self["num_kv_heads"], "head": head, "token": self.axes["head_dim"]}
        page, head, token = (self[f"kv_{name}_stride"] or dense[name] for name in dense)
        return page, head, token

    @property
    def split_rows(self) -> int:
        axes = self.axes
        rows = self["num_routes"] * self["num_kv_heads"] * axes["splits"]
        return int(rows * self["group"] * axes["heads_per_kv"])


def _strides(rng: random.Random, axes: Mapping[str, Any], heads: int) -> dict[str, int]:
    """Of a dense HND cache, of an NHD one, or of one layer among several."""
    if axes["flat_kv_heads"]:
        return {}
    head_dim, page = axes["head_dim"], axes["page_size"]
    nhd = {"kv_head_stride": head_dim, "kv_token_stride": heads * head_dim}
    layers = rng.randrange(1, 5) * page * heads * head_dim
    return rng.choice([{}, {"kv_page_stride": layers}, nhd, {**nhd, "kv_page_stride": layers}])


def random_call(rng: random.Random, axes: Mapping[str, Any]) -> Call:
    """A valid call. Scratch is as large as it ever needs to be: what it must be is another test's."""
    ratio, page = axes["heads_per_kv"], axes["page_size"]
    heads = axes["flat_kv_heads"] or rng.choice([1, 2, 3, 8])
    group = rng.randrange(2, min(8, axes["tile_q"] // ratio) + 1) if axes["grouped"] else 1
    routes = rng.choice([1, 2, 7, 64, rng.randrange(1, 600)])
    total = routes if group == 1 else rng.randrange(routes, routes * group + 1)
    length = rng.choice([1, 5, 2048, 131072, rng.randrange(1, 2**20)])
    fields: dict[str, Any] = {
        "num_q_heads": ratio * heads,
        "num_kv_heads": heads,
        "group": group,
        "block_topk": rng.choice([1, 2, 128, 512, rng.randrange(1, 513)]),
        "scale": rng.choice([0.0625, 1.0, -0.5, rng.uniform(0.01, 3)]),
        "out_scale": rng.choice([1.0, rng.uniform(0.01, 3)]),
        "max_seq_len": length,
        "num_routes": routes,
        "total_q": total,
        "num_pages": rng.randrange(1, 2**16),
        **_strides(rng, axes, heads),
        **{name: address(rng, align) for name, align in ALWAYS.items()},
        "workspace": address(rng, 256),
        "workspace_bytes": 2**40,
        "stream": rng.choice([0, 1, 2, address(rng, 8)]),
    }
    if axes["grouped"]:
        return Call(axes, {**fields, **{name: address(rng, align) for name, align in GROUPED.items()}})
    columns = -(-length // page) + rng.choice([0, 3])
    single = {
        "num_requests": rng.randrange(1, 2**16),
        "max_pages_per_request": columns,
        "block_indices_stride": rng.choice([0, fields["block_topk"] + rng.randrange(9)]),
        "block_table_stride": rng.choice([0, columns + rng.randrange(9)]),
        **{name: address(rng, align) for name, align in SINGLE.items()},
    }
    return Call(axes, {**fields, **single})
