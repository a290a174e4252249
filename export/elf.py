"""Reads a cubin: entries, parameter layout, registers, shared memory. Format facts: NVIDIA's ``.nv.info`` attributes."""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from elftools.elf.elffile import ELFFile

from kernseal.loader.errors import Malformed

REGCOUNT, FRAME_SIZE, PARAM_CBANK, CBANK_PARAM_SIZE, KPARAM_INFO = 0x2F, 0x11, 0x0A, 0x19, 0x17
SIZED, HALF = 0x04, 0x03
COMPRESSED, HEADER_BYTES = 0x800, 64
CODE_SECTIONS = (".text.", ".nv.constant", ".nv.global", ".nv.info", ".nv.shared.")


@dataclass(frozen=True)
class Param:
    """A kernel parameter: ordinal, offset and size in bytes."""

    ordinal: int
    offset: int
    size: int


@dataclass(frozen=True)
class Entry:
    """One kernel of a cubin.

    Attributes:
        name: symbol.
        registers: per thread.
        frame: bytes of stack a thread.
        code_bytes: size of its machine code.
        params: in order of ordinal.
    """

    name: str
    registers: int
    frame: int
    code_bytes: int
    params: tuple[Param, ...]


@dataclass(frozen=True)
class Cubin:
    """What a cubin holds.

    Attributes:
        entries: kernels, by name.
        code_sha256: SHA-256 over names and bytes of the sections that make up the program, without notes and symbols.
    """

    entries: dict[str, Entry]
    code_sha256: str


def read(data: bytes) -> Cubin:
    """Parse a cubin.

    Raises:
        Malformed: not an ELF file, or its attributes do not parse.
    """
    elf = _open(data, "cubin")
    try:
        sections = {section.name: section for section in elf.iter_sections()}
        names = [name[len(".text.") :] for name in sections if name.startswith(".text.")]
        symbols = _symbols(elf)
        per_symbol = _global_attributes(_bytes(sections.get(".nv.info")), symbols)
        entries = {name: _entry(name, sections, per_symbol.get(name, {})) for name in sorted(names)}
        entries = {name: entry for name, entry in entries.items() if f".nv.info.{name}" in sections}
        return Cubin(entries, _code_digest(sections))
    except Exception as error:  # whatever pyelftools makes of nonsense, and it is a lot
        raise Malformed(f"cubin: {type(error).__name__}: {error}") from error


def _open(data: bytes, what: str) -> ELFFile:
    """An ELF file of 64 bits whose sections lie in it side by side: reading it costs no more than its size.

    Raises:
        Malformed: it is none.
    """
    try:
        elf = ELFFile(io.BytesIO(data))
        end = elf["e_shoff"] + elf["e_shnum"] * elf["e_shentsize"]
        if elf.elfclass != 64 or elf["e_shentsize"] != HEADER_BYTES or end > len(data):
            raise Malformed(f"{what}: its section table does not lie in its {len(data)} bytes")
        total = 0
        for section in elf.iter_sections():
            # A compressed section could unpack to anything; compilers make none here.
            if section["sh_flags"] & COMPRESSED:
                raise Malformed(
                    f"{what}: section {section.name!r} is compressed; supported are plain sections"
                )
            total += 0 if section["sh_type"] == "SHT_NOBITS" else section["sh_size"]
    except Malformed:
        raise
    except Exception as error:
        raise Malformed(f"{what}: {type(error).__name__}: {error}") from error
    if total > len(data):
        raise Malformed(f"{what}: {total} bytes of sections; supported are at most its own {len(data)}")
    return elf


def _bytes(section: object) -> bytes:
    if section is None or section["sh_type"] == "SHT_NOBITS":  # type: ignore[index]
        return b""
    return bytes(section.data())  # type: ignore[attr-defined]


def _symbols(elf: ELFFile) -> dict[int, str]:
    table = elf.get_section_by_name(".symtab")
    return {} if table is None else {i: symbol.name for i, symbol in enumerate(table.iter_symbols())}


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == SIZED:
            yield attribute, data[at : at + size]
            at += size
        else:
            yield attribute, struct.pack("<H", size)


def _global_attributes(data: bytes, symbols: dict[int, str]) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = {}
    for attribute, value in _attributes(data):
        if attribute in (REGCOUNT, FRAME_SIZE) and len(value) == 8:
            symbol, number = struct.unpack("<II", value)
            found.setdefault(symbols[symbol], {})[attribute] = number
    return found


def _entry(name: str, sections: dict[str, object], numbers: dict[int, int]) -> Entry:
    params = []
    for attribute, value in _attributes(_bytes(sections.get(f".nv.info.{name}"))):
        if attribute == KPARAM_INFO:
            _, ordinal, offset, packed = struct.unpack("<IHHI", value)
            params.append(Param(ordinal, offset, packed >> 18))
    return Entry(
        name=name,
        registers=numbers.get(REGCOUNT, 0),
        frame=numbers.get(FRAME_SIZE, 0),
        code_bytes=len(_bytes(sections[f".text.{name}"])),
        params=tuple(sorted(params, key=lambda p: p.ordinal)),
    )


def _code_digest(sections: dict[str, object]) -> str:
    digest = hashlib.sha256()
    for name in sorted(sections):
        if name.startswith(CODE_SECTIONS):
            data = _bytes(sections[name])
            digest.update(f"{name}\0{len(data)}\0".encode())
            digest.update(data)
    return digest.hexdigest()


def constant_u32(data: bytes, name: str) -> int:
    """A 32-bit constant that a cubin exports.

    Raises:
        Malformed: not an ELF file, or it has no such constant with a value.
    """
    elf = _open(data, "cubin")
    try:
        table = elf.get_section_by_name(".symtab")
        found = [] if table is None else table.get_symbol_by_name(name) or []
        for symbol in found:
            content = _bytes(elf.get_section(symbol["st_shndx"]))
            at, size = symbol["st_value"], symbol["st_size"]
            if size == 4 and at + size <= len(content):
                return int.from_bytes(content[at : at + size], "little")
    except Exception as error:
        raise Malformed(f"cubin: {type(error).__name__}: {error}") from error
    raise Malformed(f"cubin: no 32-bit constant {name!r}")


def undefined_symbols(data: bytes) -> list[str]:
    """Names that an object file imports.

    Raises:
        Malformed: not an ELF file.
    """
    elf = _open(data, "object file")
    try:
        table = elf.get_section_by_name(".symtab")
        symbols = [] if table is None else table.iter_symbols()
        return sorted(s.name for s in symbols if s.name and s["st_shndx"] == "SHN_UNDEF")
    except Exception as error:
        raise Malformed(f"object file: {type(error).__name__}: {error}") from error
