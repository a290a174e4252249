"""A cubin of under a kilobyte with everything that our reader looks at: what the fuzzers of the ELF readers start from."""

from __future__ import annotations

import struct

from kernseal.export import elf

PROGBITS, SYMTAB, STRTAB, CUDA_INFO = 1, 2, 3, 0x70000000
CUDA, EXECUTABLE = 190, 2
KERNEL, HELPER = "k", "helper"


def small_cubin() -> bytes:
    """One kernel with two parameters, and one symbol that is not defined."""
    names = [f".text.{KERNEL}", ".nv.info", f".nv.info.{KERNEL}", ".symtab", ".strtab", ".shstrtab"]
    strings, at = _strings([KERNEL, HELPER])
    symbols = bytes(24) + _symbol(at[KERNEL], section=1) + _symbol(at[HELPER], section=0)
    titles, title_at = _strings(names)
    bodies = [bytes(range(64)), _info(), _kernel_info(), symbols, strings, titles]
    kinds = [PROGBITS, CUDA_INFO, CUDA_INFO, SYMTAB, STRTAB, STRTAB]
    headers, offset = [bytes(64)], 64
    for name, kind, body in zip(names, kinds, bodies, strict=True):
        link, size = (5, 24) if kind == SYMTAB else (0, 0)
        headers.append(
            struct.pack("<IIQQQQIIQQ", title_at[name], kind, 0, 0, offset, len(body), link, 0, 1, size)
        )
        offset += len(body)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", EXECUTABLE, CUDA, 1, 0, 0, offset, 0, 64, 56, 0, 64, 7, 6
    )
    return header + b"".join(bodies) + b"".join(headers)


def _strings(names: list[str]) -> tuple[bytes, dict[str, int]]:
    data, at = b"\0", {}
    for name in names:
        at[name] = len(data)
        data += name.encode() + b"\0"
    return data, at


def _symbol(name: int, section: int) -> bytes:
    return struct.pack("<IBBHQQ", name, 0x12, 0, section, 0, 64)


def _sized(attribute: int, value: bytes) -> bytes:
    return struct.pack("<BBH", elf.SIZED, attribute, len(value)) + value


def _info() -> bytes:
    registers = _sized(elf.REGCOUNT, struct.pack("<II", 1, 40))
    return registers + _sized(elf.FRAME_SIZE, struct.pack("<II", 1, 16))


def _kernel_info() -> bytes:
    params = [_sized(elf.KPARAM_INFO, struct.pack("<IHHI", 0, i, 8 * i, 8 << 18 | 0x1F000)) for i in range(2)]
    half = struct.pack("<BBH", elf.HALF, elf.CBANK_PARAM_SIZE, 16)
    return half + b"".join(params)
