"""Tensor shapes of the paged prefill call, for the loader's generic caller.

Source of the field meanings: ``kernel.yaml`` (a test compares the names with it).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernseal.loader.operands import Operand, OpSpec

_Q_STRIDES = ("q_row_stride", "q_head_stride")
_KV_STRIDES = ("kv_page_stride", "kv_row_stride", "kv_head_stride")


def _operands(config: Mapping[str, Any]) -> dict[str, Operand]:
    ends = ("batch_size+1",)
    pool = ("num_pages", "page_size", "num_kv_heads", "head_dim")
    return {
        "qo_indptr": Operand("i32", ends, host=True),
        "page_indptr": Operand("i32", ends, host=True),
        "kv_lens": Operand("i32", ("batch_size",), host=True),
        "page_indices": Operand("i32", ("total_pages",)),
        "q": Operand("dtype", ("total_q", "num_q_heads", "head_dim"), strides=_Q_STRIDES),
        "k": Operand("dtype", pool, strides=_KV_STRIDES),
        "v": Operand("dtype", pool, strides=_KV_STRIDES),
        "o": Operand("dtype", ("total_q", "num_q_heads", "head_dim")),
        "lse": Operand("f32", ("total_q", "num_q_heads")),
        "plan": Operand("bytes", ("plan_bytes",), host=True),
        "plan_device": Operand("bytes", ("plan_bytes",)),
        "workspace": Operand("bytes", ("workspace_bytes",)),
    }


def _derive(sizes: Mapping[str, Any]) -> dict[str, int | None]:
    return {}


SPEC = OpSpec(
    operands=_operands,
    config_enums={"dtype": "kseal_dtype"},
    derive=_derive,
    config_defaults={"device": -1, "dtype": "bf16", "head_dim": 128, "causal": True, "stream": 0},
    args_defaults={
        "tile_q": 0,
        "fixed_grid": 0,
        "pdl": 0,
        "kv_chunk": 0,
        **dict.fromkeys((*_Q_STRIDES, *_KV_STRIDES), 0),
        "plan_bytes": 0,
        "workspace_bytes": 0,
    },
    tags={"dtype": "", "head_dim": "d", "causal": ("full", "causal")},
)
