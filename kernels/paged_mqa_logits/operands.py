"""Tensor shapes of the paged MQA logits call, for the loader's generic caller.

Source of the field meanings: ``kernel.yaml`` (a test compares the names with it).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernseal.loader.operands import Operand, OpSpec

_STRIDES = ("kv_page_stride", "page_table_stride", "seq_len_stride", "logits_stride")
_SEGMENT = 256
_SCALE_BYTES = 4


def _operands(config: Mapping[str, Any]) -> dict[str, Operand]:
    fp4 = config["kv_dtype"] == "fp4"
    head, page = ("half_head", "half_page_bytes") if fp4 else ("head_dim", "page_bytes")
    return {
        "seq_lens": Operand("i32", ("batch_size",)),
        "page_table": Operand("i32", ("batch_size", "max_pages_per_seq"), strides=("page_table_stride",)),
        "q": Operand("u8" if fp4 else "e4m3", ("batch_size", "next_n", "num_heads", head)),
        "q_scales": Operand("u8", ("batch_size", "next_n", "num_heads", "scale_bytes")),
        # A page is bytes: the values of its tokens, then their scales.
        "kv": Operand("u8", ("num_pages", page), strides=("kv_page_stride",)),
        "weights": Operand("epi_dtype", ("rows", "num_heads")),
        "schedule": Operand("i32", ("num_ctas+1", "two")),
        "logits": Operand("out_dtype", ("rows", "padded_len"), strides=("logits_stride",)),
    }


def _derive(sizes: Mapping[str, Any]) -> dict[str, int | None]:
    page_size, head_dim = sizes["page_size"], sizes["head_dim"]
    batch, longest = sizes["batch_size"], sizes["max_seq_len"]
    return {
        "two": 2,
        "scale_bytes": _SCALE_BYTES,
        "half_head": head_dim // 2,
        "page_bytes": page_size * (head_dim + _SCALE_BYTES),
        "half_page_bytes": page_size * (head_dim // 2 + _SCALE_BYTES),
        "rows": None if batch is None else batch * sizes["next_n"],
        # Without max_seq_len the C library says what is missing.
        "padded_len": None if longest is None else -(-longest // _SEGMENT) * _SEGMENT,
    }


SPEC = OpSpec(
    operands=_operands,
    config_enums=dict.fromkeys(("kv_dtype", "out_dtype", "epi_dtype", "acc_dtype"), "kseal_dtype"),
    derive=_derive,
    config_defaults={
        "device": -1,
        "kv_dtype": "e4m3",
        "out_dtype": "f32",
        "epi_dtype": "f32",
        "acc_dtype": "f32",
        "num_heads": 64,
        "head_dim": 128,
        "next_n": 1,
        "page_size": 64,
        "interleaved": False,
        "stream": 0,
    },
    args_defaults={"num_ctas": 0, **dict.fromkeys(_STRIDES, 0)},
    tags={
        "kv_dtype": "",
        "out_dtype": "o",
        "epi_dtype": "w",
        "acc_dtype": "a",
        "num_heads": "h",
        "head_dim": "d",
        "next_n": "n",
        "page_size": "p",
        "interleaved": ("", "interleaved"),
    },
)
