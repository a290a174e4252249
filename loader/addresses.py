"""What the torch functions of an op call on their way to ``Op.launch``: the addresses of a call's tensors, each checked for
what the C library cannot see.

Nothing is made, and an attribute is read at most once. torch is imported where it is first needed: the loader works without.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .errors import InvalidArgument, Unsupported
from .op import Op
from .serving import device_name


def look(tensors: Sequence[Any | None]) -> tuple[tuple[Any, ...], list[int]]:
    """What tensors show but their addresses, and these; None and 0 of None. A dense tensor's strides are its shape's."""
    shown = [
        None if t is None else (t.dtype, t.get_device(), t.shape, t.is_contiguous() or t.stride())
        for t in tensors
    ]
    return tuple(shown), [0 if t is None else t.data_ptr() for t in tensors]


def dtype_name(names: Mapping[Any, str], field: str, dtype: Any) -> str:
    """What the C library calls an element type.

    Raises:
        Unsupported: it is none of ``names``.
    """
    found = names.get(dtype)
    if found is None:
        raise Unsupported(f"{field}: {dtype}; supported: {', '.join(str(d) for d in names)}")
    return found


def on_device(name: str, tensor: Any, device: int) -> int:
    """The address of a tensor on ``device``.

    Raises:
        InvalidArgument: it is elsewhere.
    """
    if tensor.get_device() != device:
        raise InvalidArgument(f"{name}: is on {tensor.device}; expected {device_name(device)}")
    return int(tensor.data_ptr())


def memory(name: str, tensor: Any, device: int) -> int:
    """The address of a dense tensor of any type.

    Raises:
        InvalidArgument: it is elsewhere, or not dense.
    """
    if not tensor.is_contiguous():
        raise InvalidArgument(f"{name}: strides {tensor.stride()}; must be dense")
    return on_device(name, tensor, device)


def check_dtype(name: str, tensor: Any, dtypes: Collection[Any]) -> None:
    """Raises InvalidArgument when the tensor's type is none of ``dtypes``."""
    if tensor.dtype not in dtypes:
        raise InvalidArgument(f"{name}: {tensor.dtype}; supported: {', '.join(str(d) for d in dtypes)}")


def check_strides(name: str, tensor: Any) -> None:
    """Raises InvalidArgument unless the last dimension is dense and entries of any other lie apart: the C library takes a
    stride of 0 for that of a dense tensor. What there is only one of may have any stride."""
    *strides, element = tensor.stride()
    shared = any(stride == 0 and count > 1 for stride, count in zip(strides, tensor.shape, strict=False))
    if element != 1 or shared:
        raise InvalidArgument(
            f"{name}: strides {tensor.stride()}; the last must be 1 and none of the others 0"
        )


def dense(name: str, tensor: Any, dtypes: Collection[Any], count: int, device: int) -> int:
    """The address of ``count`` dense elements of one of ``dtypes``.

    Raises:
        InvalidArgument: they are not.
    """
    check_dtype(name, tensor, dtypes)
    if tensor.numel() != count:
        raise InvalidArgument(f"{name}: shape {tuple(tensor.shape)}; expected {count} elements")
    return memory(name, tensor, device)


def matrix(name: str, tensor: Any, device: int) -> tuple[int, int]:
    """The address of a matrix with dense rows and the distance of these.

    Raises:
        InvalidArgument: it is none, or is elsewhere.
    """
    if tensor.ndim != 2:
        raise InvalidArgument(f"{name}: shape {tuple(tensor.shape)}; expected two dimensions")
    rows, columns = tensor.shape
    row, column = tensor.stride()
    if (column != 1 and columns > 1) or (row < columns and rows > 1):
        raise InvalidArgument(f"{name}: strides {tensor.stride()}; rows must be dense and not overlap")
    # What there is only one of may have any stride.
    return on_device(name, tensor, device), row if rows > 1 else columns


def optional(name: str, tensor: Any | None, dtypes: Collection[Any], count: int, device: int) -> int:
    """As ``dense``; 0 for None."""
    return 0 if tensor is None else dense(name, tensor, dtypes, count, device)


def scale(name: str, given: Any, dtypes: Collection[Any], device: int) -> tuple[float, int]:
    """A factor that is a number, or one element on the device: the number, and the address that is read instead."""
    if isinstance(given, (float, int)):
        return given, 0
    return 1.0, dense(name, given, dtypes, 1, device)


@functools.cache
def _torch() -> Any:
    import torch

    return torch


_NOTHING = nullcontext()


def on(device: int) -> AbstractContextManager[Any]:
    """What makes ``device`` current. That costs time, so nothing is done where it is already."""
    torch = _torch()
    return _NOTHING if torch.cuda.current_device() == device else torch.cuda.device(device)


def launch_on(device: int, op: Op, run: dict[str, Any]) -> None:
    """``op.launch(**run)`` with ``device`` current."""
    with on(device):
        op.launch(**run)


_semaphores: dict[tuple[str, int, int], Any] = {}


def semaphores(op: str, beside: Any, stream: int, size: int) -> Any:
    """``size`` bytes on the device of ``beside``, zero before the first launch of ``op`` on ``stream``, whose launches
    come one after the other. While a graph is captured they are its own, since it may be launched on any stream.
    """
    torch = _torch()
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(size, dtype=torch.uint8, device=beside.device)
    key = op, beside.get_device(), stream
    found = _semaphores.get(key)
    if found is None or found.numel() < size:
        found = _semaphores[key] = torch.zeros(size, dtype=torch.uint8, device=beside.device)
    return found


@functools.cache
def sm_count(device: int) -> int:
    """Multiprocessors of a CUDA device."""
    return int(_torch().cuda.get_device_properties(device).multi_processor_count)


def check_sm_count(given: int | None, device: int) -> None:
    """Refuse to be told how many multiprocessors to fill: how work is split does not follow from it here.

    Raises:
        Unsupported: ``given`` is neither None nor the device's own.
    """
    if given is not None and given != sm_count(device):
        raise Unsupported(f"sm_count is {given}; it must be None or the device's own, {sm_count(device)}")
