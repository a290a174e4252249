"""``fp8_paged_mqa_logits`` and ``fp4_paged_mqa_logits`` for torch, with the arguments of FlashInfer's.

Say once which bundle serves a device, then call::

    use_bundle(open_bundle("dist/sm_100a-linux-x86_64"))
    logits = fp8_paged_mqa_logits(q, kv_fused, weights, block_tables, seq_lens, max_seq_len)

Every call that upstream serves and this does not raises an error of ``kernseal.loader.errors``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernseal.kernels.paged_mqa_schedule import torch_api as schedules
from kernseal.loader import addresses, serving
from kernseal.loader.addresses import check_dtype, dense, dtype_name, launch_on, on_device
from kernseal.loader.errors import InvalidArgument, Unsupported
from kernseal.loader.op import Op
from kernseal.loader.serving import Served, served_by, use_bundle
from kernseal.loader.tensors import torch_stream

__all__ = [
    "REPLACES",
    "fp4_paged_mqa_logits",
    "fp8_paged_mqa_logits",
    "precompile_paged_mqa_logits",
    "prepare",
    "use_bundle",
]

_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_I32 = (torch.int32,)
_F32 = (torch.float32,)
_U8 = (torch.uint8,)
_E4M3 = (torch.float8_e4m3fn,)
_SEGMENT = 256
_SCALE_BYTES = 4
_GROUP = 32
_UNSCHEDULED = "sm_12"  # SMs whose kernel shares out its work by itself

# What FlashInfer compiles ahead: DeepSeek's indexer.
_AHEAD_PAGES, _AHEAD_NEXT_N = (32, 64, 128), (1, 2, 3, 4)
_AHEAD_DTYPES = {"fp8": (torch.float32,), "fp4": (torch.bfloat16, torch.float32)}

prepare = functools.partial(serving.prepare, "paged_mqa_logits")
"""Prepare a variant ahead of the first call; see ``kernseal.loader.serving.prepare``."""


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_fused: torch.Tensor,
    weights: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    *,
    output_dtype: torch.dtype = torch.float32,
    epi_dtype: torch.dtype = torch.float32,
    acc_dtype: torch.dtype = torch.float32,
    schedule_meta: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores of an indexer over a paged FP8 cache, on torch's current stream.

    Variants are prepared at their first use on a device. An empty batch is a call that writes nothing.

    Args:
        q: [B, next_n, H, D] float8_e4m3fn, dense.
        kv_fused: [pages, page_size, 1, D + 4] uint8: per page all values, then all float32 scales. Pages may be apart.
        weights: [B * next_n, H] float32, dense.
        block_tables: [B, columns] int32 with dense rows.
        seq_lens: [B] int32, of any positive stride.
        max_seq_len: columns of the result; no length may be larger.
        output_dtype: float32 or float16.
        epi_dtype: what weights and the sum over heads are computed in: float32 or float16.
        acc_dtype: what products are summed in: float32 or float16.
        schedule_meta: [CTAs + 1, 2] from ``compute_paged_mqa_logits_schedule`` of these lengths; None computes it. SM120
            and SM121, which FlashInfer's function does not serve, have no schedule.
        out: at least [B * next_n, max_seq_len rounded up to 256] of ``output_dtype`` to write to; None allocates.

    Returns:
        [B * next_n, max_seq_len] of ``output_dtype``, a view. Columns that a row does not see are unspecified.

    Raises:
        Unsupported: an argument asks for what these kernels do not do, or the bundle lacks the variant; the message has
            the command that builds it.
        InvalidArgument: a tensor's device, type, shape or strides do not fit.
        Capturing: under graph capture before the variant was prepared.
        NotPrepared: no bundle serves the device; see ``use_bundle``.
    """
    check_dtype("q", q, _E4M3)
    given = _Given(q, None, kv_fused, weights, block_tables, seq_lens, max_seq_len, schedule_meta, out)
    return _logits("e4m3", given, output_dtype, epi_dtype, acc_dtype, interleaved=False)


def fp4_paged_mqa_logits(
    q: torch.Tensor,
    q_sf: torch.Tensor,
    kv_fused: torch.Tensor,
    weights: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    *,
    sf_vec_size: int = _GROUP,
    output_dtype: torch.dtype = torch.bfloat16,
    epi_dtype: torch.dtype = torch.float32,
    is_kv_sf_interleaved: bool = False,
    schedule_meta: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``fp8_paged_mqa_logits``, for 4-bit queries and cache with a power of two for every 32 elements.

    Args:
        q: [B, next_n, 64, 64] uint8, dense: two elements a byte, the first in its low half.
        q_sf: [B, next_n, 64] int32, dense: the powers of two of the four groups of 32, the first in the lowest byte.
        kv_fused: [pages, page_size, 1, 68] uint8: per page all values, then 4 bytes a token. Pages may be apart.
        sf_vec_size: 32.
        output_dtype: bfloat16, float32 or float16.
        epi_dtype: float32, float16 or bfloat16.
        is_kv_sf_interleaved: whether the powers of a page are in the order of the tensor core; see ``kernel.yaml``.
        schedule_meta: from ``compute_paged_mqa_logits_schedule`` with this ``next_n`` and ``variant="fp4"``.
    """
    if sf_vec_size != _GROUP:
        raise Unsupported(f"sf_vec_size is {sf_vec_size}; supported: {_GROUP}")
    check_dtype("q", q, _U8)
    given = _Given(q, q_sf, kv_fused, weights, block_tables, seq_lens, max_seq_len, schedule_meta, out)
    return _logits("fp4", given, output_dtype, epi_dtype, torch.float32, interleaved=is_kv_sf_interleaved)


def precompile_paged_mqa_logits(
    device: torch.device | None = None,
    variants: Sequence[str] = ("fp8", "fp4"),
    output_dtypes: Sequence[torch.dtype] | None = None,
    batch_sizes: Sequence[int] | None = None,
) -> None:
    """Prepare what FlashInfer would compile ahead: 64 heads of 128, every page size, next_n 1 to 4, and the schedules.

    Args:
        device: None is torch's current device.
        variants: of ``fp8`` and ``fp4``.
        output_dtypes: None is float32 for FP8, and bfloat16 and float32 for FP4.
        batch_sizes: not needed here: one schedule variant serves every batch.

    Raises:
        Unsupported: the bundle lacks one of them; the message has the command that builds it.
        NotPrepared: no bundle serves the device; see ``use_bundle``.
    """
    at = torch.device("cuda") if device is None else torch.device(device)
    served = served_by(torch.cuda.current_device() if at.index is None else at.index)
    for variant in variants:
        most = max(_AHEAD_NEXT_N)
        for atoms in sorted({1, schedules.atoms_of(variant, most)}):
            served.prepare("paged_mqa_schedule", atoms=atoms)
        kv_dtype = "fp4" if variant == "fp4" else "e4m3"
        for dtype in _AHEAD_DTYPES[variant] if output_dtypes is None else output_dtypes:
            name = dtype_name(_DTYPES, "output_dtypes", dtype)
            for page_size in _AHEAD_PAGES:
                for next_n in _AHEAD_NEXT_N:
                    wanted = _Wanted(kv_dtype, name, "f32", "f32", 64, 128, next_n, page_size, False)
                    served.ready("paged_mqa_logits", wanted, _prepare)


REPLACES = {
    "flashinfer.attn_scores.attn_scores": {
        "fp8_paged_mqa_logits": fp8_paged_mqa_logits,
        "fp4_paged_mqa_logits": fp4_paged_mqa_logits,
        "precompile_paged_mqa_logits": precompile_paged_mqa_logits,
    },
    "flashinfer": {
        "fp8_paged_mqa_logits": fp8_paged_mqa_logits,
        "fp4_paged_mqa_logits": fp4_paged_mqa_logits,
        "precompile_paged_mqa_logits": precompile_paged_mqa_logits,
    },
}
"""What stands where in FlashInfer; see ``kernseal.loader.flashinfer``."""


class _Given(NamedTuple):
    """The tensors of a call."""

    q: torch.Tensor
    q_sf: torch.Tensor | None
    kv_fused: torch.Tensor
    weights: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    schedule_meta: torch.Tensor | None
    out: torch.Tensor | None


class _Wanted(NamedTuple):
    """What decides the variant: the axes of ``kernel.yaml``, by name."""

    kv_dtype: str
    out_dtype: str
    epi_dtype: str
    acc_dtype: str
    num_heads: int
    head_dim: int
    next_n: int
    page_size: int
    interleaved: bool


def _prepare(served: Served, wanted: _Wanted) -> Op:
    return served.prepare("paged_mqa_logits", **wanted._asdict())


def _logits(
    kv_dtype: str,
    given: _Given,
    output_dtype: torch.dtype,
    epi_dtype: torch.dtype,
    acc_dtype: torch.dtype,
    interleaved: bool,
) -> torch.Tensor:
    q, seq_lens = given.q, given.seq_lens
    device = q.get_device()
    served = served_by(device)
    if q.ndim != 4:
        raise InvalidArgument(f"q: shape {tuple(q.shape)}; expected [B, next_n, heads, elements]")
    batch_size, next_n, heads, row_bytes = q.shape
    page_size = given.kv_fused.shape[1] if given.kv_fused.ndim == 4 else 0
    wanted = _Wanted(
        kv_dtype,
        dtype_name(_DTYPES, "output_dtype", output_dtype),
        dtype_name(_DTYPES, "epi_dtype", epi_dtype),
        dtype_name(_DTYPES, "acc_dtype", acc_dtype),
        heads,
        row_bytes * 2 if kv_dtype == "fp4" else row_bytes,
        next_n,
        page_size,
        interleaved,
    )
    kv, kv_stride = _pool(given.kv_fused, row_bytes + _SCALE_BYTES, device)
    op, rows = served.ready("paged_mqa_logits", wanted, _prepare), batch_size * next_n
    logits = _output(given, rows, output_dtype)
    stride = schedules.length_stride(seq_lens)
    if seq_lens.shape[0] != batch_size:
        raise InvalidArgument(f"seq_lens: shape {tuple(seq_lens.shape)}; expected [{batch_size}]")
    dense("weights", given.weights, _F32, rows * heads, device)
    weights = given.weights.to(epi_dtype)
    table, table_stride = _table(given.block_tables, batch_size, device)
    schedule = _schedule(given, wanted, served)
    q_scales = 0
    if given.q_sf is not None:
        q_scales = dense("q_sf", given.q_sf, _I32, rows * heads, device)
    run = {
        "num_ctas": 0 if schedule is None else schedule.shape[0] - 1,
        "batch_size": batch_size,
        "num_pages": given.kv_fused.shape[0],
        "max_pages_per_seq": given.block_tables.shape[1],
        "max_seq_len": given.max_seq_len,
        "kv_page_stride": kv_stride,
        "page_table_stride": table_stride,
        "seq_len_stride": stride,
        "logits_stride": logits.stride(0) if rows > 1 else 0,
        "q": dense("q", q, (q.dtype,), q.numel(), device),
        "q_scales": q_scales,
        "kv": kv,
        "weights": on_device("weights", weights, device),
        "page_table": table,
        "seq_lens": on_device("seq_lens", seq_lens, device),
        "schedule": 0
        if schedule is None
        else dense("schedule_meta", schedule, _I32, schedule.numel(), device),
        "logits": on_device("out", logits, device),
        "stream": torch_stream(device),
    }
    launch_on(device, op, run)
    return logits[:, : given.max_seq_len]


def _schedule(given: _Given, wanted: _Wanted, served: Served) -> torch.Tensor | None:
    """The caller's schedule, or one made now; None where the kernel works without one."""
    schedule = given.schedule_meta
    if served.sm.startswith(_UNSCHEDULED):
        if schedule is not None:
            raise InvalidArgument(f"schedule_meta: must be None; {served.sm} has no schedule")
        return None
    if schedule is None:
        shape = (addresses.sm_count(served.device) + 1, 2)
        schedule = torch.empty(shape, dtype=torch.int32, device=given.q.device)
        variant = "fp4" if wanted.kv_dtype == "fp4" else "fp8"
        schedules.launch(given.seq_lens, schedule, schedules.atoms_of(variant, wanted.next_n))
    elif schedule.ndim != 2 or schedule.shape[0] < 2 or schedule.shape[1] != 2:
        raise InvalidArgument(f"schedule_meta: shape {tuple(schedule.shape)}; expected [CTAs + 1, 2]")
    return schedule


def _output(given: _Given, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that hold what a kernel may write: every column up to the next multiple of 256."""
    width = -(-given.max_seq_len // _SEGMENT) * _SEGMENT
    if given.out is None:
        return torch.empty((rows, width), dtype=dtype, device=given.q.device)
    out = given.out
    check_dtype("out", out, (dtype,))
    if out.ndim != 2 or out.shape[0] < rows or out.shape[1] < width:
        raise InvalidArgument(f"out: shape {tuple(out.shape)}; expected at least [{rows}, {width}]")
    if out.stride(1) != 1 or (rows > 1 and out.stride(0) < width):
        raise InvalidArgument(f"out: strides {out.stride()}; rows must be dense and not overlap")
    return out[:rows]


def _pool(kv: torch.Tensor, row: int, device: int) -> tuple[int, int]:
    """The address of the pages and the bytes from one to the next."""
    check_dtype("kv_fused", kv, _U8)
    if kv.ndim != 4 or kv.shape[2:] != (1, row):
        raise InvalidArgument(f"kv_fused: shape {tuple(kv.shape)}; expected [pages, page_size, 1, {row}]")
    pages, page_size = kv.shape[:2]
    stride = kv.stride(0) if pages > 1 else page_size * row
    if kv.stride(3) != 1 or (page_size > 1 and kv.stride(1) != row) or stride == 0:
        raise InvalidArgument(f"kv_fused: strides {kv.stride()}; the bytes of a page must be dense")
    return on_device("kv_fused", kv, device), stride


def _table(table: torch.Tensor, batch_size: int, device: int) -> tuple[int, int]:
    """The address of the page table and the entries from one row to the next."""
    check_dtype("block_tables", table, _I32)
    if table.ndim != 2 or table.shape[0] != batch_size:
        raise InvalidArgument(f"block_tables: shape {tuple(table.shape)}; expected [{batch_size}, columns]")
    columns = table.shape[1]
    stride = table.stride(0) if batch_size > 1 else columns
    if (columns > 1 and table.stride(1) != 1) or stride == 0:
        raise InvalidArgument(
            f"block_tables: strides {table.stride()}; rows must be dense and not share memory"
        )
    return on_device("block_tables", table, device), stride
