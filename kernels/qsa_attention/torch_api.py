"""QSA attention for torch, with the arguments of ``flashinfer.attention.prims_ts``'s function of the same name.

Say once which bundle serves a device, then call::

    use_bundle(open_bundle("dist/sm_100a-linux-x86_64"))
    q_token_kv_block_sparse_attention_with_paged_kv_cache(q, (k, v), block_table, ids, requests, positions, workspace,
                                                          max_seq_len_kv=131072, qo_indptr=qo_indptr)

Every call that upstream serves and this does not raises an error of ``kernseal.loader.errors``. A call plans nothing that it
keeps: it may be captured once its variants are prepared.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from kernseal.kernels.qsa_attention.operands import page_capacity, query_major
from kernseal.loader import addresses
from kernseal.loader.addresses import (
    check_dtype,
    check_strides,
    dense,
    dtype_name,
    launch_on,
    matrix,
    memory,
    on_device,
)
from kernseal.loader.errors import InvalidArgument, Unsupported, WorkspaceTooSmall
from kernseal.loader.op import Op
from kernseal.loader.serving import Served, served_by, use_bundle
from kernseal.loader.tensors import torch_stream

__all__ = ["REPLACES", "q_token_kv_block_sparse_attention_with_paged_kv_cache", "use_bundle"]

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float8_e4m3fn: "e4m3"}
_OUT_DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
_POSITIONS = {torch.int32: "i32", torch.int64: "i64"}
_I32 = (torch.int32,)
_ALIGN = 256


class _Wanted(NamedTuple):
    """What decides the variants, and the sizes of the tables between them."""

    dtype: torch.dtype
    out_dtype: torch.dtype
    position_dtype: torch.dtype
    head_dim: int
    num_q_heads: int
    num_kv_heads: int
    block_size: int
    page_size: int
    group: int
    block_topk: int
    max_seq_len: int
    num_routes: int
    num_pages: int
    kv_strides: tuple[int, int, int]
    split: bool
    count_current: bool


class _Ready(NamedTuple):
    """The variants of a call: attention, and for groups the metadata before it, with the width of its tables."""

    attention: Op
    metadata: Op | None
    columns: int
    flat_kv_heads: int


def q_token_kv_block_sparse_attention_with_paged_kv_cache(
    q: torch.Tensor,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
    block_table: torch.Tensor,
    indexer_block_ids: torch.Tensor,
    token_to_request: torch.Tensor | None,
    query_positions: torch.Tensor | None,
    workspace_buffer: torch.Tensor,
    *,
    max_seq_len_kv: int,
    group_size: int = 1,
    kv_block_size: int = 4,
    mask_type: str = "causal",
    sm_scale: float | None = None,
    v_scale: float | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    qo_indptr: torch.Tensor | None = None,
    split_kv: bool = True,
    share_pattern_across_kv_heads: bool = True,
    count_current_block_in_topk: bool = True,
    seq_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of packed query tokens over the KV blocks that were selected for each, on torch's current stream.

    Variants are chosen as FlashInfer chooses them and prepared at their first use on a device.

    Args:
        q: [T, Hq, D], dense: bfloat16, float16 or float8_e4m3fn.
        paged_kv_cache: K and V, each [num_pages, Hkv, page_size, D] of q's type, with the same strides.
        block_table: [requests, pages] int32.
        indexer_block_ids: [T, block_topk] int32.
        token_to_request: [T] int32.
        query_positions: [T] int32 or int64.
        workspace_buffer: scratch of any type, 256-byte aligned; too small a one is refused with the size that is needed.
        max_seq_len_kv: most positions that a token may see.
        group_size: most tokens of a route.
        kv_block_size: tokens of a block.
        sm_scale: multiplies the logits; None is 1/sqrt(D).
        v_scale: multiplies the output; None is 1.
        out: [T, Hq, D], dense; None makes one of ``out_dtype``.
        out_dtype: None is that of ``out``, else of q (bfloat16 for float8_e4m3fn).
        qo_indptr: [routes + 1] int32. Needed: there is no fixed layout here.
        split_kv: whether several thread blocks may share a route; False for prefill.
        count_current_block_in_topk: whether a completed block of the query itself is one of block_topk.
        mask_type, share_pattern_across_kv_heads, seq_lens: of upstream; other values than the defaults are refused.

    Raises:
        Unsupported: an argument asks for what these kernels do not do, or the bundle lacks a variant; the message has the
            command that builds it.
        InvalidArgument: a tensor's device, type, shape or strides do not fit.
        WorkspaceTooSmall: ``workspace_buffer``; the message has the size that is needed.
        Capturing: under graph capture before the variants were prepared.
        NotPrepared: no bundle serves the device; see ``use_bundle``.
    """
    device = q.get_device()
    served = served_by(device)
    if mask_type != "causal" or not share_pattern_across_kv_heads or seq_lens is not None:
        raise Unsupported("mask_type, share_pattern_across_kv_heads, seq_lens: only 'causal', True and None")
    if qo_indptr is None or token_to_request is None or query_positions is None or q.ndim != 3:
        raise Unsupported(
            "only packed queries [T, Hq, D] with qo_indptr, token_to_request and query_positions"
        )
    k, v, strides = _cache(paged_kv_cache, q, device)
    num_pages, num_kv_heads, page_size, head_dim = paged_kv_cache[0].shape
    total_q, num_q_heads, _ = q.shape
    if indexer_block_ids.ndim != 2 or block_table.ndim != 2:
        raise InvalidArgument("indexer_block_ids, block_table: must be [T, block_topk] and [requests, pages]")
    if out is None:
        default = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
        out = torch.empty(q.shape, dtype=out_dtype or default, device=q.device)
    wanted = _Wanted(
        dtype=q.dtype,
        out_dtype=out.dtype,
        position_dtype=query_positions.dtype,
        head_dim=head_dim,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        block_size=kv_block_size,
        page_size=page_size,
        group=group_size,
        block_topk=indexer_block_ids.shape[1],
        max_seq_len=max_seq_len_kv,
        num_routes=qo_indptr.numel() - 1,
        num_pages=num_pages,
        kv_strides=strides,
        split=split_kv,
        count_current=count_current_block_in_topk,
    )
    known: dict[Hashable, Any] = served.ops["qsa_attention"]
    ready: _Ready | None = known.get(wanted)
    if ready is None:
        ready = known[wanted] = _prepare(served, wanted, device)
    indices, indices_stride = _rows("indexer_block_ids", indexer_block_ids, device)
    table, table_stride = _rows("block_table", block_table, device)
    selection = {
        "num_requests": block_table.shape[0],
        "max_pages_per_request": block_table.shape[1],
        "block_indices_stride": indices_stride,
        "block_table_stride": table_stride,
        "block_indices": indices,
        "block_table": table,
        "token_to_request": dense("token_to_request", token_to_request, _I32, total_q, device),
        "query_positions": dense("query_positions", query_positions, _POSITIONS, total_q, device),
    }
    routes = {
        "block_topk": wanted.block_topk,
        "max_seq_len": max_seq_len_kv,
        "num_routes": wanted.num_routes,
        "total_q": total_q,
        "qo_indptr": dense("qo_indptr", qo_indptr, _I32, wanted.num_routes + 1, device),
        "stream": torch_stream(device),
    }
    run = {
        **routes,
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
        "group": group_size,
        "scale": head_dim**-0.5 if sm_scale is None else sm_scale,
        "out_scale": 1.0 if v_scale is None else v_scale,
        "num_pages": num_pages,
        "kv_page_stride": strides[0],
        "kv_head_stride": strides[1],
        "kv_token_stride": strides[2],
        "q": dense("q", q, (q.dtype,), total_q * num_q_heads * head_dim, device),
        "k": k,
        "v": v,
        "o": dense("out", out, _OUT_DTYPES, total_q * num_q_heads * head_dim, device),
    }
    start, size = memory("workspace_buffer", workspace_buffer, device), workspace_buffer.nbytes
    tables = _tables(start, ready.columns, wanted.num_routes) if ready.metadata is not None else {}
    used = tables.pop("end", start) - start
    if used > size:
        raise WorkspaceTooSmall(f"workspace_buffer has {size} bytes; {used} are needed for the tables alone")
    if ready.metadata is not None:
        sizes = {
            "block_size": kv_block_size,
            "page_size": page_size,
            "page_capacity": ready.columns,
            "pdl": 1,
        }
        flags = {"count_current": int(count_current_block_in_topk), "flat_kv_heads": ready.flat_kv_heads}
        launch_on(device, ready.metadata, {**routes, **selection, **tables, **sizes, **flags})
        selection = dict.fromkeys(selection, 0)
    else:
        tables = dict.fromkeys(("page_indices", "memberships", "kv_lens"), 0)
    scratch = {"workspace": start + used, "workspace_bytes": size - used}
    launch_on(device, ready.attention, {**run, **selection, **tables, **scratch})
    return out


REPLACES = {
    "flashinfer.attention.prims_ts": {
        "q_token_kv_block_sparse_attention_with_paged_kv_cache": q_token_kv_block_sparse_attention_with_paged_kv_cache
    },
    "flashinfer.attention.prims_ts.q_token_kv_block_sparse_metadata": {
        "q_token_kv_block_sparse_attention_with_paged_kv_cache": q_token_kv_block_sparse_attention_with_paged_kv_cache
    },
}
"""What stands where in FlashInfer; see ``kernseal.loader.flashinfer``."""


def _prepare(served: Served, wanted: _Wanted, device: int) -> _Ready:
    grouped = wanted.group > 1
    position = dtype_name(_POSITIONS, "query_positions", wanted.position_dtype)
    sizes = {
        "num_q_heads": wanted.num_q_heads,
        "num_kv_heads": wanted.num_kv_heads,
        "group": wanted.group,
        "block_topk": wanted.block_topk,
        "max_seq_len": wanted.max_seq_len,
        "num_routes": wanted.num_routes,
        "num_pages": wanted.num_pages,
        **dict(zip(("kv_page_stride", "kv_head_stride", "kv_token_stride"), wanted.kv_strides, strict=True)),
    }
    config = served.bundle.choose(
        "qsa_attention",
        sizes,
        sm_count=addresses.sm_count(device),
        dtype=dtype_name(_DTYPES, "q", wanted.dtype),
        out_dtype=dtype_name(_OUT_DTYPES, "out", wanted.out_dtype),
        head_dim=wanted.head_dim,
        heads_per_kv=wanted.num_q_heads // max(wanted.num_kv_heads, 1),
        block_size=wanted.block_size,
        page_size=wanted.page_size,
        position_dtype="i64" if grouped else position,
        count_current=True if grouped else wanted.count_current,
        splits=0 if wanted.split else 1,
    )
    attention = served.prepare("qsa_attention", **config)
    if not grouped:
        return _Ready(attention, None, 0, 0)
    masks = query_major(config)
    metadata = served.prepare("qsa_metadata", group=wanted.group, position_dtype=position, query_major=masks)
    return _Ready(attention, metadata, page_capacity({**config, **sizes}, masks) or 0, config["flat_kv_heads"])


def _tables(start: int, columns: int, routes: int) -> dict[str, int]:
    """Addresses of the tables between metadata and attention, one behind the other, and where they end."""
    found, at = {}, start
    for name, words in (
        ("page_indices", columns),
        ("memberships", -(-columns // 4)),
        ("kv_lens", 1),
    ):
        found[name] = at
        at += -(-routes * words * 4 // _ALIGN) * _ALIGN
    return {**found, "end": at}


def _rows(name: str, tensor: torch.Tensor, device: int) -> tuple[int, int]:
    """The address of an int32 matrix with dense rows, and their distance."""
    check_dtype(name, tensor, _I32)
    return matrix(name, tensor, device)


def _cache(
    cache: tuple[torch.Tensor, torch.Tensor], q: torch.Tensor, device: int
) -> tuple[int, int, tuple[int, int, int]]:
    """The addresses of K and V, and the distances of pages, heads and tokens."""
    k, v = cache
    if k.ndim != 4 or k.shape[-1] != q.shape[-1] or v.shape != k.shape or v.stride() != k.stride():
        raise InvalidArgument(
            f"paged_kv_cache: shapes {tuple(k.shape)} and {tuple(v.shape)}; expected [pages, Hkv, page_size, "
            f"{q.shape[-1]}] twice, with the same strides"
        )
    for name, tensor in (("k_cache", k), ("v_cache", v)):
        check_dtype(name, tensor, (q.dtype,))
    check_strides("paged_kv_cache", k)
    page, head, token, _ = k.stride()
    _, heads, size, dim = k.shape
    # What there is only one of may have any stride.
    head = head if heads > 1 else size * dim
    page = page if k.shape[0] > 1 else heads * size * dim
    return on_device("k_cache", k, device), on_device("v_cache", v, device), (page, head, token)
