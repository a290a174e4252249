"""XQA decode from plain Python, without torch or any other array library: a complete program in one file.

    python xqa_decode.py BUNDLE [KEY ...]

BUNDLE is a bundle's folder, such as dist/sm_90a-linux-x86_64. The pins or keys of the installed package must vouch for it
or, where public keys are named, one of those.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from pathlib import Path
from typing import Any

import kernseal
from kernseal.loader.errors import KernsealError
from kernseal.loader.policy import Policy

B, GROUP, D, PAGE, PAGES = 2, 8, 128, 16, 4


class Cuda:
    """The CUDA driver, as much of it as this example needs, with the primary context of device 0 current."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._driver, name)(*arguments):
            raise RuntimeError(f"{name}: CUDA error {code}")


class Memory:
    """Device memory with a copy of ``data`` in it; an array of bytes to whoever asks, or of ``typestr``."""

    def __init__(self, cuda: Cuda, data: bytes, typestr: str = "|u1", *shape: int) -> None:
        self._cuda, self._size = cuda, len(data)
        address = ctypes.c_uint64()
        cuda.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(len(data)))
        cuda.call("cuMemcpyHtoD_v2", address, data, ctypes.c_size_t(len(data)))
        self.address = address.value
        shown = {
            "shape": shape or (len(data),),
            "typestr": typestr,
            "data": (self.address, False),
            "version": 3,
        }
        self.__cuda_array_interface__ = shown

    def read(self) -> bytes:
        data = ctypes.create_string_buffer(self._size)
        self._cuda.call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(self.address), ctypes.c_size_t(self._size))
        return data.raw

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._cuda.call("cuMemFree_v2", ctypes.c_uint64(self.address))


def to_bf16(values: list[float]) -> bytes:
    """Exact for the values used here."""
    singles = struct.pack(f"<{len(values)}f", *values)
    return b"".join(singles[at + 2 : at + 4] for at in range(0, len(singles), 4))


def from_bf16(data: bytes) -> list[float]:
    singles = b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2))
    return list(struct.unpack(f"<{len(data) // 2}f", singles))


def cache() -> tuple[list[float], list[float]]:
    """K and V of the pool.

    Pages 3 and 1 hold the 20 positions of sequence 0, page 0 the 3 of sequence 1. Row t of V is t + 1. The keys of sequence
    0 are all zero, so its output is the mean of its rows; in sequence 1 the key of position 1 outweighs the others.
    """
    k, v = [0.0] * (PAGES * PAGE * D), [0.0] * (PAGES * PAGE * D)
    k[D] = 100.0
    for page, first in ((3, 0), (1, PAGE), (0, 0)):
        for row in range(PAGE):
            at = (page * PAGE + row) * D
            v[at : at + D] = [first + row + 1.0] * D
    return k, v


def run(folder: str, policy: Policy) -> None:
    cuda = Cuda()
    # Before the bundle, so that it is freed after it: launches must have finished when memory goes.
    q, k, v, o = (
        Memory(cuda, to_bf16(values))
        for values in ([8.0, *[0.0] * (D - 1)] * (B * GROUP), *cache(), [0.0] * (B * GROUP * D))
    )
    page_table = Memory(cuda, struct.pack("<4i", 3, 1, 0, -1), "<i4", B, 2)
    seq_lens = Memory(cuda, struct.pack("<2i", 20, 3), "<i4", B)

    # README: begin
    with kernseal.open(folder, policy=policy) as bundle:  # verified: pins or trusted signature
        decode = bundle.prepare("xqa_decode", head_dim=D, group_size=GROUP, page_size=PAGE, device=0)
        sizes = {"num_kv_heads": 1, "num_q_heads": GROUP, "num_pages": PAGES}
        sizes |= {"batch_size": B, "max_pages_per_seq": 2}
        workspace = Memory(cuda, bytes(decode.workspace_size(**sizes) + 1))
        semaphores = Memory(cuda, bytes(decode.semaphores_size(**sizes) + 1))
        decode(
            **sizes,
            q=q.address,  # bfloat16 has no name in __cuda_array_interface__; an address is taken as it is
            k=k.address,
            v=v.address,
            o=o.address,
            page_table=page_table,  # shape and element type are compared with what the op reads
            seq_lens=seq_lens,
            workspace=workspace,
            semaphores=semaphores,
            stream=0,  # a CUstream; 0 is the legacy default stream
        )
        cuda.call("cuCtxSynchronize")
    # README: end

    out = from_bf16(o.read())
    for sequence, expected in enumerate((10.5, 2.0)):
        for value in out[sequence * GROUP * D : (sequence + 1) * GROUP * D]:
            if not abs(value - expected) < 1e-2:
                raise AssertionError(f"o of sequence {sequence} is {value}, expected {expected}")
    print("ok: two sequences of XQA decode, output as expected")


def main(arguments: list[str]) -> int:
    if not arguments:
        print("usage: xqa_decode.py BUNDLE [KEY ...]", file=sys.stderr)
        return 1
    folder, *keys = arguments
    try:
        run(folder, Policy.from_options(keys=[Path(key) for key in keys]))
    except KernsealError as error:
        print(f"{error.status}: {error}", file=sys.stderr)
        return 1
    except (AssertionError, OSError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
