"""Tensor shapes of the call of attention over selected positions, for the loader's generic caller.

Source of the field meanings: ``kernel.yaml`` (a test compares the names with it).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernseal.loader.operands import Operand, OpSpec

_KV_STRIDES = ("kv_page_stride", "kv_token_stride", "kv_head_stride")


def _operands(config: Mapping[str, Any]) -> dict[str, Operand]:
    rows = ("num_rows", "num_q_heads", "head_dim")
    cache = Operand("kv_dtype", ("num_pages", "page_size", "num_kv_heads", "head_dim"), strides=_KV_STRIDES)
    return {
        "q": Operand("bf16", rows),
        "k": cache,
        "v": cache,
        "k_descale": Operand("f32", ("one",)),
        "v_descale": Operand("f32", ("one",)),
        "block_table": Operand("i32", ("num_requests", "max_pages_per_request")),
        "token_to_request": Operand("request_dtype", ("num_rows",)),
        "selected_positions": Operand("i32", ("num_rows", "selection_width")),
        "query_positions": Operand("i64", ("num_rows",)),
        "o": Operand("bf16", rows),
        "lse": Operand("f32", ("num_rows", "num_q_heads")),
        "workspace": Operand("bytes", ("workspace_bytes",)),
    }


SPEC = OpSpec(
    operands=_operands,
    derive=lambda sizes: {"one": 1},
    config_enums={"kv_dtype": "kseal_dtype", "request_dtype": "kseal_dtype"},
    config_defaults={
        "device": -1,
        "stream": 0,
        "kv_dtype": "bf16",
        "request_dtype": "i32",
        "tile_q": 16,
        "lse": False,
    },
    args_defaults=dict.fromkeys((*_KV_STRIDES, "splits"), 0),
    tags={"kv_dtype": "kv", "request_dtype": "req", "tile_q": "t", "lse": ("", "lse")},
)
