"""Which variants a model's attention layers need. Layers over everything and layers with a window may differ in geometry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernseal.export.model import ModelConfig
from kernseal.loader.errors import Unsupported

SERVES = "layers of attention over K and V heads (latent attention, MLA, has none)"

FIELDS = {
    "dtype": "dtype or torch_dtype",
    "kv_dtype": "that of q",
    "out_dtype": "that of q",
    "head_dim": "head_dim, else hidden_size / num_attention_heads",
    "group_size": "num_attention_heads / num_key_value_heads",
}
"""Where an axis comes from, for messages."""

WINDOWED = {
    "full_attention": False,
    "attention": False,
    "hybrid": False,
    "sliding_attention": True,
    "hybrid_sliding": True,
}
"""Layer types with a KV cache: whether a window applies."""

WITHOUT_CACHE = ("linear_attention", "mamba", "conv", "moe")

REFUSED = {
    "attn_logit_softcapping": "the kernel does not cap logits",
    "alibi": "the kernel adds nothing to logits",
    "attention_chunk_size": "the kernel has windows, not chunks",
    "index_topk": "the kernel attends to every position, not to chosen ones",
    "sparse_attention_config": "the kernel attends to every position, not to chosen ones",
    "block_configs": "only layer_types may tell layers apart",
    "per_layer_config": "only layer_types may tell layers apart",
    "attention_other_setting": "only layer_types may tell layers apart",
    "hybrid_layer_pattern": "only layer_types may tell layers apart",
}
"""Fields that change what attention computes, or where it has which geometry."""

OTHER_KV_HEADS = ("multi_query", "num_kv_heads", "n_head_kv", "multi_query_group_num", "num_attention_groups")
"""What some configs have instead of num_key_value_heads. With none of these, each query head has a KV head of its own."""


def variants(config: ModelConfig, chosen: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Axes of each variant; what they leave out takes the defaults.

    Args:
        chosen: axes that the caller has set, which are not looked for in the config.

    Raises:
        Unsupported: attention that this kernel does not compute, or a field it cannot be worked out without.
    """
    if "kv_lora_rank" in config:
        return []
    windows = _windows(config)
    if not windows:
        return []
    for name, why in REFUSED.items():
        if config.get(name):
            raise config.refused(name, f"it must be absent: {why}")
    dtype = chosen.get("dtype") or config.element("dtype", "torch_dtype")
    elements = dict.fromkeys(("dtype", "kv_dtype", "out_dtype"), dtype) if dtype else {}
    return [
        {**elements, **_geometry(config, windowed, chosen), "sliding_window": windowed}
        for windowed in sorted(windows)
    ]


def _windows(config: ModelConfig) -> set[bool]:
    """Whether there are layers that attend to everything (False) and to a window (True)."""
    kinds = config.words("layer_types")
    if kinds is None:
        return _windows_without_types(config)
    unknown = [kind for kind in kinds if kind not in WINDOWED and kind not in WITHOUT_CACHE]
    if unknown:
        raise Unsupported(
            f"{config.place}: layer_types has {unknown[0]!r}; supported: {', '.join([*WINDOWED, *WITHOUT_CACHE])}"
        )
    cuts = _window(config) is not None
    return {WINDOWED[kind] and cuts for kind in kinds if kind in WINDOWED}


def _windows_without_types(config: ModelConfig) -> set[bool]:
    if _window(config) is None:
        return {False}
    every = config.integer("sliding_window_pattern") or config.integer("_sliding_window_pattern")
    if every is not None:  # Gemma 3: each layer with this number attends to everything
        return {index % every != 0 for index in range(1, config.needed("num_hidden_layers") + 1)}
    first = config.integer("max_window_layers", least=0)
    if first is not None:  # Qwen2: the layers from there on have the window
        return {index >= first for index in range(config.needed("num_hidden_layers"))}
    return {True}


def _window(config: ModelConfig) -> int | None:
    """Positions that count in layers with a window; None where it is switched off or never cuts anything off."""
    window = config.integer("sliding_window")
    off = not config.flag("use_sliding_window", default="max_window_layers" not in config)
    longest = config.integer("max_position_embeddings")
    if window is None or off or (longest is not None and window >= longest):
        return None
    return window


def _geometry(config: ModelConfig, windowed: bool, chosen: Mapping[str, Any]) -> dict[str, int]:
    found = {}
    if "head_dim" not in chosen:
        found["head_dim"] = _head_dim(config, windowed)
    if "group_size" not in chosen:
        found["group_size"] = _group_size(config, windowed)
    return found


# Gemma 4 gives the layers that attend to everything a head_dim and KV heads of their own.


def _head_dim(config: ModelConfig, windowed: bool) -> int:
    value = None if windowed else config.integer("global_head_dim")
    value = value or config.integer("head_dim")
    if value is None:
        heads = config.needed("num_attention_heads")
        value, rest = divmod(config.needed("hidden_size"), heads)
        if rest:
            raise config.refused(
                "hidden_size", f"without head_dim it must be a multiple of num_attention_heads, {heads}"
            )
    if config.get("v_head_dim", value) != value:
        raise config.refused("v_head_dim", f"it must be that of K, {value}")
    return value


def _group_size(config: ModelConfig, windowed: bool) -> int:
    heads = config.needed("num_attention_heads")
    kv_heads = _kv_heads(config, windowed) or heads
    group, rest = divmod(heads, kv_heads)
    if rest:
        raise config.refused("num_attention_heads", f"it must be a multiple of the KV heads, {kv_heads}")
    return group


def _kv_heads(config: ModelConfig, windowed: bool) -> int | None:
    if not windowed and config.flag("attention_k_eq_v", default=True):
        value = config.integer("num_global_key_value_heads")
        if value is not None:
            return value
    value = config.integer("num_key_value_heads")
    for name in OTHER_KV_HEADS:
        if value is None and config.get(name):
            raise config.refused(name, "supported is num_key_value_heads, or --set group_size=N")
    return value
