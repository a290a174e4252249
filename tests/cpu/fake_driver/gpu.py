"""The fake driver in this process, for tests: what it was asked, and what it shall answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cffi

CDEF = """
const char *fake_log(void);
void fake_reset(void);
void fake_fail(const char *call, int code, int after);
void fake_set_device(int count, int major, int minor, int sms);
void fake_set_current(int device);
void fake_set_capturing(int status);
void fake_set_params(const char *kernel, uint32_t count, const uint32_t *sizes);
void fake_call_over(int byte, void *function, void **args, int32_t count);
"""


class FakeGpu:
    """Loaded once a process, under the name by which every later ``dlopen("libcuda.so.1")`` finds it."""

    def __init__(self, library: Path) -> None:
        self.ffi: Any = cffi.FFI()
        self.ffi.cdef(CDEF)
        self.c: Any = self.ffi.dlopen(str(library), self.ffi.RTLD_NOW | self.ffi.RTLD_GLOBAL)

    def reset(self) -> None:
        """One device of SM 9.0 with 132 SMs, device 0 current, nothing fails, an empty log."""
        self.c.fake_reset()

    def device(self, cc: tuple[int, int], count: int = 1, sms: int = 132) -> None:
        self.c.fake_set_device(count, *cc, sms)

    def current(self, device: int) -> None:
        """Make ``device`` current; -1 for no context."""
        self.c.fake_set_current(device)

    def capturing(self, status: int) -> None:
        self.c.fake_set_capturing(status)

    def fail(self, call: str, code: int, after: int = 0) -> None:
        """Let ``call`` fail with ``code``, after it has worked ``after`` times."""
        self.c.fake_fail(call.encode(), code, after)

    def params(self, sizes: list[int], kernel: str = "") -> None:
        """Sizes of the parameters of ``kernel``, or of every one that no other call names."""
        self.c.fake_set_params(kernel.encode(), len(sizes), sizes)

    def call_over(self, byte: int, function: Any, args: Any) -> None:
        """Call a CuTe host function over a stack filled with ``byte``."""
        cast = self.ffi.cast
        self.c.fake_call_over(byte, cast("void *", function), cast("void **", args), len(args))

    def log(self, call: str | None = None) -> list[dict[str, Any]]:
        lines = self.ffi.string(self.c.fake_log()).decode().splitlines()
        records = [json.loads(line) for line in lines]
        return [r for r in records if call is None or r["call"] == call]
