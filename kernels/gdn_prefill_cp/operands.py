"""Tensor shapes of the context-parallel GDN prefill call, for the loader's generic caller.

Source of the field meanings: ``kernel.yaml`` (a test compares the names with it).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernseal.loader.operands import Operand, OpSpec

# 0 says "dense" for a stride, "none" for a count, and what its doc says for a length.
_ZERO_DEFAULTS = (
    "q_token_stride",
    "k_token_stride",
    "v_token_stride",
    "o_token_stride",
    "initial_state_stride",
    "final_state_stride",
    "checkpoint_every",
    "chunk_len",
    "max_seqlen",
    "pool_rows",
    "total_checkpoints",
)


def _operands(config: Mapping[str, Any]) -> dict[str, Operand]:
    pooled = config["pooled"]
    state = ("pool_rows" if pooled else "num_seqs", "o_heads", "head_dim", "head_dim")
    seqs, ends = ("num_seqs",), ("num_seqs+1",)
    return {
        "cu_seqlens": Operand("index_dtype", ends),
        "q": Operand("dtype", ("total_tokens", "num_q_heads", "head_dim"), "q_token_stride"),
        "k": Operand("dtype", ("total_tokens", "num_k_heads", "head_dim"), "k_token_stride"),
        "v": Operand("dtype", ("total_tokens", "num_v_heads", "head_dim"), "v_token_stride"),
        "o": Operand("dtype", ("total_tokens", "o_heads", "head_dim"), "o_token_stride"),
        "alpha": Operand("f32", ("total_tokens", "o_heads")),
        "beta": Operand("f32", ("total_tokens", "o_heads")),
        "initial_state": Operand("state_dtype", state, "initial_state_stride" if pooled else None),
        "final_state": Operand("state_dtype", state, "final_state_stride" if pooled else None),
        "state_indices": Operand("index_dtype", seqs),
        "output_state_indices": Operand("index_dtype", seqs),
        "checkpoints": Operand("state_dtype", ("total_checkpoints", "o_heads", "head_dim", "head_dim")),
        "checkpoint_cu_starts": Operand("index_dtype", ends),
        "workspace": Operand("bytes", ("workspace_bytes",)),
    }


def _derive(sizes: Mapping[str, Any]) -> dict[str, int | None]:
    heads = sizes["num_q_heads"], sizes["num_v_heads"]
    return {"o_heads": None if None in heads else max(heads)}


SPEC = OpSpec(
    operands=_operands,
    config_enums={
        "dtype": "kseal_dtype",
        "state_dtype": "kseal_dtype",
        "state_layout": "kseal_state_layout",
        "index_dtype": "kseal_dtype",
    },
    derive=_derive,
    config_defaults={
        "device": -1,
        "stream": 0,
        "dtype": "bf16",
        "state_dtype": "f32",
        "state_layout": "hvk",
        "index_dtype": "i64",
        "initial_state": True,
        "pooled": False,
        "checkpoints": False,
    },
    args_defaults=dict.fromkeys(_ZERO_DEFAULTS, 0),
    tags={
        "dtype": "",
        "state_dtype": "s",
        "state_layout": "",
        "index_dtype": "",
        "initial_state": ("zero", "init"),
        "pooled": ("packed", "pooled"),
        "checkpoints": ("", "ckpt"),
    },
)
