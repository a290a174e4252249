"""Models of linear and full attention in real geometry with random weights, for the programs that run transformers."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3NextConfig

from kernseal.integrations.transformers import FULL_LAYERS, LINEAR_LAYERS

LAYERS = 8
CUDNN_HELP = "let torch attend with cuDNN where it would, as it is installed; the report says so"

GEOMETRIES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "qwen3_5": (Qwen3_5TextConfig, {}),
    "qwen3_next": (Qwen3NextConfig, {"mlp_only_layers": list(range(LAYERS))}),
}
"""The defaults of the classes are the geometry of Qwen3.5 9B and of Qwen3-Next 80B-A3B. The latter without experts: which of
them a token goes to is decided by ties as the tokens are, and one such tie changes everything after it."""

RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
STEPS = (1e-3, 1e-1)
"""Of the gates, as state space models are initialised: memories of ten to a thousand tokens and more."""

NORM = 0.5
"""Of q and k, on top of 1, so that attention has peaks."""


def build(geometry: str, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """A model whose logits are float32, so that two tokens are seldom as good."""
    config_class, fixed = GEOMETRIES[geometry]
    config = config_class(**{"num_hidden_layers": LAYERS, **fixed, **changes})
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    for layer in layers(model, LINEAR_LAYERS):
        low, high = map(math.log, STEPS)
        step = torch.empty_like(layer.dt_bias, dtype=torch.float32).uniform_(low, high).exp()
        layer.dt_bias.data.copy_(step.expm1().log())  # softplus of it is the step
    for layer in layers(model, FULL_LAYERS):
        layer.q_norm.weight.data.fill_(NORM)
        layer.k_norm.weight.data.fill_(NORM)
    model.lm_head.float()
    model.lm_head.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    return model


def layers(model: Any, names: Sequence[str]) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ in names]


def prompts(model: Any, rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random tokens; 0 is left for padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, model.config.vocab_size, (rows, length), generator=generator).to(model.device)


def linear_attention() -> str:
    """What stock transformers runs linear attention with."""
    try:
        return f"fla-core {metadata.version('fla-core')}"
    except metadata.PackageNotFoundError:
        return "torch"


@contextmanager
def references(model: Any) -> Iterator[None]:
    """The other stock path: transformers' own rules in torch, and eager attention."""
    modeling = sys.modules[type(layers(model, LINEAR_LAYERS)[0]).__module__]
    stock = {name: getattr(modeling, name) for name in RULES}
    for name, rule in stock.items():
        setattr(modeling, name, inspect.unwrap(rule))
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")
        for name, rule in stock.items():
            setattr(modeling, name, rule)
