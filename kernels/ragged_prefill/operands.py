"""Tensor shapes of the ragged prefill call, for the loader's generic caller.

Source of the field meanings: ``kernel.yaml`` (a test compares the names with it).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernseal.loader.operands import Operand, OpSpec

_STRIDES = {name: (f"{name}_row_stride", f"{name}_head_stride") for name in "qkv"}


def _operands(config: Mapping[str, Any]) -> dict[str, Operand]:
    ends = ("batch_size+1",)
    return {
        "qo_indptr": Operand("i32", ends, host=True),
        "kv_indptr": Operand("i32", ends, host=True),
        "q": Operand("dtype", ("total_q", "num_q_heads", "head_dim"), strides=_STRIDES["q"]),
        "k": Operand("dtype", ("total_kv", "num_kv_heads", "head_dim"), strides=_STRIDES["k"]),
        "v": Operand("dtype", ("total_kv", "num_kv_heads", "v_dim"), strides=_STRIDES["v"]),
        "o": Operand("dtype", ("total_q", "num_q_heads", "v_dim")),
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
    config_defaults={
        "device": -1,
        "dtype": "bf16",
        "head_dim": 128,
        "v_dim": 128,
        "causal": True,
        "stream": 0,
    },
    args_defaults={
        "tile_q": 0,
        "fixed_grid": 0,
        "pdl": 0,
        "kv_chunk": 0,
        **{name: 0 for pair in _STRIDES.values() for name in pair},
        "plan_bytes": 0,
        "workspace_bytes": 0,
    },
    tags={"dtype": "", "head_dim": "d", "v_dim": "v", "causal": ("full", "causal")},
)
