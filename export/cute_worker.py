"""Compiles one variant with CuTe DSL. No GPU is needed. See ``compile_server`` for the process it runs in.

The host object is made from the same MLIR module that the DSL exports, with two changes: the cubin embedded in it is
removed (the image that loads is the bundle's), and code is generated for the baseline of the host architecture, not for the
processor that happens to build.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import sys
import types
from pathlib import Path
from typing import Any

from kernseal.export.job import CuteAnswer, CuteJob
from kernseal.export.recipe import load_recipe
from kernseal.export.toolchain import bind_dsl

HOST_TARGETS = {
    "linux-x86_64": ("x86_64-unknown-linux-gnu", "x86-64"),
    "linux-aarch64": ("aarch64-unknown-linux-gnu", "generic"),
}
EMBEDDED_IMAGE = "kernels_binary"
LAUNCH = "llvm.call @_cudaLaunchKernelEx("
CONFIG = r"struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"


def isolate(job: CuteJob) -> None:
    """Make ``flashinfer`` mean the patched tree, whatever is installed, and nothing but its source set."""
    top = types.ModuleType("flashinfer")
    top.__path__ = [str(Path(job.tree) / "flashinfer")]
    sys.modules["flashinfer"] = top
    for name, attributes in job.host_only.items():
        module = types.ModuleType(name)
        for attribute in attributes:
            setattr(module, attribute, _refuse(f"{name}.{attribute}"))
        sys.modules[name] = module


def _refuse(name: str) -> Any:
    def called(*_: object, **__: object) -> None:
        raise RuntimeError(f"{name} is host-only and was called by a kernel build")

    return called


def imported_files(tree: str) -> list[str]:
    root = Path(tree)
    origins = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return sorted(
        {Path(o).relative_to(root).as_posix() for o in origins if o and Path(o).is_relative_to(root)}
    )


def launched_kernels(mlir: str) -> list[tuple[str, int]]:
    """The kernels that the host code launches, in order, and the bytes of dynamic shared memory it asks for (the most, where
    one is launched in several places).

    Raises:
        ValueError: a launch whose kernel or constant cannot be told.
    """
    (body,) = (text for text in re.split(r"^  llvm\.func ", mlir, flags=re.MULTILINE) if LAUNCH in text)
    fields = re.findall(
        rf"(%\d+) = llvm\.getelementptr %\d+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, !llvm\.{CONFIG}", body
    )
    kernels = re.findall(rf"{re.escape(LAUNCH)}%\w+, (%\w+),", body)
    if len(fields) != len(kernels):
        raise ValueError(f"{len(kernels)} launches and {len(fields)} launch configurations")
    found: dict[str, int] = {}
    for field, kernel in zip(fields, kernels, strict=True):
        entry = _launched_entry(body, kernel)
        found[entry] = max(found.get(entry, 0), _stored_constant(body, field))
    return list(found.items())


def _launched_entry(body: str, kernel: str) -> str:
    """Name of the kernel that the value is loaded from the global of."""
    names = re.findall(
        rf"^\s*(%\w+) = llvm\.mlir\.addressof @kernels_(\S+) : !llvm\.ptr\n\s*{kernel} = llvm\.load \1 ",
        body,
        re.MULTILINE,
    )
    if len(names) != 1:
        raise ValueError(f"launch of {kernel}: expected one kernel, found {[name for _, name in names]}")
    return str(names[0][1])


def _stored_constant(body: str, field: str) -> int:
    """Bytes of dynamic shared memory stored into a launch configuration."""
    values: set[int] = set()
    for stored in re.findall(rf"llvm\.store (%\w+), {field} : i64", body):
        constants = re.findall(rf"^\s*{stored} = llvm\.mlir\.constant\((\d+) : i64\)", body, re.MULTILINE)
        values |= {int(value) for value in constants}
    if len(values) != 1:
        raise ValueError(
            f"dynamic shared memory: expected one constant in the launch configuration, found {sorted(values)}"
        )
    return values.pop()


def host_object(compiled: Any, job: CuteJob, path: Path) -> None:
    """Write the host object without the cubin and without the DSL's pickled signature (which differs between Pythons)."""
    from cutlass._mlir import ir
    from cutlass.base_dsl.export import get_export_module

    module = get_export_module(compiled.ir_module, job.prefix)
    removed = []

    def strip(op: Any) -> Any:
        if op.name == "llvm.mlir.global" and op.attributes["sym_name"].value == EMBEDDED_IMAGE:
            with module.context:
                op.attributes["value"] = ir.StringAttr.get("\0")
                op.attributes["global_type"] = ir.TypeAttr.get(ir.Type.parse("!llvm.array<1 x i8>"))
            removed.append(op.name)
        return ir.WalkResult.ADVANCE

    module.operation.walk(strip)
    if len(removed) != 1:
        raise RuntimeError(
            f"expected one embedded image {EMBEDDED_IMAGE!r} in the host module, found {len(removed)}"
        )
    if "gpu.container_module" in module.operation.attributes:
        del module.operation.attributes["gpu.container_module"]
    triple, cpu = HOST_TARGETS[job.host]
    engine = compiled.export_provider.mlirExecutionEngine
    name = f"{job.prefix}_{compiled.function_name}"
    engine.dump_object_file_pic(module, str(path), name, host_triple=triple, host_cpu=cpu, host_features="")


def import_dsl(runtime: str) -> None:
    """Import the pinned DSL with its runtime library loaded, so that host code can be compiled."""
    ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    bind_dsl()
    importlib.import_module("cutlass.cute")


def compile_variant(job: CuteJob) -> None:
    import_dsl(job.runtime)
    isolate(job)
    import cutlass.cute as cute
    from cutlass.base_dsl.compiler import DumpDir

    upstream_class = getattr(importlib.import_module(job.cls["module"]), job.cls["name"])
    recipe = load_recipe(job.recipe)
    kernel, args = getattr(recipe, job.cls["builder"])(
        upstream_class, job.axes, {**job.cls, "arch": job.arch}
    )
    out = Path(job.out)
    dump = out / "dump"
    dump.mkdir()
    options = (
        cute.GPUArch(job.arch),
        cute.OptLevel(3),
        cute.KeepPTX(True),
        cute.KeepCUBIN(True),
        DumpDir(str(dump)),
    )
    compiled = cute.compile[options](kernel, *args)
    (ptx,) = dump.glob("*.ptx")
    (cubin,) = dump.glob("*.cubin")
    kernels = launched_kernels(str(compiled.ir_module))
    if {entry for entry, _ in kernels} != set(compiled.kernel_info):
        raise RuntimeError(f"kernels {sorted(compiled.kernel_info)}, but launched are {kernels}")
    ptx.rename(out / "raw.ptx")
    cubin.rename(out / "dsl.cubin")
    host_object(compiled, job, out / "host.o")
    answer = CuteAnswer(kernels, compiled.function_name, imported_files(job.tree))
    answer.save(out / "answer.json")
