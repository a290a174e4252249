"""``compute_paged_mqa_logits_schedule`` for torch, with the arguments of FlashInfer's.

Say once which bundle serves a device, then call::

    use_bundle(open_bundle("dist/sm_100a-linux-x86_64"))
    schedule = compute_paged_mqa_logits_schedule(seq_lens)

Every call that upstream serves and this does not raises an error of ``kernseal.loader.errors``.
"""

from __future__ import annotations

import functools

import torch

from kernseal.loader import addresses, serving
from kernseal.loader.addresses import check_dtype, dense, launch_on, on_device
from kernseal.loader.errors import InvalidArgument, Unsupported
from kernseal.loader.op import Op
from kernseal.loader.serving import Served, served_by, use_bundle
from kernseal.loader.tensors import torch_stream

__all__ = ["REPLACES", "compute_paged_mqa_logits_schedule", "launch", "prepare", "use_bundle"]

_I32 = (torch.int32,)
_VARIANTS = ("fp8", "fp4")
_MAX_FP4_NEXT_N, _MAX_FP4_ATOM = 4, 3

prepare = functools.partial(serving.prepare, "paged_mqa_schedule")
"""Prepare a variant ahead of the first call; see ``kernseal.loader.serving.prepare``."""


def atoms_of(variant: str, next_n: int) -> int:
    """Rows of work that a sequence is in logits of ``variant``.

    Raises:
        Unsupported: there are no such logits.
    """
    if variant not in _VARIANTS:
        raise Unsupported(f"variant is {variant!r}; supported: {', '.join(_VARIANTS)}")
    if next_n < 1 or (variant == "fp4" and next_n > _MAX_FP4_NEXT_N):
        most = f"1 to {_MAX_FP4_NEXT_N}" if variant == "fp4" else "1 and more"
        raise Unsupported(f"next_n is {next_n}; supported for {variant}: {most}")
    return 2 if variant == "fp4" and next_n > _MAX_FP4_ATOM else 1


def compute_paged_mqa_logits_schedule(
    seq_lens: torch.Tensor,
    device: torch.device | None = None,
    *,
    next_n: int = 1,
    variant: str = "fp8",
    use_gpu_kernel: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which CTA of a logits call works on what, on torch's current stream.

    A variant is prepared at its first use on a device. It must be computed again whenever a length has changed, in a
    replayed graph too.

    Args:
        seq_lens: [B] int32 on the device, of any positive stride.
        device: None or the device of ``seq_lens``.
        next_n: of the logits call.
        variant: ``fp8`` or ``fp4``: which logits call.
        use_gpu_kernel: True: there is no other way here.
        out: [CTAs + 1, 2] int32 to write to; None allocates for as many CTAs as the device has SMs.

    Returns:
        ``out``, or what was allocated. An empty batch writes nothing.

    Raises:
        Unsupported: an argument asks for what this kernel does not do, or the bundle lacks the variant.
        InvalidArgument: a tensor's device, type, shape or strides do not fit.
        Capturing: under graph capture before the variant was prepared.
        NotPrepared: no bundle serves the device; see ``use_bundle``.
    """
    if not use_gpu_kernel:
        raise Unsupported("use_gpu_kernel is False; schedules are computed on the device")
    where = seq_lens.get_device()
    wanted = seq_lens.device if device is None else torch.device(device)
    if wanted.type != seq_lens.device.type or wanted.index not in (None, seq_lens.device.index):
        raise InvalidArgument(f"seq_lens: is on {seq_lens.device}; expected {wanted}")
    if out is None:
        shape = (addresses.sm_count(where) + 1, 2)
        out = torch.empty(shape, dtype=torch.int32, device=seq_lens.device)
    launch(seq_lens, out, atoms_of(variant, next_n))
    return out


def launch(seq_lens: torch.Tensor, schedule: torch.Tensor, atoms: int) -> None:
    """Compute a schedule of rows of ``atoms`` a sequence into ``schedule``, for the CTAs that it has room for."""
    device = seq_lens.get_device()
    served = served_by(device)
    op = served.ready("paged_mqa_schedule", atoms, _prepare)
    if schedule.ndim != 2 or schedule.shape[0] < 2 or schedule.shape[1] != 2:
        raise InvalidArgument(f"out: shape {tuple(schedule.shape)}; expected [CTAs + 1, 2]")
    run = {
        "num_ctas": schedule.shape[0] - 1,
        "batch_size": seq_lens.shape[0] if seq_lens.ndim else 0,
        "seq_len_stride": length_stride(seq_lens),
        "seq_lens": on_device("seq_lens", seq_lens, device),
        "schedule": dense("out", schedule, _I32, schedule.numel(), device),
        "stream": torch_stream(device),
    }
    launch_on(device, op, run)


def _prepare(served: Served, atoms: int) -> Op:
    return served.prepare("paged_mqa_schedule", atoms=atoms)


def length_stride(seq_lens: torch.Tensor) -> int:
    """The distance between lengths.

    Raises:
        InvalidArgument: they are not a vector of int32, or all the same element.
    """
    check_dtype("seq_lens", seq_lens, _I32)
    if seq_lens.ndim != 1:
        raise InvalidArgument(f"seq_lens: shape {tuple(seq_lens.shape)}; expected [B]")
    stride = seq_lens.stride(0) if seq_lens.shape[0] > 1 else 1
    if stride == 0:
        raise InvalidArgument("seq_lens: strides (0,); entries must not share memory")
    return stride


REPLACES = {
    "flashinfer.attn_scores.attn_scores": {
        "compute_paged_mqa_logits_schedule": compute_paged_mqa_logits_schedule
    },
    "flashinfer": {"compute_paged_mqa_logits_schedule": compute_paged_mqa_logits_schedule},
}
"""What stands where in FlashInfer; see ``kernseal.loader.flashinfer``."""
