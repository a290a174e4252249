"""Tensor shapes of the QSA metadata call, for the loader's generic caller.

Source of the field meanings: ``kernel.yaml`` (a test compares the names with it).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernseal.loader.operands import Operand, OpSpec


def _operands(config: Mapping[str, Any]) -> dict[str, Operand]:
    return {
        "qo_indptr": Operand("i32", ("num_routes+1",)),
        "block_indices": Operand("i32", ("total_q", "block_topk"), "block_indices_stride"),
        "block_table": Operand("i32", ("num_requests", "max_pages_per_request"), "block_table_stride"),
        "token_to_request": Operand("i32", ("total_q",)),
        "query_positions": Operand("position_dtype", ("total_q",)),
        "page_indices": Operand("i32", ("num_routes", "page_capacity")),
        "memberships": Operand("i32", ("num_routes", "membership_words")),
        "kv_lens": Operand("i32", ("num_routes",)),
    }


def _derive(sizes: Mapping[str, Any]) -> dict[str, int | None]:
    capacity = sizes["page_capacity"]
    return {"membership_words": None if capacity is None else -(-capacity // 4)}


SPEC = OpSpec(
    operands=_operands,
    config_enums={"position_dtype": "kseal_dtype"},
    derive=_derive,
    config_defaults={
        "device": -1,
        "stream": 0,
        "group": 4,
        "position_dtype": "i64",
        "query_major": False,
    },
    args_defaults={
        "block_indices_stride": 0,
        "block_table_stride": 0,
        "count_current": 1,
        "flat_kv_heads": 0,
        "pdl": 1,
    },
    tags={"group": "g", "position_dtype": "pos", "query_major": ("bytes", "masks")},
)
