"""Tensor shapes of the XQA MLA decode call, for the loader's generic caller.

Source of the field meanings: ``kernel.yaml`` (a test compares the names with it).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernseal.loader.operands import Operand, OpSpec

_KV_STRIDES = ("kv_page_stride", "kv_token_stride")


def _operands(config: Mapping[str, Any]) -> dict[str, Operand]:
    pool = ("num_pages", "page_size", "head_dim")
    return {
        "page_table": Operand("i32", ("batch_size", "max_pages_per_seq")),
        "q": Operand("dtype", ("batch_size", "num_q_heads", "head_dim")),
        "k": Operand("dtype", pool, strides=_KV_STRIDES),
        "v": Operand("dtype", pool, strides=_KV_STRIDES),
        "o": Operand("bf16", ("batch_size", "num_q_heads", "v_dim")),
        "seq_lens": Operand("i32", ("batch_size",)),
        "q_scale_ptr": Operand("f32", ("one",)),
        "kv_scale_ptr": Operand("f32", ("one",)),
        "workspace": Operand("bytes", ("workspace_bytes",)),
    }


def _derive(sizes: Mapping[str, Any]) -> dict[str, int | None]:
    return {"one": 1, "head_dim": 576, "v_dim": 512}


SPEC = OpSpec(
    operands=_operands,
    config_enums={"dtype": "kseal_dtype"},
    derive=_derive,
    config_defaults={"device": -1, "dtype": "bf16", "page_size": 64, "stream": 0},
    args_defaults={
        "pdl": 0,
        "q_scale": 1.0,
        "kv_scale": 1.0,
        **dict.fromkeys(_KV_STRIDES, 0),
        "workspace_bytes": 0,
    },
    tags={"dtype": "", "page_size": "p"},
)
