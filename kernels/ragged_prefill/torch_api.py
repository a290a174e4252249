"""``BatchPrefillWithRaggedKVCacheWrapper`` for torch, with the arguments of FlashInfer's.

Say once which bundle serves a device, then call::

    use_bundle(open_bundle("dist/sm_90a-linux-x86_64"))
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace)
    wrapper.plan(qo_indptr, kv_indptr, 32, 8, 128, causal=True, q_data_type=torch.bfloat16)
    o = wrapper.run(q, k, v)

Every call of what is here that upstream serves and this does not raises an error of ``kernseal.loader.errors``.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from kernseal.kernels.ragged_prefill.planned import (
    Planned,
    PlannedWrapper,
    check_buffer,
    check_fixed,
    chunk_of,
    dtype_of,
    on_host,
    refuse,
    refuse_attention,
    refuse_lse,
    refuse_scales,
    rows_of,
)
from kernseal.loader import serving
from kernseal.loader.errors import InvalidArgument
from kernseal.loader.serving import use_bundle

__all__ = ["REPLACES", "BatchPrefillWithRaggedKVCacheWrapper", "prepare", "use_bundle"]

OP = "ragged_prefill"

prepare = functools.partial(serving.prepare, OP)
"""Prepare a variant ahead of the first call; see ``kernseal.loader.serving.prepare``."""


class BatchPrefillWithRaggedKVCacheWrapper(PlannedWrapper):
    """Attention of packed sequences, planned once a step and run once a layer, on torch's current stream."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        """Arguments as upstream's.

        Args:
            float_workspace_buffer: scratch on the device for sequences that are split, 16-byte aligned.
            kv_layout: ``NHD`` or ``HND``.
            use_cuda_graph: every plan makes the same launch, into the same memory, so that a captured run can be replayed
                after another plan. The first plan fixes the most rows of q and all else but lengths: a later one that
                would make another launch is refused.
            qo_indptr_buf, kv_indptr_buf: with ``use_cuda_graph``, where plan leaves the ends of the sequences. The kernel
                reads its own copy.
            backend: ``auto`` or ``fa2``.

        Raises:
            Unsupported: a mask buffer, a variant of the kernel that is compiled at run time, or another backend.
            InvalidArgument: an argument that upstream does not know either, or a buffer that is missing or of another shape
                or type.
        """
        refuse(custom_mask_buf=custom_mask_buf, mask_indptr_buf=mask_indptr_buf, jit_args=jit_args)
        refuse(jit_kwargs=jit_kwargs, variant_owns_mask=variant_owns_mask or None)
        super().__init__(OP, float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        if use_cuda_graph:
            if qo_indptr_buf is None or kv_indptr_buf is None:
                raise InvalidArgument("qo_indptr_buf, kv_indptr_buf: needed with use_cuda_graph")
            check_buffer("qo_indptr_buf", qo_indptr_buf)
            check_buffer("kv_indptr_buf", kv_indptr_buf, qo_indptr_buf.numel())
        self._ends = (qo_indptr_buf, kv_indptr_buf) if use_cuda_graph else (None, None)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
        qo_indptr_cpu: torch.Tensor | None = None,
        kv_indptr_cpu: torch.Tensor | None = None,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
        *,
        tile_q: int = 0,
    ) -> None:
        """Plan the runs of a step. Makes host memory for the plan each time, so a plan never changes one that is in use.

        Args:
            qo_indptr, kv_indptr: [B + 1] int32, on the host or, which waits for the device, on it.
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, causal, sm_scale: as upstream's.
            q_data_type: float16 or bfloat16; the other two must be it.
            fixed_split_size: keys of a part of a sequence. Tiles then have 64 query rows (see ``tile_q``), so that a
                sequence's result does not follow from the batch.
            disable_split_kv: no parts. Without either, upstream's choice by the whole batch.
            qo_indptr_cpu, kv_indptr_cpu: the same on the host, read instead.
            seq_lens, seq_lens_q, max_token_per_sequence, max_sequence_kv: for a backend that is not here; not read.
            uniform_q_len: with ``use_cuda_graph``, the rows of every sequence in every plan: tiles are chosen for as many,
                and not for the one sequence that could have nearly all rows. Not read without.
            non_blocking, rope_scale, rope_theta: not needed.
            tile_q: not upstream's: query rows of a tile, or 0 for its choice by the batch.

        Raises:
            Unsupported: an argument asks for what these kernels do not do, or the bundle lacks the variant; the message has
                the command that builds it.
            InvalidArgument: the ends of the sequences are none; or with ``use_cuda_graph`` anything but lengths is not as it
                was fixed, or ``uniform_q_len`` is not what the sequences have.
            WorkspaceTooSmall: ``float_workspace_buffer``; the message has the size that is needed.
            NotPrepared: no bundle serves the device; see ``use_bundle``.
        """
        refuse(custom_mask=custom_mask, packed_custom_mask=packed_custom_mask, prefix_len_ptr=prefix_len_ptr)
        refuse(token_pos_in_items_ptr=token_pos_in_items_ptr, max_item_len_ptr=max_item_len_ptr)
        refuse(v_indptr=v_indptr, o_indptr=o_indptr, use_token_head_sf=use_token_head_sf or None)
        refuse(use_fp16_qk_reduction=use_fp16_qk_reduction or None)
        refuse_attention(pos_encoding_mode, window_left, logits_soft_cap)
        dtype = dtype_of(q_data_type, kv_data_type, o_data_type)
        v_dim = head_dim_qk if head_dim_vo is None else head_dim_vo
        qo = on_host("qo_indptr", qo_indptr if qo_indptr_cpu is None else qo_indptr_cpu)
        kv = on_host("kv_indptr", kv_indptr if kv_indptr_cpu is None else kv_indptr_cpu)
        if qo.numel() != kv.numel():
            raise InvalidArgument(f"kv_indptr: {kv.numel()} entries; qo_indptr has {qo.numel()}")
        check_fixed("qo_indptr", qo, self._ends[0])
        chunk = chunk_of(fixed_split_size, disable_split_kv)
        axes = {"head_dim": head_dim_qk, "v_dim": v_dim, "causal": bool(causal)}
        fields = {
            "num_q_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "tile_q": self._tile(tile_q, chunk, uniform_q_len, qo, (num_qo_heads, num_kv_heads, v_dim)),
            "sm_scale": 1.0 / math.sqrt(head_dim_qk) if sm_scale is None else sm_scale,
            "batch_size": qo.numel() - 1,
            "total_q": self._rows(int(qo[-1])),
            "total_kv": int(kv[-1]),
            "kv_chunk": chunk,
        }
        self._make_plan(axes, dtype, v_dim, int(qo[-1]), fields, qo_indptr=qo, kv_indptr=kv)
        for buffer, ends in zip(self._ends, (qo, kv), strict=True):
            if buffer is not None:
                buffer.copy_(ends, non_blocking=non_blocking)

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of q over k and v as planned.

        Args:
            q: [rows, num_qo_heads, head_dim_qk]; heads and rows may lie apart.
            k, v: [rows, num_kv_heads, head_dim_qk or head_dim_vo], or heads first with ``HND``; likewise.
            out, lse: [rows, num_qo_heads, head_dim_vo] of q's type and [rows, num_qo_heads] float32, dense; made where
                missing.
            return_lse: give log2 of the softmax's sums too.
            enable_pdl: let the launch begin while the kernel before it is ending; None is yes.

        Raises:
            Unsupported: a scale that is not 1, scale factors, another base or layout of lse, or arguments of a variant.
            InvalidArgument: a tensor's device, type, shape or strides do not fit the plan.
            NotPrepared: there is no plan.
        """
        refuse_scales(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, o_scale=o_scale)
        refuse(kv_cache_sf=kv_cache_sf, args=args or None)
        refuse_lse(lse_base, lse_layout)
        return self._launch(q, k, v, out, lse, return_lse, enable_pdl)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Upstream's old name of ``run``. What it says again must be as planned: ``sm_scale`` None is 1 / sqrt(head_dim_qk).

        Raises:
            Unsupported: it is not.
            KernsealError: see ``run``.
        """
        refuse(use_fp16_qk_reduction=use_fp16_qk_reduction or None)
        self._check_as_planned(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, causal=bool(causal))
        return self.run(q, k, v, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)

    def _operands(
        self, planned: Planned, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> dict[str, int]:
        fields, layout, device = planned.fields, self._kv_layout, self._ordinal
        heads, kv_heads, keys = (fields[name] for name in ("num_q_heads", "num_kv_heads", "total_kv"))
        head_dim, dtype = planned.op.config["head_dim"], planned.dtype
        return {
            **rows_of("q", q, "NHD", (planned.rows, heads, head_dim), dtype, device, exact=True),
            **rows_of("k", k, layout, (keys, kv_heads, head_dim), dtype, device),
            **rows_of("v", v, layout, (keys, kv_heads, planned.v_dim), dtype, device),
        }


REPLACES: dict[str, dict[str, Any]] = {}
"""Nothing stands in FlashInfer by itself (``kernseal.loader.flashinfer``): a wrapper is made before it is told what to do,
so what these kernels lack could not fall through to FlashInfer's own. Who wants this one imports it from here."""
