"""Attention of one query token a sequence over a cache of transformers, on op xqa_decode."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernseal.loader.errors import Unsupported
from kernseal.loader.op import Op

from .variants import Variants, dtype_name, launching

OP = "xqa_decode"


@dataclass
class _Plan:
    """What the layers of one forward pass share.

    Attributes:
        mask: gives the mask it was made from, while that lives.
        layer: the last layer that used it.
        pool: sizes, strides and the page table, as the op takes them.
        scratch: semaphores and workspace.
    """

    key: tuple[Any, ...]
    mask: Callable[[], torch.Tensor | None]
    layer: int
    pool: dict[str, Any]
    scratch: dict[str, torch.Tensor]

    def serves(self, key: tuple[Any, ...], mask: torch.Tensor | None, layer: int) -> bool:
        # A mask that is written to between two passes is the same object; but then the layers start over.
        return self.key == key and self.mask() is mask and layer > self.layer


class CachedAttention:
    """Decode attention on one model's variants.

    The cache is used where it is. A pool is K and V, a distance between pages, and a table of page numbers; with pages one
    row apart, every row of a [B, Hkv, T, D] tensor begins a page. So the first page of a sequence begins at its first row
    that counts, wherever padding ends.
    """

    def __init__(self, variants: Variants, page_size: int) -> None:
        self._variants = variants
        self._page_size = page_size
        self._plan: _Plan | None = None

    def op(self, dtype: str, device: torch.device, head_dim: int, group_size: int) -> Op:
        """The variant for layers of this geometry."""
        return self._variants.op(
            OP,
            device,
            dtype=dtype,
            kv_dtype=dtype,
            out_dtype=dtype,
            head_dim=head_dim,
            group_size=group_size,
            page_size=self._page_size,
            sliding_window=False,
            spec_decode=False,
            fp8_math=False,
        )

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        scaling: float,
        layer: int,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [B, Hq, 1, D].
            key, value: [B, Hkv, T, D], the whole cache of the layer.
            mask: [B, 1, 1, T] of bool, true where a row counts; None when all do.
            scaling: of the logits.
            layer: number of the layer, ascending within a forward pass.

        Returns:
            [B, 1, Hq, D].

        Raises:
            Unsupported: an element type or variant that the bundle lacks, or a mask whose rows that count are not adjacent.
        """
        batch, q_heads, _, dim = query.shape
        kv_heads = key.shape[1]
        op = self.op(dtype_name(query, "query"), query.device, dim, q_heads // kv_heads)
        if key.dtype != query.dtype or value.dtype != query.dtype:
            raise Unsupported(
                f"key is {key.dtype} and value {value.dtype}; they must be of query's type, {query.dtype}"
            )
        key, value = _alike(key, value)
        q = query.reshape(batch, q_heads, dim).contiguous()
        output = torch.empty_like(q)
        with launching(query.device) as stream:
            call = {
                "q": q,
                "k": key.data_ptr(),
                "v": value.data_ptr(),
                "o": output,
                "q_scale": scaling * math.sqrt(dim),
                "stream": stream,
            }
            plan = self._planned(op, q, key, mask, layer, call)
            op.run(**call, **plan.pool, **plan.scratch)
        return output.unsqueeze(1)

    def _planned(
        self,
        op: Op,
        q: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        layer: int,
        call: dict[str, Any],
    ) -> _Plan:
        fingerprint = (q.shape, q.dtype, q.device, key.shape, key.stride(), call["stream"], mask is None)
        plan = self._plan
        if plan is None or not plan.serves(fingerprint, mask, layer):
            pool = _pool(key, mask, self._page_size)
            needed = {**call, **pool}
            scratch = {
                "semaphores": q.new_zeros(op.semaphores_size(**needed), dtype=torch.uint8),
                "workspace": q.new_empty(op.workspace_size(**needed), dtype=torch.uint8),
            }
            plan = _Plan(fingerprint, _nothing if mask is None else weakref.ref(mask), layer, pool, scratch)
        plan.layer = layer
        self._plan = plan
        return plan


def _nothing() -> None:
    return None


def _alike(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V with the same strides, all of whole rows, and heads and tokens apart."""
    dim = key.shape[-1]
    rows = all(stride % dim == 0 for stride in key.stride()[:-1])
    shared = any(key.stride(n) == 0 and key.shape[n] > 1 for n in (1, 2))
    if key.stride() == value.stride() and key.stride(-1) == 1 and rows and not shared:
        return key, value
    return key.contiguous(), value.contiguous()


def _pool(key: torch.Tensor, mask: torch.Tensor | None, page_size: int) -> dict[str, Any]:
    """The fields of a call that say where each sequence's rows lie."""
    batch, heads, tokens, dim = key.shape
    rows = [stride // dim for stride in key.stride()[:-1]]  # between sequences, heads, tokens
    sequences = torch.arange(batch, dtype=torch.int64, device=key.device) * rows[0]
    pages = torch.arange(0, tokens, page_size, dtype=torch.int64, device=key.device) * rows[2]
    if mask is None:
        lengths = torch.full((batch,), tokens, dtype=torch.int32, device=key.device)
    else:
        first, lengths = _runs(mask, batch, tokens)
        sequences = sequences + first * rows[2]
    last = sum((size - 1) * step for size, step in zip(key.shape, rows, strict=False))
    return {
        "num_kv_heads": heads,
        "num_pages": last + 1,
        "max_seq_len": tokens,
        "kv_page_stride": dim,
        "kv_head_stride": key.stride(1),
        "kv_token_stride": key.stride(2),
        "page_table": (sequences[:, None] + pages).to(torch.int32),
        "seq_lens": lengths,
    }


def _runs(mask: torch.Tensor, batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the rows that count begin and how many there are. Waits for the device, since the rows must be side by side."""
    if mask.dtype != torch.bool or mask.shape[1:] != (1, 1, tokens):
        raise Unsupported(
            f"attention_mask is {mask.dtype} of shape {tuple(mask.shape)}; it must be bool, [B, 1, 1, {tokens}]"
        )
    counts = mask[:, 0, 0].expand(batch, tokens)
    first, lengths = counts.int().argmax(-1), counts.sum(-1)
    at = torch.arange(tokens, device=mask.device)
    run = (at >= first[:, None]) & (at < (first + lengths)[:, None])
    if not torch.equal(run, counts):
        raise Unsupported("attention_mask has gaps; the rows of a sequence that count must be side by side")
    return first, lengths.to(torch.int32)
