"""Which variants a model's attention layers need: those over everything whose cache has the type of q, with and without
the mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernseal.export.model import ModelConfig
from kernseal.kernels.xqa_decode import model as attention

SERVES = "layers of attention over everything, with heads of 64, 128 or 256, without sinks and with a cache of q's type"

FIELDS = {name: attention.FIELDS[name] for name in ("dtype", "head_dim")}
"""Where an axis comes from, for messages."""

HEAD_DIMS = (64, 128, 256)

DTYPE = "bf16"
"""Where neither the config nor the caller says one: the default of ``kernel.yaml``."""

WITH_SINKS = ("gpt_oss",)
"""By ``model_type``: models that add a sink to each softmax, which this kernel does not."""


def variants(config: ModelConfig, chosen: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Axes of each variant; what they leave out takes the defaults.

    Nothing for layers that the kernel does not compute: ``xqa_decode`` serves those, or refuses them.

    Args:
        chosen: axes that the caller has set, which are not looked for in the config. ``kv_dtype`` is of ``xqa_decode``;
            here a cache has the type of q.

    Raises:
        Unsupported: attention that neither kernel computes, or a field it cannot be worked out without.
    """
    if config.get("model_type") in WITH_SINKS:
        return []
    layers = attention.variants(config, {**chosen, "group_size": None})  # of any size
    masks = [{}] if "causal" in chosen else [{"causal": True}, {"causal": False}]
    return [
        {name: needed[name] for name in ("dtype", "head_dim") if name in needed} | mask
        for needed in layers
        if _computed(needed, chosen)
        for mask in masks
    ]


def _computed(needed: Mapping[str, Any], chosen: Mapping[str, Any]) -> bool:
    """Whether the kernel computes the layers for which ``xqa_decode`` needs these axes."""
    head_dim, dtype = needed.get("head_dim", chosen.get("head_dim")), needed.get("dtype", DTYPE)
    return not needed["sliding_window"] and head_dim in HEAD_DIMS and chosen.get("kv_dtype", dtype) == dtype
