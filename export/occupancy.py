"""How many thread blocks (CTAs) of a kernel one SM can hold, by the rules of CUDA's own cuda_occupancy.h.

It only informs: ``elf.py`` and ``limits.py``, which decide bytes of a variant, are read through and not added to.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernseal.export import elf, limits
from kernseal.loader.errors import Malformed

MAX_THREADS, EXACT_THREADS = 0x05, 0x10
"""``.nv.info`` attributes: ``.maxntid`` and ``.reqntid`` of the PTX."""
WARP_THREADS, PARTITIONS = 32, 4
REGISTER_UNIT, SMEM_UNIT = 256, 128
"""What registers of a warp, and shared memory of a CTA, are allocated in."""


@dataclass(frozen=True)
class Occupancy:
    """CTAs of one kernel that one SM holds at once.

    Attributes:
        ctas: how many; 0 for a kernel that cannot be launched at all.
        limited_by: those of ``registers``, ``smem``, ``threads`` and ``ctas`` that allow no more.
    """

    ctas: int
    limited_by: tuple[str, ...]


def block_threads(cubin: bytes, entry: str) -> int | None:
    """Most threads that a CTA of ``entry`` may have, from its launch bounds, or None where it has none.

    Raises:
        Malformed: not a cubin.
    """
    file = elf._open(cubin, "cubin")
    try:
        attributes = dict(elf._attributes(elf._bytes(file.get_section_by_name(f".nv.info.{entry}"))))
        bound = attributes.get(EXACT_THREADS, attributes.get(MAX_THREADS))
        if bound is None:
            return None
        x, y, z = struct.unpack("<III", bound)
    except Exception as error:  # as elf.read: whatever comes of nonsense
        raise Malformed(f"cubin: {type(error).__name__}: {error}") from error
    return int(x) * int(y) * int(z)


def of(arch: str, threads: int, registers: int, smem: int) -> Occupancy:
    """CTAs of ``threads`` threads that fit, with the SM's memory given to shared memory as far as it goes.

    Args:
        threads: at least 1.
        registers: of a thread.
        smem: bytes of shared memory of a CTA, static and dynamic, without what the system adds.
    """
    sm = limits._table()[arch]
    warps = _div_up(threads, WARP_THREADS)
    most = {
        "registers": _by_registers(sm, warps, registers),
        "smem": _by_smem(sm, smem),
        "threads": sm["max_threads_per_sm"] // WARP_THREADS // warps,
        "ctas": sm["max_blocks_per_sm"],
    }
    fewest = min(most.values())
    return Occupancy(fewest, tuple(name for name, ctas in most.items() if ctas == fewest))


def of_kernel(arch: str, record: Mapping[str, Any], cubin: bytes) -> Occupancy | None:
    """Of a kernel as a manifest records it; None where its cubin does not bound its threads.

    Raises:
        Malformed: ``cubin`` is none.
    """
    threads = block_threads(cubin, record["entry"])
    smem = record["static_smem"] + record["dynamic_smem"]
    return None if threads is None else of(arch, threads, record["registers"], smem)


def _by_registers(sm: Mapping[str, Any], warps: int, registers: int) -> int:
    a_warp = _div_up(registers * WARP_THREADS, REGISTER_UNIT) * REGISTER_UNIT
    file = sm["registers_per_sm"]
    if a_warp == 0:
        return int(sm["max_blocks_per_sm"])
    # The check at a launch counts warps in whole rounds over the partitions; a CTA may use up the file.
    if a_warp * _div_up(warps, PARTITIONS) * PARTITIONS > file:
        return 0
    return int(file // PARTITIONS // a_warp * PARTITIONS // warps)


def _by_smem(sm: Mapping[str, Any], smem: int) -> int:
    if smem > sm["max_smem_per_block"]:
        return 0
    a_cta = _div_up(smem + sm["reserved_smem_per_block"], SMEM_UNIT) * SMEM_UNIT
    return int(sm["max_smem_per_sm"] // a_cta)


def _div_up(value: int, unit: int) -> int:
    return -(-value // unit)
