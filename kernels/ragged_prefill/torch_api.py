"""``BatchPrefillWithRaggedKVCacheWrapper`` for torch, with the arguments of FlashInfer's.

Say once which bundle serves a device, then call::

    use_bundle(open_bundle("dist/sm_90a-linux-x86_64"))
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace)
    wrapper.plan(qo_indptr, kv_indptr, 32, 8, 128, causal=True, q_data_type=torch.bfloat16)
    o = wrapper.run(q, k, v)

Every call that upstream serves and this does not raises an error of ``kernseal.loader.errors``.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kernseal.loader import serving
from kernseal.loader.addresses import check_dtype, dense, dtype_name, launch_on, memory, on_device
from kernseal.loader.errors import InvalidArgument, NotPrepared, Unsupported
from kernseal.loader.op import Op
from kernseal.loader.serving import Served, served_by, use_bundle

__all__ = ["REPLACES", "BatchPrefillWithRaggedKVCacheWrapper", "prepare", "use_bundle"]

OP = "ragged_prefill"
INVARIANT_TILE = 64
"""Query rows of a tile where upstream promises results that do not follow from the batch."""
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
_NAMES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "half": torch.float16}
_F32 = (torch.float32,)

prepare = functools.partial(serving.prepare, OP)
"""Prepare a variant ahead of the first call; see ``kernseal.loader.serving.prepare``."""


@dataclass(frozen=True)
class _Planned:
    """What ``run`` needs of the last plan.

    Attributes:
        fields: of the C struct; those of memory and strides that a run has are not in it.
        host, device: the plan and its copy.
    """

    op: Op
    dtype: torch.dtype
    dims: tuple[int, int]
    fields: dict[str, Any]
    host: torch.Tensor
    device: torch.Tensor
    rows: int


class BatchPrefillWithRaggedKVCacheWrapper:
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
                after another plan; the first plan fixes the most rows of q.
            qo_indptr_buf, kv_indptr_buf: with ``use_cuda_graph``, where plan leaves the ends of the sequences. The kernel
                reads its own copy.
            backend: ``auto`` or ``fa2``.

        Raises:
            Unsupported: a mask buffer, a variant of the kernel that is compiled at run time, or another backend.
            InvalidArgument: an argument that upstream does not know either.
        """
        _refuse(custom_mask_buf=custom_mask_buf, mask_indptr_buf=mask_indptr_buf, jit_args=jit_args)
        _refuse(jit_kwargs=jit_kwargs, variant_owns_mask=variant_owns_mask or None)
        if backend not in ("auto", "fa2"):
            raise Unsupported(f"backend is {backend!r}; 'auto' and 'fa2' are supported")
        if kv_layout not in ("NHD", "HND"):
            raise InvalidArgument(f"kv_layout is {kv_layout!r}; it must be NHD or HND")
        if use_cuda_graph and (qo_indptr_buf is None or kv_indptr_buf is None):
            raise InvalidArgument("qo_indptr_buf, kv_indptr_buf: needed with use_cuda_graph")
        self._workspace = float_workspace_buffer
        self._ordinal = float_workspace_buffer.get_device()
        self._kv_layout = kv_layout
        self._graph = use_cuda_graph
        self._ends = (qo_indptr_buf, kv_indptr_buf)
        self._most_rows: int | None = None
        self._planned: _Planned | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._graph

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
            uniform_q_len, non_blocking, rope_scale, rope_theta: not needed.
            tile_q: not upstream's: query rows of a tile, or 0 for its choice by the batch.

        Raises:
            Unsupported: an argument asks for what these kernels do not do, or the bundle lacks the variant; the message has
                the command that builds it.
            InvalidArgument: the ends of the sequences are none, or with ``use_cuda_graph`` other than was fixed.
            WorkspaceTooSmall: ``float_workspace_buffer``; the message has the size that is needed.
            NotPrepared: no bundle serves the device; see ``use_bundle``.
        """
        _refuse(custom_mask=custom_mask, packed_custom_mask=packed_custom_mask, prefix_len_ptr=prefix_len_ptr)
        _refuse(token_pos_in_items_ptr=token_pos_in_items_ptr, max_item_len_ptr=max_item_len_ptr)
        _refuse(v_indptr=v_indptr, o_indptr=o_indptr, use_token_head_sf=use_token_head_sf or None)
        _refuse(use_fp16_qk_reduction=use_fp16_qk_reduction or None, logits_soft_cap=logits_soft_cap or None)
        if pos_encoding_mode != "NONE":
            raise Unsupported(f"pos_encoding_mode is {pos_encoding_mode!r}; only 'NONE' is supported")
        if window_left >= 0:
            raise Unsupported(f"window_left is {window_left}; there is no window (-1)")
        dtype = _same_dtype(q_data_type, kv_data_type, o_data_type)
        head_dim_vo = head_dim_qk if head_dim_vo is None else head_dim_vo
        qo, kv = _ends("qo_indptr", qo_indptr, qo_indptr_cpu), _ends("kv_indptr", kv_indptr, kv_indptr_cpu)
        if qo.numel() != kv.numel():
            raise InvalidArgument(f"kv_indptr: {kv.numel()} entries; qo_indptr has {qo.numel()}")
        chunk = (
            0
            if disable_split_kv
            else -1
            if fixed_split_size is None or fixed_split_size <= 0
            else fixed_split_size
        )
        wanted = _Wanted(dtype, head_dim_qk, head_dim_vo, bool(causal))
        op = served_by(self._ordinal).ready(OP, wanted, _prepare)
        fields = {
            "num_q_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "tile_q": INVARIANT_TILE if chunk > 0 and tile_q == 0 else tile_q,
            "fixed_grid": int(self._graph),
            "sm_scale": 1.0 / math.sqrt(head_dim_qk) if sm_scale is None else sm_scale,
            "batch_size": qo.numel() - 1,
            "total_q": self._rows(qo),
            "total_kv": int(kv[-1]),
            "kv_chunk": chunk,
            "workspace": memory("float_workspace_buffer", self._workspace, self._ordinal),
            "workspace_bytes": self._workspace.nbytes,
        }
        self._planned = self._made(op, fields, qo, kv, (dtype, head_dim_qk, head_dim_vo))
        for buffer, ends in zip(self._ends, (qo, kv), strict=True):
            if self._graph and buffer is not None:
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
        planned = self._planned
        if planned is None:
            raise NotPrepared("plan must be called before run")
        for name, scale in (
            ("q_scale", q_scale),
            ("k_scale", k_scale),
            ("v_scale", v_scale),
            ("o_scale", o_scale),
        ):
            if scale is not None and scale != 1.0:
                raise Unsupported(f"{name} is {scale}; only 1 is supported")
        _refuse(kv_cache_sf=kv_cache_sf, args=args or None)
        if (lse_base, lse_layout) != ("log2", "NH"):
            raise Unsupported(
                f"lse_base is {lse_base!r}, lse_layout {lse_layout!r}; 'log2' and 'NH' are supported"
            )
        heads, kv_heads = planned.fields["num_q_heads"], planned.fields["num_kv_heads"]
        shape = (planned.rows, heads, planned.dims[1])
        if out is None:
            out = torch.empty(shape, dtype=planned.dtype, device=self._workspace.device)
        if return_lse and lse is None:
            lse = torch.empty(shape[:2], dtype=torch.float32, device=self._workspace.device)
        least, device = planned.fields["total_kv"], self._ordinal
        fields = {
            **planned.fields,
            **_operand(
                "q", q, "NHD", (planned.rows, heads, planned.dims[0]), planned.dtype, device, exact=True
            ),
            **_operand("k", k, self._kv_layout, (least, kv_heads, planned.dims[0]), planned.dtype, device),
            **_operand("v", v, self._kv_layout, (least, kv_heads, planned.dims[1]), planned.dtype, device),
            "o": dense("out", out, (planned.dtype,), math.prod(shape), device),
            "lse": dense("lse", lse, _F32, planned.rows * heads, device)
            if return_lse and lse is not None
            else 0,
            "pdl": 1 if enable_pdl is None or enable_pdl else 0,
            "qo_indptr": 0,
            "kv_indptr": 0,
            "plan": planned.host.data_ptr(),
            "plan_bytes": planned.host.nbytes,
            "plan_device": planned.device.data_ptr(),
            "stream": torch.cuda.current_stream(device).cuda_stream,
        }
        launch_on(device, planned.op, fields)
        return (out, lse) if return_lse and lse is not None else out

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Other scratch for the plans to come; ``int_workspace_buffer`` is upstream's and not needed."""
        self._workspace = float_workspace_buffer

    def _rows(self, qo: torch.Tensor) -> int:
        """Rows that the launch is for: with a graph, those of the first plan."""
        rows = int(qo[-1])
        if not self._graph:
            return rows
        fixed = self._ends[0]
        if fixed is not None and fixed.numel() != qo.numel():
            raise InvalidArgument(f"qo_indptr: {qo.numel()} entries; {fixed.numel()} were fixed")
        self._most_rows = rows if self._most_rows is None else self._most_rows
        if rows > self._most_rows:
            raise InvalidArgument(f"qo_indptr: {rows} rows; the first plan fixed at most {self._most_rows}")
        return self._most_rows

    def _made(
        self,
        op: Op,
        fields: dict[str, Any],
        qo: torch.Tensor,
        kv: torch.Tensor,
        kind: tuple[torch.dtype, int, int],
    ) -> _Planned:
        on_gpu = self._workspace.is_cuda
        given = {**fields, "qo_indptr": qo.data_ptr(), "kv_indptr": kv.data_ptr()}
        host = torch.empty(max(op.plan(**given), 1), dtype=torch.uint8, pin_memory=on_gpu)
        used = op.plan(**given, plan=host.data_ptr(), plan_bytes=host.nbytes)
        before = self._planned
        if self._graph and before is not None and before.device.nbytes >= host.nbytes:
            device = before.device
        else:
            device = torch.empty(host.nbytes, dtype=torch.uint8, device=self._workspace.device)
        device[:used].copy_(host[:used], non_blocking=True)
        return _Planned(op, kind[0], kind[1:], fields, host, device, int(qo[-1]))


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise Unsupported(f"{name}: not supported")


def _dtype(given: str | torch.dtype) -> Any:
    return _NAMES.get(given, given) if isinstance(given, str) else given


def _same_dtype(
    q: str | torch.dtype, kv: str | torch.dtype | None, o: str | torch.dtype | None
) -> torch.dtype:
    dtype = _dtype(q)
    dtype_name(_DTYPES, "q_data_type", dtype)
    for name, other in (("kv_data_type", kv), ("o_data_type", o)):
        if other is not None and _dtype(other) != dtype:
            raise Unsupported(f"{name} is {other}; only q_data_type, {dtype}, is supported")
    found: torch.dtype = dtype
    return found


def _ends(name: str, given: torch.Tensor, on_host: torch.Tensor | None) -> torch.Tensor:
    """The ends of the sequences on the host."""
    read = given if on_host is None else on_host
    check_dtype(name, read, (torch.int32,))
    if read.ndim != 1 or read.numel() == 0:
        raise InvalidArgument(f"{name}: shape {tuple(read.shape)}; expected [B + 1]")
    return read.cpu().contiguous()


class _Wanted(NamedTuple):
    """What decides the variant."""

    dtype: torch.dtype
    head_dim: int
    v_dim: int
    causal: bool


def _prepare(served: Served, wanted: _Wanted) -> Op:
    return served.prepare(OP, **{**wanted._asdict(), "dtype": _DTYPES[wanted.dtype]})


def _operand(
    name: str,
    tensor: torch.Tensor,
    layout: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: int,
    exact: bool = False,
) -> dict[str, int]:
    """The address and the distances of rows and heads. ``shape`` has the rows that are read; there may be more."""
    check_dtype(name, tensor, (dtype,))
    if tensor.ndim != 3:
        raise InvalidArgument(f"{name}: shape {tuple(tensor.shape)}; expected three dimensions")
    rows_first = tensor if layout == "NHD" else tensor.transpose(0, 1)
    rows, *head = rows_first.shape
    if head != list(shape[1:]) or rows < shape[0] or (exact and rows != shape[0]):
        raise InvalidArgument(f"{name}: shape {tuple(tensor.shape)}; the plan is for {shape} in {layout}")
    row, step, element = rows_first.stride()
    if element != 1:
        raise InvalidArgument(f"{name}: strides {tensor.stride()}; the last must be 1")
    # What there is only one of may have any stride: 0 stands for that of a dense tensor.
    strides = {"row": row if rows > 1 else 0, "head": step if shape[1] > 1 else 0}
    return {
        name: on_device(name, tensor, device),
        **{f"{name}_{what}_stride": n for what, n in strides.items()},
    }


REPLACES: dict[str, dict[str, Any]] = {}
"""Nothing stands in FlashInfer by itself (``kernseal.loader.flashinfer``): a wrapper is made before it is told what to do,
so what these kernels lack could not fall through to FlashInfer's own. Who wants this one imports it from here."""
