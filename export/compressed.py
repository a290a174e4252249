"""What a file becomes for its way: gzip, each file on its own, and back within the bounds that were announced."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from kernseal.loader.violations import Malformed, failed

LEVEL = 6
"""Level 9 takes 5 times as long for 2 % less."""
_GZIP = zlib.MAX_WBITS + 16
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """Of a bundle: ``bytes`` of its files, manifest and envelope among them, and what travels, ``compressed``."""

    files: int
    bytes: int
    compressed: int


def pack(data: bytes) -> bytes:
    """``data`` as one gzip member without time or name: the same bytes wherever zlib is the same."""
    stream = zlib.compressobj(LEVEL, zlib.DEFLATED, _GZIP)
    return stream.compress(data) + stream.flush()


def unpack(packed: BinaryIO, size: int, name: str) -> Iterator[bytes]:
    """What ``packed`` holds, in pieces: ``size`` bytes together, and never one more.

    Raises:
        VerificationFailed: Malformed; it is not one whole gzip member, or of another size. ``name`` is how it is called.
    """
    stream, left = zlib.decompressobj(_GZIP), size
    while not stream.eof and (data := stream.unconsumed_tail or packed.read(_CHUNK)):
        try:
            piece = stream.decompress(data, min(left + 1, _CHUNK))
        except zlib.error as error:
            raise failed(Malformed(name, f"bytes that do not unpack ({error})", "gzip")) from None
        left -= len(piece)
        if left < 0:
            raise failed(Malformed(name, f"unpacks to more than {size} bytes", f"{size} bytes"))
        yield piece
    if not stream.eof or left:
        raise failed(Malformed(name, f"unpacks to {size - left} bytes", f"{size} bytes, all of them"))
    if stream.unused_data or packed.read(1):
        raise failed(Malformed(name, "bytes after its gzip member", "one member"))
