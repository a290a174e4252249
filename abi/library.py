"""The C sources of one libkernseal.so: the core, the launch code of every op, and its table of variants."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernseal.abi.model import ABI_DIR, KERNELS_DIR, Abi, axis_key, load
from kernseal.abi.render import template

_SYMBOL = re.compile(r"[A-Za-z0-9_.$]+")
MAX_KERNELS = 8
"""``KSEAL_MAX_KERNELS`` of ``core/variant.h``."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class KernelRecord:
    """One kernel of a variant's image.

    Attributes:
        entry: its name in the image.
        registers: of a thread.
        spill_bytes: register spills of a thread, stores and loads together.
        static_smem, dynamic_smem: bytes of shared memory of a block, declared and asked for at launch.
    """

    entry: str
    registers: int
    spill_bytes: int
    static_smem: int
    dynamic_smem: int


@dataclass(frozen=True)
class VariantRecord:
    """One built variant, as the library needs to know it.

    Attributes:
        class_name: key of ``classes`` in the op's ``kernel.yaml``.
        axes: value of every axis of the op.
        kernels: of the image, 1 to 8; the first is the one a ``kseal_variant_info`` describes.
        file: the image's path in the bundle.
        size, sha256: of the image.
        evidence: a name of ``kseal_evidence`` in ``types.yaml``.
        host_prefix, host_function: the CuTe host object's symbols are ``_mlir_<prefix>_cuda_init``,
            ``_mlir_<prefix>_cuda_load_to_device`` and ``_mlir_<prefix>__mlir_ciface_<function>``. Both None where there
            is no host object and the library launches the kernel itself.
    """

    op: str
    variant: str
    class_name: str
    axes: dict[str, str | bool | int]
    kernels: tuple[KernelRecord, ...]
    file: str
    size: int
    sha256: str
    evidence: str
    host_prefix: str | None
    host_function: str | None


@dataclass(frozen=True)
class _Row:
    """A record with its names resolved to what the C table holds."""

    record: VariantRecord
    axes: tuple[int, ...]
    axes_text: str
    class_index: int
    evidence: int


def compute_capability(sm: str) -> tuple[int, int]:
    """``sm_90a`` to (9, 0). Raises ValueError for anything that is not an SM name."""
    match = re.fullmatch(r"sm_(\d{1,2})(\d)[af]?", sm)
    if match is None:
        raise ValueError(f"sm: {sm!r} is not an SM such as sm_90a")
    return int(match[1]), int(match[2])


def core_sources() -> list[Path]:
    """Every C file but kseal_variants.c, in a fixed order."""
    ops = sorted(source for path in KERNELS_DIR.glob("*/kernel.yaml") for source in path.parent.glob("*.c"))
    return [*sorted((ABI_DIR / "core").glob("*.c")), ABI_DIR / "generated" / "kernseal_ops.c", *ops]


def include_dirs() -> list[Path]:
    """Folders for ``-I``; an op includes its own headers, and other ops', as ``<op>/<name>.h``."""
    return [ABI_DIR / "core", ABI_DIR / "generated", KERNELS_DIR]


def version_script() -> Path:
    """Linker version script: exports kseal_* functions of the header and nothing else."""
    return ABI_DIR / "core" / "kernseal.map"


def header() -> Path:
    """The public header, which a bundle carries as kernseal.h."""
    return ABI_DIR / "generated" / "kernseal.h"


def interface_files() -> dict[str, Path]:
    """What a C or C++ program is built with, by its path in the bundle; the same for every bundle."""
    places = {
        "": ("kernseal.h", "kernseal.hpp"),
        "lib/cmake/kernseal/": ("kernseal-config.cmake", "kernseal-config-version.cmake"),
        "lib/pkgconfig/": ("kernseal.pc", "kernseal-headers.pc"),
    }
    return {f"{at}{name}": ABI_DIR / "generated" / name for at, names in places.items() for name in names}


def cdef() -> str:
    """The declarations for cffi."""
    return (ABI_DIR / "generated" / "kernseal_cdef.h").read_text()


def abi_version() -> int:
    return load().version


def library_sources(
    sm: str, retarget: str | None, variants: Sequence[VariantRecord], out: Path
) -> list[Path]:
    """Writes ``kseal_variants.c`` into ``out`` and returns every C file to compile, in a fixed order.

    Args:
        sm: the target, such as ``sm_120a``.
        retarget: the SM that the target's classes were built for instead, for validation; else None.
        variants: in any order; the table is sorted by op and variant.

    Raises:
        ValueError: a record that does not fit ``kernel.yaml`` or cannot be written into C.
    """
    rows = _rows(load(), variants)
    runs_on = retarget or sm
    text = template("kseal_variants.c.j2").render(
        sm=sm, retarget=retarget, runs_on=runs_on, cc=compute_capability(runs_on), variants=rows
    )
    compute_capability(sm)
    out.mkdir(parents=True, exist_ok=True)
    (out / "kseal_variants.c").write_text(text)
    return [*core_sources(), out / "kseal_variants.c"]


def _rows(abi: Abi, variants: Sequence[VariantRecord]) -> list[_Row]:
    ordered = sorted(variants, key=lambda v: (v.op, v.variant))
    _refuse_duplicates("variant", [f"{v.op}/{v.variant}" for v in ordered])
    _refuse_duplicates("host_prefix", [v.host_prefix for v in ordered if v.host_prefix is not None])
    rows = []
    for record in ordered:
        try:
            rows.append(_row(abi, record))
        except KeyError as e:
            raise ValueError(f"{record.op}/{record.variant}: {e.args[0]}") from None
    _refuse_duplicates("config", [f"{row.record.op} {row.axes_text}" for row in rows])
    return rows


def _check_text(record: VariantRecord) -> None:
    where = f"{record.op}/{record.variant}"
    texts = {name: value for name, value in vars(record).items() if isinstance(value, str)}
    texts |= {f"kernels.{i}.entry": kernel.entry for i, kernel in enumerate(record.kernels)}
    if not 1 <= len(record.kernels) <= MAX_KERNELS:
        raise ValueError(f"{where}: kernels: {len(record.kernels)}; supported are 1 to {MAX_KERNELS}")
    for name, value in texts.items():
        if not value.isascii() or not value.isprintable() or '"' in value or "\\" in value:
            raise ValueError(f"{where}: {name} {value!r} cannot be written into C")
    if (record.host_prefix is None) != (record.host_function is None):
        raise ValueError(f"{where}: host_prefix and host_function: one is there without the other")
    for name in ("host_prefix", "host_function"):
        value = getattr(record, name)
        if value is not None and not _SYMBOL.fullmatch(value):
            raise ValueError(f"{where}: {name} {value!r} is not a symbol")
    if not _SHA256.fullmatch(record.sha256):
        raise ValueError(f"{where}: sha256 {record.sha256!r} is not 64 lowercase hex digits")


def _row(abi: Abi, record: VariantRecord) -> _Row:
    _check_text(record)
    op = abi.op(record.op)
    classes = [c.name for c in op.classes]
    if record.class_name not in classes:
        raise KeyError(f"class_name {record.class_name!r} is not one of {', '.join(classes)}")
    evidence = next(e for e in abi.enums if e.name == "kseal_evidence").constant(record.evidence).value
    axes = op.axis_values(record.axes)
    text = " ".join(f"{axis.name}={axis_key(record.axes[axis.name])}" for axis in op.axes)
    return _Row(record, axes, text, classes.index(record.class_name), evidence)


def _refuse_duplicates(what: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{what} given twice: {', '.join(twice)}")
