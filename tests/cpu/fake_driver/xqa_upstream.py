"""Upstream's XQA host launchers, compiled by nvcc and run on the fake driver: what a launch must look like."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cffi
from cpu.fake_driver.xqa import SMEM, Call, op
from nvcc import toolkit, upstream

HERE = Path(__file__).resolve().parent
STRIDES = ("page_stride", "token_stride", "head_stride")
FIELDS = (
    ("uint32_t", ("sms", "kv_heads", "window", "max_seq_len", "batch", "q_len", "pdl")),
    ("float", ("q_scale", "rcp_out_scale", "kv_scale")),
    (
        "void *",
        (
            *(
                "q_scale_ptr",
                "output",
                "q",
                "sinks",
                "k",
                "v",
                "k_scales",
                "v_scales",
                "page_table",
                "seq_lens",
            ),
            *("kv_scale_ptr", "q_cu_lens", "mask", "semaphores", "scratch", "stream"),
        ),
    ),
    ("uint64_t", (*STRIDES, *(f"scale_{name}" for name in STRIDES))),
)
CDEF = (
    "struct upstream_call {"
    + " ".join(f"{kind} {name};" for kind, names in FIELDS for name in names)
    + "}; void upstream_launch(const struct upstream_call *); uint64_t upstream_scratch(uint32_t blocks);"
)
RENAMED = {
    "kv_heads": "num_kv_heads",
    "batch": "batch_size",
    "output": "o",
    "scratch": "workspace",
    **{name: f"kv_{name}" for name in STRIDES},
}
PARAM_BYTES = {"b8": 1, "u32": 4, "f32": 4, "u64": 8}


class Launcher:
    """The host code of one variant. Its kernel is compiled to PTX and goes no further.

    Attributes:
        param_sizes: bytes of each parameter of ``kernel_mha``.
    """

    def __init__(self, axes: Mapping[str, Any], sm: str, folder: Path) -> None:
        upstream.unpack(op(), folder)
        for name in ("xqa_upstream.cu", "fake_registration.c"):
            shutil.copy(HERE / name, folder)
        gmma = upstream.class_of(op(), axes, sm)["builder"] == "gmma"
        toolkit.nvcc(
            [
                *(upstream.architecture(sm, assembled=False), *upstream.FLAGS, "-shared", "-cudart", "none"),
                *("-Xcompiler", "-fPIC", "-Xlinker", "-Bsymbolic", "--keep", "-w", "-I.", f"-I{HERE}"),
                *(f"-DUPSTREAM_GMMA={int(gmma)}", *upstream.definitions(op(), axes, sm)),
                *("-o", "upstream.so", "xqa_upstream.cu", "fake_registration.c"),
                *(["tensorMap.cpp"] if gmma else []),
            ],
            folder,
        )
        self.param_sizes = _param_sizes((folder / "xqa_upstream.ptx").read_text())
        os.environ["UPSTREAM_SMEM"] = str(SMEM)  # asked for when the library is loaded
        self.ffi: Any = cffi.FFI()
        self.ffi.cdef(CDEF)
        self.c: Any = self.ffi.dlopen(str(folder / "upstream.so"), self.ffi.RTLD_LAZY | self.ffi.RTLD_LOCAL)

    def run(self, call: Call, sms: int) -> None:
        length = call["max_pages_per_seq"] * call.axes["page_size"]
        values: dict[str, Any] = {"sms": sms, "max_seq_len": length}
        for kind, names in FIELDS:
            for name in names:
                value = values.get(name, call[RENAMED.get(name, name)])
                values[name] = self.ffi.cast("void *", value) if kind == "void *" else value
        self.c.upstream_launch(self.ffi.new("struct upstream_call *", values))

    def scratch(self, blocks: int) -> int:
        return int(self.c.upstream_scratch(blocks))


def _param_sizes(ptx: str) -> list[int]:
    """Of the one entry of a program in PTX."""
    (declared,) = re.findall(r"\.entry \w*kernel_mha\w*\(([^)]*)\)", ptx)
    kinds = "|".join(PARAM_BYTES)
    found = re.findall(
        rf"\.param (?:\.align \d+ )?\.({kinds})(?: \.ptr \.align \d+)? \w+(?:\[(\d+)\])?", declared
    )
    assert len(found) == declared.count(".param ")
    return [PARAM_BYTES[kind] * int(count or 1) for kind, count in found]
