"""CuTe's own host object, driven through CuTe's own runtime: what a launch must look like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cffi
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.host_objects import HostObject, header_arguments
from cpu.fake_driver.native import ZIG, compile_c

from kernseal.export import toolchain


@dataclass(frozen=True)
class Tensor:
    """A tensor as CuTe passes it: base, dynamic extents, dynamic strides."""

    data: int
    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scalar:
    ctype: str
    value: float


def params_of(launch: Mapping[str, Any]) -> list[bytes]:
    return [bytes.fromhex(text) for text in launch["params"]]


def masked(launch: Mapping[str, Any], masks: list[bytes]) -> dict[str, Any]:
    """The launch without the bytes that nobody set."""
    params = [
        bytes(a & b for a, b in zip(p, m, strict=True)) for p, m in zip(params_of(launch), masks, strict=True)
    ]
    return {**launch, "params": [p.hex() for p in params]}


def _set_by_both(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[bytes]:
    """255 for each byte of the parameters that is the same in two launches."""
    pairs = zip(params_of(one), params_of(two), strict=True)
    return [bytes(255 * (a == b) for a, b in zip(p, q, strict=True)) for p, q in pairs]


class Reference:
    """One host object, loaded."""

    def __init__(self, made: HostObject, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        runtime = toolchain.dsl_runtime_path().with_name("libcuda_dialect_runtime_static.a")
        library = compile_c(
            ZIG, [made.theirs, runtime], folder / "reference.so", "-shared", "-Wl,-z,lazy", "-Wl,-z,undefs"
        )
        self.order = header_arguments(made.header)
        entry = f"_mlir_{made.prefix}__mlir_ciface_{made.answer.host_function}"
        self.ffi: Any = cffi.FFI()
        self.ffi.cdef(f"""
            void _mlir_{made.prefix}_cuda_init(void **);
            void _mlir_{made.prefix}_cuda_load_to_device(void **);
            void {entry}(void **, int32_t);
        """)
        # The runtime has functions for all of CUDA; only those that are called are there.
        c: Any = self.ffi.dlopen(str(library), self.ffi.RTLD_LAZY | self.ffi.RTLD_LOCAL)
        self._init = getattr(c, f"_mlir_{made.prefix}_cuda_init")
        self._load = getattr(c, f"_mlir_{made.prefix}_cuda_load_to_device")
        self.c, self.entry = c, entry

    def load(self, device: int = 0) -> None:
        new = self.ffi.new
        library, result, ordinal = new("void **"), new("int *", -1), new("int32_t *", device)
        library_at = new("void **", library)
        self._init(new("void *[]", [library_at, result]))
        assert result[0] == 0
        self._load(new("void *[]", [library_at, ordinal, result]))
        assert result[0] == 0

    def launch(
        self, gpu: FakeGpu, values: Mapping[str, Tensor | Scalar]
    ) -> tuple[dict[str, Any], list[bytes]]:
        """What ``launches`` gives, of a host function that launches once."""
        (only,) = self.launches(gpu, values)
        return only

    def launches(
        self, gpu: FakeGpu, values: Mapping[str, Tensor | Scalar]
    ) -> list[tuple[dict[str, Any], list[bytes]]]:
        """Call the host function with arguments by CuTe's names, in the order and the structs of CuTe's header.

        Returns:
            Each recorded launch, and a mask for each of its parameters: 0 for bytes that the host code leaves unset
            (padding, and the unused half of a tensor map), which are whatever was on its stack.
        """
        keep: list[Any] = []
        for name, extents, strides in self.order:
            value = values[name]
            if isinstance(value, Scalar):
                assert extents == -1, name
                keep.append(self.ffi.new(f"{value.ctype} *", self._scalar(value)))
            else:
                assert (extents, strides) == (len(value.shape), len(value.stride)), name
                keep.append(self._tensor(value))
        result = self.ffi.new("int32_t *", -1)
        pointers = self.ffi.new("void *[]", [*keep, result])
        before = len(gpu.log("launch"))
        for byte in (0x55, 0xAA):
            gpu.call_over(byte, self.ffi.addressof(self.c, self.entry), pointers)
            assert result[0] == 0
        found = gpu.log("launch")[before:]
        half = len(found) // 2
        return [(one, _set_by_both(one, two)) for one, two in zip(found[:half], found[half:], strict=True)]

    def _scalar(self, value: Scalar) -> Any:
        return self.ffi.cast("void *", int(value.value)) if value.ctype == "void *" else value.value

    def _tensor(self, tensor: Tensor) -> Any:
        """The struct of the header; its last member would be missing where it has no elements."""
        members = ["void *data;", f"int32_t shape[{len(tensor.shape)}];"]
        if tensor.stride:
            members.append(f"int64_t stride[{len(tensor.stride)}];")
        kind = f"struct {{ {' '.join(members)} }}"
        made = self.ffi.new(f"{kind} *")
        made.data = self.ffi.cast("void *", tensor.data)
        made.shape = list(tensor.shape)
        if tensor.stride:
            made.stride = list(tensor.stride)
        return made
