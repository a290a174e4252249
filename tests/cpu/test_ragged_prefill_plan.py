"""Ragged prefill's plan is upstream's, number for number, but for the tile where upstream's has no kernel."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import cffi
import pytest
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.kernseal_library import Kernseal
from cpu.fake_driver.native import compiler
from cpu.fake_driver.ragged_prefill import (
    DIMS,
    Call,
    Plan,
    Session,
    axes_of,
    ends_of,
    library_of,
    random_call,
)
from nvcc import toolkit

from kernseal.export import source

HERE = Path(__file__).resolve().parent / "fake_driver"
CASES = 700
"""For each pair of head dimensions."""
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
                  int fixed_grid, int32_t chunk, int unsplit, char *memory, uint64_t size, struct upstream_plan *out,
                  char *error);
"""
FILES = (
    "allocator.h",
    "exception.h",
    "pos_enc.cuh",
    "utils.cuh",
    "attention/heap.h",
    "attention/scheduler.cuh",
)


class Upstream:
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
        command = [str(compiler("g++")), *flags, str(HERE / "ragged_prefill_plan.cpp"), "-o", "upstream.so"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        self.ffi: Any = cffi.FFI()
        self.ffi.cdef(CDEF)
        self.c: Any = self.ffi.dlopen(str(folder / "upstream.so"), self.ffi.RTLD_LOCAL)
        self.memory = self.ffi.new("char[]", MEMORY)

    def plan(self, call: Call, sms: int, major: int, v_dim: int) -> tuple[dict[str, int], bytes]:
        """What upstream says of its plan, by name, and the plan."""
        out, error = self.ffi.new("struct upstream_plan *"), self.ffi.new("char[256]")
        qo, kv = (self.ffi.new("int32_t[]", list(ends)) for ends in (call.qo, call.kv))
        fixed, chunk = call["fixed_grid"], call["kv_chunk"]
        rows = call["total_q"] if fixed else call.qo[-1]
        heads = call["num_q_heads"], call["num_kv_heads"]
        dims = call.axes["head_dim"], v_dim
        failed = self.c.upstream_plan(
            *(sms, major, SMEM_OPTIN[major], qo, kv, rows, call["batch_size"], *heads, *dims),
            *(fixed, chunk, chunk == 0, self.memory, MEMORY, out, error),
        )
        assert not failed, self.ffi.string(error).decode()
        sizes = {"float_bytes": out.float_bytes, "int_bytes": out.int_bytes}
        return {**dict(zip(INFO, out.info, strict=True)), **sizes}, bytes(
            self.ffi.buffer(self.memory, out.int_bytes)
        )


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Upstream:
    if reason := toolkit.unavailable():
        pytest.skip(reason)
    return Upstream(tmp_path_factory.mktemp("scheduler"))


@pytest.fixture(scope="module")
def library(fake_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory) -> Kernseal:
    fake_gpu.reset()
    return library_of([axes_of(head_dim=d, v_dim=v) for d, v in DIMS], tmp_path_factory.mktemp("plans"))


@pytest.fixture
def session(library: Kernseal, gpu: FakeGpu) -> Iterator[Session]:
    made = Session(library, axes_of())
    yield made
    made.close()


def arrays(call: Call, blocks: int, rows: int, split: int) -> dict[str, int]:
    """What of a plan has meaning: int32 entries of each array."""
    found = {"requests": blocks, "q_tiles": blocks, "kv_tiles": blocks}
    found |= {"o_indptr": call["batch_size"] + 1, "chunk": 1}
    found |= {"all_rows": 1} if call["fixed_grid"] else {}
    return found | ({"merge_indptr": rows + 1} if split else {})


def compare(call: Call, plan: Plan, info: dict[str, int], theirs: bytes) -> None:
    """Fails unless both plans say the same."""
    head, base = plan.head, plan.head["requests"]
    assert (head["grid"], head["rows"]) == (info["padded_batch_size"], info["total_num_rows"])
    assert (plan.tile, head["split"]) == (info["cta_tile_q"], info["split_kv"])
    assert head["bytes"] - base == info["int_bytes"]
    assert head["workspace_bytes"] == info["float_bytes"]
    assert head["part_lse_at"] == info["part_lse"]
    blocks = sum(theirs[info["valid"] :][: head["grid"]]) if call["fixed_grid"] else head["grid"]
    for name, count in arrays(call, blocks, call.qo[-1], head["split"]).items():
        assert head[name] - base == info[name], name
        mine, them = plan.data[head[name] :][: 4 * count], theirs[info[name] :][: 4 * count]
        assert mine == them, name
    if call["fixed_grid"]:
        assert head["valid"] - base == info["valid"]
        assert plan.data[head["valid"] :][: head["grid"]] == theirs[info["valid"] :][: head["grid"]]
    assert plan.ints("q_indptr", len(call.qo)) == call.qo
    assert plan.ints("kv_indptr", len(call.kv)) == call.kv


@pytest.mark.parametrize("dims", DIMS, ids=[f"{d}-{v}" for d, v in DIMS])
def test_plans_are_upstreams(
    library: Kernseal, gpu: FakeGpu, upstream: Upstream, dims: tuple[int, int]
) -> None:
    """With a v_dim of 192 upstream is asked for 256, which has these tiles: its own choice would have no kernel."""
    axes = axes_of(head_dim=dims[0], v_dim=dims[1])
    rng = random.Random(repr(dims))
    seen: set[tuple[int, int, int]] = set()
    for _ in range(CASES):
        call = random_call(rng, axes)
        call = Call(axes, call.qo, call.kv, {**call.fields, "tile_q": 0})
        sms, major = rng.choice([1, 20, 78, 132, 148, 188]), rng.choice([9, 10, 12])
        if call.qo[-1] == 0 or call["total_q"] < call["batch_size"]:
            continue
        gpu.reset()
        gpu.device((9, 0), sms=sms)
        mine = Session(library, axes)
        plan = mine.plan(call)
        info, theirs = upstream.plan(call, sms, major, 256 if dims[1] == 192 else dims[1])
        if dims[1] == 192 and plan.head["split"]:
            info = resized(info, call, plan)
        compare(call, plan, info, theirs)
        assert plan.head["workspace_bytes"] <= mine.size(call, "workspace")
        seen.add((plan.tile, plan.head["split"], plan.head["fixed_grid"]))
        mine.close()
    assert seen == {
        (tile, split, fixed)
        for tile in ((16, 64, 128) if dims[1] <= 128 else (16, 64))
        for split in (0, 1)
        for fixed in (0, 1)
    }


def resized(info: dict[str, int], call: Call, plan: Plan) -> dict[str, int]:
    """Upstream's scratch for parts of 256 elements, as it would be for 192."""
    rows = -(-info["padded_batch_size"] * plan.tile // call.group)
    heads = call["num_q_heads"]
    assert info["part_lse"] == heads * rows * 256 * 4
    return {**info, "part_lse": heads * rows * 192 * 4, "float_bytes": heads * rows * 193 * 4}


@pytest.mark.parametrize("major", [9, 10, 12])
def test_upstream_chooses_a_tile_that_has_no_kernel(upstream: Upstream, major: int) -> None:
    """If this fails, upstream's choice for heads of 192 has changed: look at docs/decisions/0069."""
    call = random_call(random.Random(0), axes_of(head_dim=192, v_dim=192))
    sizes = {"batch_size": 1, "total_q": 4096, "fixed_grid": 0, "kv_chunk": 0}
    long = Call(call.axes, [0, 4096], [0, 4096], {**call.fields, **sizes})
    assert upstream.plan(long, 132, major, 192)[0]["cta_tile_q"] == 128
    assert upstream.plan(long, 132, major, 256)[0]["cta_tile_q"] == 64


@pytest.mark.parametrize("tile", [16, 64, 128])
@pytest.mark.parametrize("chunk", [0, 128])
def test_a_fixed_tile_gives_a_sequence_the_same_work_in_every_batch(
    session: Session, tile: int, chunk: int
) -> None:
    """What the kernel reads of a sequence: its tiles, parts, lengths, and where its rows of parts begin from each other."""

    def work(others: int) -> list[tuple[int, ...]]:
        lengths = [(300, 700), *[(5 * n, 900 - n) for n in range(others)]]
        qo, kv = ends_of([q for q, _ in lengths]), ends_of([k for _, k in lengths])
        made = random_call(random.Random(3), session.axes)
        sizes = {"batch_size": len(lengths), "total_q": qo[-1], "total_kv": kv[-1], "num_q_heads": 8}
        choice = {"num_kv_heads": 2, "tile_q": tile, "kv_chunk": chunk, "fixed_grid": 0}
        plan = session.plan(Call(session.axes, qo, kv, {**made.fields, **sizes, **choice}))
        columns = [plan.ints(name, plan.head["grid"]) for name in ("requests", "q_tiles", "kv_tiles")]
        mine = [row for row in zip(*columns, strict=True) if row[0] == 0]
        return [*mine, tuple(plan.ints("chunk", 1)), tuple(plan.ints("o_indptr", 2))]

    assert work(0) == work(1) == work(50)
    assert len(work(0)) > 2


def test_a_plan_writes_every_byte_of_itself(session: Session) -> None:
    """So that the same step gives the same bytes, whatever the memory held."""
    rng = random.Random(11)
    for _ in range(50):
        call = random_call(rng, session.axes)
        room = session.size(call)
        made = Call(call.axes, call.qo, call.kv, {**call.fields, "plan_bytes": room})
        found = []
        for fill in (b"\x00", b"\xff"):
            memory = session.library.ffi.new("char[]", fill * room)
            status, size = session.try_plan(made, memory)
            assert status == 0, session.library.error()
            found.append(bytes(session.library.ffi.buffer(memory, size)))
        gaps = [n for n, (a, b) in enumerate(zip(*found, strict=True)) if a != b]
        assert gaps == []


def test_planning_calls_nothing_of_the_driver(session: Session, gpu: FakeGpu) -> None:
    before = gpu.log()
    session.plan(random_call(random.Random(5), session.axes))
    assert gpu.log() == before
