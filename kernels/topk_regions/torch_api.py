"""Top-k with the arguments of ``flashinfer.topk``: ``top_k``, ``top_k_ragged_transform``, ``top_k_page_table_transform``.

Say once which bundle serves a device, then call::

    use_bundle(open_bundle("dist/sm_90a-linux-x86_64"))
    slots = top_k_page_table_transform(scores, page_table, lengths, 2048, page_size=64, deterministic=True)

Every call that upstream serves and this does not raises an error of ``kernseal.loader.errors``.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from kernseal.loader import serving
from kernseal.loader.addresses import (
    check_dtype,
    dense,
    dtype_name,
    launch_on,
    matrix,
    on_device,
    optional,
    semaphores,
)
from kernseal.loader.errors import InvalidArgument, Unsupported
from kernseal.loader.op import Op
from kernseal.loader.serving import Served, served_by, use_bundle
from kernseal.loader.tensors import torch_stream

__all__ = [
    "REPLACES",
    "prepare",
    "top_k",
    "top_k_page_table_transform",
    "top_k_ragged_transform",
    "use_bundle",
]

_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_I32 = (torch.int32,)
_SEMAPHORES_BYTES = 1 << 20
"""More than any launch needs on a device of up to 400 multiprocessors, so that its size need not be asked for."""

prepare = functools.partial(serving.prepare, "topk_regions")
"""Prepare a variant ahead of the first call; see ``kernseal.loader.serving.prepare``."""


def top_k(
    input: torch.Tensor,
    k: int,
    sorted: bool = False,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest values of every row and their columns, on torch's current stream.

    Args:
        input: [R, d] of float32, bfloat16 or float16. Rows may lie apart.
        k: at most d.
        sorted: by falling value, which is torch's own sort.
        deterministic: the same order again for the same input.
        tie_break: 0; which of equal values are selected is not the caller's choice.
        dsa_graph_safe: an argument of upstream; a launch can be captured either way.

    Returns:
        Values [R, k] of the input's type, and int64 columns [R, k].

    Raises:
        Unsupported: an argument asks for what these kernels do not do, or the bundle lacks the variant; the message has
            the command that builds it.
        InvalidArgument: a tensor's device, type, shape or strides do not fit, or k.
        Capturing: under graph capture before the variant was prepared.
        NotPrepared: no bundle serves the device; see ``use_bundle``.
    """
    if k > input.shape[-1]:
        raise InvalidArgument(f"k is {k}; the rows of input have {input.shape[-1]}")
    shape = (input.shape[0], k)
    values = torch.empty(shape, dtype=input.dtype, device=input.device)
    indices = torch.empty(shape, dtype=torch.int32, device=input.device)
    wanted = _Wanted(input.dtype, False, deterministic)
    _launch(wanted, input, k, tie_break, indices, values=on_device("values", values, input.get_device()))
    columns = indices.long()
    if not sorted:
        return values, columns
    falling, order = torch.sort(values, dim=-1, descending=True, stable=deterministic)
    return falling, columns.gather(-1, order)


def top_k_ragged_transform(
    input: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """The columns of the k largest scores of every row, each row's offset added, on torch's current stream.

    Args:
        input: [R, max_len] of float32, bfloat16 or float16. Rows may lie apart.
        offsets: [R] int32.
        lengths: [R] int32, the scores that each row has.
        k: at least 1; more than max_len will do.
        deterministic, tie_break, dsa_graph_safe: see ``top_k``.
        row_starts: [R] int32, the column of each row's first score.

    Returns:
        int32 [R, k]; -1 where a row has no more.

    Raises:
        KernsealError: see ``top_k``.
    """
    rows, device = input.shape[0], input.get_device()
    indices = torch.empty((rows, k), dtype=torch.int32, device=input.device)
    given = {"offsets": offsets, "lengths": lengths, "row_starts": row_starts}
    pointers = {name: optional(name, tensor, _I32, rows, device) for name, tensor in given.items()}
    _launch(_Wanted(input.dtype, False, deterministic), input, k, tie_break, indices, **pointers)
    return indices


def top_k_page_table_transform(
    input: torch.Tensor,
    src_page_table: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    row_to_batch: torch.Tensor | None = None,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
    page_table_row_starts: torch.Tensor | None = None,
    *,
    page_size: int = 1,
    out: torch.Tensor | None = None,
    out_raw_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """The slots, by a page table, of the k largest scores of every row, on torch's current stream.

    Args:
        input: [R, max_len] of float32, bfloat16 or float16. Rows may lie apart.
        src_page_table: [requests, pages] int32. Rows may lie apart.
        lengths: [R] int32, the scores that each row has.
        k: at least 1; more than max_len will do.
        row_to_batch: [R] int32, the row of the page table for each row; None where that is its own number.
        deterministic, tie_break, dsa_graph_safe: see ``top_k``.
        row_starts: [R] int32, the column of each row's first score.
        page_table_row_starts: [R] int32, the column of the page table for each row's first score; None is ``row_starts``.
        page_size: scores that an entry of the page table stands for: a power of two.
        out: [R, k] int32, written; None makes one.
        out_raw_indices: [R, k] int32, written: the columns before they are looked up.

    Returns:
        ``out``; -1 where a row has no more.

    Raises:
        KernsealError: see ``top_k``.
    """
    rows, device = input.shape[0], input.get_device()
    indices = torch.empty((rows, k), dtype=torch.int32, device=input.device) if out is None else out
    per_row = {
        "lengths": lengths,
        "row_starts": row_starts,
        "row_to_request": row_to_batch,
        "page_table_starts": page_table_row_starts,
    }
    pages, page_table_stride = matrix("src_page_table", src_page_table, device)
    check_dtype("src_page_table", src_page_table, _I32)
    _launch(
        _Wanted(input.dtype, True, deterministic),
        *(input, k, tie_break, indices),
        page_size=page_size,
        num_requests=src_page_table.shape[0],
        max_pages=src_page_table.shape[1],
        page_table_stride=page_table_stride,
        page_table=pages,
        raw_indices=optional("out_raw_indices", out_raw_indices, _I32, rows * k, device),
        **{name: optional(name, tensor, _I32, rows, device) for name, tensor in per_row.items()},
    )
    return indices


_FUNCTIONS = {
    "top_k": top_k,
    "top_k_page_table_transform": top_k_page_table_transform,
    "top_k_ragged_transform": top_k_ragged_transform,
}
REPLACES = {"flashinfer.topk": _FUNCTIONS, "flashinfer": _FUNCTIONS}
"""What stands where in FlashInfer; see ``kernseal.loader.flashinfer``."""


class _Wanted(NamedTuple):
    """What decides the variant."""

    dtype: torch.dtype
    paged: bool
    deterministic: bool


def _prepare(served: Served, wanted: _Wanted) -> Op:
    dtype = dtype_name(_DTYPES, "input", wanted.dtype)
    return served.prepare("topk_regions", **{**wanted._asdict(), "dtype": dtype})


_NOTHING = dict.fromkeys(
    (
        *("page_size", "num_requests", "max_pages", "page_table_stride", "lengths", "row_starts", "offsets"),
        *("page_table", "row_to_request", "page_table_starts", "values", "raw_indices"),
    ),
    0,
)


def _launch(
    wanted: _Wanted, scores: torch.Tensor, k: int, tie_break: int, indices: torch.Tensor, **fields: int
) -> None:
    """Launch on ``scores``, with what ``fields`` says beyond it."""
    device = scores.get_device()
    served = served_by(device)
    if tie_break != 0:
        raise Unsupported(f"tie_break is {int(tie_break)}; supported is 0, no preference by index")
    op = served.ready("topk_regions", wanted, _prepare)
    address, row_stride = matrix("input", scores, device)
    rows, max_len = scores.shape
    stream = torch_stream(device)
    zeros = semaphores("topk_regions", scores, stream, _SEMAPHORES_BYTES)
    run = {
        **_NOTHING,
        **fields,
        "top_k": k,
        "num_rows": rows,
        "max_len": max_len,
        "row_stride": row_stride,
        "scores": address,
        "indices": dense("out", indices, _I32, rows * k, device),
        "semaphores": zeros.data_ptr(),
        "semaphores_bytes": _SEMAPHORES_BYTES,
        "stream": stream,
    }
    launch_on(device, op, run)
