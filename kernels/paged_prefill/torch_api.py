"""``BatchPrefillWithPagedKVCacheWrapper`` and ``BatchDecodeWithPagedKVCacheWrapper`` for torch, with FlashInfer's arguments.

Say once which bundle serves a device, then call::

    use_bundle(open_bundle("dist/sm_90a-linux-x86_64"))
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace)
    wrapper.plan(indptr, indices, last_page_len, 32, 8, 128, 16, q_data_type=torch.bfloat16)
    o = wrapper.run(q, (k_cache, v_cache))

Every call of what is here that upstream serves and this does not raises an error of ``kernseal.loader.errors``. Not here are
``workspace_size`` and ``prewarm_paged_kv_stride_variant``: plan refuses scratch that is too small with the size that it
needs, and nothing is compiled.
"""

from __future__ import annotations

import functools
import math
from typing import Any, TypeAlias

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
    refuse_window,
    rows_of,
    uniform_tile,
)
from kernseal.loader import addresses, serving
from kernseal.loader.addresses import check_dtype, check_strides, memory, on_device
from kernseal.loader.errors import InvalidArgument, Unsupported
from kernseal.loader.serving import use_bundle

__all__ = [
    "REPLACES",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "prepare",
    "use_bundle",
]

OP = "paged_prefill"
BLOCKS_PER_SM = 2
"""Thread blocks on a multiprocessor that upstream's split of sequences aims at."""

prepare = functools.partial(serving.prepare, OP)
"""Prepare a variant ahead of the first call; see ``kernseal.loader.serving.prepare``."""

Cache: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class _PagedWrapper(PlannedWrapper):
    """Plans and runs over a paged cache."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        backend: str,
        qo_indptr: torch.Tensor | None,
        buffers: dict[str, torch.Tensor | None],
    ) -> None:
        """``buffers``: upstream's of the page table's ends, its entries and the last pages' lengths, by their names."""
        super().__init__(OP, float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        if use_cuda_graph:
            given = {name: buffer for name, buffer in buffers.items() if buffer is not None}
            if missing := [name for name in buffers if name not in given]:
                raise InvalidArgument(f"{', '.join(missing)}: needed with use_cuda_graph")
            (ends, ends_buffer), (pages, pages_buffer), (last, last_buffer) = given.items()
            check_buffer(pages, pages_buffer)
            check_buffer(last, last_buffer)
            check_buffer(ends, ends_buffer, last_buffer.numel() + 1)
            if qo_indptr is not None:
                check_buffer("qo_indptr_buf", qo_indptr, last_buffer.numel() + 1)
        self._buffers = (qo_indptr, *buffers.values()) if use_cuda_graph else (None,) * 4
        self._pages: torch.Tensor | None = None

    def _plan_pages(
        self,
        qo: torch.Tensor,
        indptr: tuple[str, torch.Tensor],
        indices: tuple[str, torch.Tensor],
        last_page_len: tuple[str, torch.Tensor],
        heads: tuple[int, int, int],
        page_size: int,
        dtype: torch.dtype,
        causal: bool,
        sm_scale: float | None,
        tile_q: int,
        chunk: int,
        non_blocking: bool,
    ) -> None:
        """Plan; tensors with upstream's names for them.

        Args:
            qo: [B + 1] int32 on the host.
            heads: of q, of the cache, and their elements.
        """
        batch = qo.numel() - 1
        qo_buffer, ends_buffer, pages_buffer, last_buffer = self._buffers
        ends, last = on_host(*indptr, batch + 1), on_host(*last_page_len, batch)
        check_fixed(indptr[0], ends, ends_buffer)
        pages = self._place(*indices, pages_buffer)
        fields = {
            "num_q_heads": heads[0],
            "num_kv_heads": heads[1],
            "page_size": page_size,
            "tile_q": tile_q,
            "sm_scale": 1.0 / math.sqrt(heads[2]) if sm_scale is None else sm_scale,
            "batch_size": batch,
            "total_q": self._rows(int(qo[-1])),
            "total_pages": pages.numel(),
            "num_pages": pages.numel(),  # of a pool that only the runs know; plan reads whether there are any
            "kv_chunk": chunk,
            "page_indices": memory(indices[0], pages, self._ordinal),
        }
        axes, lengths = {"head_dim": heads[2], "causal": causal}, _lengths(ends, last, page_size)
        read = {"qo_indptr": qo, "page_indptr": ends, "kv_lens": lengths}
        self._make_plan(axes, dtype, heads[2], int(qo[-1]), fields, **read)
        self._pages = pages
        if pages_buffer is not None:
            # Host memory may be pinned, and the caller's to write again at once: its copy is waited for.
            at_ease = non_blocking and indices[1].get_device() == self._ordinal
            pages[: indices[1].numel()].copy_(indices[1], non_blocking=at_ease)
        for buffer, values in ((qo_buffer, qo), (ends_buffer, ends), (last_buffer, last)):
            if buffer is not None:
                buffer.copy_(values, non_blocking=non_blocking)

    def _place(self, name: str, given: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
        """Where the runs read the entries of the page table: with a graph a buffer, which is not yet written."""
        check_dtype(name, given, (torch.int32,))
        if given.ndim != 1:
            raise InvalidArgument(f"{name}: shape {tuple(given.shape)}; expected one dimension")
        if buffer is None:
            return given.to(self._workspace.device).contiguous()
        if given.numel() > buffer.numel():
            raise InvalidArgument(f"{name}: {given.numel()} entries; {buffer.numel()} were fixed")
        return buffer

    def _operands(
        self, planned: Planned, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> dict[str, int]:
        fields, device = planned.fields, self._ordinal
        shape = tuple(int(fields[name]) for name in ("page_size", "num_kv_heads"))
        pool = (*shape, planned.v_dim)
        strides = _pool("k", k, self._kv_layout, pool, planned.dtype, device)
        others = _pool("v", v, self._kv_layout, pool, planned.dtype, device)
        if strides != others or k.shape != v.shape:
            raise Unsupported(
                f"paged_kv_cache: v is {tuple(v.shape)} with strides {v.stride()}, k {tuple(k.shape)} with "
                f"{k.stride()}; only the same are supported"
            )
        page, row, head = strides
        expected = planned.rows, int(fields["num_q_heads"]), planned.v_dim
        return {
            **rows_of("q", q, "NHD", expected, planned.dtype, device, exact=True),
            "num_pages": k.shape[0],
            "kv_page_stride": page,
            "kv_row_stride": row,
            "kv_head_stride": head,
        }

    def _run_paged(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        enable_pdl: bool | None,
        q_scale: float | torch.Tensor | None,
        k_scale: float | torch.Tensor | None,
        v_scale: float | torch.Tensor | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        factor = 1.0
        for name, scale in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
            if isinstance(scale, torch.Tensor):
                raise Unsupported(f"{name}: is a tensor; only a number is supported")
            if name != "v_scale" and scale is not None:
                factor *= scale
        refuse_scales(v_scale=v_scale)
        k, v = _unpack(paged_kv_cache)
        return self._launch(q, k, v, out, lse, return_lse, enable_pdl, factor)


class BatchPrefillWithPagedKVCacheWrapper(_PagedWrapper):
    """Attention of packed query rows over a paged cache, planned once a step and run once a layer, on torch's current
    stream."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
        max_total_num_rows: int | None = None,
    ) -> None:
        """Arguments as upstream's.

        Args:
            float_workspace_buffer: scratch on the device for sequences that are split, 16-byte aligned.
            kv_layout: ``NHD`` or ``HND``.
            use_cuda_graph: every plan makes the same launch, into the same memory, so that a captured run can be replayed
                after another plan. The first plan fixes all but lengths and pages: a later one that would make another
                launch is refused.
            paged_kv_indices_buf: with ``use_cuda_graph``, where the kernel reads the page table's entries: as many as a
                plan will ever have.
            qo_indptr_buf, paged_kv_indptr_buf, paged_kv_last_page_len_buf: with ``use_cuda_graph``, where plan leaves what
                it was given: [B + 1], [B + 1] and [B]. The kernel reads its own copy.
            backend: ``auto`` or ``fa2``.
            max_total_num_rows: with ``use_cuda_graph``, the most rows of q; None is those of the first plan.

        Raises:
            Unsupported: a mask buffer, a variant of the kernel that is compiled at run time, or another backend.
            InvalidArgument: an argument that upstream does not know either, or a buffer that is missing or of another shape
                or type.
        """
        refuse(custom_mask_buf=custom_mask_buf, mask_indptr_buf=mask_indptr_buf, jit_args=jit_args)
        refuse(jit_kwargs=jit_kwargs, variant_owns_mask=variant_owns_mask or None)
        buffers = {
            "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
        }
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, qo_indptr_buf, buffers)
        if use_cuda_graph and qo_indptr_buf is None:
            raise InvalidArgument("qo_indptr_buf: needed with use_cuda_graph")
        if max_total_num_rows is not None and not use_cuda_graph:
            raise InvalidArgument("max_total_num_rows: needs use_cuda_graph")
        self._most_rows = max_total_num_rows

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
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
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
        *,
        tile_q: int = 0,
    ) -> None:
        """Plan the runs of a step. Makes host memory for the plan each time, so a plan never changes one that is in use.

        Args:
            qo_indptr, paged_kv_indptr: [B + 1] int32, on the host or, which waits for the device, on it.
            paged_kv_indices: int32, on the device or the host. Without ``use_cuda_graph`` one on the device is read by the
                runs.
            paged_kv_last_page_len: [B] int32, as ``qo_indptr``: keys in the last page of each sequence; not read where a
                sequence has no page.
            num_qo_heads, num_kv_heads, head_dim_qk, page_size, causal, sm_scale: as upstream's.
            head_dim_vo: None or ``head_dim_qk``.
            q_data_type: float16 or bfloat16; the other two must be it.
            fixed_split_size: pages of a part of a sequence. Tiles then have 64 query rows (see ``tile_q``), so that a
                sequence's result does not follow from the batch. Not with ``use_cuda_graph``.
            disable_split_kv: no parts. Without either, upstream's choice by the whole batch.
            seq_lens, seq_lens_q, block_tables, max_token_per_sequence, max_sequence_kv: for backends that are not here; not
                read.
            uniform_q_len: with ``use_cuda_graph``, the rows of every sequence in every plan: tiles are chosen for as many,
                and not for the one sequence that could have nearly all rows. Not read without.
            non_blocking, rope_scale, rope_theta: not needed.
            tile_q: not upstream's: query rows of a tile, or 0 for its choice by the batch.

        Raises:
            Unsupported: an argument asks for what these kernels do not do, or the bundle lacks the variant; the message has
                the command that builds it.
            InvalidArgument: the page table or the ends of the sequences are none; or with ``use_cuda_graph`` anything but
                lengths and pages is other than was fixed, or ``uniform_q_len`` is not what the sequences have.
            WorkspaceTooSmall: ``float_workspace_buffer``; the message has the size that is needed.
            NotPrepared: no bundle serves the device; see ``use_bundle``.
        """
        refuse(custom_mask=custom_mask, packed_custom_mask=packed_custom_mask, prefix_len_ptr=prefix_len_ptr)
        refuse(token_pos_in_items_ptr=token_pos_in_items_ptr, max_item_len_ptr=max_item_len_ptr)
        refuse(use_token_head_sf=use_token_head_sf or None)
        refuse(use_fp16_qk_reduction=use_fp16_qk_reduction or None)
        refuse_attention(pos_encoding_mode, window_left, logits_soft_cap)
        if head_dim_vo is not None and head_dim_vo != head_dim_qk:
            raise Unsupported(f"head_dim_vo is {head_dim_vo}; only head_dim_qk, {head_dim_qk}, is supported")
        chunk = chunk_of(fixed_split_size, disable_split_kv, page_size)
        qo, heads = on_host("qo_indptr", qo_indptr), (num_qo_heads, num_kv_heads, head_dim_qk)
        self._plan_pages(
            qo,
            ("paged_kv_indptr", paged_kv_indptr),
            ("paged_kv_indices", paged_kv_indices),
            ("paged_kv_last_page_len", paged_kv_last_page_len),
            heads,
            page_size,
            dtype_of(q_data_type, kv_data_type, o_data_type),
            bool(causal),
            sm_scale,
            self._tile(tile_q, chunk, uniform_q_len, qo, heads),
            chunk,
            non_blocking,
        )

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of q over the cache as planned.

        Args:
            q: [rows, num_qo_heads, head_dim_qk]; heads and rows may lie apart.
            paged_kv_cache: k and v, [num_pages, page_size, num_kv_heads, head_dim_qk], or heads before rows with ``HND``,
                with the same strides; or one tensor of both, [num_pages, 2, ..].
            q_scale, k_scale: multiply the logits.
            out, lse: [rows, num_qo_heads, head_dim_qk] of q's type and [rows, num_qo_heads] float32, dense; made where
                missing.
            return_lse: give log2 of the softmax's sums too.
            enable_pdl: let the launch begin while the kernel before it is ending; None is yes.

        Raises:
            Unsupported: a window, sinks, another v_scale than 1, scale factors, another base or layout of lse, arguments of
                a variant, or k and v that lie differently.
            InvalidArgument: a tensor's device, type, shape or strides do not fit the plan.
            NotPrepared: there is no plan.
        """
        refuse(kv_cache_sf=kv_cache_sf, args=args or None, sinks=sinks)
        refuse(skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        refuse(use_fp16_softmax=use_fp16_softmax or None, uses_spcompress=uses_spcompress or None)
        refuse_window(window_left)
        refuse_lse(lse_base, lse_layout)
        return self._run_paged(q, paged_kv_cache, out, lse, return_lse, enable_pdl, q_scale, k_scale, v_scale)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
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
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


class BatchDecodeWithPagedKVCacheWrapper(_PagedWrapper):
    """Attention of one query token a sequence, or of a few drafts, over a paged cache, planned once a step and run once a
    layer, on torch's current stream. Always on tensor cores, as upstream's with ``use_tensor_cores``."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Arguments as upstream's.

        Args:
            float_workspace_buffer, kv_layout, use_cuda_graph, backend: see ``BatchPrefillWithPagedKVCacheWrapper``.
            use_tensor_cores: not read.
            paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer: likewise; they fix the batch
                size.

        Raises:
            Unsupported: a variant of the kernel that is compiled at run time, or another backend.
            InvalidArgument: an argument that upstream does not know either, or a buffer that is missing or of another shape
                or type.
        """
        refuse(jit_args=jit_args, jit_kwargs=jit_kwargs)
        buffers = {
            "paged_kv_indptr_buffer": paged_kv_indptr_buffer,
            "paged_kv_indices_buffer": paged_kv_indices_buffer,
            "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer,
        }
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, None, buffers)
        self._q_len = 1

    @property
    def use_tensor_cores(self) -> bool:
        return True

    @property
    def resolved_backend(self) -> str:
        return "fa2"

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
        is_causal: bool | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Plan the runs of a step. Makes host memory for the plan each time, so a plan never changes one that is in use.

        Args:
            indptr: [B + 1] int32, on the host or, which waits for the device, on it.
            indices: int32, on the device or the host. Without ``use_cuda_graph`` one on the device is read by the runs.
            last_page_len: [B] int32, as ``indptr``: keys in the last page of each sequence; not read where a sequence has
                no page.
            num_qo_heads, num_kv_heads, head_dim, page_size, sm_scale: as upstream's.
            q_data_type: float16 or bfloat16; the other two must be it. ``data_type`` stands in for those that are None.
            fixed_split_size: pages of a part of a sequence: a sequence's result does not follow from the batch. Not with
                ``use_cuda_graph``.
            disable_split_kv: no parts. Without either, upstream's choice by the whole batch.
            q_len_per_req: query rows of every sequence: with more than 1 the last sees every key, the one before it all
                but the last.
            is_causal: None or whether ``q_len_per_req`` is above 1.
            block_tables, seq_lens: for backends that are not here; not read.
            non_blocking, rope_scale, rope_theta: not needed.

        Raises:
            KernsealError: see ``BatchPrefillWithPagedKVCacheWrapper.plan``.
        """
        refuse(use_token_head_sf=use_token_head_sf or None, window_right=window_right or None)
        refuse_attention(pos_encoding_mode, window_left, logits_soft_cap)
        if q_len_per_req < 1:
            raise InvalidArgument(f"q_len_per_req is {q_len_per_req}; at least 1")
        if is_causal is not None and is_causal != (q_len_per_req > 1):
            raise Unsupported(f"is_causal is {is_causal}; it follows from q_len_per_req, {q_len_per_req}")
        if self._graph and self._planned is not None and q_len_per_req != self._q_len:
            raise InvalidArgument(f"q_len_per_req is {q_len_per_req}; {self._q_len} was fixed")
        q_type = data_type if q_data_type is None and data_type is not None else q_data_type or "float16"
        batch, heads = last_page_len.numel(), (num_qo_heads, num_kv_heads, head_dim)
        tile = uniform_tile(q_len_per_req, *heads)
        chunk = chunk_of(fixed_split_size, disable_split_kv, page_size)
        if self._graph and chunk < 0 and self._is_full(batch, q_len_per_req, heads, tile):
            chunk = 0
        self._plan_pages(
            torch.arange(0, batch * q_len_per_req + 1, q_len_per_req, dtype=torch.int32),
            ("indptr", indptr),
            ("indices", indices),
            ("last_page_len", last_page_len),
            heads,
            page_size,
            dtype_of(q_type, kv_data_type or data_type, o_data_type),
            q_len_per_req > 1,
            sm_scale,
            tile,
            chunk,
            non_blocking,
        )
        self._q_len = q_len_per_req

    def _is_full(self, batch: int, rows: int, heads: tuple[int, int, int], tile: int) -> bool:
        """Whether whole sequences are more thread blocks than a split aims at, so that upstream's never splits one."""
        num_q_heads, num_kv_heads, _ = heads
        if tile == 0:
            return False
        tiles = -(-rows * (num_q_heads // num_kv_heads) // tile)
        return batch * tiles > BLOCKS_PER_SM * addresses.sm_count(self._ordinal) // num_kv_heads

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of q over the cache as planned.

        Args:
            q: [B * q_len_per_req, num_qo_heads, head_dim]; heads and rows may lie apart.
            paged_kv_cache, q_scale, k_scale, out, lse, return_lse, enable_pdl: see
                ``BatchPrefillWithPagedKVCacheWrapper.run``.
            q_len_per_req: None or as planned.

        Raises:
            KernsealError: see ``BatchPrefillWithPagedKVCacheWrapper.run``.
        """
        refuse(kv_cache_sf=kv_cache_sf, args=args or None, sinks=sinks)
        refuse(skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        refuse_window(window_left)
        if q_len_per_req is not None and q_len_per_req != self._q_len:
            raise InvalidArgument(f"q_len_per_req is {q_len_per_req}; the plan is for {self._q_len}")
        return self._run_paged(q, paged_kv_cache, out, lse, return_lse, enable_pdl, q_scale, k_scale, v_scale)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Upstream's old name of ``run``; see ``BatchPrefillWithPagedKVCacheWrapper.forward``.

        Raises:
            KernsealError: likewise.
        """
        self._check_as_planned(pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
        return self.run(
            q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse
        )

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


def _lengths(ends: torch.Tensor, last: torch.Tensor, page_size: int) -> torch.Tensor:
    """Keys of each sequence."""
    pages = ends.diff()
    return torch.where(pages > 0, (pages - 1) * page_size + last, 0).to(torch.int32)


def _unpack(cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v."""
    if isinstance(cache, torch.Tensor):
        if cache.ndim != 5 or cache.shape[1] != 2:
            raise InvalidArgument(
                f"paged_kv_cache: shape {tuple(cache.shape)}; expected [num_pages, 2, ..], or k and v"
            )
        k, v = cache.unbind(1)
        return k, v
    k, v = cache
    return k, v


def _pool(
    name: str, pool: torch.Tensor, layout: str, shape: tuple[int, ...], dtype: torch.dtype, device: int
) -> tuple[int, int, int]:
    """The distances of pages, rows and heads. ``shape``: rows, heads and their elements."""
    check_dtype(name, pool, (dtype,))
    rows_first = pool.transpose(1, 2) if layout == "HND" and pool.ndim == 4 else pool
    if rows_first.ndim != 4 or tuple(rows_first.shape[1:]) != shape:
        raise InvalidArgument(
            f"{name}: shape {tuple(pool.shape)}; the plan is for [num_pages, {shape}] in {layout}"
        )
    check_strides(name, pool)
    on_device(name, pool, device)
    # What there is only one of may have any stride: 0 stands for that of a dense tensor.
    page, row, head = (
        stride if count > 1 else 0
        for stride, count in zip(rows_first.stride()[:3], rows_first.shape[:3], strict=True)
    )
    return page, row, head


REPLACES: dict[str, dict[str, Any]] = {}
"""Nothing stands in FlashInfer by itself (``kernseal.loader.flashinfer``): a wrapper is made before it is told what to do,
so what these kernels lack could not fall through to FlashInfer's own. Who wants these imports them from here."""
