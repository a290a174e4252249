"""Upstream's XQA host launcher, compiled by nvcc and run on the fake driver: what a launch must look like."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cffi
from cpu.fake_driver.xqa import Call, op
from elftools.elf.elffile import ELFFile

from kernseal.export import source
from kernseal.export.recipe import load_recipe

HERE = Path(__file__).resolve().parent
FIELDS = (
    ("uint32_t", ("sms", "kv_heads", "window", "max_seq_len", "batch", "pdl")),
    ("float", ("q_scale", "rcp_out_scale", "kv_scale")),
    (
        "void *",
        (
            *("q_scale_ptr", "output", "q", "sinks", "k", "v", "page_table", "seq_lens", "kv_scale_ptr"),
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


def unavailable() -> str | None:
    """Why upstream's host code cannot be compiled here, or None."""
    lacking = [name for name in ("nvcc", "g++") if shutil.which(name) is None]
    return f"{' and '.join(lacking)}: not on PATH" if lacking else None


class Upstream:
    """The launcher of one variant.

    Attributes:
        smem: shared memory that nvcc's program says it needs.
        spill_bytes: what nvcc's ptxas says of it, loads and stores.
    """

    def __init__(self, axes: Mapping[str, Any], sm: str, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        opened, _ = source.open_source(None, source.upstream())
        for name in (*source.source_set(op().folder), "flashinfer/data/csrc/xqa/hostUtils.h"):
            data = opened.read(name)
            assert data is not None, name
            (folder / Path(name).name).write_bytes(data)
        report = _nvcc(axes, sm, folder)
        self.spill_bytes = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", report)))
        (cubin,) = folder.glob(f"*.{sm}.cubin")
        self.smem = _smem(cubin.read_bytes())
        os.environ["UPSTREAM_SMEM"] = str(self.smem)
        self.ffi: Any = cffi.FFI()
        self.ffi.cdef(CDEF)
        self.c: Any = self.ffi.dlopen(str(folder / "upstream.so"), self.ffi.RTLD_LAZY | self.ffi.RTLD_LOCAL)

    def run(self, call: Call, sms: int) -> None:
        renamed = {
            "kv_heads": "num_kv_heads",
            "batch": "batch_size",
            "output": "o",
            "scratch": "workspace",
            **{f"{name}_stride": f"kv_{name}_stride" for name in ("page", "token", "head")},
        }
        length = call["max_pages_per_seq"] * call.axes["page_size"]
        values: dict[str, Any] = {"sms": sms, "max_seq_len": length}
        for kind, names in FIELDS:
            for name in names:
                value = values.get(name, call.fields.get(renamed.get(name, name), 0))
                values[name] = self.ffi.cast("void *", value) if kind == "void *" else value
        self.c.upstream_launch(self.ffi.new("struct upstream_call *", values))


def _nvcc(axes: Mapping[str, Any], sm: str, folder: Path) -> str:
    data = op().data
    program = load_recipe(str(op().folder / data["recipe"])).mha(axes, data["classes"]["mha"])
    macros = {name: value for name, value in program.macros.items() if name != "GENERATE_CUBIN"}
    command = [
        "nvcc",
        f"-arch={sm}",
        "-std=c++17",
        "-O3",
        "-use_fast_math",
        "--expt-relaxed-constexpr",
        "-shared",
        "-cudart",
        "none",
    ]
    command += [
        "-Xptxas",
        "-v",
        "-Xcompiler",
        "-fPIC",
        "-Xlinker",
        "-Bsymbolic",
        "--keep",
        "-I.",
        f"-I{HERE}",
    ]
    command += [f"-D{name}={value}" for name, value in sorted(macros.items())]
    for name in ("xqa_upstream.cu", "fake_registration.c"):
        shutil.copy(HERE / name, folder / name)
    command += ["-o", "upstream.so", "xqa_upstream.cu", "fake_registration.c"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def _smem(cubin: bytes) -> int:
    """``smemSize``, which is a local symbol here and so has a mangled name."""
    elf = ELFFile(io.BytesIO(cubin))
    table = elf.get_section_by_name(".symtab")
    assert table is not None
    (symbol,) = [s for s in table.iter_symbols() if re.search(r"8smemSize|^smemSize$", s.name)]
    data = elf.get_section(symbol["st_shndx"]).data()
    return int.from_bytes(data[symbol["st_value"] : symbol["st_value"] + 4], "little")
