"""Packs a C struct in one step: setting thirty fields one by one costs more than the launch."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from .errors import InvalidArgument, InvalidArgumentType, KernsealError

_CODES = {"int32_t": "i", "uint32_t": "I", "int64_t": "q", "uint64_t": "Q", "float": "f", "double": "d"}
_WHOLE_NUMBERS = frozenset(name for name, code in _CODES.items() if code in "iIqQ")
_SIZE_FIELD = "struct_size"


class Layout:
    """One C struct that starts with ``struct_size``.

    Attributes:
        names: its fields after ``struct_size``, in order.
        pointers: those that are pointers.
        sizes: those that are whole numbers.
    """

    def __init__(self, ffi: Any, name: str) -> None:
        kind = ffi.typeof(name)
        self._ffi = ffi
        self._pointer = ffi.typeof(f"{name} *")
        self.names: tuple[str, ...] = tuple(f for f, _ in kind.fields if f != _SIZE_FIELD)
        self.pointers = frozenset(f for f, c in kind.fields if c.type.kind == "pointer")
        self.sizes: tuple[str, ...] = tuple(
            f for f, c in kind.fields if f in self.names and c.type.cname in _WHOLE_NUMBERS
        )
        self._size = ffi.sizeof(name)
        self._codes = struct.Struct(_format(kind.fields, self._size))

    def pack(self, values: Sequence[Any]) -> Any:
        """Return a struct, as cdata, with ``values`` for ``names``. It is read-only.

        Raises:
            InvalidArgument: a value is None, or its type or range does not fit its field.
        """
        try:
            record = self._codes.pack(self._size, *values)
        except (struct.error, OverflowError, TypeError) as error:
            raise self._misfit(values) from error
        return self._ffi.from_buffer(self._pointer, record)

    def _misfit(self, values: Sequence[Any]) -> KernsealError:
        missing = [name for name, value in zip(self.names, values, strict=True) if value is None]
        if missing:
            return InvalidArgumentType(f"missing: {', '.join(missing)}; pass them, or tensors that show them")
        zeros: list[Any] = [0] * len(self.names)
        for index, (name, value) in enumerate(zip(self.names, values, strict=True)):
            row = list(zeros)
            row[index] = value
            try:
                self._codes.pack(self._size, *row)
            except (struct.error, OverflowError, TypeError) as error:
                kind = InvalidArgument if isinstance(value, (int, float)) else InvalidArgumentType
                return kind(f"{name}: {value!r} does not fit the field: {error}")
        return InvalidArgument("arguments do not fit their fields")


def _format(fields: Sequence[tuple[str, Any]], size: int) -> str:
    codes = ["="]
    at = 0
    for _, member in fields:
        codes.append(f"{member.offset - at}x")
        code = "Q" if member.type.kind == "pointer" else _CODES[member.type.cname]
        codes.append(code)
        at = member.offset + struct.calcsize(f"={code}")
    codes.append(f"{size - at}x")
    return "".join(codes)
