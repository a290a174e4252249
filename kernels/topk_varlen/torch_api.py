"""``top_k_varlen`` for torch, with the arguments of ``flashinfer.top_k_varlen``.

Say once which bundle serves a device, then call::

    use_bundle(open_bundle("dist/sm_100a-linux-x86_64"))
    indices, _ = top_k_varlen(logits, seq_lens, 2048, next_n=2)

Every call that upstream serves and this does not raises an error of ``kernseal.loader.errors``.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from kernseal.loader import serving
from kernseal.loader.addresses import dense, dtype_name, launch_on, matrix, semaphores
from kernseal.loader.errors import InvalidArgument, Unsupported
from kernseal.loader.op import Op
from kernseal.loader.serving import Served, served_by, use_bundle
from kernseal.loader.tensors import torch_stream

__all__ = ["REPLACES", "prepare", "top_k_varlen", "use_bundle"]

_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_I32 = (torch.int32,)
_BACKENDS = ("auto", "radix")
_SEMAPHORES_BYTES = 1 << 20
"""More than any launch needs on a device of up to 600 multiprocessors, so that its size need not be asked for."""

prepare = functools.partial(serving.prepare, "topk_varlen")
"""Prepare a variant ahead of the first call; see ``kernseal.loader.serving.prepare``."""


def top_k_varlen(
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    top_k: int,
    *,
    row_starts: torch.Tensor | None = None,
    max_window_len: int | None = None,
    absolute_indices: bool = False,
    page_table: torch.Tensor | None = None,
    page_size: int | None = None,
    compress_ratio: int | None = None,
    next_n: int | None = None,
    pre_idx: torch.Tensor | None = None,
    return_values: bool = False,
    out_indices: torch.Tensor | None = None,
    out_values: torch.Tensor | None = None,
    backend: str = "auto",
    load_balance: bool = True,
    workspace: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The columns of the k largest scores of every row of a decode step, on torch's current stream.

    Args:
        logits: [B * next_n, N] of float32, bfloat16 or float16. Rows may lie apart.
        seq_lens: [B] int32, tokens of each sequence.
        top_k: at least 1.
        row_starts, max_window_len, absolute_indices: of upstream's windowed mode, which is not here.
        page_table, page_size: of upstream's paged output; the op ``topk_regions`` has page tables.
        compress_ratio: tokens that one score stands for; None is 1.
        next_n: rows of a sequence; None is 1.
        pre_idx, load_balance, workspace: arguments of upstream's other backends, which change no result.
        return_values: store the scores too.
        out_indices: [B * next_n, top_k] int32, or as many elements; written. None makes one.
        out_values: likewise, of the type of ``logits``.
        backend: ``radix``, or ``auto``, which is that.

    Returns:
        int32 [B * next_n, top_k] (``out_indices`` where given), -1 where a row has no more; and the scores (-inf), or None.

    Raises:
        Unsupported: an argument asks for what this kernel does not do, or the bundle lacks the variant; the message has
            the command that builds it.
        InvalidArgument: a tensor's device, type, shape or strides do not fit.
        Capturing: under graph capture before the variant was prepared.
        NotPrepared: no bundle serves the device; see ``use_bundle``.
    """
    device = logits.get_device()
    served = served_by(device)
    if row_starts is not None or max_window_len is not None or absolute_indices:
        raise Unsupported("row_starts: not supported; rows begin at column 0")
    if page_table is not None or page_size is not None:
        raise Unsupported("page_table: not supported here; see the op topk_regions")
    if backend not in _BACKENDS:
        raise Unsupported(f"backend is {backend!r}; supported are {', '.join(_BACKENDS)}")
    next_n = 1 if next_n is None else next_n
    requests = seq_lens.numel()
    if logits.ndim != 2 or logits.shape[0] != requests * next_n:
        raise InvalidArgument(
            f"logits: shape {tuple(logits.shape)}; expected [{requests * next_n}, N], next_n rows a sequence"
        )
    rows, max_len = logits.shape
    scores, row_stride = matrix("logits", logits, device)
    wanted = _Wanted(logits.dtype, return_values)
    op = served.ready("topk_varlen", wanted, _prepare)
    indices = _output(out_indices, logits, torch.int32, top_k)
    values = _output(out_values, logits, logits.dtype, top_k) if return_values else None
    stream = torch_stream(device)
    run = {
        "top_k": top_k,
        "next_n": next_n,
        "compress_ratio": 1 if compress_ratio is None else compress_ratio,
        "num_requests": requests,
        "max_len": max_len,
        "row_stride": row_stride,
        "scores": scores,
        "seq_lens": dense("seq_lens", seq_lens, _I32, requests, device),
        "indices": dense("out_indices", indices, _I32, rows * top_k, device),
        "values": 0 if values is None else dense("out_values", values, (logits.dtype,), rows * top_k, device),
        "semaphores": semaphores("topk_varlen", logits, stream, _SEMAPHORES_BYTES).data_ptr(),
        "semaphores_bytes": _SEMAPHORES_BYTES,
        "stream": stream,
    }
    launch_on(device, op, run)
    return indices, values


REPLACES = {
    "flashinfer.topk_varlen.topk_varlen": {"top_k_varlen": top_k_varlen},
    "flashinfer": {"top_k_varlen": top_k_varlen},
}
"""What stands where in FlashInfer; see ``kernseal.loader.flashinfer``."""


class _Wanted(NamedTuple):
    """What decides the variant."""

    dtype: torch.dtype
    values: bool


def _prepare(served: Served, wanted: _Wanted) -> Op:
    dtype = dtype_name(_DTYPES, "logits", wanted.dtype)
    return served.prepare("topk_varlen", dtype=dtype, values=wanted.values)


def _output(given: torch.Tensor | None, logits: torch.Tensor, dtype: torch.dtype, top_k: int) -> torch.Tensor:
    if given is not None:
        return given
    return torch.empty((logits.shape[0], top_k), dtype=dtype, device=logits.device)
