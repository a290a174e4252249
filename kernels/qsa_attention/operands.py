"""Tensor shapes of the QSA attention call, for the loader's generic caller.

Source of the field meanings: ``kernel.yaml`` (a test compares the names with it).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernseal.loader.operands import Operand, OpSpec

_KV_STRIDES = ("kv_page_stride", "kv_head_stride", "kv_token_stride")
_ZERO_DEFAULTS = (
    *_KV_STRIDES,
    "block_indices_stride",
    "block_table_stride",
    "num_requests",
    "max_pages_per_request",
)


def _operands(config: Mapping[str, Any]) -> dict[str, Operand]:
    rows = ("total_q", "num_q_heads", "head_dim")
    form = "masks" if query_major(config) else "bytes"
    cache = Operand("dtype", ("num_pages", "num_kv_heads", "page_size", "head_dim"), strides=_KV_STRIDES)
    return {
        "q": Operand("dtype", rows),
        "k": cache,
        "v": cache,
        "o": Operand("out_dtype", rows),
        "qo_indptr": Operand("i32", ("num_routes+1",)),
        "block_indices": Operand("i32", ("total_q", "block_topk"), "block_indices_stride"),
        "block_table": Operand("i32", ("num_requests", "max_pages_per_request"), "block_table_stride"),
        "token_to_request": Operand("i32", ("total_q",)),
        "query_positions": Operand("position_dtype", ("total_q",)),
        "page_indices": Operand("i32", ("num_routes", f"columns_{form}")),
        "memberships": Operand("i32", ("num_routes", f"words_{form}")),
        "kv_lens": Operand("i32", ("num_routes",)),
        "workspace": Operand("bytes", ("workspace_bytes",)),
    }


def query_major(config: Mapping[str, Any]) -> bool:
    """Whether memberships are masks of 32 entries, as an e4m3 variant with large tiles reads them."""
    wide = config["block_size"] == 4 and config["tile_q"] >= 64
    return bool(config["grouped"] and config["dtype"] == "e4m3" and wide)


def page_capacity(sizes: Mapping[str, Any], masks: bool) -> int | None:
    """Columns of ``page_indices``; None where a size is not known."""
    group, topk, length = sizes["group"], sizes["block_topk"], sizes["max_seq_len"]
    if None in (group, topk, length):
        return None
    block, page = sizes["block_size"], sizes["page_size"]
    blocks = min(group * (topk + 1), -(-length // block))
    fragments: int = blocks * max(1, block // page)
    return -(-fragments // 32) * 32 if masks else fragments


def _derive(sizes: Mapping[str, Any]) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for form, masks in (("bytes", False), ("masks", True)):
        capacity = page_capacity(sizes, masks)
        found[f"columns_{form}"] = capacity
        found[f"words_{form}"] = None if capacity is None else -(-capacity // 4)
    return found


SPEC = OpSpec(
    operands=_operands,
    config_enums={"dtype": "kseal_dtype", "out_dtype": "kseal_dtype", "position_dtype": "kseal_dtype"},
    derive=_derive,
    config_defaults={
        "device": -1,
        "stream": 0,
        "dtype": "bf16",
        "out_dtype": "bf16",
        "head_dim": 256,
        "heads_per_kv": 12,
        "block_size": 4,
        "page_size": 64,
        "grouped": False,
        "position_dtype": "i64",
        "count_current": True,
        "tile_q": 16,
        "splits": 1,
        "persistent": False,
        "flat_kv_heads": 0,
    },
    args_defaults={**dict.fromkeys(_ZERO_DEFAULTS, 0), "group": 1, "out_scale": 1.0},
    tags={
        "dtype": "",
        "out_dtype": "o",
        "head_dim": "d",
        "heads_per_kv": "g",
        "block_size": "b",
        "page_size": "p",
        "grouped": ("single", "grouped"),
        "position_dtype": "pos",
        "count_current": ("apart", ""),
        "tile_q": "t",
        "splits": "s",
        "persistent": ("", "persistent"),
        "flat_kv_heads": "flat",
    },
)
