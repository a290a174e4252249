"""What FlashInfer's wrappers have in common here, whichever cache they read: calls that are planned once a step and run
once a layer, with all but addresses settled."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kernseal.loader.addresses import (
    check_dtype,
    check_strides,
    dense,
    dtype_name,
    look,
    memory,
    on,
    on_device,
)
from kernseal.loader.errors import InvalidArgument, NotPrepared, Unsupported
from kernseal.loader.op import Op, Settled
from kernseal.loader.serving import device_name, served_by
from kernseal.loader.tensors import torch_stream

DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
_NAMES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "half": torch.float16}
_F32 = (torch.float32,)
_CHANGING = ("q", "k", "v", "o", "lse", "sm_scale", "stream")
"""Fields that a run has of its own."""
_CHECKED_ALONE = ("total_kv",)
"""Fields that no launch has: they bound what a plan and a run check."""
INVARIANT_TILE = 64
"""Query rows of a tile where upstream promises results that do not follow from the batch."""


@dataclass(frozen=True)
class Planned:
    """What ``run`` needs of the last plan.

    Attributes:
        fields: of the C struct; those of a run's own memory and strides are not in it.
        launch: what else is fixed with a graph: the axes of the variant, and fields before the plan has its place.
        v_dim: elements of a row of o.
        rows: of q.
        workspace: the scratch whose address is in fields.
        host, device: the plan and its copy.
        calls: what runs like those before need not work out again, by what their tensors show.
    """

    op: Op
    dtype: torch.dtype
    fields: Mapping[str, Any]
    launch: Mapping[str, Any]
    v_dim: int
    rows: int
    workspace: torch.Tensor
    host: torch.Tensor
    device: torch.Tensor
    calls: dict[Hashable, Settled] = field(default_factory=dict)


class PlannedWrapper:
    """Attention, planned once a step and run once a layer, on torch's current stream."""

    def __init__(
        self,
        op: str,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        backend: str,
    ) -> None:
        """Arguments as upstream's; ``op``: what runs.

        Raises:
            Unsupported: another backend than ``auto`` and ``fa2``.
            InvalidArgument: a layout that upstream does not know either.
        """
        if backend not in ("auto", "fa2"):
            raise Unsupported(f"backend is {backend!r}; 'auto' and 'fa2' are supported")
        if kv_layout not in ("NHD", "HND"):
            raise InvalidArgument(f"kv_layout is {kv_layout!r}; it must be NHD or HND")
        self._op = op
        self._workspace = float_workspace_buffer
        self._ordinal = float_workspace_buffer.get_device()
        self._kv_layout = kv_layout
        self._graph = use_cuda_graph
        self._most_rows: int | None = None
        self._planned: Planned | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Other scratch for the plans to come; ``int_workspace_buffer`` is upstream's and not needed."""
        self._workspace = float_workspace_buffer

    def _rows(self, rows: int) -> int:
        """Rows of q that the launch is for: with a graph, those of the first plan unless more were asked for.

        Raises:
            InvalidArgument: there are more.
        """
        most = self._most_rows if self._planned is None else self._planned.fields["total_q"]
        if not self._graph or most is None:
            return rows
        if rows > most:
            raise InvalidArgument(f"qo_indptr: {rows} rows; at most {most} were fixed")
        return int(most)

    def _tile(
        self,
        tile_q: int,
        chunk: int,
        uniform_q_len: int | None,
        qo: torch.Tensor,
        heads: tuple[int, int, int],
    ) -> int:
        """``tile_q`` of the C struct: the caller's, or what a promise of ``uniform_q_len`` or of invariance makes it.

        Args:
            qo: [B + 1] int32 on the host.
            heads: of q, of k, and the elements of a row of v.

        Raises:
            InvalidArgument: with a graph, a sequence has other than ``uniform_q_len`` rows. Without one nobody reads it.
        """
        uniform = 0
        if self._graph and uniform_q_len is not None and uniform_q_len > 0:
            rows = qo.diff()
            if (rows != uniform_q_len).any():
                raise InvalidArgument(
                    f"uniform_q_len is {uniform_q_len}; the sequences have {int(rows.min())} to {int(rows.max())} rows"
                )
            uniform = uniform_tile(uniform_q_len, *heads)
        return tile_q or (INVARIANT_TILE if chunk > 0 else uniform)

    def _make_plan(
        self,
        axes: Mapping[str, Any],
        dtype: torch.dtype,
        v_dim: int,
        rows: int,
        fields: Mapping[str, Any],
        **read: torch.Tensor,
    ) -> None:
        """Plan, in host memory of its own: the step before this one may still run.

        Args:
            axes: what decides the variant, but for ``dtype``.
            rows: of q that the runs have.
            fields: of the C struct.
            read: what plan alone reads, on the host.

        Raises:
            InvalidArgument: with a graph, a run would make another launch than the first plan's.
        """
        fields = {
            **fields,
            "fixed_grid": int(self._graph),
            "workspace": memory("float_workspace_buffer", self._workspace, self._ordinal),
            "workspace_bytes": self._workspace.nbytes,
        }
        launch = {**axes, "dtype": dtype, **fields}
        before = self._planned if self._graph else None
        if before is not None:
            _check_same(launch, before.launch)
        wanted = (*axes.items(), dtype)
        op = served_by(self._ordinal).ready(
            self._op, wanted, lambda served, _: served.prepare(self._op, **axes, dtype=DTYPES[dtype])
        )
        if before is not None and op is not before.op:
            where = device_name(self._ordinal)
            raise InvalidArgument(
                f"bundle: another serves {where} than at the first plan, which use_cuda_graph fixed"
            )
        given = {**fields, **{name: values.data_ptr() for name, values in read.items()}}
        host = torch.empty(max(op.plan(**given), 1), dtype=torch.uint8, pin_memory=self._workspace.is_cuda)
        used = op.plan(**given, plan=host.data_ptr(), plan_bytes=host.nbytes)
        if before is not None:
            device = before.device
        else:
            device = torch.empty(host.nbytes, dtype=torch.uint8, device=self._workspace.device)
        device[:used].copy_(host[:used], non_blocking=True)
        places = {"plan": host.data_ptr(), "plan_bytes": host.nbytes, "plan_device": device.data_ptr()}
        memories = self._workspace, host, device
        self._planned = Planned(op, dtype, {**fields, **places}, launch, v_dim, rows, *memories)

    def _operands(
        self, planned: Planned, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> dict[str, int]:
        """The sizes and strides that q, k and v show.

        Raises:
            InvalidArgument: they do not fit the plan.
        """
        raise NotImplementedError

    def _launch(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        enable_pdl: bool | None,
        factor: float = 1.0,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Run as planned. ``out`` and ``lse`` are made where they are missing; ``factor`` multiplies the planned scale."""
        planned, device = self._ready(), self._ordinal
        shape = (planned.rows, int(planned.fields["num_q_heads"]), planned.v_dim)
        if out is None:
            out = torch.empty(shape, dtype=planned.dtype, device=planned.workspace.device)
        if not return_lse:
            lse = None
        elif lse is None:
            lse = torch.empty(shape[:2], dtype=torch.float32, device=planned.workspace.device)
        shown, addresses = look((q, k, v, out, lse))
        key = shown, enable_pdl
        call = planned.calls.get(key)
        if call is None:
            dense("out", out, (planned.dtype,), shape[0] * shape[1] * shape[2], device)
            if lse is not None:
                dense("lse", lse, _F32, shape[0] * shape[1], device)
            numbers = {**planned.fields, **self._operands(planned, q, k, v)}
            numbers["pdl"] = 1 if enable_pdl is None or enable_pdl else 0
            call = planned.calls[key] = planned.op.settle(_CHANGING, **numbers)
        with on(device):
            stream = torch_stream(device)
            call.launch([*addresses, planned.fields["sm_scale"] * factor, stream])
        return out if lse is None else (out, lse)

    def _check_as_planned(
        self,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        **same: Any,
    ) -> None:
        """For ``forward``, which is told anew what a plan fixes here: ``same`` are axes of the variant.

        Raises:
            Unsupported: it is told anything else than plan was.
        """
        refuse_attention(pos_encoding_mode, window_left, logits_soft_cap)
        launch = self._ready().launch
        same["sm_scale"] = 1.0 / math.sqrt(launch["head_dim"]) if sm_scale is None else sm_scale
        for name, value in same.items():
            if value != launch[name]:
                raise Unsupported(f"{name} is {value}; forward does what was planned, {launch[name]}")

    def _ready(self) -> Planned:
        if self._planned is None:
            raise NotPrepared("plan must be called before run")
        return self._planned


def _check_same(launch: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Raises InvalidArgument for the first thing of a launch that is not as it was fixed."""
    for name, value in launch.items():
        if name not in _CHECKED_ALONE and value != fixed[name]:
            raise InvalidArgument(
                f"{name} is {value}; with use_cuda_graph it stays as the first plan had it, {fixed[name]}"
            )


def refuse(**arguments: Any) -> None:
    """Raises Unsupported for the first argument that is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise Unsupported(f"{name}: not supported")


def refuse_lse(base: str, layout: str) -> None:
    """Raises Unsupported unless lse is upstream's usual one."""
    if (base, layout) != ("log2", "NH"):
        raise Unsupported(f"lse_base is {base!r}, lse_layout {layout!r}; 'log2' and 'NH' are supported")


def refuse_scales(**scales: float | None) -> None:
    """Raises Unsupported for the first scale that is neither None nor 1."""
    for name, scale in scales.items():
        if scale is not None and scale != 1.0:
            raise Unsupported(f"{name} is {scale}; only 1 is supported")


def refuse_attention(pos_encoding_mode: str, window_left: int, logits_soft_cap: float | None) -> None:
    """Raises Unsupported for attention that these kernels do not do."""
    if pos_encoding_mode != "NONE":
        raise Unsupported(f"pos_encoding_mode is {pos_encoding_mode!r}; only 'NONE' is supported")
    refuse_window(window_left)
    refuse(logits_soft_cap=logits_soft_cap or None)


def refuse_window(window_left: int | None) -> None:
    """Raises Unsupported for a window."""
    if window_left is not None and window_left >= 0:
        raise Unsupported(f"window_left is {window_left}; there is no window (-1)")


def dtype_of(q: str | torch.dtype, kv: str | torch.dtype | None, o: str | torch.dtype | None) -> torch.dtype:
    """The one element type.

    Raises:
        Unsupported: it is not supported, or there are others.
    """
    dtype = _dtype(q)
    dtype_name(DTYPES, "q_data_type", dtype)
    for name, other in (("kv_data_type", kv), ("o_data_type", o)):
        if other is not None and _dtype(other) != dtype:
            raise Unsupported(f"{name} is {other}; only q_data_type, {dtype}, is supported")
    found: torch.dtype = dtype
    return found


def _dtype(given: str | torch.dtype) -> Any:
    return _NAMES.get(given, given) if isinstance(given, str) else given


def chunk_of(fixed_split_size: int | None, disable_split_kv: bool, unit: int = 1) -> int:
    """``kv_chunk`` of the C struct; ``unit``: keys that ``fixed_split_size`` counts by."""
    if disable_split_kv:
        return 0
    return -1 if fixed_split_size is None or fixed_split_size <= 0 else fixed_split_size * unit


def uniform_tile(rows: int, num_q_heads: int, num_kv_heads: int, v_dim: int) -> int:
    """Query rows of a tile, by upstream's rule, where every sequence has ``rows`` rows of q; 0 where there are no heads."""
    if num_kv_heads < 1:
        return 0
    packed = rows * (num_q_heads // num_kv_heads)
    if packed > 64 and v_dim <= 128:
        return 128
    return 64 if packed > 16 else 16


def on_host(name: str, given: torch.Tensor, count: int | None = None) -> torch.Tensor:
    """int32 of the host; [B + 1] unless ``count`` says how many. Never in pinned memory of the caller, from which a copy to
    the device could still be under way when plan returns.

    Raises:
        InvalidArgument: another type or shape.
    """
    check_dtype(name, given, (torch.int32,))
    if given.ndim != 1 or (given.numel() == 0 if count is None else given.numel() != count):
        expected = "B + 1" if count is None else str(count)
        raise InvalidArgument(f"{name}: shape {tuple(given.shape)}; expected [{expected}]")
    held = given.cpu().contiguous()
    return held.clone() if held.is_pinned() else held


def check_buffer(name: str, buffer: torch.Tensor, count: int | None = None) -> None:
    """Raises InvalidArgument unless a buffer for a graph has ``count`` int32, or any number of them."""
    check_dtype(name, buffer, (torch.int32,))
    if buffer.ndim != 1 or count not in (None, buffer.numel()):
        expected = "one dimension" if count is None else f"[B + 1] = [{count}]"
        raise InvalidArgument(f"{name}: shape {tuple(buffer.shape)}; expected {expected}")


def check_fixed(name: str, given: torch.Tensor, buffer: torch.Tensor | None) -> None:
    """Raises InvalidArgument unless there are as many entries as the buffer has that was fixed for a graph."""
    if buffer is not None and buffer.numel() != given.numel():
        raise InvalidArgument(f"{name}: {given.numel()} entries; {buffer.numel()} were fixed")


def rows_of(
    name: str,
    tensor: torch.Tensor,
    layout: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: int,
    exact: bool = False,
) -> dict[str, int]:
    """The distances of rows and heads. ``shape`` has the rows that are read; there may be more.

    Raises:
        InvalidArgument: the tensor is elsewhere, or of another type or shape, or rows or heads share memory.
    """
    check_dtype(name, tensor, (dtype,))
    if tensor.ndim != 3:
        raise InvalidArgument(f"{name}: shape {tuple(tensor.shape)}; expected three dimensions")
    rows_first = tensor if layout == "NHD" else tensor.transpose(0, 1)
    rows, *head = rows_first.shape
    if head != list(shape[1:]) or rows < shape[0] or (exact and rows != shape[0]):
        raise InvalidArgument(f"{name}: shape {tuple(tensor.shape)}; the plan is for {shape} in {layout}")
    check_strides(name, tensor)
    row, step, _ = rows_first.stride()
    on_device(name, tensor, device)
    # What there is only one of may have any stride: 0 stands for that of a dense tensor.
    strides = {"row": row if rows > 1 else 0, "head": step if shape[1] > 1 else 0}
    return {f"{name}_{what}_stride": n for what, n in strides.items()}
