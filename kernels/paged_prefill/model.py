"""Which variants a model's attention layers need: those over everything that are in 16 bits, with and without the mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernseal.export.model import ModelConfig
from kernseal.kernels.xqa_decode import model as attention

SERVES = "layers of attention over everything, with heads of 64, 128 or 256 and without sinks"

FIELDS = {name: attention.FIELDS[name] for name in ("dtype", "head_dim")}
"""Where an axis comes from, for messages."""

HEAD_DIMS = (64, 128, 256)

WITH_SINKS = ("gpt_oss",)
"""By ``model_type``: models that add a sink to each softmax, which this kernel does not."""


def variants(config: ModelConfig, chosen: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Axes of each variant; what they leave out takes the defaults.

    Nothing for layers that the kernel does not compute: ``xqa_decode`` serves those, or refuses them.

    Args:
        chosen: axes that the caller has set, which are not looked for in the config.

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
        if not needed["sliding_window"] and needed.get("head_dim", chosen.get("head_dim")) in HEAD_DIMS
        for mask in masks
    ]
