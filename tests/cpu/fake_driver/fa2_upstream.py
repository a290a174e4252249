"""Upstream's launchers of FA2 prefill, unpatched, for the parameter struct of our programs, over the recording driver."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cffi
from builds import compile_cache, locked
from cpu.fake_driver.fa2 import MERGE_PARAMS
from cpu.fake_driver.gpu import FakeGpu
from nvcc import toolkit

from kernseal.export import build, patch, paths, source, spec
from kernseal.export.build import Options
from kernseal.export.progress import Silent
from kernseal.export.recipe import load_recipe
from kernseal.export.variant import Built

HERE = Path(__file__).resolve().parent


def class_of(op: spec.Op, axes: Mapping[str, Any], sm: str) -> Any:
    return op.data["classes"][op.variant(spec.Target(sm), axes).class_name]


def recipe_of(op: spec.Op) -> Any:
    return load_recipe(str(op.folder / op.data["recipe"]))


def built(op: spec.Op, axes: Mapping[str, Any], sm: str) -> Built:
    """The variant, compiled as for a bundle."""
    target = spec.Target(sm)
    variant = op.variant(target, axes)
    options = Options(profile="full", only=(f"{op.name}/{variant.id}",))
    with locked(op.name), compile_cache():
        made = build.compile_all(build.plan([op], target, options), options, Silent())
    return made[variant.key]


def _unpack(op: spec.Op, folder: Path) -> None:
    """Upstream's headers as they are, and the program that our patch adds."""
    opened, _ = source.open_source(None, source.upstream())
    for name in opened.names("flashinfer/data/include/flashinfer"):
        if name.endswith((".cuh", ".h")):
            path = folder / Path(name).relative_to("flashinfer/data/include")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(opened.read(name) or b"")
    program = f"flashinfer/data/include/{op.name}.cu"
    (own,) = [name for name in op.data["patches"] if name.startswith(f"source/{op.name}/0001-")]
    (folder / Path(program).name).write_bytes(patch.apply({}, patch.load(paths.patches(), [own]))[program])


class Launcher:
    """The launcher of one configuration: ``<op>_upstream.cu``, compiled by nvcc for the host."""

    def __init__(self, op: spec.Op, axes: Mapping[str, Any], sm: str, folder: Path, call: str) -> None:
        """``call`` is the C declaration of ``struct upstream_call``."""
        _unpack(op, folder)
        name, cls = f"{op.name}_upstream.cu", class_of(op, axes, sm)
        for file in (name, "fa2_runtime.c"):
            shutil.copy(HERE / file, folder)
        code = sm.replace("sm_", "compute_")
        macros = recipe_of(op).fa2(axes, cls).macros.items()
        toolkit.nvcc(
            [
                *(f"-gencode=arch={code},code={code}", "-std=c++17", "-w", "-shared", "-cudart", "none"),
                *("-Xcicc", "-O0", "-Xcompiler", "-fPIC", "-Xlinker", "-Bsymbolic", "-I.", f"-I{HERE}"),
                *(f"-D{name}={value}" for name, value in macros if "MMA_KV" not in name),
                *("-o", "upstream.so", name, "fa2_runtime.c"),
            ],
            folder,
        )
        self.ffi: Any = cffi.FFI()
        self.ffi.cdef(
            call + "int upstream_launch(const struct upstream_call *call, char *error);"
            "void upstream_device(int per_sm, int per_block);"
        )
        self.c: Any = self.ffi.dlopen(str(folder / "upstream.so"), self.ffi.RTLD_LAZY | self.ffi.RTLD_LOCAL)
        self.c.upstream_device(cls["smem"]["per_sm"], cls["smem"]["per_block"])

    def launch(self, values: Mapping[str, Any], addresses: Mapping[str, int]) -> str:
        """Launch; what upstream throws, or nothing."""
        pointers = {name: self.ffi.cast("char *", address) for name, address in addresses.items()}
        error = self.ffi.new("char[512]")
        call = self.ffi.new("struct upstream_call *", {**values, **pointers})
        status = self.c.upstream_launch(call, error)
        assert status in (0, -2), status
        return str(self.ffi.string(error).decode())


def sizes(gpu: FakeGpu, tile_params: Sequence[int]) -> None:
    gpu.params(tile_params)
    gpu.params(MERGE_PARAMS, "merge")


def launches(gpu: FakeGpu, unused: Sequence[range]) -> list[dict[str, Any]]:
    """What was launched, in words that both have: one of upstream's kernels has one name whatever its tile.

    Args:
        unused: bytes of the tiles' parameter that no field has.
    """
    found = []
    for line in gpu.log("launch"):
        params = [bytes.fromhex(text) for text in line["params"]]
        if line["kernel"] != "merge":
            cleared = bytearray(params[0])
            for padding in unused:
                cleared[padding.start : padding.stop] = bytes(len(padding))
            params = [bytes(cleared)]
        pdl = [value for number, value in line["attributes"] if number == 6]
        kernel = "merge" if line["kernel"] == "merge" else "tile"
        found.append({**line, "kernel": kernel, "params": params, "attributes": pdl in (["01000000"],)})
    return found
