"""Which variants a model's gated delta net layers need: the fields of Qwen3-Next and Qwen3.5.

Head counts are arguments of a run. Where an engine keeps its states is its own choice: packed and pooled, in either memory
order, as in the first group of the default profile. bfloat16 states are pooled there, and so they are here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernseal.export.model import ModelConfig

SERVES = "layers of gated delta rule (linear_attention with linear_num_value_heads)"

FIELDS = {"dtype": "dtype or torch_dtype", "state_dtype": "mamba_ssm_dtype"}
"""Where an axis comes from, for messages."""

HEAD_DIM = 128
"""Of keys and of values; the limit of ``kernel.yaml``."""


def variants(config: ModelConfig, chosen: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Axes of each variant; what they leave out takes the defaults.

    Args:
        chosen: axes that the caller has set.

    Raises:
        Unsupported: head dimensions or counts that no class has.
    """
    kinds = config.words("layer_types")
    if "linear_num_value_heads" not in config or (kinds is not None and "linear_attention" not in kinds):
        return []
    for name in ("linear_key_head_dim", "linear_value_head_dim"):
        if config.needed(name) != HEAD_DIM:
            raise config.refused(name, f"it must be {HEAD_DIM}")
    keys = config.needed("linear_num_key_heads")
    if config.needed("linear_num_value_heads") % keys:
        raise config.refused(
            "linear_num_value_heads", f"it must be a multiple of linear_num_key_heads, {keys}"
        )
    axes: dict[str, Any] = {"alpha": True, "beta": True}
    if dtype := config.element("dtype", "torch_dtype"):
        axes["dtype"] = dtype
    if state_dtype := chosen.get("state_dtype") or config.element("mamba_ssm_dtype"):
        axes["state_dtype"] = state_dtype
    homes = (True,) if state_dtype == "bf16" else (False, True)
    return [
        {**axes, "pooled": pooled, "state_layout": layout} for pooled in homes for layout in ("hvk", "hkv")
    ]
