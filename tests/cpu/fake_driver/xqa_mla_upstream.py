"""Upstream's MLA host launcher, compiled by nvcc and run on the fake driver: what a launch must look like."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cffi
from cpu.fake_driver.xqa_mla import Call, op
from nvcc import toolkit, upstream

HERE = Path(__file__).resolve().parent
FIELDS = (
    ("uint32_t", ("sms", "max_seq_len", "batch", "pdl")),
    ("float", ("q_scale", "kv_scale")),
    (
        "void *",
        (
            *("q_scale_ptr", "output", "q", "k", "v", "page_table", "seq_lens", "kv_scale_ptr"),
            *("semaphores", "scratch", "stream"),
        ),
    ),
    ("uint64_t", ("page_stride", "token_stride", "head_stride")),
)
CDEF = (
    "struct upstream_call {"
    + " ".join(f"{kind} {name};" for kind, names in FIELDS for name in names)
    + "}; void upstream_launch(const struct upstream_call *);"
)


class Upstream:
    """The launcher of one variant.

    Attributes:
        smem: shared memory that nvcc's program says it needs.
        local_bytes: local memory that nvcc's ptxas reports: a thread's stack, spill loads and spill stores.
    """

    def __init__(self, axes: Mapping[str, Any], sm: str, folder: Path) -> None:
        upstream.unpack(op(), folder)
        for name in ("xqa_mla_upstream.cu", "fake_registration.c"):
            shutil.copy(HERE / name, folder)
        report = toolkit.nvcc(
            [
                *(upstream.architecture(sm, assembled=True), *upstream.FLAGS, "-shared", "-cudart", "none"),
                *(
                    "-Xptxas",
                    "-v",
                    "-Xcompiler",
                    "-fPIC",
                    "-Xlinker",
                    "-Bsymbolic",
                    "--keep",
                    "-w",
                    "-I.",
                    f"-I{HERE}",
                ),
                *upstream.definitions(op(), axes, sm),
                *("-o", "upstream.so", "xqa_mla_upstream.cu", "fake_registration.c"),
            ],
            folder,
        )
        self.local_bytes = sum(map(int, re.findall(r"(\d+) bytes (?:stack|spill)", report)))
        (cubin,) = folder.glob("*.cubin")
        self.smem = upstream.smem_size(cubin.read_bytes())
        os.environ["UPSTREAM_SMEM"] = str(self.smem)  # asked for when the library is loaded
        self.ffi: Any = cffi.FFI()
        self.ffi.cdef(CDEF)
        self.c: Any = self.ffi.dlopen(str(folder / "upstream.so"), self.ffi.RTLD_LAZY | self.ffi.RTLD_LOCAL)

    def run(self, call: Call, sms: int) -> None:
        """Launch ``call``, whose one head upstream is told to lie a token apart."""
        given = {
            "sms": sms,
            "max_seq_len": call["max_pages_per_seq"] * call.axes["page_size"],
            "batch": call["batch_size"],
            "output": call["o"],
            "scratch": call["workspace"],
            "semaphores": 0,
            "page_stride": call["kv_page_stride"],
            "token_stride": call["kv_token_stride"],
            "head_stride": call["kv_token_stride"],
        }
        values: dict[str, Any] = {}
        for kind, names in FIELDS:
            for name in names:
                value = given[name] if name in given else call[name]
                values[name] = self.ffi.cast("void *", value) if kind == "void *" else value
        self.c.upstream_launch(self.ffi.new("struct upstream_call *", values))
