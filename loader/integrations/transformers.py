"""Serves a Hugging Face transformers model of the Qwen3-Next and Qwen3.5 family from a bundle::

    with open_bundle("dist/sm_90a-linux-x86_64") as bundle, enable(bundle, model) as served:
        tokens = model.generate(**inputs)
        counts = served.stats()

Linear-attention layers take prompts through op gdn_prefill, full-attention layers take single tokens through op xqa_decode.
Everything else stays as transformers has it. Written for transformers 5.17, of which it uses the attention registry, forward
hooks, and the name under which the modeling files call the chunked rule.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import ModuleType, TracebackType
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kernseal.loader.bundle import Bundle
from kernseal.loader.errors import InvalidArgument, Unsupported

from . import cached_attention, gated_delta
from .cached_attention import CachedAttention
from .gated_delta import GatedDelta
from .variants import Variants, dtype_name

LINEAR_LAYERS = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
FULL_LAYERS = ("Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention")
RULE = "torch_chunk_gated_delta_rule"
"""The modeling files' name for the chunked rule, whatever implements it."""

NAME = "kernseal"
"""Of our attention in transformers' registry, and of the argument by which a layer's call finds who serves it."""

STOCK = "sdpa"
"""The attention that serves what ours does not."""


@dataclass
class Count:
    """Calls of one op.

    Attributes:
        served: by kernseal.
        left: to transformers, by reason.
    """

    served: int = 0
    left: Counter[str] = field(default_factory=Counter)


def enable(bundle: Bundle, model: Any, *, page_size: int = 16, missing: str = "raise") -> Served:
    """Let ``bundle`` serve ``model`` until ``Served.disable``, or until the ``with`` block ends.

    Args:
        bundle: an open bundle for the model's device; the caller closes it, afterwards.
        model: a model with attention implementation sdpa.
        page_size: of the decode variant. The cache is used where it is, whatever its size.
        missing: what becomes of a call that the bundle cannot serve: "raise" raises Unsupported, "stock" leaves it to
            transformers and counts it.

    Raises:
        Unsupported: the model has no layer of this family, another attention implementation, or (with ``missing="raise"``)
            needs a variant that the bundle lacks; the message has the command that builds it.
        InvalidArgument: an argument has another value than these, the model is not on a CUDA device, or is enabled already.
    """
    return Served(bundle, model, page_size, missing)


class Served:
    """A model that a bundle serves. Made by ``enable``; a context manager."""

    def __init__(self, bundle: Bundle, model: Any, page_size: int, missing: str) -> None:
        """Enable; see ``enable``."""
        if missing not in ("raise", "stock"):
            raise InvalidArgument(f"missing is {missing!r}; it must be 'raise' or 'stock'")
        self._missing = missing
        variants = Variants(bundle, _build_command(bundle, page_size))
        self._gated_delta = GatedDelta(variants)
        self._attention = CachedAttention(variants, page_size)
        self._counts = {gated_delta.OP: Count(), cached_attention.OP: Count()}
        linear, full = _layers(model, LINEAR_LAYERS), _layers(model, FULL_LAYERS)
        _check(model, linear, full)
        self._prepare(linear, full)
        self._undo = ExitStack()
        self._install(model, linear, full)

    def stats(self) -> dict[str, dict[str, Any]]:
        """For each op, how many calls it served, and how many it left to transformers for which reason."""
        return {op: {"served": c.served, "left": dict(c.left)} for op, c in self._counts.items()}

    def disable(self) -> None:
        """Give the model back to transformers. Doing so again does nothing."""
        self._undo.close()

    def __enter__(self) -> Served:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disable()

    def _prepare(self, linear: list[Any], full: list[Any]) -> None:
        """Load every variant now: the first token need not wait, and what is missing shows."""
        try:
            for layer in linear:
                weight = layer.out_proj.weight
                self._gated_delta.op(dtype_name(weight, "model"), weight.device)
            for layer in full:
                weight = layer.o_proj.weight
                dtype = dtype_name(weight, "model")
                self._attention.op(dtype, weight.device, layer.head_dim, layer.num_key_value_groups)
        except Unsupported:
            if self._missing == "raise":
                raise

    def _install(self, model: Any, linear: list[Any], full: list[Any]) -> None:
        # Dynamo need not look into a call through cffi.
        prefill, decode = torch.compiler.disable(self._prefill), torch.compiler.disable(self._decode)
        for layer in linear:
            _route(sys.modules[type(layer).__module__])
            self._hook(layer, functools.partial(prefill, layer))
        for layer in full:
            self._hook(layer, decode)
        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        _set_attention(model, NAME)
        self._undo.callback(_set_attention, model, STOCK)

    def _hook(self, layer: Any, serve: Callable[..., Any]) -> None:
        """Let the layer's calls of attention carry ``serve``."""

        def add(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            return args, {**kwargs, NAME: serve}

        self._undo.callback(layer.register_forward_pre_hook(add, with_kwargs=True).remove)

    def _prefill(
        self,
        layer: Any,
        stock: Callable[..., Any],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **call: Any,
    ) -> Any:
        def kernel() -> tuple[torch.Tensor, torch.Tensor | None]:
            output, state = self._gated_delta(
                query,
                key,
                value,
                call["g"],
                call["beta"],
                k_heads=layer.num_k_heads,
                initial_state=call["initial_state"],
                use_qk_l2norm_in_kernel=call["use_qk_l2norm_in_kernel"],
                cu_seqlens=call["cu_seqlens"],
            )
            return output, state if call["output_final_state"] else None

        return self._serve(gated_delta.OP, query, kernel, lambda: stock(query, key, value, **call))

    def _decode(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        stock: Callable[[], Any],
        scaling: float,
    ) -> Any:
        def kernel() -> tuple[torch.Tensor, None]:
            return self._attention(query, key, value, mask, scaling=scaling, layer=layer.layer_idx), None

        return self._serve(cached_attention.OP, query, kernel, stock)

    def _serve(
        self, op: str, query: torch.Tensor, kernel: Callable[[], Any], stock: Callable[[], Any]
    ) -> Any:
        count = self._counts[op]
        try:
            if query.requires_grad and torch.is_grad_enabled():
                raise Unsupported(
                    f"{op}: query needs a gradient, which the kernel does not give; use torch.no_grad()"
                )
            result = kernel()
        except Unsupported as error:
            if self._missing == "raise":
                raise
            count.left[str(error)] += 1
            return stock()
        count.served += 1
        return result


def _attention(
    layer: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **call: Any,
) -> Any:
    """Attention of transformers' registry: ours for single tokens of layers that are served, else stock."""
    serve = call.pop(NAME, None)
    stock = functools.partial(sdpa_attention_forward, layer, query, key, value, attention_mask, **call)
    if serve is None or query.shape[2] != 1:
        return stock()
    return serve(layer, query, key, value, attention_mask, stock, call["scaling"])


def _route(modeling: ModuleType) -> None:
    """Let a call of the chunked rule that carries ``kernseal=`` go there. Others pass, so this stays once it is there."""
    stock = getattr(modeling, RULE)
    if hasattr(stock, NAME):
        return

    @functools.wraps(stock)
    def rule(*args: Any, **call: Any) -> Any:
        serve = call.pop(NAME, None)
        return stock(*args, **call) if serve is None else serve(stock, *args, **call)

    setattr(rule, NAME, True)
    setattr(modeling, RULE, rule)


def _layers(model: Any, names: tuple[str, ...]) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ in names]


def _check(model: Any, linear: list[Any], full: list[Any]) -> None:
    if not linear and not full:
        known = ", ".join((*LINEAR_LAYERS, *FULL_LAYERS))
        raise Unsupported(f"model is a {type(model).__name__}; supported are models with layers {known}")
    for layer in linear:
        modeling = type(layer).__module__
        if not hasattr(sys.modules[modeling], RULE):
            raise Unsupported(f"{modeling} has no {RULE}; supported is transformers 5.17")
    for layer in full:
        found = layer.config._attn_implementation
        if found == NAME:
            raise InvalidArgument("model is enabled already; disable it first")
        if found != STOCK:
            raise Unsupported(f"model has attention implementation {found!r}; it must be {STOCK!r}")


def _set_attention(model: Any, name: str) -> None:
    text = "text_config" in model.config.sub_configs
    model.set_attn_implementation({"text_config": name} if text else name)


def _build_command(bundle: Bundle, page_size: int) -> str:
    sm = bundle.variants()[0].sm
    return f"kernseal build --sm {sm} --model config.json --set page_size={page_size}"
