"""How GDN prefill is compiled: the upstream class's flags and its arguments as fake tensors.

The tensor layouts here and the argument lists in ``launch.c`` are two sides of one thing: what is dynamic here (``sym_*``)
is a field of the structs there, in this order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
import torch

D = 128
"""Head dimension, the only one these classes have."""

CUTLASS = {
    "bf16": cutlass.BFloat16,
    "f16": cutlass.Float16,
    "f32": cutlass.Float32,
    "i32": cutlass.Int32,
    "i64": cutlass.Int64,
}
TORCH = {"i32": torch.int32, "i64": torch.int64}
INNER_STRIDES = {"hvk": (D * D, D, 1), "hkv": (D * D, 1, D)}
"""Strides of head, V and K within one row of a state, in elements."""

SM_COUNT = 148
"""Persistent CTAs of the Blackwell class: an upper bound on its grid, correct on any device; B200 has 148 SMs."""


def fake(dtype: Any, shape: tuple[Any, ...], stride: tuple[Any, ...], align: int = 16) -> Any:
    """A tensor that has a type but no memory; ``align`` in bytes."""
    return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=align)


def i32() -> Any:
    return cute.sym_int32()


def i64(divisibility: int) -> Any:
    return cute.sym_int64(divisibility=divisibility)


def vector(dtype: Any, align: int) -> Any:
    return fake(dtype, (i32(),), (1,), align)


def indices(axes: Mapping[str, Any]) -> Any:
    dtype = CUTLASS[axes["index_dtype"]]
    return vector(dtype, dtype.width // 8)


def state(axes: Mapping[str, Any], divisibility: int = 0) -> Any:
    """[rows, H, V, K] in the layout of the variant; rows may be padded to so many elements, else to 16 bytes."""
    dtype = CUTLASS[axes["state_dtype"]]
    unit = divisibility or 16 * 8 // dtype.width
    return fake(dtype, (i32(), i32(), D, D), (i64(unit), *INNER_STRIDES[axes["state_layout"]]))


def delta_rule(
    upstream_class: Any, axes: Mapping[str, Any], cls: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...]]:
    """SM90 and SM120 classes."""
    dtype, state_dtype = CUTLASS[axes["dtype"]], CUTLASS[axes["state_dtype"]]
    pooled, init, ckpt = axes["pooled"], axes["initial_state"], axes["checkpoints"]
    strides = INNER_STRIDES[axes["state_layout"]] if pooled or axes["state_layout"] == "hkv" else None
    dense_rows = 16 * 8 // state_dtype.width if pooled and axes["state_layout"] == "hvk" else None
    index_torch = TORCH[axes["index_dtype"]]
    kernel = upstream_class(
        axes["alpha"],
        axes["beta"],
        init,
        ckpt,
        dtype,
        initial_state_dtype=state_dtype,
        state_dtype=state_dtype,
        checkpoint_state_dtype=state_dtype,
        use_state_indices=pooled,
        cu_seqlens_dtype=index_torch,
        state_indices_dtype=index_torch if pooled else None,
        checkpoint_cu_starts_dtype=index_torch if ckpt else None,
        state_inner_strides=strides,
        init_state_inner_strides=strides if init else None,
        use_output_state_indices=pooled,
        output_state_indices_dtype=index_torch if pooled else None,
        **_row_alignment(upstream_class, dense_rows, init),
    )

    def tokens_first() -> Any:
        return fake(dtype, (i32(), D, i32()), (i64(D), 1, D))

    def dim_first() -> Any:
        return fake(dtype, (D, i32(), i32()), (1, i64(D), D))

    args = (
        tokens_first(),
        dim_first(),
        dim_first(),
        dim_first(),
        vector(cutlass.Float32, 16) if axes["alpha"] else None,
        vector(cutlass.Float32, 16) if axes["beta"] else None,
        state(axes),
        state(axes) if init else None,
        indices(axes) if pooled else None,
        vector(state_dtype, 16) if ckpt else None,
        indices(axes) if ckpt else None,
        vector(cutlass.Uint8, 128),
        indices(axes),
        cutlass.Float32(1 / math.sqrt(D)),
        *(cutlass.Int32(1) for _ in range(7)),
        indices(axes) if pooled else None,
        None,
        None,
        cutlass.Int32(1),
        driver.CUstream(0),
    )
    return kernel, args


def _row_alignment(upstream_class: Any, elements: int | None, init: bool) -> dict[str, Any]:
    """Rows of dense HVK pools move as element pairs where the class can (the SM120 class)."""
    parameters = upstream_class.__init__.__code__.co_varnames
    if "state_row_align" not in parameters:
        return {}
    return {"state_row_align": elements, "init_state_row_align": elements if init else None}


def blackwell(
    upstream_class: Any, axes: Mapping[str, Any], cls: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...]]:
    """The chunked class for SM100 and SM103, with head counts kept dynamic."""
    dtype, state_dtype = CUTLASS[axes["dtype"]], CUTLASS[axes["state_dtype"]]
    pooled, init, ckpt = axes["pooled"], axes["initial_state"], axes["checkpoints"]
    kernel = upstream_class(
        io_dtype=dtype,
        inverse_dtype=dtype,
        acc_dtype=cutlass.Float32,
        state_dtype=state_dtype,
        mma_tiler_qk=(64, 64, 128),
        mma_tiler_qs=(128, 64, 128),
        mma_tiler_qkv=(128, 64, 64),
        mma_tiler_kv=(128, 128, 64),
        max_active_clusters=SM_COUNT,
        num_sm=SM_COUNT,
        is_GQA=False,
        use_initial_state=init,
        store_final_state=True,
        enable_checkpoints=ckpt,
        is_persistent=True,
        state_stride_divisibility=D if pooled and axes["state_layout"] == "hvk" else 1,
        use_output_state_indices=pooled,
    )

    def heads() -> Any:
        return fake(dtype, (i32(), i32(), D), (i64(D), D, 1))

    def gate() -> Any:
        return fake(cutlass.Float32, (i32(), i32()), (i64(1), 1), 16)

    args = (
        heads(),
        heads(),
        heads(),
        gate(),
        gate(),
        heads(),
        indices(axes),
        state(axes, D) if init else None,
        state(axes, D),
        indices(axes) if pooled else None,
        state(axes, D) if ckpt else None,
        indices(axes) if ckpt else None,
        indices(axes) if pooled else None,
        None,
        None,
        cutlass.Int32(0),
        cutlass.Float32(1 / math.sqrt(D)),
        vector(cutlass.Int8, 128),
        driver.CUstream(0),
    )
    return kernel, args
