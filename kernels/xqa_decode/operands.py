"""Tensor shapes of the XQA decode call, for the loader's generic caller.

Source of the field meanings: ``kernel.yaml`` (a test compares the names with it).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernseal.loader.operands import Operand, OpSpec

_KV_STRIDES = ("kv_page_stride", "kv_token_stride", "kv_head_stride")
_SCALE_STRIDES = ("scale_page_stride", "scale_token_stride", "scale_head_stride")


def _operands(config: Mapping[str, Any]) -> dict[str, Operand]:
    drafts, fp4 = config["spec_decode"], config["kv_dtype"] == "nvfp4"
    rows = ("q_rows" if drafts else "batch_size", "num_q_heads", "head_dim")
    # NHD in shape; an HND cache is passed as its transposed view.
    token = ("num_pages", "page_size", "num_kv_heads")
    cache = Operand("u8", (*token, "half_head"), strides=_KV_STRIDES) if fp4 else None
    pool = cache or Operand("kv_dtype", (*token, "head_dim"), strides=_KV_STRIDES)
    scales = Operand("e4m3|u8", (*token, "head_scales"), strides=_SCALE_STRIDES)
    return {
        "page_table": Operand("i32", ("batch_size", "max_pages_per_seq")),
        "q": Operand("dtype", rows),
        "k": pool,
        "v": pool,
        "k_scales": scales,
        "v_scales": scales,
        "o": Operand("out_dtype", rows),
        "seq_lens": Operand("i32|u32", ("batch_size",)),
        "q_cu_lens": Operand("i32|u32", ("batch_size+1",)),
        "mask": Operand("i32|u32", ("q_rows", "mask_words")),
        "sinks": Operand("f32", ("num_q_heads",)),
        "q_scale_ptr": Operand("f32", ("one",)),
        "kv_scale_ptr": Operand("f32", ("one",)),
        "semaphores": Operand("bytes", ("semaphores_bytes",)),
        "workspace": Operand("bytes", ("workspace_bytes",)),
    }


def _derive(sizes: Mapping[str, Any]) -> dict[str, int | None]:
    q_len, head_dim = sizes["q_len"], sizes["head_dim"]
    return {
        "one": 1,
        "half_head": head_dim // 2,
        "head_scales": head_dim // 16,
        # Without q_len the C library says what is missing.
        "mask_words": -(-q_len // 32) if q_len else None,
    }


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
        "spec_decode": False,
        "fp8_math": False,
        "stream": 0,
    },
    args_defaults={
        "q_len": 0,
        "q_rows": 0,
        "kv_splits": 0,
        "window": 0,
        "pdl": 0,
        "q_scale": 1.0,
        "kv_scale": 1.0,
        "rcp_out_scale": 1.0,
        "max_seq_len": 0,
        **dict.fromkeys((*_KV_STRIDES, *_SCALE_STRIDES), 0),
        "semaphores_bytes": 0,
        "workspace_bytes": 0,
    },
    tags={
        "dtype": "",
        "kv_dtype": "kv",
        "out_dtype": "o",
        "head_dim": "d",
        "group_size": "g",
        "page_size": "p",
        "sliding_window": ("", "window"),
        "spec_decode": ("", "spec"),
        "fp8_math": ("", "fp8math"),
    },
)
