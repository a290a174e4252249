"""Tensor shapes of the GDN decode call, for the loader's generic caller: what belongs to a token has one row a token, those
of sequence 0 first.

Source of the field meanings: ``kernel.yaml`` (a test compares the names with it).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernseal.loader.operands import Operand, OpSpec

_TOKEN_STRIDES = tuple(f"{name}_token_stride" for name in ("q", "k", "v", "o", "a", "b"))


def _operands(config: Mapping[str, Any]) -> dict[str, Operand]:
    qk, v, gate = (
        ("rows", "num_q_heads", "head_dim"),
        ("rows", "num_v_heads", "head_dim"),
        ("rows", "num_v_heads"),
    )
    matrix = ("num_v_heads", "head_dim", "head_dim")
    return {
        "state_indices": Operand("index_dtype", ("batch_size",)),
        "output_state_indices": Operand("index_dtype", ("batch_size",)),
        "q": Operand("bf16", qk, "q_token_stride"),
        "k": Operand("bf16", qk, "k_token_stride"),
        "v": Operand("bf16", v, "v_token_stride"),
        "o": Operand("bf16", v, "o_token_stride"),
        "a": Operand("bf16", gate, "a_token_stride"),
        "b": Operand("bf16", gate, "b_token_stride"),
        "a_log": Operand("f32", ("num_v_heads",)),
        "dt_bias": Operand("f32", ("num_v_heads",)),
        "state": Operand("bf16", ("pool_rows", *matrix), "state_row_stride"),
        "intermediate_states": Operand("bf16", ("batch_size", "intermediate_steps", *matrix)),
    }


def _derive(sizes: Mapping[str, Any]) -> dict[str, int | None]:
    batch_size = sizes["batch_size"]
    return {"rows": None if batch_size is None else batch_size * sizes["tokens"]}


SPEC = OpSpec(
    operands=_operands,
    config_enums={"index_dtype": "kseal_dtype"},
    derive=_derive,
    config_defaults={
        "device": -1,
        "stream": 0,
        "tokens": 1,
        "wide": False,
        "tile_v": 16,
        "index_dtype": "i32",
        "qk_l2norm": True,
        "output_indices": False,
        "intermediate_states": False,
        "update_state": True,
    },
    args_defaults=dict.fromkeys((*_TOKEN_STRIDES, "state_row_stride", "intermediate_steps"), 0),
    tags={
        "tokens": "t",
        "wide": ("narrow", "wide"),
        "tile_v": "v",
        "index_dtype": "",
        "qk_l2norm": ("plain", "norm"),
        "output_indices": ("", "split"),
        "intermediate_states": ("", "steps"),
        "update_state": ("verify", ""),
    },
)
