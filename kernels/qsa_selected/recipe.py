"""How attention over selected positions is compiled: one host function for both of upstream's ways to a row.

Upstream compiles three programs, and its Python launches either the split kernel and then a merge, or the direct kernel.
Here they are one module: ``Attention`` launches what ``splits`` says. The merge is upstream's, with its own choice between
two kernels.

The argument list in ``launch.c`` has the same order as ``Attention.__call__``; pointers are passed as they are.
"""

# CuTe DSL has no types, its decorators neither; and it reads annotations as objects, so they are not postponed here.
# mypy: disable-error-code="untyped-decorator"

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute

CUTLASS = {
    "bf16": cutlass.BFloat16,
    "e4m3": cutlass.Float8E4M3FN,
    "i32": cutlass.Int32,
    "i64": cutlass.Int64,
}

KV_WARPS = 2
"""Positions of a step, in units of 16. Upstream's split kernel has no other, its direct kernel by default."""

ADDRESS = 1 << 12
"""What the pointers of a compile hold; nobody follows it."""


@dataclass(repr=False)
class Attention:
    """The kernels of one variant.

    Attributes:
        split: several CTAs for a row and KV head, each with a partial output in float32.
        merge: what joins them.
        direct: one CTA for a row and KV head, which writes the output.
    """

    split: Any
    merge: Any
    direct: Any

    @cute.jit
    def __call__(
        self,
        query: cute.Pointer,
        key: cute.Pointer,
        value: cute.Pointer,
        k_descale: cute.Pointer,
        v_descale: cute.Pointer,
        page_table: cute.Pointer,
        request_ids: cute.Pointer,
        selected: cute.Pointer,
        query_positions: cute.Pointer,
        partial: cute.Pointer,
        partial_lse: cute.Pointer,
        output: cute.Pointer,
        output_lse: cute.Pointer,
        num_pages: cutlass.Int64,
        num_requests: cutlass.Int64,
        table_width: cutlass.Int64,
        scale: cutlass.Float32,
        rows: cutlass.Int32,
        splits: cutlass.Int32,
        num_q_heads: cutlass.Int32,
        selection_width: cutlass.Int32,
        heads_per_kv: cutlass.Int32,
        kv_heads: cutlass.Int32,
        page_size: cutlass.Int32,
        page_stride: cutlass.Int64,
        token_stride: cutlass.Int64,
        head_stride: cutlass.Int64,
        stream: driver.CUstream,
    ) -> None:
        cache = query, key, value, k_descale, v_descale
        tables = page_table, request_ids, selected, query_positions
        sizes = num_pages, num_requests, table_width, scale, rows, splits
        rest = (
            selection_width,
            heads_per_kv,
            kv_heads,
            page_size,
            page_stride,
            token_stride,
            head_stride,
            stream,
        )
        if splits > 1:
            self.split(*cache, *tables, partial, partial_lse, output, *sizes, *rest)
            self.merge(partial, partial_lse, output, output_lse, rows, splits, num_q_heads, stream)
        else:
            self.direct(*cache, *tables, partial, output_lse, output, *sizes, *rest)


def pointer(dtype: Any) -> Any:
    """Global memory, aligned to its element as upstream has it."""
    return cute.runtime.make_ptr(dtype, ADDRESS, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)


def selected_positions(
    upstream_class: Any, axes: Mapping[str, Any], cls: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...]]:
    module, lse = sys.modules[upstream_class.__module__], axes["lse"]

    def kernel(direct: bool) -> Any:
        return upstream_class(
            tile_m=axes["tile_q"],
            kv_is_fp8=axes["kv_dtype"] == "e4m3",
            direct_output=direct,
            return_lse=lse or not direct,
            kv_warps=KV_WARPS,
            sm120=cls["arch"].startswith("sm_12"),
        )

    attention = Attention(
        split=kernel(direct=False),
        merge=module._MERGE_KERNEL(return_lse=lse),
        direct=kernel(direct=True),
    )
    bf16, f32, i32, i64 = cutlass.BFloat16, cutlass.Float32, cutlass.Int32, cutlass.Int64
    cache = CUTLASS[axes["kv_dtype"]]
    pointers = (
        bf16,
        cache,
        cache,
        f32,
        f32,
        i32,
        CUTLASS[axes["request_dtype"]],
        i32,
        i64,
        f32,
        f32,
        bf16,
        f32,
    )
    numbers = (i64, i64, i64, f32, *(i32,) * 7, i64, i64, i64)
    args = (*map(pointer, pointers), *(number(1) for number in numbers), driver.CUstream(0))
    return attention, args
