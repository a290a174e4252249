"""Attention over selected positions for the tests: calls in the words of ``kernel.yaml``, and upstream's own host policy."""

from __future__ import annotations

import ast
import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpu.fake_driver.host_objects import HostObject
from cpu.fake_driver.kernseal_library import Kernseal, build_library
from cpu.fake_driver.native import ZIG
from cpu.fake_driver.reference import Scalar, Tensor
from cpu.fake_driver.xqa import address

from kernseal.export import source

OP = "qsa_selected"
D = 256
UPSTREAM = "flashinfer/experimental/b12x/attention"
POINTERS = {
    **dict.fromkeys(("q", "k", "v", "o"), 16),
    **dict.fromkeys(("k_descale", "v_descale", "block_table", "selected_positions", "lse"), 4),
    "token_to_request": 4,
    "query_positions": 8,
    "workspace": 256,
}
"""With the alignment of each; that of token_to_request is its element's."""


def library_of(variants: Sequence[HostObject], folder: Path) -> Kernseal:
    """A library with these variants, in which undefined behaviour traps."""
    command = (*ZIG, "-fsanitize=undefined", "-fsanitize-trap=undefined")
    records = [(made.record, made.ours, made.cubin) for made in variants]
    return Kernseal(build_library(variants[0].target.sm, None, records, folder, command))


@dataclass(frozen=True)
class Call:
    """Fields of ``kseal_qsa_selected_args``."""

    axes: Mapping[str, Any]
    fields: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields.get(name, 0)

    def but(self, **changes: Any) -> Call:
        return Call(self.axes, {**self.fields, **changes})

    def args(self, library: Kernseal) -> Any:
        cast = {name: library.ffi.cast("void *", self[name]) for name in (*POINTERS, "stream")}
        return library.struct(f"kseal_{OP}_args", **{**self.fields, **cast})

    @property
    def splits(self) -> int:
        return int(self["splits"] or upstream_splits()(self["num_rows"]))

    @property
    def sums(self) -> int:
        """Partial outputs: [rows, splits, heads]."""
        return int(self["num_rows"] * self.splits * self["num_q_heads"]) if self.splits > 1 else 0

    @property
    def strides(self) -> tuple[int, int, int]:
        """Of pages, tokens and heads, in elements."""
        token = self["num_kv_heads"] * D
        dense = {"page": token * self["page_size"], "token": token, "head": D}
        page, token, head = (self[f"kv_{name}_stride"] or dense[name] for name in dense)
        return page, token, head

    def arguments(self) -> dict[str, Tensor | Scalar]:
        """What the recipe's host function is to be given, by its names."""
        partial = self["workspace"] if self.sums else 0
        addresses = {
            "query": self["q"],
            "key": self["k"],
            "value": self["v"],
            "k_descale": self["k_descale"],
            "v_descale": self["v_descale"],
            "page_table": self["block_table"],
            "request_ids": self["token_to_request"],
            "selected": self["selected_positions"],
            "query_positions": self["query_positions"],
            "partial": partial,
            "partial_lse": partial + self.sums * D * 4,
            "output": self["o"],
            "output_lse": self["lse"],
            "stream": self["stream"],
        }
        wide = {
            "num_pages": self["num_pages"],
            "num_requests": self["num_requests"],
            "table_width": self["max_pages_per_request"],
            **dict(zip(("page_stride", "token_stride", "head_stride"), self.strides, strict=True)),
        }
        numbers = {
            "rows": self["num_rows"],
            "splits": self.splits,
            "num_q_heads": self["num_q_heads"],
            "selection_width": self["selection_width"],
            "heads_per_kv": self["num_q_heads"] // self["num_kv_heads"],
            "kv_heads": self["num_kv_heads"],
            "page_size": self["page_size"],
        }
        return {
            **{name: Scalar("void *", value) for name, value in addresses.items()},
            **{name: Scalar("int64_t", value) for name, value in wide.items()},
            **{name: Scalar("int32_t", value) for name, value in numbers.items()},
            "scale": Scalar("float", self["scale"]),
        }

    def grids(self) -> list[tuple[str, list[int]]]:
        """A word of each kernel's name and its grid, as upstream launches them."""
        rows, heads = self["num_rows"], self["num_q_heads"]
        attention = ("SelectedPosition", [rows, self["num_kv_heads"], self.splits])
        if self.splits == 1:
            return [attention]
        if rows > self.splits:
            return [attention, ("SparseGqaMerge", [heads, rows, 1])]
        return [attention, ("CooperativeSparseGqaMerge", [heads, rows, D // 32])]


def random_call(rng: random.Random, axes: Mapping[str, Any]) -> Call:
    """A call that the op accepts, with room for a workspace of any size."""
    kv_heads = rng.choice([1, 2, 3, 8, rng.randrange(1, 65536)])
    splits = rng.choice([0, 0, 0, 1, 2, 3, 16, 64])
    most = 65535 if splits > 1 else 2**31 - 1
    unit = 16 if axes["kv_dtype"] == "e4m3" else 8
    page_size = rng.choice([1, 16, 64, 100, 256])
    dense = kv_heads * D
    fields = {
        "num_q_heads": kv_heads * rng.randrange(1, axes["tile_q"] + 1),
        "num_kv_heads": kv_heads,
        "head_dim": D,
        "page_size": page_size,
        "selection_width": rng.choice([1, 2051, 2055, 4096, rng.randrange(1, 2**30)]),
        "splits": splits,
        "scale": rng.choice([D**-0.5, 1.0, 3e-4]),
        "num_rows": rng.choice([1, 2, 4, 5, 63, 64, 65, rng.randrange(1, 5000), rng.randrange(1, most + 1)]),
        "num_requests": rng.choice([1, 7, rng.randrange(1, 2**31)]),
        "max_pages_per_request": rng.choice([1, 33, rng.randrange(1, 2**31)]),
        "num_pages": rng.choice([1, 1000, rng.randrange(1, 2**20)]),
        "kv_page_stride": rng.choice(
            [0, dense * page_size, dense * page_size * 2 + unit * rng.randrange(999)]
        ),
        "kv_token_stride": rng.choice([0, D, dense + unit * rng.randrange(999)]),
        "kv_head_stride": rng.choice([0, D * page_size, D + unit * rng.randrange(99)]),
        "workspace_bytes": 2**63,
        "stream": rng.choice([0, 1, 2, address(rng, 8)]),
    }
    fields |= {name: address(rng, max(align, 8)) for name, align in POINTERS.items()}
    if axes["kv_dtype"] == "bf16":
        fields |= {"k_descale": 0, "v_descale": 0}
    if not axes["lse"]:
        fields["lse"] = 0
    return Call(axes, fields)


# ---- upstream's own host code, without a GPU ----


def upstream_text(path: str) -> str:
    opened, _ = source.open_source(None, source.upstream())
    text = opened.read(f"{UPSTREAM}/{path}")
    assert text is not None
    return text.decode() if isinstance(text, bytes) else text


@functools.cache
def upstream_splits() -> Any:
    """``_qwen_row_splits``: CTAs that share a row, from the number of rows."""
    (rule,) = (
        node
        for node in ast.parse(upstream_text("qsa/_contract.py")).body
        if isinstance(node, ast.FunctionDef) and node.name == "_qwen_row_splits"
    )
    names = _constants("qsa/_sparse_gqa_cute_config.py")
    scope: dict[str, Any] = {"_MAX_SPLIT_ROWS": names["MAX_SPLIT_ROWS"]}
    exec(compile(ast.Module([rule], []), "_contract.py", "exec"), scope)
    return scope["_qwen_row_splits"]


def upstream_limits() -> dict[str, int]:
    return {
        **_constants("qsa/_sparse_gqa_cute_config.py"),
        **_constants("paged/_selected_forward_config.py"),
    }


def _constants(path: str) -> dict[str, int]:
    """Numbers that a module assigns to names."""
    found = {}
    for node in ast.parse(upstream_text(path)).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                if isinstance(target, ast.Name) and isinstance(node.value.value, int):
                    found[target.id] = node.value.value
    return found


@functools.cache
def upstream_warps(heads_per_kv: int) -> int:
    """``qk_warps`` of upstream's constructor: units of 16 rows of the query tile."""
    (line,) = (
        node
        for node in ast.walk(ast.parse(upstream_text("paged/_selected_forward.py")))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "self.qk_warps"
    )
    expression = ast.unparse(line.value).replace("self.heads_per_kv", "heads_per_kv")
    return int(eval(expression, {"heads_per_kv": heads_per_kv}))
