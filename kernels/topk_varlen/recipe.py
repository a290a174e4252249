"""How top-k of a decode step is compiled: the upstream class, and its arguments as fake tensors.

What is dynamic here is a field of the structs that ``launch.c`` fills, in this order. One host function launches one of two
kernels: for rows in one thread block, and for rows in a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute

SCORES = {"f32": cutlass.Float32, "bf16": cutlass.BFloat16, "f16": cutlass.Float16}
STATE_WORDS = 770
"""int32 of a group in row_states: three histograms and two counters."""
FIXED_SMEM, COPY_BITS = 2304, 256
"""Bytes in shared memory before a chunk, and what a load takes, which chunks are multiples of."""


def matrix(dtype: Any) -> Any:
    """Rows that lie anywhere apart."""
    extents, stride = (cute.sym_int32(), cute.sym_int32()), (cute.sym_int64(divisibility=1), 1)
    return cute.runtime.make_fake_tensor(dtype, extents, stride, assumed_align=dtype.width // 8)


def radix(
    upstream_class: Any, axes: Mapping[str, Any], cls: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...]]:
    dtype = SCORES[axes["dtype"]]
    most = (cls["smem_per_block"] - FIXED_SMEM) * 8 // dtype.width
    kernel = upstream_class(
        dtype, max_chunk=most - most % (COPY_BITS // dtype.width), num_copy_bits=COPY_BITS
    )
    states = (cute.sym_int32(), STATE_WORDS), (STATE_WORDS, 1)
    args = (
        matrix(dtype),
        cute.runtime.make_fake_tensor(cutlass.Int32, *states, assumed_align=16),
        cute.runtime.make_fake_tensor(cutlass.Int32, (cute.sym_int32(),), (1,), assumed_align=4),
        matrix(cutlass.Int32),
        matrix(dtype) if axes["values"] else None,
        *(cutlass.Int32(1) for _ in range(6)),
        driver.CUstream(0),
    )
    return kernel, args
