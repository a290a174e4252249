"""What a call needs to know of a tensor: address, device, element type, shape, strides.

torch tensors are read through their own methods (torch is never imported here), all others through DLPack, or through
``__cuda_array_interface__`` where that is all they have.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable
from typing import Any

from .errors import InvalidArgument, InvalidArgumentType, Unsupported

HOST = -1
"""Device of memory that no CUDA device owns."""
UNKNOWN = -2
"""Device of memory whose protocol does not tell: CUDA memory, taken to be where the op runs."""

ITEM_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "i32": 4, "u32": 4, "i64": 8, "u8": 1, "i8": 1, "e4m3": 1}


View = tuple[int, int, str, tuple[int, ...], "tuple[int, ...] | None"]
"""One tensor, described: address, CUDA device (or HOST, UNKNOWN), element type, shape, and strides in elements
(None for a dense row-major tensor). A plain tuple, since a call makes a dozen of them."""

Reader = Callable[[str, Any, int], View]
"""Reads an object, given the field it is for and the stream that will use it."""

_readers: dict[type, Reader] = {}
TORCH_TYPES: set[type] = set()
"""torch's tensor types, once one of each was read."""


def reader_of(name: str, value: object) -> Reader:
    """Return what reads objects of ``value``'s type.

    Raises:
        InvalidArgumentType: ``value`` is none of the objects that can be read.
    """
    kind = type(value)
    reader = _readers.get(kind)
    if reader is None:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            reader = _torch_reader(torch)
            TORCH_TYPES.add(kind)
        elif hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
            reader = _read_dlpack
        elif hasattr(value, "__cuda_array_interface__"):
            reader = _read_cuda_array
        else:
            raise InvalidArgumentType(
                f"{name}: expected a tensor, an object with __dlpack__ or __cuda_array_interface__, or an "
                f"address (int), got {kind.__name__}"
            )
        _readers[kind] = reader
    return reader


def _torch_reader(torch: Any) -> Reader:
    names = {
        torch.bfloat16: "bf16",
        torch.float16: "f16",
        torch.float32: "f32",
        torch.int32: "i32",
        torch.uint32: "u32",
        torch.int64: "i64",
        torch.uint8: "u8",
        torch.int8: "i8",
        torch.float8_e4m3fn: "e4m3",
    }

    def read(name: str, tensor: Any, stream: int) -> View:
        dtype = tensor.dtype
        return (
            tensor.data_ptr(),
            tensor.get_device() if tensor.is_cuda else HOST,
            names.get(dtype) or str(dtype),
            tensor.shape,
            None if tensor.is_contiguous() else tensor.stride(),
        )

    return read


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_DLPACK_DTYPES = {
    (4, 16): "bf16",
    (2, 16): "f16",
    (2, 32): "f32",
    (0, 32): "i32",
    (0, 64): "i64",
    (1, 8): "u8",
    (1, 32): "u32",
    (0, 8): "i8",
    (10, 8): "e4m3",
}
_DLPACK_CUDA = frozenset({2, 13})  # kDLCUDA, kDLCUDAManaged
_DLPACK_LEGACY_STREAM = 1  # the protocol's name for the legacy default stream; 0 would be ambiguous

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _read_dlpack(name: str, value: Any, stream: int) -> View:
    kind, _ = value.__dlpack_device__()
    on_cuda = int(kind) in _DLPACK_CUDA
    capsule = value.__dlpack__(**({"stream": stream or _DLPACK_LEGACY_STREAM} if on_cuda else {}))
    # The capsule is not consumed: when it goes, its producer takes the description back. The memory is the
    # caller's.
    address = _capsule_pointer(capsule, b"dltensor")
    if address is None:
        raise Unsupported(f"{name}: a DLPack capsule without a tensor")
    tensor = _DLTensor.from_address(address)
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None
    dtype = _DLPACK_DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    return (
        (tensor.data or 0) + tensor.byte_offset,
        tensor.device_id if tensor.device_type in _DLPACK_CUDA else HOST,
        dtype or f"DLPack type code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes",
        shape,
        None if strides == dense_strides(shape) else strides,
    )


_TYPESTR_DTYPES = {"f2": "f16", "f4": "f32", "i1": "i8", "i4": "i32", "i8": "i64", "u1": "u8", "u4": "u32"}


def _read_cuda_array(name: str, value: Any, stream: int) -> View:
    """Version 2 or 3 of the protocol. It has no bfloat16 and no 8-bit float, and does not tell the device."""
    described = value.__cuda_array_interface__
    theirs = described.get("stream")
    # The protocol leaves it to the reader to wait for their stream; a run does not wait.
    if theirs is not None and theirs != (stream or _DLPACK_LEGACY_STREAM):
        raise InvalidArgument(
            f"{name}: its work is on stream {theirs}; run there, or synchronise and pass it without"
        )
    shape, typestr = tuple(described["shape"]), described["typestr"]
    dtype = _TYPESTR_DTYPES.get(typestr[1:]) if typestr[0] in "<|=" else None
    return (
        described["data"][0],
        UNKNOWN,
        dtype or f"typestr {typestr!r}",
        shape,
        _strides_of_bytes(name, described.get("strides"), dtype, shape),
    )


def _strides_of_bytes(
    name: str, strides: tuple[int, ...] | None, dtype: str | None, shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    """In elements; None for a dense tensor, and for one whose element type is going to be refused."""
    if strides is None or dtype is None:
        return None
    size = ITEM_BYTES[dtype]
    if any(stride % size for stride in strides):
        raise InvalidArgument(
            f"{name}: strides {tuple(strides)} must be multiples of its {size}-byte elements"
        )
    elements = tuple(stride // size for stride in strides)
    return None if elements == dense_strides(shape) else elements


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a row-major tensor without gaps."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def row_stride(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the distance between rows (dimension 0) in elements, or 0 for a dense tensor.

    Raises:
        InvalidArgument: the rows themselves are not dense and row-major, or overlap.
    """
    if 0 in shape:
        return 0
    dense = dense_strides(shape)
    for size, have, want in zip(shape[1:], strides[1:], dense[1:], strict=True):
        if size != 1 and have != want:
            raise InvalidArgument(
                f"{name}: strides {tuple(strides)} of shape {tuple(shape)}; must be dense from dimension 1 on"
            )
    if shape[0] == 1 or strides[0] == dense[0]:
        return 0
    if strides[0] < dense[0]:
        raise InvalidArgument(f"{name}: rows overlap: stride {strides[0]}, rows of {dense[0]} elements")
    return int(strides[0])


def stream_handle(stream: object) -> int:
    """Return the CUstream behind an int, a torch stream or an object with ``__cuda_stream__``.

    Raises:
        InvalidArgumentType: it is none of these.
    """
    if type(stream) is int:
        return stream
    handle = getattr(stream, "cuda_stream", None)
    if isinstance(handle, int):
        return handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version, handle = protocol()
        if version == 0:
            return int(handle)
    raise InvalidArgumentType(
        "stream: expected a CUstream (int; 0 is the legacy default stream), a torch stream or an object with "
        f"__cuda_stream__ version 0, got {type(stream).__name__}"
    )


def torch_stream(device: int) -> int:
    """Return the address of torch's current stream on a CUDA device.

    ``torch.cuda.current_stream`` makes an object at each call, which takes longer than all checks of a run. What Triton asks
    gives the address alone; it is not documented, so where it is missing the object is made.
    """
    torch = sys.modules["torch"]
    ask = getattr(getattr(torch, "_C", None), "_cuda_getCurrentRawStream", None)
    return int(torch.cuda.current_stream(device).cuda_stream if ask is None else ask(device))


def current_stream(values: Iterable[object]) -> int:
    """Return torch's current stream on the device of the first CUDA tensor of torch's among ``values``.

    Raises:
        InvalidArgumentType: there is none, and no other memory says on which stream its work is.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        for value in values:
            if isinstance(value, torch.Tensor) and value.is_cuda:
                return torch_stream(value.get_device())
    raise InvalidArgumentType(
        "stream: missing; torch tensors have a current one, 0 is the legacy default stream"
    )
