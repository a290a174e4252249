"""How paged MQA logits are compiled: the upstream class's flags and its arguments as fake tensors.

The tensor layouts here and the argument lists in ``launch.c`` are two sides of one thing: what is dynamic here (``sym_*``)
is a field of the structs there, in this order. Shapes, strides and alignments are those of upstream's own compile, so that
the kernels are its own too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute

CUTLASS = {"f32": cutlass.Float32, "f16": cutlass.Float16, "bf16": cutlass.BFloat16}

TILE = 128
"""Positions of one matrix product, ``block_kv`` of upstream."""

SCALE_BYTES = 4
"""Of a token: one float32, or the powers of two of four groups of 32."""

PAGE_STRIDE_ALIGN = 16
"""Bytes; what a TMA descriptor can hold."""

MAX_ATOM = 3
"""Most query positions that one pass of the FP4 class can hold in the tensor memory of SM100 and SM103."""


def atoms(next_n: int) -> int:
    """Passes over the cache that the FP4 class makes: the fewest of equal size."""
    return next(
        count for count in range(1, next_n + 1) if next_n % count == 0 and next_n // count <= MAX_ATOM
    )


def epilogue(num_heads: int, next_n: int, epi_dtype: str) -> tuple[int, int | None]:
    """Upstream's choice for FP8: parts of the heads, and registers for weights (None: its default).

    It changes no bit, it was measured: with 32 heads the default spills.
    """
    if num_heads != 32:
        return 1, None
    if epi_dtype == "f16":
        return (2 if next_n == 6 else 1), None
    return 1, 96


def fake(dtype: Any, shape: tuple[Any, ...], stride: tuple[Any, ...], align: int | None = None) -> Any:
    """A tensor that has a type but no memory; ``align`` in bytes, None for its element."""
    return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=align)


def compact(dtype: Any, shape: tuple[Any, ...], order: tuple[int, ...]) -> Any:
    return cute.runtime.make_fake_compact_tensor(dtype, shape, stride_order=order)


def i32() -> Any:
    return cute.sym_int32()


def pool(page_size: int, row_bytes: int) -> Any:
    """Pages of bytes: the values of all tokens, then their scales."""
    return fake(cutlass.Uint8, (i32(), page_size * (row_bytes + SCALE_BYTES)), (cute.sym_int64(), 1))


def outputs_and_indices(axes: Mapping[str, Any], batch: Any) -> tuple[Any, ...]:
    """The logits, the page table, the lengths, the schedule; then pages, rows of work and the stream."""
    return (
        fake(CUTLASS[axes["out_dtype"]], (i32(), i32()), (cute.sym_int64(), 1)),
        fake(cutlass.Int32, (batch, i32()), (cute.sym_int64(), 1), 4),
        fake(cutlass.Int32, (batch,), (cute.sym_int64(),), 4),
        compact(cutlass.Int32, (i32(), 2), (1, 0)),
        cutlass.Int32(1),
        cutlass.Int32(1),
        driver.CUstream(0),
    )


def fp8(upstream_class: Any, axes: Mapping[str, Any], cls: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    heads, dim, next_n = axes["num_heads"], axes["head_dim"], axes["next_n"]
    subtiles, registers = epilogue(heads, next_n, axes["epi_dtype"])
    kernel = upstream_class(
        block_kv=TILE,
        phys_block_kv=axes["page_size"],
        num_heads=heads,
        head_dim=dim,
        next_n=next_n,
        num_epi_subtiles=subtiles,
        epi_dtype=CUTLASS[axes["epi_dtype"]],
        acc_dtype=CUTLASS[axes["acc_dtype"]],
        output_dtype=CUTLASS[axes["out_dtype"]],
        w_cache_regs=registers,
        arch=cls["arch"],
    )
    columns, batch = next_n * heads, i32()
    args = (
        pool(axes["page_size"], dim),
        compact(cutlass.Uint8, (columns, dim, batch), (1, 0, 2)),
        compact(CUTLASS[axes["epi_dtype"]], (columns, batch), (0, 1)),
        *outputs_and_indices(axes, batch),
    )
    return kernel, args


def fp4(upstream_class: Any, axes: Mapping[str, Any], cls: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    heads, dim, next_n = axes["num_heads"], axes["head_dim"], axes["next_n"]
    kernel = upstream_class(
        block_kv=TILE,
        phys_block_kv=axes["page_size"],
        num_heads=heads,
        head_dim=dim,
        next_n=next_n,
        num_next_n_atoms=atoms(next_n),
        num_epi_subtiles=1,
        epi_dtype=CUTLASS[axes["epi_dtype"]],
        output_dtype=CUTLASS[axes["out_dtype"]],
        remove_online_sf_transpose=axes["interleaved"],
        arch=cls["arch"],
    )
    columns, rows = next_n // atoms(next_n) * heads, i32()
    args = (
        pool(axes["page_size"], dim // 2),
        compact(cutlass.Uint8, (columns, dim // 2, rows), (1, 0, 2)),
        compact(cutlass.Int32, (columns, rows), (0, 1)),
        compact(CUTLASS[axes["epi_dtype"]], (columns, rows), (0, 1)),
        *outputs_and_indices(axes, i32()),
    )
    return kernel, args


def dsa(upstream_class: Any, axes: Mapping[str, Any], cls: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """The SM120 scorer. Built for an SM before, it multiplies with the instruction that those have."""
    heads, page_size, dim = axes["num_heads"], axes["page_size"], axes["head_dim"]
    kernel = upstream_class(heads, next_n=axes["next_n"], block_scaled=cls["arch"].startswith("sm_12"))
    page_stride = cute.sym_int64(divisibility=PAGE_STRIDE_ALIGN)
    args = (
        fake(cutlass.Uint8, (i32(), heads, dim), (heads * dim, dim, 1), 16),
        fake(cutlass.Float32, (i32(), heads), (heads, 1), 16),
        fake(cutlass.Uint8, (i32(), page_size, dim), (page_stride, dim, 1), 16),
        fake(cutlass.Float32, (i32(), page_size), (cute.sym_int64(), 1), 4),
        fake(cutlass.Int32, (i32(), i32()), (cute.sym_int64(), 1), 4),
        fake(cutlass.Int32, (i32(),), (cute.sym_int64(),), 4),
        cutlass.Int32(1),
        cutlass.Int32(1),
        fake(cutlass.Float32, (i32(), i32()), (cute.sym_int64(), 1), 4),
        driver.CUstream(0),
    )
    return kernel, args
