"""One cold start of kernseal from Python: ``python -m gpu.cold.kernseal_child BUNDLE PROBLEM WHAT``.

BUNDLE is a name of ``gpu.bundles``, PROBLEM a folder of ``gpu.cold.write_problem``, WHAT an op or ``model``. No torch and no
other array library: memory comes from the driver, as in ``abi/examples/python/xqa_decode.py``.
"""

from __future__ import annotations

import ctypes
import math
import sys
from pathlib import Path
from typing import Any

from gpu.cold.problem import MODEL, Laps, asked, definition, inputs, require_right

ITEM_BYTES = {"bf16": 2, "f32": 4}


class Cuda:
    """The driver, with the primary context of device 0 current."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._driver, name)(*arguments):
            raise SystemExit(f"{name}: CUDA error {code}")

    def copied(self, data: bytes) -> int:
        """The address of new device memory with ``data`` in it, which lives as long as the process."""
        address, size = ctypes.c_uint64(), ctypes.c_size_t(len(data))
        self.call("cuMemAlloc_v2", ctypes.byref(address), size)
        self.call("cuMemcpyHtoD_v2", address, data, size)
        return address.value

    def read(self, address: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return data.raw


class Run:
    """One call of a prepared op with everything in place."""

    def __init__(self, cuda: Cuda, prepared: Any, problem: dict[str, Any], given: dict[str, bytes]) -> None:
        self._cuda, self._prepared = cuda, prepared
        sizes = problem["sizes"]
        self._bytes = {
            name: ITEM_BYTES[of["dtype"]] * math.prod(of["shape"]) for name, of in problem["outputs"].items()
        }
        # 0xFF is NaN: what is not written shows. Semaphores have to be zero.
        self._outputs = {name: cuda.copied(b"\xff" * size) for name, size in self._bytes.items()}
        self._args = sizes | {name: cuda.copied(data) for name, data in given.items()} | self._outputs
        for scratch in ("workspace", "semaphores"):
            if size := getattr(prepared, f"{scratch}_size")(**sizes):
                self._args |= {scratch: cuda.copied(bytes(size)), f"{scratch}_bytes": size}

    def __call__(self) -> None:
        self._prepared.run(**self._args, stream=0)

    def outputs(self) -> dict[str, bytes]:
        """Waits."""
        return {name: self._cuda.read(address, self._bytes[name]) for name, address in self._outputs.items()}


def main(name: str, folder: Path, what: str) -> None:
    laps, defined = Laps(), definition(folder)
    problems = {op: defined["problems"][op] for op in asked(what)}
    from gpu import bundles  # kernseal's loader with it

    laps.end("import")
    cuda = Cuda()
    laps.end("context")
    with bundles.open_by_name(name) as bundle:
        laps.end("open")
        ready = {op: bundle.prepare(op, device=0, **problem["axes"]) for op, problem in problems.items()}
        for other in defined["also"] if what == MODEL else ():
            bundle.prepare(other["op"], device=0, **other["axes"])
        laps.end("prepare")
        runs = {
            op: Run(cuda, ready[op], problem, inputs(folder, op, problem["inputs"]))
            for op, problem in problems.items()
        }
        laps.end("memory")
        for run in runs.values():
            run()
        results = {op: run.outputs() for op, run in runs.items()}
        laps.end("first_run")
        laps.show()
    for op, problem in problems.items():
        require_right(folder, op, problem["outputs"], results[op])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
