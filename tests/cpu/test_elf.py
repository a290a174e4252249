"""The cubin reader: right on real cubins, typed errors on anything else."""

from __future__ import annotations

import contextlib
import io
import struct

import pytest
from builds import PACKED, bundle
from elftools.elf.elffile import ELFFile
from fuzz.small_elf import small_cubin
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernseal.export import elf
from kernseal.loader.errors import Malformed


@pytest.fixture(scope="module")
def image() -> bytes:
    return (bundle("90").path / f"cubin/gdn_prefill/{PACKED}.cubin").read_bytes()


@pytest.mark.slow
def test_a_real_cubin_has_one_entry_with_its_parameters(image: bytes) -> None:
    cubin = elf.read(image)
    (entry,) = cubin.entries.values()
    assert entry.name.startswith("kernel_cutlass_kernel_flashinfer")
    assert 24 <= entry.registers <= 255
    assert entry.code_bytes > 10_000
    assert [p.ordinal for p in entry.params] == list(range(len(entry.params)))
    tensor_maps = [p for p in entry.params if p.size == 128]
    assert len(tensor_maps) == 4  # q, k, v and o
    assert {(0x210 + p.offset) % 64 for p in tensor_maps} == {0}  # 0x210: where parameters start in the bank


@pytest.mark.slow
def test_another_instruction_is_another_code_digest_and_another_note_is_not(image: bytes) -> None:
    good = elf.read(image).code_sha256
    sections = {section.name: section for section in ELFFile(io.BytesIO(image)).iter_sections()}
    text = next(section for name, section in sections.items() if name.startswith(".text."))
    note = sections[".note.nv.tkinfo"]
    assert elf.read(flipped(image, text["sh_offset"] + 16)).code_sha256 != good
    assert elf.read(flipped(image, note["sh_offset"] + note["sh_size"] - 2)).code_sha256 == good


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_cubin_is_malformed_or_read_never_a_crash(image: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(image)))
    flips = data.draw(st.lists(st.tuples(st.integers(0, len(image) - 1), st.integers(0, 255)), max_size=8))
    altered = bytearray(image)
    for at, value in flips:
        altered[at] = value
    with contextlib.suppress(Malformed):
        elf.read(bytes(altered[:cut] if data.draw(st.booleans()) else altered))


@given(st.binary(max_size=4096))
def test_noise_is_malformed(noise: bytes) -> None:
    with pytest.raises(Malformed):
        elf.read(noise)


SECTION_FLAGS, SECTION_SIZE = 8, 32


def with_section_field(index: int, field: int, value: int) -> bytes:
    data = bytearray(small_cubin())
    (table,) = struct.unpack_from("<Q", data, 40)
    struct.pack_into("<Q", data, table + 64 * index + field, value)
    return bytes(data)


def test_a_compressed_section_is_refused_before_it_is_unpacked() -> None:
    with pytest.raises(Malformed, match=r"section '\.nv\.info' is compressed; supported are plain"):
        elf.read(with_section_field(2, SECTION_FLAGS, elf.COMPRESSED))


def test_sections_that_together_are_larger_than_the_file_are_refused() -> None:
    with pytest.raises(Malformed, match="supported are at most its own"):
        elf.read(with_section_field(1, SECTION_SIZE, 1 << 62))


def test_a_section_table_beyond_the_end_is_refused() -> None:
    data = bytearray(small_cubin())
    struct.pack_into("<Q", data, 40, 1 << 63)
    with pytest.raises(Malformed, match="section table does not lie in its 773 bytes"):
        elf.read(bytes(data))
