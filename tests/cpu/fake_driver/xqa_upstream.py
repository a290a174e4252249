"""Upstream's XQA host launcher, compiled by nvcc and run on the fake driver: what a launch must look like."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
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
        lay_out(op().folder, ["flashinfer/data/csrc/xqa/hostUtils.h"], folder)
        data = op().data
        program = load_recipe(str(op().folder / data["recipe"])).mha(axes, data["classes"]["mha"])
        report = nvcc(program.macros, sm, folder, "xqa_upstream.cu")
        self.spill_bytes = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", report)))
        self.smem = shared_memory(folder)
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


def lay_out(op_folder: Path, further: Sequence[str], folder: Path) -> None:
    """Upstream's files, unpatched and side by side: the op's source set and ``further``."""
    folder.mkdir(parents=True, exist_ok=True)
    opened, _ = source.open_source(None, source.upstream())
    for name in (*source.source_set(op_folder), *further):
        data = opened.read(name)
        assert data is not None, name
        (folder / Path(name).name).write_bytes(data)


def nvcc(macros: Mapping[str, str | int], sm: str, folder: Path, unit: str) -> str:
    """Compile ``unit`` of this folder to ``upstream.so``; what ptxas says of its kernel."""
    command = [
        "nvcc",
        f"-gencode=arch={sm.replace('sm_', 'compute_')},code={sm}",
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
    command += [f"-D{name}={value}" for name, value in sorted(macros.items()) if name != "GENERATE_CUBIN"]
    for name in (unit, "fake_registration.c"):
        shutil.copy(HERE / name, folder / name)
    command += ["-o", "upstream.so", unit, "fake_registration.c"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def shared_memory(folder: Path) -> int:
    """``smemSize`` of the program, which is a local symbol and so has a mangled name. The launcher will read it too."""
    (path,) = folder.glob("*.cubin")
    elf = ELFFile(io.BytesIO(path.read_bytes()))
    table = elf.get_section_by_name(".symtab")
    assert table is not None
    (symbol,) = [s for s in table.iter_symbols() if re.search(r"8smemSize|^smemSize$", s.name)]
    data = elf.get_section(symbol["st_shndx"]).data()
    size = int.from_bytes(data[symbol["st_value"] : symbol["st_value"] + 4], "little")
    os.environ["UPSTREAM_SMEM"] = str(size)
    return size
