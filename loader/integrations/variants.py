"""Gets a model's ops ready, and launches them where torch would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kernseal.loader.bundle import Bundle
from kernseal.loader.errors import InvalidArgument, Unsupported
from kernseal.loader.op import Op

DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}


class Variants:
    """The ops of one bundle.

    Args:
        build: the command that builds what a model lacks, for messages.
    """

    def __init__(self, bundle: Bundle, build: str) -> None:
        self._bundle = bundle
        self._build = build

    def op(self, name: str, device: torch.device, **axes: Any) -> Op:
        """An op ready to run on ``device``; the same axes give the same op again.

        Raises:
            Unsupported: the bundle lacks the variant; the message has the command that builds it.
            KernsealError: see ``Bundle.prepare``.
        """
        try:
            return self._bundle.prepare(name, device=ordinal(device), **axes)
        except Unsupported as error:
            raise Unsupported(f"{error}; to build it: {self._build}") from error


def ordinal(device: torch.device) -> int:
    """The number of a CUDA device.

    Raises:
        InvalidArgument: it is none.
    """
    if device.type != "cuda":
        raise InvalidArgument(f"device is {device}; it must be a CUDA device")
    return int(device.index)


@contextmanager
def launching(device: torch.device) -> Iterator[int]:
    """Make ``device`` current and yield the address of torch's current stream there."""
    with torch.cuda.device(device):
        yield torch.cuda.current_stream(device).cuda_stream


def dtype_name(tensor: torch.Tensor, field: str) -> str:
    """What axes call the element type of ``tensor``.

    Raises:
        Unsupported: the kernels do not have it.
    """
    found = DTYPES.get(tensor.dtype)
    if found is None:
        raise Unsupported(f"{field} is {tensor.dtype}; supported: {', '.join(map(str, DTYPES))}")
    return found
