"""The patched kernels of top-k on a CPU: the library launches them on the fake driver, which says with what they run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cffi
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.kernseal_library import Kernseal
from cpu.fake_driver.native import ZIG, compile_c
from cpu.fake_driver.topk_regions import KERNELS, OP, PARAM_SIZES, op

from kernseal.export import patch, paths, source
from kernseal.export.recipe import load_recipe

HERE = Path(__file__).resolve().parent
FOLDER = "flashinfer/data/include/flashinfer"
IN_PTX = re.compile(
    r"^// Acquire/Release primitives.*?(?=^// Wait until the value)", re.MULTILINE | re.DOTALL
)
SMEM = "  extern __shared__ __align__(16) uint8_t smem[];\n"


def patched() -> dict[str, str]:
    """The source set with its patches, as built, by the name of the file."""
    opened, _ = source.open_source(None, source.upstream())
    patches = patch.load(paths.patches(), op().data["patches"])
    tree = patch.apply(source.read_set(opened, source.source_set(op().folder)), patches)
    return {Path(name).name: data.decode() for name, data in tree.items()}


class Emulator:
    """Both kernels of one variant."""

    def __init__(self, axes: Mapping[str, Any], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tree = patched()
        text, taken = IN_PTX.subn("", tree["topk.cuh"])
        assert taken == 1
        assert text.count(SMEM) == 1
        (folder / "topk_emulated.cuh").write_text(text.replace(SMEM, "  uint8_t* smem = emu_smem();\n"))
        (folder / "topk_common.cuh").write_text(tree["topk_common.cuh"])
        for name in ("cuda_bf16.h", "cuda_fp16.h"):
            (folder / name).write_text("")
        cls = op().data["classes"]["radix_sm120"]
        macros = load_recipe(str(op().folder / "recipe.py")).radix(axes, cls).macros
        flags = ["-O2", "-fPIC", "-w", *(f"-D{name}={value}" for name, value in macros.items())]
        program = compile_c(
            (*ZIG[:-1], "c++"),
            [HERE / "topk_regions.cpp"],
            folder / "kernels.o",
            *(*flags, "-std=c++17", "-c", f"-I{folder}", f"-I{HERE}"),
        )
        library = compile_c(
            ZIG, [HERE / "emulator.c", program], folder / "kernels.so", "-O2", "-fPIC", "-shared"
        )
        self.ffi: Any = cffi.FFI()
        self.ffi.cdef("void run_kernel(int group, unsigned blocks, unsigned long smem, void **params);")
        self.c: Any = self.ffi.dlopen(str(library))

    def run(self, launch: Mapping[str, Any]) -> None:
        """What the fake driver recorded of a launch, whose addresses are of this process."""
        keep = [self.ffi.from_buffer(bytearray.fromhex(text)) for text in launch["params"]]
        params = self.ffi.new("void *[]", [self.ffi.cast("void *", buffer) for buffer in keep])
        assert launch["block"] == [1024, 1, 1]
        self.c.run_kernel(KERNELS.index(launch["kernel"]), launch["grid"][0], launch["smem"], params)


def launch(library: Kernseal, gpu: FakeGpu, handle: Any, **fields: Any) -> dict[str, Any]:
    """Run the op on the fake driver: tensors as addresses, and the launch that came of it."""
    kinds = {name: f.type for name, f in library.ffi.typeof(f"kseal_{OP}_args").fields}
    given = {name: v.data_ptr() if hasattr(v, "data_ptr") else v for name, v in fields.items()}
    args = {n: library.ffi.cast(kinds[n], v) if kinds[n].kind == "pointer" else v for n, v in given.items()}
    before = len(gpu.log("launch"))
    gpu.params(PARAM_SIZES)
    made = library.struct(f"kseal_{OP}_args", **args)
    assert library.c.kseal_topk_regions_run(handle, made) == 0, library.error()
    (found,) = gpu.log("launch")[before:]
    return found
