"""libkernseal.so and a folder with its images, made of test objects, and called through cffi."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cffi
from cpu.fake_driver.native import STRICT, ZIG, compile_c

from kernseal.abi import library, model
from kernseal.abi.library import KernelRecord, VariantRecord
from kernseal.export.spec import Op, Target, Variant

if TYPE_CHECKING:
    from cpu.fake_driver.host_objects import HostObject

ABI = model.load()
TRAPS = (*ZIG, "-fsanitize=undefined", "-fsanitize-trap=undefined")
"""The compiler of a library in which undefined behaviour traps."""
IMAGE = bytes(range(64))
KERNEL = KernelRecord("kernel", 0, 0, 0, 0)


def record_of(
    variant: Variant,
    image: bytes,
    kernels: Sequence[KernelRecord],
    host_prefix: str | None = None,
    host_function: str | None = None,
) -> VariantRecord:
    """What a library says of a variant."""
    return VariantRecord(
        op=variant.op,
        variant=variant.id,
        class_name=variant.class_name,
        axes=dict(variant.axes),
        kernels=tuple(kernels),
        file=f"cubin/{variant.key}.cubin",
        size=len(image),
        sha256=hashlib.sha256(image).hexdigest(),
        evidence="inspected",
        host_prefix=host_prefix,
        host_function=host_function,
    )


def stub(
    op: Op,
    axes: Mapping[str, Any],
    target: Target,
    image: bytes = IMAGE,
    kernels: Sequence[KernelRecord] = (KERNEL,),
) -> VariantRecord:
    """A variant whose image is just bytes, and which no host object launches."""
    return record_of(op.variant(target, axes), image, kernels)


def stub_library(stubs: Iterable[VariantRecord], sm: str, folder: Path) -> Path:
    """A library of variants whose images are ``IMAGE``: it refuses as the real one does. Undefined behaviour traps."""
    return build_library(sm, None, [(record, None, IMAGE) for record in stubs], folder, TRAPS)


def compiled_library(made: Sequence[HostObject], folder: Path) -> Kernseal:
    """A library of variants that were compiled for one target. Undefined behaviour traps."""
    target = made[0].target
    variants = [(one.record, one.ours, one.cubin) for one in made]
    path = build_library(target.sm, target.retarget, variants, folder, TRAPS)
    return Kernseal(path, flags=1 if target.retarget else 0)


def build_library(
    sm: str,
    retarget: str | None,
    variants: Sequence[tuple[VariantRecord, Path | None, bytes]],
    folder: Path,
    command: Sequence[str] = ZIG,
) -> Path:
    """Link the library of ``variants`` (record, host object if any, image) and lay out their images beside it."""
    generated = folder / "generated"
    sources = library.library_sources(sm, retarget, [record for record, _, _ in variants], generated)
    for record, _, image in variants:
        path = folder / record.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    flags = [*STRICT, "-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden"]
    flags += [f"-I{d}" for d in library.include_dirs()]
    flags.append(f"-Wl,--version-script,{library.version_script()}")
    objects = [host for _, host, _ in variants if host is not None]
    return compile_c(command, [*sources, *objects], folder / "libkernseal.so", *flags)


class Kernseal:
    """One libkernseal.so with a bundle open."""

    def __init__(self, path: Path, flags: int = 0) -> None:
        self.ffi: Any = cffi.FFI()
        self.ffi.cdef(library.cdef())
        self.c: Any = self.ffi.dlopen(str(path))
        out = self.ffi.new("kseal_bundle **")
        folder = self.ffi.new("char[]", str(path.parent).encode())
        args = self.struct(
            "kseal_open_args", abi_version=self.c.KSEAL_ABI_VERSION, flags=flags, bundle_path=folder
        )
        assert self.c.kseal_open(args, out) == 0, self.error()
        self.bundle = out[0]

    def struct(self, name: str, **fields: Any) -> Any:
        made = self.ffi.new(f"{name} *", {"struct_size": self.ffi.sizeof(name), **fields})
        return made

    def args(self, op: str, fields: Mapping[str, Any], pointers: Collection[str]) -> Any:
        """``kseal_<op>_args``; those of its fields that are ``pointers`` come as numbers."""
        cast = {n: self.ffi.cast("void *", v) if n in pointers else v for n, v in fields.items()}
        return self.struct(f"kseal_{op}_args", **cast)

    def error(self) -> str:
        text = self.ffi.string(self.c.kseal_last_error())
        assert isinstance(text, bytes)
        return text.decode()

    def config(self, op: str, axes: Mapping[str, Any], device: int = -1) -> Any:
        described = ABI.op(op)
        values = {a.name: a.values[model.axis_key(axes[a.name])] for a in described.axes}
        return self.struct(f"kseal_{op}_config", device=device, **values)

    def prepare(self, op: str, axes: Mapping[str, Any], device: int = -1) -> Any:
        out = self.ffi.new(f"kseal_{op} **")
        status = getattr(self.c, f"kseal_{op}_prepare")(self.bundle, self.config(op, axes, device), out)
        assert status == 0, self.error()
        return out[0]

    def close(self) -> None:
        self.c.kseal_close(self.bundle)
