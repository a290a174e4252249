"""Upstream's CUDA C++ as it is, unpatched, and what nvcc makes of it."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile
from nvcc import toolkit

from kernseal.export import elf, occupancy, source
from kernseal.export.recipe import load_recipe
from kernseal.export.spec import Op, Target

OURS = ("GENERATE_CUBIN", "KSEAL_SMALL_TILES")
"""Macros that only our builds set."""
HOST_FILES = ("hostUtils.h", "tensorMap.h", "tensorMap.cpp")
FLAGS = ("-std=c++17", "-O3", "-use_fast_math", "--expt-relaxed-constexpr")
"""Those of upstream's JIT (``gen_jit_spec``)."""


def unpack(op: Op, folder: Path) -> None:
    """The files that the op's launchers and kernels are made of, side by side."""
    opened, _ = source.open_source(None, source.upstream())
    names = list(source.source_set(op.folder))
    names += [str(Path(names[0]).with_name(name)) for name in HOST_FILES]
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        data = opened.read(name)
        assert data is not None, name
        (folder / Path(name).name).write_bytes(data)


def class_of(op: Op, axes: Mapping[str, Any], sm: str) -> Mapping[str, Any]:
    """The class of ``kernel.yaml`` that has the axes on ``sm``."""
    cls: Mapping[str, Any] = op.data["classes"][op.variant(Target(sm), axes).class_name]
    return cls


def definitions(op: Op, axes: Mapping[str, Any], sm: str) -> list[str]:
    """``-D`` for every macro that upstream's JIT would set."""
    cls = class_of(op, axes, sm)
    builder = getattr(load_recipe(str(op.folder / op.data["recipe"])), cls["builder"])
    macros = {name: value for name, value in builder(axes, cls).macros.items() if name not in OURS}
    return [f"-D{name}={value}" for name, value in sorted(macros.items())]


def architecture(sm: str, *, assembled: bool) -> str:
    virtual = sm.replace("sm_", "compute_")
    return f"-gencode=arch={virtual},code={sm if assembled else virtual}"


@dataclass(frozen=True)
class Kernel:
    """A kernel as nvcc builds it, in the words of our manifests.

    Attributes:
        frame: bytes of stack a thread.
    """

    registers: int
    frame: int
    spill_bytes: int
    static_smem: int
    dynamic_smem: int
    threads: int
    params: tuple[int, ...]


def compile_kernel(op: Op, axes: Mapping[str, Any], sm: str, folder: Path) -> Kernel:
    """nvcc's kernel for the product's SM: sources from ``unpack`` in ``folder``."""
    module = Path(class_of(op, axes, sm)["module"]).name
    report = toolkit.nvcc(
        [
            *(
                architecture(sm, assembled=True),
                *FLAGS,
                "-w",
                "-Xptxas",
                "-v",
                "-I.",
                *definitions(op, axes, sm),
            ),
            *("-cubin", "-o", "kernel.cubin", module),
        ],
        folder,
    )
    cubin = (folder / "kernel.cubin").read_bytes()
    (entry,) = elf.read(cubin).entries.values()
    threads = occupancy.block_threads(cubin, entry.name)
    assert threads is not None
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    assert spills, report
    return Kernel(
        registers=entry.registers,
        frame=entry.frame,
        spill_bytes=sum(map(int, spills)),
        static_smem=sum(map(int, re.findall(r"(\d+) bytes smem", report))),
        dynamic_smem=smem_size(cubin),
        threads=threads,
        params=tuple(param.size for param in entry.params),
    )


def smem_size(cubin: bytes) -> int:
    """``smemSize``, which is a local symbol here and so has a mangled name."""
    file = ELFFile(io.BytesIO(cubin))
    table = file.get_section_by_name(".symtab")
    assert table is not None
    (symbol,) = [s for s in table.iter_symbols() if re.search(r"8smemSize|^smemSize$", s.name)]
    data = file.get_section(symbol["st_shndx"]).data()
    return int.from_bytes(data[symbol["st_value"] : symbol["st_value"] + 4], "little")
