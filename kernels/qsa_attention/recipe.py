"""How QSA attention is compiled: upstream's kernel configuration at a variant's axes, and a flat host function.

FlashInfer derives the configuration from a batch and launches through a function that takes tuples of tensors. Here the
configuration follows from the axes alone (a test holds it against FlashInfer's own, item by item), and the host function
takes what ``launch.c`` passes, in this order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from flashinfer.attention.prims_ts.kernels.fmha_decode.direct_sparse_metadata import DirectSparseMetadataView
from flashinfer.attention.prims_ts.kernels.fmha_decode.fmha_decode_config import (
    LENGTH_DERIVED_FIELDS,
    FmhaDecodeConfig,
    arch_config_args,
    make_decode_config,
)
from flashinfer.attention.prims_ts.kernels.fmha_decode.reduction import fmha_decode_separate_reduction_launch

CUTLASS = {
    "bf16": cutlass.BFloat16,
    "f16": cutlass.Float16,
    "e4m3": cutlass.Float8E4M3FN,
    "i32": cutlass.Int32,
    "i64": cutlass.Int64,
}
TILE_KV = 128
"""Positions that a thread block works through at a time, the only size this route has."""
KEEPS = 64
"""Query tiles of this many rows and more keep Q as operand A; smaller ones swap the operands."""
WIDE = 128
"""Heads wider than this are staged in bands."""


def fragment(axes: Mapping[str, Any]) -> int:
    """Tokens that are contiguous in both a selected block and a page of the cache."""
    return math.gcd(axes["block_size"], axes["page_size"])


def query_major(axes: Mapping[str, Any]) -> bool:
    """Whether memberships are one 32-bit mask for each query and KV tile instead of one byte for each fragment."""
    return bool(
        axes["grouped"] and axes["dtype"] == "e4m3" and axes["block_size"] == 4 and axes["tile_q"] >= KEEPS
    )


def head_band(axes: Mapping[str, Any]) -> int:
    """Columns of a head that one stage of K and V holds; 0 where that is the whole head."""
    head_dim, keeps = axes["head_dim"], axes["tile_q"] >= KEEPS
    if head_dim <= WIDE:
        return 0
    if head_dim == 192 and axes["tile_q"] == 128 and axes["dtype"] == "bf16":
        return 192
    return 256 if head_dim == 256 and keeps and axes["dtype"] == "e4m3" else 128


def profile(axes: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of upstream's configuration that this route fixes."""
    keeps, wide = axes["tile_q"] >= KEEPS, axes["head_dim"] > WIDE
    grouped = axes["grouped"]
    fields = {
        "use_variable_seqlens_q": True,
        "use_q_token_kv_block_sparse_route": True,
        "share_pattern_across_kv_heads": True,
        "use_pdl": True,
        "use_keeps_mma_ab": keeps,
        "groups_tokens_heads_q": True,
        "tile_size_q": axes["tile_q"],
        "tile_size_kv": TILE_KV,
        "head_dim_per_stage_kv": head_band(axes),
        "num_insts_kv": 1 if wide and keeps else 2,
        "use_persistent_scheduler": axes["persistent"],
        "correction_num_warps": 4,
        "mma_warp_idx": 12,
        "scheduler_warp_idx": 13,
        "clc_load_warp_idx": 16,
        "page_offsets_warp_idx": 14,
        "page_offsets_num_warps": 1 if grouped else 2,
        "load_warp_idx": 16,
        "load_num_warps": 4 if not grouped and axes["dtype"] == "e4m3" else 8,
    }
    if keeps:
        fields["o_stages"] = 1 if wide else 2
    return fields


def config(axes: Mapping[str, Any], cc: tuple[int, int]) -> FmhaDecodeConfig:
    """Upstream's configuration at ``axes`` for compute capability ``cc``.

    The sizes given to upstream here decide nothing that is compiled: every field that it derives from lengths is dropped.
    """
    splits, heads = axes["splits"], axes["heads_per_kv"]
    dtype = CUTLASS[axes["dtype"]]
    made = make_decode_config(
        headdim=axes["head_dim"],
        args=(arch_config_args(cc), profile(axes)),
        seq_len_q=1,
        seq_len_kv=TILE_KV * 4 * splits,
        batch_size=1,
        num_heads_q=heads,
        num_heads_kv=1,
        q_dtype=dtype,
        k_dtype=dtype,
        v_dtype=dtype,
        o_dtype=CUTLASS[axes["out_dtype"]],
        qkv_layout="pagedKv",
        num_tokens_per_page=fragment(axes),
        storage_tokens_per_page=axes["page_size"],
        split_kv_mode="gmem_reduction_with_separate_kernel" if splits > 1 else "disabled",
        splits_kv=splits,
        max_splits_kv=splits,
        min_loop_iters_per_split=1,
        mask_type="causal",
        auto_tuner=False,
        split_kv=splits > 1,
    )
    flat = axes["flat_kv_heads"]
    items = {name: getattr(made, name) for name in made.__dataclass_fields__}
    for name in LENGTH_DERIVED_FIELDS:
        del items[name]
    items |= {
        "query_memberships": axes["grouped"],
        "query_major_memberships": query_major(axes),
        "lse_mode": "none",
        "use_flat_native_kv_tma": flat > 0,
        "flat_native_kv_num_heads": max(flat, 1),
    }
    return FmhaDecodeConfig(**items)


def capability(arch: str) -> tuple[int, int]:
    """``sm_103a`` to (10, 3)."""
    major, minor = divmod(int(arch.removeprefix("sm_").removesuffix("a")), 10)
    return major, minor


def fake(dtype: Any, shape: tuple[Any, ...], stride: tuple[Any, ...], align: int) -> Any:
    """A tensor that has a type but no memory; ``align`` in bytes."""
    return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=align)


def i32() -> Any:
    return cute.sym_int32()


def vector(dtype: Any, align: int) -> Any:
    return fake(dtype, (i32(),), (1,), align)


def table() -> Any:
    """[rows, columns] int32 whose rows may lie apart."""
    return fake(Int32, (i32(), i32()), (cute.sym_int64(), 1), 4)


def attention(launch: Any, axes: Mapping[str, Any], cls: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """The attention kernel, and behind it the one that merges splits.

    Args:
        launch: upstream's ``fmha_decode_launch``.
    """
    cfg = config(axes, capability(cls["arch"]))
    grouped, split = axes["grouped"], axes["splits"] > 1
    ratio, head_dim = axes["heads_per_kv"], axes["head_dim"]

    @cute.jit  # type: ignore[untyped-decorator]
    def qsa(
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        qo_indptr: cute.Tensor,
        selected: cute.Tensor,
        pages: cute.Tensor,
        requests: cute.Tensor,
        positions: cute.Tensor,
        partial_o: cute.Tensor,
        partial_stats: cute.Tensor,
        num_routes: Int32,
        num_kv_heads: Int32,
        q_capacity: Int32,
        kv_capacity: Int32,
        page_capacity: Int32,
        max_seq_len: Int32,
        num_pages: Int64,
        k_page_stride: Int64,
        k_head_stride: Int64,
        k_token_stride: Int64,
        v_page_stride: Int64,
        v_head_stride: Int64,
        v_token_stride: Int64,
        softmax_scale: Float32,
        output_scale: Float32,
        stream: driver.CUstream,
    ) -> None:
        heads = num_kv_heads * Int32(ratio)
        shape = (num_routes, heads, num_kv_heads, kv_capacity, Int32(head_dim))
        lengths = positions.iterator
        locators = selected.iterator
        memberships = selected.iterator
        membership_stride = page_capacity
        if cutlass.const_expr(grouped):
            memberships = pages.iterator
            membership_stride = Int32(pages.stride[0])
        else:
            inputs = (selected, pages, requests, positions)
            lengths = view(inputs, qo_indptr, max_seq_len, page_capacity, True)
            locators = view(inputs, qo_indptr, max_seq_len, page_capacity, False)
        rows = q_capacity * Int32(ratio)
        launch(
            shape,
            q.iterator,
            k.iterator,
            v.iterator,
            o.iterator,
            o.iterator,
            o.iterator,
            lengths,
            qo_indptr.iterator,
            Int32(q.shape[0]),
            locators,
            memberships,
            partial_o.iterator,
            partial_stats.iterator,
            qo_indptr.iterator,
            partial_stats.iterator,
            softmax_scale,
            output_scale,
            Int32(0),
            Int32(1),
            stream,
            cfg,
            None,
            False,
            True,
            Int64(page_capacity),
            page_capacity,
            membership_stride,
            num_pages,
            k_page_stride,
            k_head_stride,
            k_token_stride,
            v_page_stride,
            v_head_stride,
            v_token_stride,
            Int64(0),
            Int64(0),
            False,
            False,
            max_q_len=q_capacity,
            runtime_q_capacity_rows=rows,
        )
        if cutlass.const_expr(split):
            fmha_decode_separate_reduction_launch(
                shape,
                o.iterator,
                lengths,
                qo_indptr.iterator,
                partial_o.iterator,
                partial_stats.iterator,
                partial_stats.iterator,
                softmax_scale,
                output_scale,
                stream,
                cfg,
                False,
                runtime_q_capacity_rows=rows,
            )

    def view(inputs: Any, offsets: Any, max_seq_len: Any, page_capacity: Any, lengths: bool) -> Any:
        return DirectSparseMetadataView(
            inputs,
            offsets,
            packed=True,
            model_len=max_seq_len,
            page_size=axes["page_size"],
            page_capacity=page_capacity,
            sparse_block_size=axes["block_size"],
            count_current_block_in_topk=axes["count_current"],
            fixed_query_len=Int32(0),
            fixed_query_layout=False,
            fragment_size=fragment(axes),
            lengths=lengths,
        )

    dtype, out_dtype = CUTLASS[axes["dtype"]], CUTLASS[axes["out_dtype"]]
    partial = cutlass.BFloat16 if split and axes["out_dtype"] == "bf16" else cutlass.Float16
    rows = vector(Int32, 4)
    args = (
        vector(dtype, 16),
        vector(dtype, 16),
        vector(dtype, 16),
        vector(out_dtype, 16),
        vector(Int32, 4),
        table(),
        table(),
        rows,
        vector(Int32, 4) if grouped else vector(CUTLASS[axes["position_dtype"]], 4),
        vector(partial, 16),
        vector(Float32, 16),
        *(Int32(1) for _ in range(6)),
        *(Int64(1) for _ in range(7)),
        Float32(1.0),
        Float32(1.0),
        driver.CUstream(0),
    )
    return qsa, args
