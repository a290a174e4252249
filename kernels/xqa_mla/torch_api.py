"""``xqa_mla`` for torch, with the arguments of ``flashinfer.xqa.xqa_mla``.

Say once which bundle serves a device, then call::

    use_bundle(open_bundle("dist/sm_120a-linux-x86_64"))
    xqa_mla(q, k_cache, v_cache, page_table, seq_lens, output, workspace, semaphores, page_size)

Every call that upstream serves and this does not raises an error of ``kernseal.loader.errors``.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import NamedTuple

import torch

from kernseal.loader import serving
from kernseal.loader.addresses import (
    check_dtype,
    check_sm_count,
    check_strides,
    dense,
    dtype_name,
    launch_on,
    memory,
    on_device,
    scale,
)
from kernseal.loader.errors import InvalidArgument, Unsupported
from kernseal.loader.op import Op
from kernseal.loader.serving import Served, served_by, use_bundle
from kernseal.loader.tensors import torch_stream

__all__ = ["REPLACES", "prepare", "use_bundle", "xqa_mla"]

_DTYPES = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3"}
_BF16 = (torch.bfloat16,)
_F32 = (torch.float32,)
_I32 = (torch.int32,)
_LENGTHS = (torch.int32, torch.uint32)
_HEAD_DIM, _V_DIM = 576, 512

prepare = functools.partial(serving.prepare, "xqa_mla")
"""Prepare a variant ahead of the first call; see ``kernseal.loader.serving.prepare``."""


def xqa_mla(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    workspace_buffer: torch.Tensor,
    semaphores: torch.Tensor,
    page_size: int,
    q_scale: float | torch.Tensor = 1.0,
    kv_scale: float | torch.Tensor = 1.0,
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
) -> None:
    """Latent attention of one query token a sequence over a paged cache, on torch's current stream.

    A variant is prepared at its first use on a device. An empty batch is a call that writes nothing.

    Args:
        q: [B, 1, 128, 576], bfloat16 or float8_e4m3fn, dense.
        k_cache: [num_pages, page_size, 1, 576] or [num_pages, page_size, 576], of q's type. A slice of a wider tensor
            will do.
        v_cache: as ``k_cache``, with the same strides; usually ``k_cache`` itself.
        page_table: [B, pages] int32.
        seq_lens: [B] or [B, 1], uint32 or int32.
        output: [B, 1, 128, 512] bfloat16, dense. Written.
        workspace_buffer: scratch of any type, 128-byte aligned; too small a one is refused with the size that is needed.
        semaphores: an argument of upstream, not needed here.
        q_scale: multiplies the logits, and nothing else does: a number, or one float32 on the device.
        kv_scale: what the elements of the cache are multiplied with; likewise.
        sm_count: None or the device's own: how the work is split does not follow from it.
        enable_pdl: let the launch begin while the kernel before it is ending; None is yes.

    Raises:
        Unsupported: an argument asks for what these kernels do not do, or the bundle lacks the variant; the message has
            the command that builds it.
        InvalidArgument: a tensor's device, type, shape or strides do not fit.
        WorkspaceTooSmall: ``workspace_buffer``; the message has the size that is needed.
        Capturing: under graph capture before the variant was prepared.
        NotPrepared: no bundle serves the device; see ``use_bundle``.
    """
    device = q.get_device()
    served = served_by(device)
    batch_size, num_q_heads = seq_lens.numel(), q.shape[-2] if q.ndim > 1 else 0
    if q.shape[:1] != (batch_size,) or q.shape[-1] != _HEAD_DIM:
        raise InvalidArgument(f"q: shape {tuple(q.shape)}; expected [{batch_size}, 1, heads, {_HEAD_DIM}]")
    check_sm_count(sm_count, device)
    wanted = _Wanted(q.dtype, page_size)
    op = served.ready("xqa_mla", wanted, _prepare)
    num_pages, max_pages = k_cache.shape[0], page_table.shape[-1]
    k, strides = _pool("k_cache", k_cache, q.dtype, page_size, device)
    v, v_strides = (
        (k, strides) if v_cache is k_cache else _pool("v_cache", v_cache, q.dtype, page_size, device)
    )
    if v_strides != strides or v_cache.shape[0] != num_pages:
        raise InvalidArgument(
            f"v_cache: shape and strides must be those of k_cache, which has {num_pages} pages"
        )
    q_scale_value, q_scale_ptr = scale("q_scale", q_scale, _F32, device)
    kv_scale_value, kv_scale_ptr = scale("kv_scale", kv_scale, _F32, device)
    run = {
        "num_q_heads": num_q_heads,
        "pdl": 1 if enable_pdl is None or enable_pdl else 0,
        "q_scale": q_scale_value,
        "kv_scale": kv_scale_value,
        "batch_size": batch_size,
        "num_pages": num_pages,
        "max_pages_per_seq": max_pages,
        "kv_page_stride": strides[0],
        "kv_token_stride": strides[1],
        "q": dense("q", q, (q.dtype,), batch_size * num_q_heads * _HEAD_DIM, device),
        "k": k,
        "v": v,
        "o": dense("output", output, _BF16, batch_size * num_q_heads * _V_DIM, device),
        "page_table": dense("page_table", page_table, _I32, batch_size * max_pages, device),
        "seq_lens": dense("seq_lens", seq_lens, _LENGTHS, batch_size, device),
        "q_scale_ptr": q_scale_ptr,
        "kv_scale_ptr": kv_scale_ptr,
        "workspace": memory("workspace_buffer", workspace_buffer, device),
        "workspace_bytes": workspace_buffer.nbytes,
        "stream": torch_stream(device),
    }
    launch_on(device, op, run)


def _module(
    input_dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    page_size: int,
    head_dim: int,
    head_group_ratio: int,
    use_sliding_window: bool = False,
) -> SimpleNamespace:
    """What ``flashinfer.xqa.get_xqa_module_mla`` returns: the module whose ``xqa_mla`` its own callers call."""
    if use_sliding_window:
        raise Unsupported("use_sliding_window: not supported; there is no variant with a window")

    def call(
        sm_count: int,
        q_scale: float | torch.Tensor,
        output: torch.Tensor,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        max_seq_len: int,
        seq_lens: torch.Tensor,
        batch_size: int,
        kv_scale: float | torch.Tensor,
        semaphores: torch.Tensor,
        workspace_buffer: torch.Tensor,
        enable_pdl: bool,
    ) -> None:
        tensors = q, k_cache, v_cache, page_table, seq_lens, output, workspace_buffer, semaphores
        xqa_mla(*tensors, page_size, q_scale, kv_scale, sm_count, enable_pdl)

    return SimpleNamespace(xqa_mla=call)


REPLACES = {
    "flashinfer.xqa": {"xqa_mla": xqa_mla, "get_xqa_module_mla": _module},
    "flashinfer.mla._batch_mla._backends.xqa_backend": {"get_xqa_module_mla": _module},
    "flashinfer": {"xqa_mla": xqa_mla},
}
"""What stands where in FlashInfer; see ``kernseal.loader.flashinfer``."""


class _Wanted(NamedTuple):
    """What decides the variant."""

    dtype: torch.dtype
    page_size: int


def _prepare(served: Served, wanted: _Wanted) -> Op:
    return served.prepare("xqa_mla", dtype=dtype_name(_DTYPES, "q", wanted.dtype), page_size=wanted.page_size)


def _pool(
    name: str, pool: torch.Tensor, dtype: torch.dtype, page_size: int, device: int
) -> tuple[int, tuple[int, int]]:
    """The address and the distances of pages and tokens."""
    pages, *row = pool.shape
    if row not in ([page_size, 1, _HEAD_DIM], [page_size, _HEAD_DIM]):
        expected = f"[pages, {page_size}, 1, {_HEAD_DIM}]"
        raise InvalidArgument(f"{name}: shape {tuple(pool.shape)}; expected {expected}, or without the 1")
    check_dtype(name, pool, (dtype,))
    check_strides(name, pool)
    page, token, *_ = pool.stride()
    # What there is only one of may have any stride.
    page = page if pages > 1 else page_size * _HEAD_DIM
    return on_device(name, pool, device), (page, token)
