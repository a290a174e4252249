"""Ragged prefill's plan is upstream's, number for number, but for the tile where upstream's has no kernel."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from cpu.fake_driver.fa2 import Call, Plan, ends_of
from cpu.fake_driver.fa2_scheduler import Scheduler, compare
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.kernseal_library import Kernseal
from cpu.fake_driver.ragged_prefill import DIMS, Session, axes_of, call_of, library_of, random_call
from nvcc import toolkit

CASES = 700
"""For each pair of head dimensions."""


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Scheduler:
    if reason := toolkit.unavailable():
        pytest.skip(reason)
    return Scheduler(tmp_path_factory.mktemp("scheduler"))


@pytest.fixture(scope="module")
def library(fake_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory) -> Kernseal:
    fake_gpu.reset()
    return library_of([axes_of(head_dim=d, v_dim=v) for d, v in DIMS], tmp_path_factory.mktemp("plans"))


@pytest.fixture
def session(library: Kernseal, gpu: FakeGpu) -> Iterator[Session]:
    made = Session(library, axes_of())
    yield made
    made.close()


def plan_of(
    upstream: Scheduler, call: Call, sms: int, major: int, v_dim: int
) -> tuple[dict[str, int], bytes]:
    return upstream.plan(call, call.host["kv_indptr"], 1, (sms, major), (call.axes["head_dim"], v_dim))


@pytest.mark.parametrize("dims", DIMS, ids=[f"{d}-{v}" for d, v in DIMS])
def test_plans_are_upstreams(
    library: Kernseal, gpu: FakeGpu, upstream: Scheduler, dims: tuple[int, int]
) -> None:
    """With a v_dim of 192 upstream is asked for 256, which has these tiles: its own choice would have no kernel."""
    axes = axes_of(head_dim=dims[0], v_dim=dims[1])
    rng = random.Random(repr(dims))
    seen: set[tuple[int, int, int]] = set()
    for _ in range(CASES):
        call = random_call(rng, axes)
        call = call.but(tile_q=0)
        sms, major = rng.choice([1, 20, 78, 132, 148, 188]), rng.choice([9, 10, 12])
        if call.qo[-1] == 0 or call["total_q"] < call["batch_size"]:
            continue
        gpu.reset()
        gpu.device((9, 0), sms=sms)
        mine = Session(library, axes)
        plan = mine.plan(call)
        info, theirs = plan_of(upstream, call, sms, major, 256 if dims[1] == 192 else dims[1])
        if dims[1] == 192 and plan.head["split"]:
            info = resized(info, call, plan)
        compare(call, plan, info, theirs)
        assert plan.ints("kv_indptr", len(call.qo)) == call.host["kv_indptr"]
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
def test_upstream_chooses_a_tile_that_has_no_kernel(upstream: Scheduler, major: int) -> None:
    """If this fails, upstream's choice for heads of 192 has changed: look at docs/decisions/0069."""
    call = random_call(random.Random(0), axes_of(head_dim=192, v_dim=192))
    sizes = {"batch_size": 1, "total_q": 4096, "fixed_grid": 0, "kv_chunk": 0}
    long = call_of(call.axes, [0, 4096], [0, 4096], {**call.fields, **sizes})
    assert plan_of(upstream, long, 132, major, 192)[0]["cta_tile_q"] == 128
    assert plan_of(upstream, long, 132, major, 256)[0]["cta_tile_q"] == 64


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
        plan = session.plan(call_of(session.axes, qo, kv, {**made.fields, **sizes, **choice}))
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
        made = call.but(plan_bytes=room)
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
