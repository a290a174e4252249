"""Upstream's host launchers of the radix kernels, compiled by nvcc and run on the fake driver: what a launch looks like."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import cffi
from cpu.fake_driver.topk_regions import Call, static_smem
from nvcc import toolkit

from kernseal.export import source

HERE = Path(__file__).resolve().parent
INCLUDE = "flashinfer/data/include/flashinfer"
FILES = ("topk.cuh", "topk_common.cuh", "math.cuh", "utils.cuh", "vec_dtypes.cuh", "exception.h")
FIELDS = (
    ("uint32_t", ("half", "paged", "ragged", "deterministic", "configurable")),
    ("uint32_t", ("num_rows", "top_k", "max_len", "page_bits")),
    ("uint32_t", ("sms", "smem_per_block", "one_cta_smem", "group_smem")),
    ("int64_t", ("row_stride", "page_table_stride")),
    (
        "void *",
        (
            *(
                "scores",
                "lengths",
                "row_starts",
                "offsets",
                "page_table",
                "row_to_request",
                "page_table_starts",
            ),
            *("indices", "values", "raw_indices", "semaphores", "stream"),
        ),
    ),
)
CDEF = (
    "struct upstream_call {"
    + " ".join(f"{kind} {name};" for kind, names in FIELDS for name in names)
    + "}; int upstream_launch(const struct upstream_call *);"
)


class Upstream:
    """The launchers for float32 and bfloat16."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        opened, _ = source.open_source(None, source.upstream())
        for name in FILES:
            data = opened.read(f"{INCLUDE}/{name}")
            assert data is not None, name
            (folder / name).write_bytes(data)
        for name in ("topk_upstream.cu", "fake_registration.c"):
            shutil.copy(HERE / name, folder)
        flags = ("-std=c++17", "-w", "-shared", "-cudart", "none")
        # So that a kernel that is launched can be told by its name.
        named = ("-static-global-template-stub=false", "-device-entity-has-hidden-visibility=false")
        host = ("-Xcompiler", "-fPIC,-rdynamic", "-Xlinker", "-Bsymbolic", "-I.", f"-I{HERE}")
        toolkit.nvcc(
            [
                *flags,
                *named,
                "-gencode=arch=compute_90,code=compute_90",
                *host,
                "-o",
                "upstream.so",
                "topk_upstream.cu",
                "fake_registration.c",
            ],
            folder,
        )
        self.ffi: Any = cffi.FFI()
        self.ffi.cdef(CDEF)
        self.c: Any = self.ffi.dlopen(str(folder / "upstream.so"), self.ffi.RTLD_LAZY | self.ffi.RTLD_LOCAL)

    def run(self, call: Call, sms: int, smem_per_block: int) -> int:
        """Launch ``call`` and return CUDA's code; our sizes of static shared memory are those of its kernels."""
        fields = call.fields
        one_cta, group = static_smem(call.axes)
        page_size, row_stride = (
            fields.get("page_size", 0) or 1,
            fields.get("row_stride", 0) or call["max_len"],
        )
        given = {
            "half": call.axes["dtype"] != "f32",
            "paged": call.axes["paged"],
            "ragged": "lengths" in fields,
            "deterministic": call.axes["deterministic"],
            "configurable": page_size > 1 or "raw_indices" in fields or row_stride != call["max_len"],
            "page_bits": page_size.bit_length() - 1,
            "row_stride": row_stride,
            "sms": sms,
            "smem_per_block": smem_per_block,
            "one_cta_smem": one_cta,
            "group_smem": group,
        }
        values: dict[str, Any] = {}
        for kind, names in FIELDS:
            for name in names:
                value = given[name] if name in given else fields.get(name, 0)
                values[name] = self.ffi.cast("void *", value) if kind == "void *" else int(value)
        return int(self.c.upstream_launch(self.ffi.new("struct upstream_call *", values)))
