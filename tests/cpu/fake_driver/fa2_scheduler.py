"""Upstream's scheduler of FA2 prefill, compiled as host code, and its plan compared with one of ours."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import cffi
from cpu.fake_driver.fa2 import Call, Plan
from cpu.fake_driver.native import compiler
from nvcc import toolkit

from kernseal.export import source

HERE = Path(__file__).resolve().parent
MEMORY = 1 << 26
SMEM_OPTIN = {9: 232448, 10: 232448, 12: 101376}
INFO = (
    *(
        "padded_batch_size",
        "total_num_rows",
        "all_rows",
        "cta_tile_q",
        "requests",
        "q_tiles",
        "kv_tiles",
        "merge_indptr",
    ),
    *("o_indptr", "chunk", "v", "part_lse", "valid", "enable_cuda_graph", "split_kv"),
)
"""Upstream's PrefillPlanInfo; the names of arrays are offsets."""
CDEF = """
struct upstream_plan { int64_t info[15]; uint64_t float_bytes, int_bytes; };
int upstream_plan(int sms, int major, int smem_optin, int32_t *qo_indptr, int32_t *kv_indptr, uint32_t rows,
                  uint32_t batch, uint32_t q_heads, uint32_t kv_heads, uint32_t head_dim, uint32_t v_dim,
                  uint32_t page_size, int fixed_grid, int32_t chunk, int unsplit, int64_t uniform_q_len,
                  int always_uniform, char *memory, uint64_t size, struct upstream_plan *out, char *error);
"""
FILES = (
    "allocator.h",
    "exception.h",
    "pos_enc.cuh",
    "utils.cuh",
    "attention/heap.h",
    "attention/scheduler.cuh",
)


class Scheduler:
    """Upstream's scheduler, compiled as it is by the host's compiler."""

    def __init__(self, folder: Path) -> None:
        opened, _ = source.open_source(None, source.upstream())
        for name in FILES:
            data = opened.read(f"flashinfer/data/include/flashinfer/{name}")
            assert data is not None, name
            (folder / "flashinfer" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "flashinfer" / name).write_bytes(data)
        cuda = metadata.distribution("nvidia-cuda-runtime").locate_file(f"{toolkit.HOME}/include")
        flags = ["-std=c++17", "-O2", "-w", "-fPIC", "-shared", "-Wl,-Bsymbolic", f"-I{folder}", f"-I{cuda}"]
        command = [str(compiler("g++")), *flags, str(HERE / "fa2_plan.cpp"), "-o", "upstream.so"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        self.ffi: Any = cffi.FFI()
        self.ffi.cdef(CDEF)
        self.c: Any = self.ffi.dlopen(str(folder / "upstream.so"), self.ffi.RTLD_LOCAL)
        self.memory = self.ffi.new("char[]", MEMORY)

    def plan(
        self,
        call: Call,
        kv_indptr: Sequence[int],
        page_size: int,
        device: tuple[int, int],
        dims: tuple[int, int],
        uniform: tuple[int, bool] = (0, False),
    ) -> tuple[dict[str, int], bytes]:
        """What upstream says of its plan, by name, and the plan.

        Args:
            kv_indptr: where the pages of each sequence begin, those alone that it has keys in.
            device: its SMs, and its compute capability's first number.
            dims: elements of a row of q and k, and of v and o.
            uniform: the rows that every sequence is said to have, or 0, and whether in every plan of the graph.
        """
        out, error = self.ffi.new("struct upstream_plan *"), self.ffi.new("char[256]")
        qo, kv = (self.ffi.new("int32_t[]", list(ends)) for ends in (call.qo, kv_indptr))
        fixed, chunk = call["fixed_grid"], call["kv_chunk"]
        rows = call["total_q"] if fixed else call.qo[-1]
        heads = call["num_q_heads"], call["num_kv_heads"]
        pages = chunk // page_size if chunk > 0 else chunk
        failed = self.c.upstream_plan(
            *(*device, SMEM_OPTIN[device[1]], qo, kv, rows, call["batch_size"], *heads, *dims, page_size),
            *(fixed, pages, chunk == 0, *uniform, self.memory, MEMORY, out, error),
        )
        assert not failed, self.ffi.string(error).decode()
        sizes = {"float_bytes": out.float_bytes, "int_bytes": out.int_bytes}
        return {**dict(zip(INFO, out.info, strict=True)), **sizes}, bytes(
            self.ffi.buffer(self.memory, out.int_bytes)
        )


def arrays(call: Call, blocks: int, rows: int, split: int) -> dict[str, int]:
    """What of a plan has meaning: int32 entries of each array."""
    found = {"requests": blocks, "q_tiles": blocks, "kv_tiles": blocks}
    found |= {"o_indptr": call["batch_size"] + 1}
    if split or (not call["fixed_grid"] and (call["kv_chunk"] != 0 or call.fields.get("page_size", 1) == 1)):
        found["chunk"] = 1  # upstream's of no parts is the largest int64 times the page size
    found |= {"all_rows": 1} if call["fixed_grid"] else {}
    return found | ({"merge_indptr": rows + 1} if split else {})


def compare(call: Call, plan: Plan, info: dict[str, int], theirs: bytes) -> None:
    """Fails unless both plans say the same, in the same places."""
    head, base = plan.head, plan.head["requests"]
    assert head["grid"] == info["padded_batch_size"]
    assert head["bytes"] - base == info["int_bytes"]
    assert head["workspace_bytes"] == info["float_bytes"]
    assert head["part_lse_at"] == info["part_lse"]
    names = set(arrays(call, 0, 0, head["split"])) | ({"valid"} if call["fixed_grid"] else set())
    assert {name: head[name] - base for name in names} == {name: info[name] for name in names}
    compare_work(call, plan, info, theirs)


def compare_work(call: Call, plan: Plan, info: dict[str, int], theirs: bytes) -> None:
    """Fails unless both plans have thread blocks that do the same. With a fixed grid ours may have more that do nothing."""
    head, blocks = plan.head, plan.head["grid"]
    assert head["rows"] == info["total_num_rows"]
    assert (plan.tile, head["split"]) == (info["cta_tile_q"], info["split_kv"])
    if call["fixed_grid"]:
        valid = theirs[info["valid"] :][: info["padded_batch_size"]]
        blocks = sum(valid)
        assert plan.data[head["valid"] :][: head["grid"]] == valid.ljust(head["grid"], b"\0")
    for name, count in arrays(call, blocks, call.qo[-1], head["split"]).items():
        mine, them = plan.data[head[name] :][: 4 * count], theirs[info[name] :][: 4 * count]
        assert mine == them, name
    assert plan.ints("q_indptr", len(call.qo)) == call.qo
