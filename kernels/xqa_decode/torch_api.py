"""``xqa`` for torch, with the arguments of ``flashinfer.xqa.xqa``.

Say once which bundle serves a device, then call::

    use_bundle(open_bundle("dist/sm_90a-linux-x86_64"))
    xqa(q, k_cache, v_cache, page_table, seq_lens, output, workspace, semaphores, num_kv_heads, page_size)

Every call that upstream serves and this does not raises an error of ``kernseal.loader.errors``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from typing import NamedTuple

import torch

from kernseal.loader import serving
from kernseal.loader.addresses import (
    check_dtype,
    check_sm_count,
    check_strides,
    dense,
    dtype_name,
    look,
    memory,
    on,
    on_device,
    optional,
)
from kernseal.loader.errors import InvalidArgument
from kernseal.loader.op import Op, Settled
from kernseal.loader.serving import Served, known, served_by, use_bundle
from kernseal.loader.tensors import torch_stream

__all__ = ["REPLACES", "prepare", "use_bundle", "xqa"]

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
_OUT_DTYPES = {**_DTYPES, torch.float8_e4m3fn: "e4m3"}
_KV_DTYPES = {**_OUT_DTYPES, torch.int8: "i8", torch.uint8: "nvfp4"}
_F32 = (torch.float32,)
_I32 = (torch.int32,)
_LENGTHS = (torch.int32, torch.uint32)
_FP4_SCALES = (torch.uint8, torch.float8_e4m3fn)
_MASK_BYTES = {torch.uint16: 2, torch.int16: 2, torch.uint32: 4, torch.int32: 4}

_FP4_PER_BYTE = 2
_FP4_PER_SCALE = 16
_MASK_BITS = 32
_NUMBER = (float, int)
_FP8_MATH_SM = "sm_90a"
_FP8_MATH_HEAD_DIM = 256

_CHANGING = (
    *("q", "k", "v", "page_table", "seq_lens", "o", "workspace", "semaphores", "sinks"),
    *("q_scale_ptr", "kv_scale_ptr", "mask", "q_cu_lens", "k_scales", "v_scales"),
    *("q_scale", "kv_scale", "rcp_out_scale", "stream"),
)
"""Fields that are not among what is remembered of a call: the addresses of the tensors, factors, the stream."""

prepare = functools.partial(serving.prepare, "xqa_decode")
"""Prepare a variant ahead of the first call; see ``kernseal.loader.serving.prepare``."""


def xqa(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    workspace_buffer: torch.Tensor,
    semaphores: torch.Tensor,
    num_kv_heads: int,
    page_size: int,
    sinks: torch.Tensor | None = None,
    q_scale: float | torch.Tensor = 1.0,
    kv_scale: float | torch.Tensor = 1.0,
    sliding_win_size: int = 0,
    kv_layout: str = "NHD",
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
    rcp_out_scale: float = 1.0,
    q_seq_len: int = 1,
    mask: torch.Tensor | None = None,
    *,
    q_cu_seq_lens: torch.Tensor | None = None,
    k_sf_cache: torch.Tensor | None = None,
    v_sf_cache: torch.Tensor | None = None,
    fp8_math: bool | None = None,
    kv_splits: int = 0,
) -> None:
    """Attention of one query token a sequence, or of a few drafts, over a paged cache, on torch's current stream.

    A variant is prepared at its first use on a device. An empty batch is a call that writes nothing.

    Args:
        q: [B, 1, Hq, D], bfloat16 or float16, dense; with drafts [B, 1, q_seq_len, Hq, D], with ``q_cu_seq_lens``
            [R, Hq, D].
        k_cache: [num_pages, page_size, Hkv, D] (NHD) or [num_pages, Hkv, page_size, D] (HND): of q's type,
            float8_e4m3fn or int8; uint8 is NVFP4, [.., D / 2]. A slice of a wider tensor will do.
        v_cache: as ``k_cache``, with the same strides.
        page_table: [B, pages] int32.
        seq_lens: [B] or [B, 1], uint32 or int32.
        output: as many elements as ``q``, dense, of q's type or float8_e4m3fn (which needs an e4m3 cache). Written.
        workspace_buffer: scratch of any type, 128-byte aligned; too small a one is refused with the size that is needed.
        semaphores: memory of any type, zero before the first call; as ``workspace_buffer``.
        sinks: Hq float32.
        q_scale: a number, or one float32 on the device.
        kv_scale: likewise, for caches of 8 and 4 bits. With one of 16 bits a tensor is not read and a number must be 1.
        sliding_win_size: positions that count; 0 or less is all of them.
        sm_count: None or the device's own: how the work is split does not follow from it, see ``kv_splits``.
        enable_pdl: let the launch begin while the kernel before it is ending; None is yes.
        rcp_out_scale: multiplies a float8 output; otherwise 1.
        q_seq_len: query tokens of a sequence; of the longest with ``q_cu_seq_lens``.
        mask: [.., 2 * ceil(q_seq_len / 32)] uint16, one row for each query token; needed for drafts, else not read.
        q_cu_seq_lens: [B + 1] int32 or uint32, where the query tokens of each sequence begin.
        k_sf_cache, v_sf_cache: scales of an NVFP4 cache, [.., D / 16] uint8 or float8_e4m3fn, shaped like the cache.
        fp8_math: multiply in e4m3. Not an argument of upstream, which always does with an e4m3 cache on SM90 where it
            can; None is that, for one query token and a head of up to 256.
        kv_splits: most thread blocks that share a sequence. Not an argument of upstream. 0 gives the same bits whatever
            else is in the batch; -1 fills the device, as upstream does.

    Raises:
        Unsupported: an argument asks for what these kernels do not do, or the bundle lacks the variant; the message has
            the command that builds it.
        InvalidArgument: a tensor's device, type, shape or strides do not fit.
        WorkspaceTooSmall: ``workspace_buffer`` or ``semaphores``; the message has the size that is needed.
        Capturing: under graph capture before the variant was prepared.
        NotPrepared: no bundle serves the device; see ``use_bundle``.
    """
    device = q.get_device()
    if k_cache.dtype != torch.uint8:
        k_sf_cache = v_sf_cache = None
    if q_seq_len <= 1:
        mask = None
    q_factor, q_scale_ptr = (q_scale, None) if isinstance(q_scale, _NUMBER) else (1.0, q_scale)
    kv_factor, kv_scale_ptr = (kv_scale, None) if isinstance(kv_scale, _NUMBER) else (1.0, kv_scale)
    if kv_scale_ptr is not None and k_cache.dtype == q.dtype:
        dense("kv_scale", kv_scale_ptr, _F32, 1, device)
        kv_scale_ptr = None
    tensors = (
        *(q, k_cache, v_cache, page_table, seq_lens, output, workspace_buffer, semaphores, sinks),
        *(q_scale_ptr, kv_scale_ptr, mask, q_cu_seq_lens, k_sf_cache, v_sf_cache),
    )
    numbers = (
        *(num_kv_heads, page_size, sliding_win_size, kv_layout, sm_count, enable_pdl, q_seq_len),
        *(fp8_math, kv_splits),
    )
    shown, addresses = look(tensors)
    key = "xqa", numbers, shown
    call = known(device, key)
    if call is None:
        served = served_by(device)
        call = _settle(served, *tensors, *numbers)
        if call is None:
            return
        served.remember(key, call)
    with on(device):
        stream = torch_stream(device)
        call.launch([*addresses, q_factor, kv_factor, rcp_out_scale, stream])


REPLACES = {"flashinfer.xqa": {"xqa": xqa}, "flashinfer": {"xqa": xqa}}
"""What stands where in FlashInfer; see ``kernseal.loader.flashinfer``."""


class _Wanted(NamedTuple):
    """What decides the variant."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    out_dtype: torch.dtype
    head_dim: int
    group_size: int
    page_size: int
    window: bool
    drafts: bool
    fp8_math: bool | None


def _prepare(served: Served, wanted: _Wanted) -> Op:
    dtype, kv_dtype = (
        dtype_name(_DTYPES, "q", wanted.dtype),
        dtype_name(_KV_DTYPES, "k_cache", wanted.kv_dtype),
    )
    fp8_math = wanted.fp8_math
    if fp8_math is None:
        can = kv_dtype == "e4m3" and wanted.head_dim <= _FP8_MATH_HEAD_DIM and not wanted.drafts
        fp8_math = can and served.sm == _FP8_MATH_SM
    return served.prepare(
        "xqa_decode",
        dtype=dtype,
        kv_dtype=kv_dtype,
        out_dtype=dtype_name(_OUT_DTYPES, "output", wanted.out_dtype),
        head_dim=wanted.head_dim,
        group_size=wanted.group_size,
        page_size=wanted.page_size,
        sliding_window=wanted.window,
        spec_decode=wanted.drafts,
        fp8_math=fp8_math,
    )


def _settle(
    served: Served,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    workspace_buffer: torch.Tensor,
    semaphores: torch.Tensor,
    sinks: torch.Tensor | None,
    q_scale_ptr: torch.Tensor | None,
    kv_scale_ptr: torch.Tensor | None,
    mask: torch.Tensor | None,
    q_cu_seq_lens: torch.Tensor | None,
    k_sf_cache: torch.Tensor | None,
    v_sf_cache: torch.Tensor | None,
    num_kv_heads: int,
    page_size: int,
    sliding_win_size: int,
    kv_layout: str,
    sm_count: int | None,
    enable_pdl: bool | None,
    q_seq_len: int,
    fp8_math: bool | None,
    kv_splits: int,
) -> Settled | None:
    """Check a call and work out its numbers; None where there is nothing to launch."""
    device = served.device
    *tokens, num_q_heads, head_dim = q.shape
    batch_size, q_rows = seq_lens.numel(), math.prod(tokens)
    ragged, drafts, window = q_cu_seq_lens is not None, q_seq_len > 1, max(sliding_win_size, 0)
    uniform = tokens[:1] == [batch_size] and q_rows == batch_size * q_seq_len
    if not tokens or not (ragged or uniform):
        expected = f"{batch_size} sequences of {q_seq_len} tokens"
        raise InvalidArgument(f"q: shape {tuple(q.shape)}; expected {expected}, heads and their elements")
    check_sm_count(sm_count, device)
    wanted = _Wanted(
        q.dtype,
        k_cache.dtype,
        output.dtype,
        head_dim,
        num_q_heads // max(num_kv_heads, 1),
        page_size,
        window > 0,
        drafts,
        fp8_math,
    )
    op = served.ready("xqa_decode", wanted, _prepare)
    if q_rows == 0 and ragged:
        return None
    fp4 = k_cache.dtype == torch.uint8
    num_pages = k_cache.shape[0]
    pool = num_pages, page_size, num_kv_heads, head_dim // _FP4_PER_BYTE if fp4 else head_dim
    kv_strides = _pool("k_cache", k_cache, (k_cache.dtype,), pool, kv_layout, device)
    if _pool("v_cache", v_cache, (k_cache.dtype,), pool, kv_layout, device) != kv_strides:
        raise InvalidArgument(f"v_cache: strides {v_cache.stride()}; k_cache has {k_cache.stride()}")
    scale_strides = 0, 0, 0
    if fp4:
        pool = num_pages, page_size, num_kv_heads, head_dim // _FP4_PER_SCALE
        scale_strides = _pool("k_sf_cache", k_sf_cache, _FP4_SCALES, pool, kv_layout, device)
        if _pool("v_sf_cache", v_sf_cache, _FP4_SCALES, pool, kv_layout, device) != scale_strides:
            raise InvalidArgument("v_sf_cache: its strides must be those of k_sf_cache")
    max_pages = page_table.shape[-1]
    optional("q_scale", q_scale_ptr, _F32, 1, device)
    optional("kv_scale", kv_scale_ptr, _F32, 1, device)
    dense("q", q, (q.dtype,), q_rows * num_q_heads * head_dim, device)
    dense("output", output, (output.dtype,), q_rows * num_q_heads * head_dim, device)
    dense("page_table", page_table, _I32, batch_size * max_pages, device)
    dense("seq_lens", seq_lens, _LENGTHS, batch_size, device)
    optional("q_cu_seq_lens", q_cu_seq_lens, _LENGTHS, batch_size + 1, device)
    if drafts:
        _mask(mask, q_rows, q_seq_len, device)
    optional("sinks", sinks, _F32, num_q_heads, device)
    memory("semaphores", semaphores, device)
    memory("workspace_buffer", workspace_buffer, device)
    return op.settle(
        _CHANGING,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        q_len=q_seq_len,
        kv_splits=kv_splits,
        window=window,
        pdl=1 if enable_pdl is None or enable_pdl else 0,
        batch_size=batch_size,
        q_rows=q_rows,
        num_pages=num_pages,
        max_pages_per_seq=max_pages,
        max_seq_len=0,
        kv_page_stride=kv_strides[0],
        kv_token_stride=kv_strides[1],
        kv_head_stride=kv_strides[2],
        scale_page_stride=scale_strides[0],
        scale_token_stride=scale_strides[1],
        scale_head_stride=scale_strides[2],
        semaphores_bytes=semaphores.nbytes,
        workspace_bytes=workspace_buffer.nbytes,
    )


def _mask(mask: torch.Tensor | None, rows: int, q_len: int, device: int) -> None:
    if mask is None:
        raise InvalidArgument(f"mask: missing; q_seq_len is {q_len}")
    size = _MASK_BYTES.get(mask.dtype, 1)
    words = rows * math.ceil(q_len / _MASK_BITS)
    dense("mask", mask, _MASK_BYTES, words * _MASK_BITS // (8 * size), device)


def _pool(
    name: str,
    pool: torch.Tensor | None,
    dtypes: Collection[torch.dtype],
    shape: tuple[int, int, int, int],
    layout: str,
    device: int,
) -> tuple[int, int, int]:
    """The distances of pages, tokens and heads. ``shape`` is NHD."""
    if pool is None:
        raise InvalidArgument(f"{name}: missing; a uint8 cache is NVFP4")
    pages, tokens, heads, width = shape
    if layout == "HND":
        shape = pages, heads, tokens, width
    elif layout != "NHD":
        raise InvalidArgument(f"kv_layout is {layout!r}; it must be NHD or HND")
    if pool.shape != shape:
        raise InvalidArgument(f"{name}: shape {tuple(pool.shape)}; expected {shape} ({layout})")
    check_dtype(name, pool, dtypes)
    check_strides(name, pool)
    page, token, head, _ = pool.stride()
    if layout == "HND":
        token, head = head, token
    # What there is only one of may have any stride.
    page, token, head = (
        stride if count > 1 else width for stride, count in ((page, pages), (token, tokens), (head, heads))
    )
    on_device(name, pool, device)
    return page, token, head
