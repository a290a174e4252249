"""Paged prefill's plan is upstream's, number for number, whatever the page size."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from cpu.fake_driver.fa2 import Call, ends_of
from cpu.fake_driver.fa2_scheduler import Scheduler, compare
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.kernseal_library import Kernseal
from cpu.fake_driver.paged_prefill import (
    DIMS,
    PAGES,
    Session,
    axes_of,
    call_of,
    library_of,
    needed,
    random_call,
    tiles,
)
from nvcc import toolkit

CASES = 1000
"""For each head dimension."""


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Scheduler:
    if reason := toolkit.unavailable():
        pytest.skip(reason)
    return Scheduler(tmp_path_factory.mktemp("scheduler"))


@pytest.fixture(scope="module")
def library(fake_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory) -> Kernseal:
    fake_gpu.reset()
    return library_of([axes_of(head_dim=d) for d in DIMS], tmp_path_factory.mktemp("plans"))


@pytest.fixture
def session(library: Kernseal, gpu: FakeGpu) -> Iterator[Session]:
    made = Session(library, axes_of())
    yield made
    made.close()


@pytest.mark.parametrize("head_dim", DIMS)
def test_plans_are_upstreams(library: Kernseal, gpu: FakeGpu, upstream: Scheduler, head_dim: int) -> None:
    """A sequence with more entries than its keys need is planned as upstream's with those alone."""
    axes = axes_of(head_dim=head_dim)
    rng = random.Random(head_dim)
    seen: set[tuple[int, int, int]] = set()
    pages: set[tuple[int, int]] = set()
    for _ in range(CASES):
        call = random_call(rng, axes).but(tile_q=0)
        sms, major = rng.choice([1, 20, 78, 132, 148, 188]), rng.choice([9, 10, 12])
        if call.qo[-1] == 0 or call["total_q"] < call["batch_size"]:
            continue
        gpu.reset()
        gpu.device((9, 0), sms=sms)
        mine = Session(library, axes)
        plan = mine.plan(call)
        info, theirs = upstream.plan(
            call, needed(call), call["page_size"], (sms, major), (head_dim, head_dim)
        )
        compare(call, plan, info, theirs)
        for name in ("page_indptr", "kv_lens"):
            assert plan.ints(name, len(call.host[name])) == call.host[name]
        assert plan.head["workspace_bytes"] <= mine.size(call, "workspace")
        seen.add((plan.tile, plan.head["split"], plan.head["fixed_grid"]))
        pages.add((call["page_size"], plan.head["split"]))
        mine.close()
    assert seen == {(tile, split, fixed) for tile in tiles(axes) for split in (0, 1) for fixed in (0, 1)}
    assert pages == {(page, split) for page in PAGES for split in (0, 1)}


@pytest.mark.parametrize("tile", [16, 64, 128])
@pytest.mark.parametrize("chunk", [0, 128])
def test_a_fixed_tile_gives_a_sequence_the_same_work_in_every_batch(
    session: Session, tile: int, chunk: int
) -> None:
    """What the kernel reads of a sequence: its tiles, parts, lengths, and where its rows of parts begin from each other."""

    def work(others: int, spare: int) -> list[tuple[int, ...]]:
        lengths = [(300, 700), *[(5 * n, 900 - n) for n in range(others)]]
        qo, pages = ends_of([q for q, _ in lengths]), ends_of([-(-k // 16) + spare for _, k in lengths])
        made = random_call(random.Random(3), session.axes)
        sizes = {"batch_size": len(lengths), "total_q": qo[-1], "total_pages": pages[-1], "page_size": 16}
        choice = {"num_q_heads": 8, "num_kv_heads": 2, "tile_q": tile, "kv_chunk": chunk, "fixed_grid": 0}
        fields = {**made.fields, **sizes, **choice}
        plan = session.plan(call_of(session.axes, qo, pages, [k for _, k in lengths], fields))
        columns = [plan.ints(name, plan.head["grid"]) for name in ("requests", "q_tiles", "kv_tiles")]
        mine = [row for row in zip(*columns, strict=True) if row[0] == 0]
        return [*mine, tuple(plan.ints("chunk", 1)), tuple(plan.ints("o_indptr", 2))]

    assert work(0, 0) == work(1, 0) == work(50, 0) == work(50, 9)
    assert len(work(0, 0)) > 2


def both(session: Session, call: Call) -> list[bytes]:
    """The plan, written over zeros and over ones."""
    room, found = session.size(call), []
    for fill in (b"\x00", b"\xff"):
        memory = session.library.ffi.new("char[]", fill * room)
        status, size = session.try_plan(call.but(plan_bytes=room), memory)
        assert status == 0, session.library.error()
        found.append(bytes(session.library.ffi.buffer(memory, size)))
    return found


def test_a_plan_writes_every_byte_of_itself(session: Session) -> None:
    """So that the same step gives the same bytes, whatever the memory held."""
    rng = random.Random(11)
    for _ in range(50):
        zeros, ones = both(session, random_call(rng, session.axes))
        assert zeros == ones


def test_planning_calls_nothing_of_the_driver(session: Session, gpu: FakeGpu) -> None:
    before = gpu.log()
    session.plan(random_call(random.Random(5), session.axes))
    assert gpu.log() == before
