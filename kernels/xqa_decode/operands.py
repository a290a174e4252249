"""Tensor shapes of the XQA decode call, for the loader's generic caller.

Source of the field meanings: ``kernel.yaml`` (a test compares the names with it).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernseal.loader.operands import Operand, OpSpec

_KV_STRIDES = ("kv_page_stride", "kv_token_stride", "kv_head_stride")


def _operands(config: Mapping[str, Any]) -> dict[str, Operand]:
    rows = ("batch_size", "num_q_heads", "head_dim")
    # NHD in shape; an HND cache is passed as its transposed view.
    pool = ("num_pages", "page_size", "num_kv_heads", "head_dim")
    return {
        "page_table": Operand("i32", ("batch_size", "max_pages_per_seq")),
        "q": Operand("dtype", rows),
        "k": Operand("kv_dtype", pool, strides=_KV_STRIDES),
        "v": Operand("kv_dtype", pool, strides=_KV_STRIDES),
        "o": Operand("out_dtype", rows),
        "seq_lens": Operand("i32", ("batch_size",)),
        "sinks": Operand("f32", ("num_q_heads",)),
        "q_scale_ptr": Operand("f32", ("one",)),
        "kv_scale_ptr": Operand("f32", ("one",)),
        "semaphores": Operand("bytes", ("semaphores_bytes",)),
        "workspace": Operand("bytes", ("workspace_bytes",)),
    }


def _derive(sizes: Mapping[str, Any]) -> dict[str, int | None]:
    return {"one": 1}


SPEC = OpSpec(
    operands=_operands,
    config_enums={"dtype": "kseal_dtype", "kv_dtype": "kseal_dtype", "out_dtype": "kseal_dtype"},
    derive=_derive,
    config_defaults={
        "device": -1,
        "dtype": "bf16",
        "kv_dtype": "bf16",
        "out_dtype": "bf16",
        "page_size": 16,
        "sliding_window": False,
        "stream": 0,
    },
    args_defaults={
        "kv_splits": 0,
        "window": 0,
        "pdl": 0,
        "q_scale": 1.0,
        "kv_scale": 1.0,
        "rcp_out_scale": 1.0,
        "max_seq_len": 0,
        **dict.fromkeys(_KV_STRIDES, 0),
        "semaphores_bytes": 0,
        "workspace_bytes": 0,
    },
)
