"""Paged prefill's launch code on the recording driver: what is launched, what is refused and in which words."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from cpu.fake_driver.fa2 import MERGE_PARAMS, SMEM, Call, Plan
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.kernseal_library import Kernseal
from cpu.fake_driver.paged_prefill import (
    ALIGN,
    HEAD,
    HOST,
    TILE_PARAMS,
    Session,
    axes_of,
    call_of,
    library_of,
    tiles,
)

PLAIN = axes_of()
WIDE = axes_of(head_dim=256)
ALL = (PLAIN, WIDE)
Q_STRIDES = ("q_row_stride", "q_head_stride")
KV_STRIDES = ("kv_page_stride", "kv_row_stride", "kv_head_stride")
STRIDES = (*Q_STRIDES, *KV_STRIDES)
PARAMS = struct.Struct("<Q3IiI3I6I6Q4Q3IiIfI2Ii")
"""The kernel's parameter up to the arrays of the plan."""
SPLIT = 260
"""Where in it the kernel is told that sequences are split."""


@pytest.fixture(scope="module")
def library(fake_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory) -> Kernseal:
    fake_gpu.reset()
    return library_of(ALL, tmp_path_factory.mktemp("paged"))


@pytest.fixture
def session(library: Kernseal, gpu: FakeGpu) -> Iterator[Session]:
    made = Session(library, PLAIN)
    yield made
    made.close()


@pytest.fixture
def wide(library: Kernseal, gpu: FakeGpu) -> Iterator[Session]:
    made = Session(library, WIDE)
    yield made
    made.close()


def call(axes: dict[str, Any] = PLAIN, **changes: Any) -> Call:
    """Three sequences over pages of 16, one of them without query rows, with ``changes``."""
    qo, lens = changes.pop("qo", [0, 100, 100, 130]), changes.pop("lens", [400, 50, 30])
    pages = changes.pop("pages", [0, 25, 30, 32])
    fields: dict[str, Any] = {
        **dict.fromkeys(
            (*STRIDES, "tile_q", "fixed_grid", "pdl", "kv_chunk", "workspace_bytes", "stream"), 0
        ),
        "num_q_heads": 8,
        "num_kv_heads": 2,
        "page_size": 16,
        "sm_scale": 0.25,
        "batch_size": len(qo) - 1,
        "total_q": 130,
        "total_pages": 32,
        "num_pages": 1000,
        "lse": 4096,
        **{name: 2**20 * (n + 1) for n, name in enumerate(ALIGN)},
    }
    return call_of(axes, qo, pages, lens, {**fields, **changes})


def launches(session: Session, gpu: FakeGpu, made: Call, plan: Plan | None = None) -> list[dict[str, Any]]:
    gpu.params(TILE_PARAMS)
    gpu.params(MERGE_PARAMS, "merge")
    assert session.run(made, plan or session.plan(made)) == 0, session.library.error()
    return gpu.log("launch")


def refused(session: Session, made: Call, plan: Plan, status: str) -> str:
    assert session.run(made, plan) == session.status[status], session.library.error()
    return str(session.library.error())


# ---- what is launched ----


@pytest.mark.parametrize("tile", tiles(PLAIN))
def test_every_tile_has_its_kernel_block_and_grid(session: Session, gpu: FakeGpu, tile: int) -> None:
    (found,) = launches(session, gpu, call(tile_q=tile))
    assert (found["kernel"], found["smem"]) == (f"prefill_{tile}", SMEM[tile])
    assert found["grid"] == [-(-400 // tile) + -(-120 // tile), 1, 2]
    assert found["block"] == ([32, 1, 4] if tile == 16 else [32, 4, 1])


@pytest.mark.parametrize(
    ("strides", "expected"),
    [
        ({}, (1024, 128, 16 * 256, 256, 128)),
        ({"q_row_stride": 2048, "q_head_stride": 256}, (2048, 256, 16 * 256, 256, 128)),
        (
            {"kv_page_stride": 2 * 16 * 256, "kv_row_stride": 128, "kv_head_stride": 16 * 128},
            (1024, 128, 2 * 16 * 256, 128, 16 * 128),
        ),
        (
            {"kv_page_stride": 2**32 - 8, "kv_row_stride": 2**31, "kv_head_stride": 2**30},
            (1024, 128, 2**32 - 8, 2**31, 2**30),
        ),
    ],
)
def test_the_kernel_gets_the_fields(
    session: Session, gpu: FakeGpu, strides: dict[str, int], expected: tuple[int, ...]
) -> None:
    made = call(pdl=1, **strides)
    plan = session.plan(made)
    (found,) = launches(session, gpu, made, plan)
    params = bytes.fromhex(found["params"][0])
    device, head = made["plan_device"], plan.head
    q_row, q_head, *kv = expected
    assert PARAMS.unpack_from(params) == (
        *(made["q"], 16, 0, 0, 4, 16, 2, 128, 3, *kv, *kv),
        *(made["k"], made["v"], made["page_indices"], device + head["page_indptr"], 0, 0),
        *(device + head["q_indptr"], device + head["kv_lens"], made["o"], 4096),
        *(4, 0, 0, 2, 4, 0.25, 8, q_row, q_head, -1),
    )
    names = ("requests", "q_tiles", "kv_tiles", "merge_indptr", "o_indptr", "chunk", "valid")
    arrays = struct.unpack_from("<7QI4xQIB", params, PARAMS.size)
    assert arrays[:7] == tuple(head[name] and device + head[name] for name in names)
    assert arrays[7:] == (130, 0, head["grid"], 0)
    assert found["attributes"] == [[6, "01000000"]]


@pytest.mark.parametrize(
    "page_size", [1, 2, 3, 5, 12, 16, 48, 64, 100, 255, 256, 257, 1000, 65535, 2**20 - 1]
)
def test_the_fast_division_divides(session: Session, gpu: FakeGpu, page_size: int) -> None:
    """A row among those of all entries, as the kernel looks up its page (cuda/cmath of the patch)."""
    made = call(page_size=page_size, qo=[0, 1], lens=[1], pages=[0, 1], total_pages=1, kv_page_stride=2048)
    found = launches(session, gpu, made)
    divisor, multiplier, add, shift, value = struct.unpack_from(
        "<IIIiI", bytes.fromhex(found[0]["params"][0]), 8
    )
    assert (divisor, value) == (page_size, page_size)
    rng = random.Random(page_size)
    for n in (0, 1, page_size - 1, page_size, 2**31 + 511, *(rng.randrange(2**31) for _ in range(50))):
        quotient = (n + add) * multiplier >> 32 >> shift if multiplier else n >> shift
        assert quotient == n // page_size, n


def test_a_page_table_is_a_list_with_spare_entries(session: Session, gpu: FakeGpu) -> None:
    """The same work is launched; where entries begin is all that differs."""
    table = call(pages=[0, 40, 80, 120], total_pages=120)
    one, other = session.plan(call()), session.plan(table)
    places = [name for name in one.head if name != "total_pages"]
    assert [one.head[name] for name in places] == [other.head[name] for name in places]
    assert other.ints("page_indptr", 4) == [0, 40, 80, 120] and other.ints("kv_lens", 3) == [400, 50, 30]
    assert one.data[one.head["kv_lens"] :] == other.data[other.head["kv_lens"] :]
    assert launches(session, gpu, table, other)[0]["grid"] == [5, 1, 2]


def test_decode_is_a_row_a_sequence(session: Session, gpu: FakeGpu) -> None:
    """One thread block a sequence and KV head, with upstream's tile for it."""
    made = call(qo=[0, 1, 2, 3], total_q=3)
    (found,) = launches(session, gpu, made)
    assert (found["kernel"], found["grid"]) == ("prefill_16", [3, 1, 2])


def test_split_sequences_are_merged(session: Session, gpu: FakeGpu) -> None:
    made = call(kv_chunk=128, workspace_bytes=2**40)
    plan = session.plan(made)
    assert plan.ints("chunk", 1) == [128]
    tile, merge = launches(session, gpu, made, plan)
    params = bytes.fromhex(tile["params"][0])
    parts, part_lse = made["workspace"], made["workspace"] + plan.head["part_lse_at"]
    assert struct.unpack_from("<2Q", params, 128) == (parts, part_lse) and params[SPLIT] == 1
    given = [int.from_bytes(bytes.fromhex(text), "little") for text in merge["params"]]
    indptr = made["plan_device"] + plan.head["merge_indptr"]
    assert given == [parts, part_lse, indptr, made["o"], made["lse"], 130, 0, 8]
    assert (merge["kernel"], merge["smem"], merge["block"]) == ("merge", SMEM["merge"], [16, 8, 1])
    assert merge["grid"] == [132 * 8, 1, 1]


def test_sequences_within_a_chunk_are_not_split(session: Session, gpu: FakeGpu) -> None:
    (found,) = launches(session, gpu, call(kv_chunk=400, workspace_bytes=2**40))
    assert bytes.fromhex(found["params"][0])[SPLIT] == 0


def test_a_fixed_grid_is_the_same_for_every_batch(session: Session, gpu: FakeGpu) -> None:
    """Launches, and so what a graph holds, do not follow from the lengths; how many rows there are is read on the device."""
    for chunk in (0, -1):
        found = []
        for qo, lens in (
            ([0, 100, 100, 130], [400, 50, 30]),
            ([0, 1, 2, 3], [0, 0, 0]),
            ([0, 0, 0, 0], [1, 1, 1]),
        ):
            gpu.reset()
            made = call(fixed_grid=1, kv_chunk=chunk, workspace_bytes=2**40, qo=qo, lens=lens)
            plan = session.plan(made)
            assert plan.ints("all_rows", 1) == [qo[-1]]
            found.append(launches(session, gpu, made, plan))
        assert found[0] == found[1] == found[2]
        assert len(found[0]) == (1 if chunk == 0 else 2)


@pytest.mark.parametrize(
    "changes", [{"qo": [0], "pages": [0], "lens": []}, {"qo": [0, 0], "pages": [0, 5], "total_q": 0}]
)
def test_nothing_to_do_is_done(session: Session, gpu: FakeGpu, changes: dict[str, Any]) -> None:
    """Nothing else is looked at: no plan, no pointer."""
    bare = dict.fromkeys((*ALIGN, "lse", "num_q_heads", "num_kv_heads", "page_size", "sm_scale"), 0)
    made = call(**bare, **changes)
    assert (session.size(made), session.size(made, "workspace")) == (0, 0)
    assert session.plan(made).data == b""
    assert session.run(made, Plan(b"", {})) == 0
    assert gpu.log("launch") == []


def test_sequences_without_queries_launch_nothing(session: Session, gpu: FakeGpu) -> None:
    assert launches(session, gpu, call(qo=[0, 0, 0, 0])) == []


def test_no_keys_need_no_memory(session: Session, gpu: FakeGpu) -> None:
    nothing = dict.fromkeys(("total_pages", "num_pages", "k", "v", "page_indices"), 0)
    assert len(launches(session, gpu, call(pages=[0] * 4, lens=[0] * 3, **nothing))) == 1


@pytest.mark.parametrize("what", ["plan", "workspace"])
@pytest.mark.parametrize("chunk", [-1, 64])
def test_sizes_are_enough_for_every_batch(session: Session, what: str, chunk: int) -> None:
    """What ``plan`` asks for is never more, one sequence with everything included."""
    everything = {"qo": [0, 0, 0, 130], "pages": [0, 0, 0, 32], "lens": [0, 0, 512]}
    made = call(kv_chunk=chunk, workspace_bytes=2**40, **everything)
    needed = session.plan(made).head["bytes" if what == "plan" else "workspace_bytes"]
    assert needed <= session.size(made, what)
    assert session.size(call(kv_chunk=0), "workspace") == 0


# ---- what is refused ----

REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"batch_size": -1}, "INVALID_ARGUMENT", "batch_size is -1; it must not be negative"),
    ({"total_q": -1}, "INVALID_ARGUMENT", "total_q is -1"),
    ({"total_pages": -5}, "INVALID_ARGUMENT", "total_pages is -5"),
    ({"num_pages": -5}, "INVALID_ARGUMENT", "num_pages is -5"),
    ({"batch_size": 2**31 - 1}, "OVERFLOW", "batch_size is 2147483647; it must be below 2^31 - 1"),
    ({"total_pages": 2**40}, "OVERFLOW", "total_pages is 1099511627776"),
    (
        {"total_pages": 2**27},
        "OVERFLOW",
        "total_pages is 134217728; times page_size, 16, it must be below 2^31",
    ),
    ({"num_pages": 2**31 + 1}, "OVERFLOW", "num_pages is 2147483649; page_indices holds int32"),
    (
        {"num_pages": 0},
        "INVALID_ARGUMENT",
        "num_pages is 0; with total_pages above 0, 32, there must be a page",
    ),
    ({"page_size": 0}, "INVALID_ARGUMENT", "page_size is 0; it must be positive"),
    ({"page_size": -16}, "INVALID_ARGUMENT", "page_size is -16"),
    ({"sm_scale": 0.0}, "INVALID_ARGUMENT", "sm_scale is 0; it must be finite and above 0"),
    ({"sm_scale": float("nan")}, "INVALID_ARGUMENT", "sm_scale is "),
    ({"num_kv_heads": 0}, "INVALID_ARGUMENT", "num_kv_heads is 0; 1 to 65535 are supported"),
    ({"num_kv_heads": 65536}, "INVALID_ARGUMENT", "num_kv_heads is 65536"),
    (
        {"num_q_heads": 7},
        "INVALID_ARGUMENT",
        "num_q_heads is 7; it must be a positive multiple of num_kv_heads, 2",
    ),
    (
        {"total_q": 2**30},
        "OVERFLOW",
        "total_q is 1073741824; total_q * num_q_heads / num_kv_heads must be below",
    ),
    ({"tile_q": 32}, "UNSUPPORTED", "tile_q is 32; 0, 16, 64, 128 are supported with a head_dim of 128"),
    ({"fixed_grid": 2}, "INVALID_ARGUMENT", "fixed_grid is 2; it must be 0 or 1"),
    ({"pdl": 2}, "INVALID_ARGUMENT", "pdl is 2; it must be 0 or 1"),
    ({"kv_chunk": -2}, "INVALID_ARGUMENT", "kv_chunk is -2; -1, 0 and lengths below 2^31 are supported"),
    ({"kv_chunk": 2**31}, "INVALID_ARGUMENT", "kv_chunk is 2147483648"),
    ({"kv_chunk": 40}, "INVALID_ARGUMENT", "kv_chunk is 40; it must be a multiple of page_size, 16"),
    ({"kv_chunk": 16, "fixed_grid": 1}, "UNSUPPORTED", "kv_chunk is 16; with fixed_grid 1, 0 and -1 are"),
    (
        {"total_q": 2**23, "num_q_heads": 256, "num_kv_heads": 256},
        "OVERFLOW",
        "total_q is 8388608; times q_row_stride, 32768",
    ),
    (
        {"total_q": 2**23, "num_q_heads": 256, "num_kv_heads": 256, "q_row_stride": 128},
        "OVERFLOW",
        "total_q is 8388608; times num_q_heads * head_dim, 32768",
    ),
    (
        {"num_q_heads": 64, "num_kv_heads": 64, "q_head_stride": 2**26},
        "OVERFLOW",
        "num_q_heads is 64; times q_head_stride",
    ),
    (
        {"page_size": 2**25, "total_pages": 1, "num_kv_heads": 1},
        "OVERFLOW",
        "kv_page_stride is 4294967296; it must be below 2^32",
    ),
    *(
        ({name: 120}, "INVALID_ARGUMENT", f"{name} is 120; it must be at least 128, or 0 for ")
        for name in STRIDES
    ),
    *(({name: -128}, "INVALID_ARGUMENT", f"{name} is -128") for name in STRIDES),
    *(
        ({name: 1001}, "MISALIGNED", f"{name} is 1001; it must be a multiple of 8 elements, 16 bytes")
        for name in STRIDES
    ),
    *(({name: 2**28}, "OVERFLOW", f"{name} is 268435456; it must be below 2^28") for name in Q_STRIDES),
    *(({name: 2**32}, "OVERFLOW", f"{name} is 4294967296; it must be below 2^32") for name in KV_STRIDES),
]


@pytest.mark.parametrize(("changes", "status", "words"), REFUSALS)
def test_sizes_are_refused_everywhere(
    session: Session, gpu: FakeGpu, changes: dict[str, Any], status: str, words: str
) -> None:
    """By the sizes, the plan and the run, in the same words; nothing is launched or written."""
    good = session.plan(call())
    made = call(**changes)
    expected = session.status[status]
    memory = session.library.ffi.new("char[]", b"\xa5" * 4096)
    for what in ("workspace", "plan"):
        size = session.library.ffi.new("uint64_t *", 77)
        assert session.call(f"{what}_size", session.args(made), size) == expected
        assert words in session.library.error() and size[0] == 77
    assert session.try_plan(made.but(plan_bytes=4096), memory) == (expected, 77)
    assert words in session.library.error()
    assert bytes(session.library.ffi.buffer(memory, 4096)) == b"\xa5" * 4096
    assert words in refused(session, made, good, status)
    assert gpu.log("launch") == []


def test_a_tile_that_has_no_kernel_is_refused(wide: Session) -> None:
    status, _ = wide.try_plan(call(WIDE, tile_q=128), wide.library.ffi.new("char[64]"))
    assert status == wide.status["UNSUPPORTED"]
    assert "tile_q is 128; 0, 16, 64 are supported with a head_dim of 256" in wide.library.error()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"qo": [1, 100, 100, 130]}, "qo_indptr[0] is 1; it must be 0"),
        ({"pages": [-1, 25, 30, 32]}, "page_indptr[0] is -1; it must be 0"),
        ({"qo": [0, 100, 99, 130]}, "qo_indptr[2] is 99; it must not be below the one before it, 100"),
        ({"pages": [0, 25, 33, 32]}, "page_indptr[3] is 32; it must not be below the one before it, 33"),
        ({"qo": [0, 100, 100, 131]}, "qo_indptr[3] is 131; it must not be above total_q, 130"),
        ({"pages": [0, 25, 30, 33]}, "page_indptr[3] is 33; it must not be above total_pages, 32"),
        ({"lens": [400, -1, 30]}, "kv_lens[1] is -1; with 5 pages of 16, 0 to 80 are supported"),
        ({"lens": [401, 50, 30]}, "kv_lens[0] is 401; with 25 pages of 16, 0 to 400 are supported"),
        ({"lens": [1, 0, 0], "pages": [0] * 4}, "kv_lens[0] is 1; with 0 pages of 16, 0 to 0 are supported"),
    ],
)
def test_sequences_that_are_none_are_refused(session: Session, changes: dict[str, Any], words: str) -> None:
    made = call(plan_bytes=4096, **changes)
    status, size = session.try_plan(made, session.library.ffi.new("char[4096]"))
    assert (status, size) == (session.status["INVALID_ARGUMENT"], 77)
    assert words in session.library.error()


@pytest.mark.parametrize("name", [*HOST, "plan"])
def test_memory_that_a_plan_needs(session: Session, name: str) -> None:
    made = call(plan_bytes=4096)
    size = session.library.ffi.new("uint64_t *")
    there = {**session.arrays(made), "plan": session.library.ffi.new("char[4096]")}
    host = {key: int(session.library.ffi.cast("uintptr_t", value)) for key, value in there.items()}
    cases = [(host[name] + 2, "MISALIGNED", f"it must be {8 if name == 'plan' else 4}-byte aligned")]
    cases += [(0, "INVALID_ARGUMENT", f"{name} is null")] if name != "plan" else []
    for value, status, words in cases:
        assert (
            session.call("plan", session.args(made, **{**host, name: value}), size) == session.status[status]
        )
        assert words in session.library.error() and name in session.library.error()


@pytest.mark.parametrize("chunk", [0, 128])
def test_too_little_memory_is_refused_with_what_is_needed(session: Session, chunk: int) -> None:
    made = call(kv_chunk=chunk, workspace_bytes=2**40)
    plan = session.plan(made)
    size, memory = len(plan.data), session.library.ffi.new("char[]", len(plan.data))
    assert session.try_plan(made.but(plan_bytes=size - 1), memory)[0] == session.status["WORKSPACE_TOO_SMALL"]
    assert f"plan_bytes is {size - 1}; this plan needs {size}" in session.library.error()
    if chunk:
        needed = plan.head["workspace_bytes"]
        short = made.but(plan_bytes=2**20, workspace_bytes=needed - 1)
        assert session.try_plan(short, memory)[0] == session.status["WORKSPACE_TOO_SMALL"]
        assert f"workspace_bytes is {needed - 1}; this plan needs {needed}" in session.library.error()
        assert f"the plan needs {needed}" in refused(session, short, plan, "WORKSPACE_TOO_SMALL")
    assert f"a plan has at least {HEAD.size}" in refused(
        session, made.but(plan_bytes=HEAD.size - 1), plan, "WORKSPACE_TOO_SMALL"
    )


@pytest.mark.parametrize(("chunk", "fixed_grid"), [(0, 0), (128, 0), (-1, 0), (0, 1), (-1, 1)])
def test_without_memory_a_plan_says_how_much_it_takes(session: Session, chunk: int, fixed_grid: int) -> None:
    made = call(kv_chunk=chunk, fixed_grid=fixed_grid)
    written = session.plan(made.but(workspace_bytes=2**40)).data
    assert session.try_plan(made, 0) == (0, len(written))


def test_parts_that_cannot_be_counted_are_refused(session: Session) -> None:
    sizes = {"total_q": 100000, "total_pages": 100000, "page_size": 1}
    everything = {"qo": [0, 100000], "pages": [0, 100000], "lens": [100000]}
    made = call(kv_chunk=1, workspace_bytes=2**60, **sizes, **everything)
    for memory in (0, session.library.ffi.new("char[64]")):
        assert session.try_plan(made.but(plan_bytes=64), memory)[0] == session.status["OVERFLOW"]
        assert "kv_chunk is 1; it makes " in session.library.error()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 2}, "batch_size is 2; the plan was made for 3"),
        ({"total_q": 131}, "total_q is 131; the plan was made for 130"),
        ({"total_pages": 33}, "total_pages is 33; the plan was made for 32"),
        ({"num_q_heads": 4}, "num_q_heads is 4; the plan was made for 8"),
        ({"num_kv_heads": 1}, "num_kv_heads is 1; the plan was made for 2"),
        ({"kv_chunk": 128}, "kv_chunk is 128; the plan was made for 0"),
        ({"fixed_grid": 1}, "fixed_grid is 1; the plan was made for 0"),
        ({"page_size": 32}, "page_size is 32; the plan was made for 16"),
    ],
)
def test_a_plan_of_another_step_is_refused(session: Session, changes: dict[str, Any], words: str) -> None:
    assert words in refused(session, call(**changes), session.plan(call()), "INVALID_ARGUMENT")


def test_memory_without_a_plan_is_refused(session: Session) -> None:
    plan = session.plan(call())
    nothing = Plan(bytes(len(plan.data)), plan.head)
    words = "plan holds no plan; kseal_paged_prefill_plan writes one"
    assert words in refused(session, call(), nothing, "INVALID_ARGUMENT")


def test_a_plan_for_a_variant_with_other_heads_is_refused(session: Session, wide: Session) -> None:
    sizes: dict[str, Any] = {"kv_chunk": 128, "tile_q": 64, "workspace_bytes": 2**40}
    words = "head_dim is 256; the plan was made for 128"
    assert words in refused(wide, call(WIDE, **sizes), session.plan(call(**sizes)), "INVALID_ARGUMENT")


@pytest.mark.parametrize("name", [*ALIGN, "lse"])
def test_pointers_are_checked(session: Session, gpu: FakeGpu, name: str) -> None:
    sizes = {"kv_chunk": 128, "workspace_bytes": 2**40}
    plan = session.plan(call(**sizes))
    odd = call(**sizes)[name] + 2
    words = f"{name} is {odd:#x}; it must be "
    assert words in refused(session, call(**sizes, **{name: odd}), plan, "MISALIGNED")
    if name != "lse":
        assert f"{name} is null" in refused(session, call(**sizes, **{name: 0}), plan, "INVALID_ARGUMENT")
    assert gpu.log("launch") == []


def test_another_device_is_refused(session: Session, gpu: FakeGpu) -> None:
    plan = session.plan(call())
    gpu.device((9, 0), count=2)
    gpu.current(1)
    assert session.run(call(), plan) == session.status["NOT_PREPARED"]


@pytest.mark.parametrize("launched", [0, 1])
def test_a_driver_that_fails_is_named(session: Session, gpu: FakeGpu, launched: int) -> None:
    made = call(kv_chunk=128, workspace_bytes=2**40)
    plan = session.plan(made)
    gpu.params(TILE_PARAMS)
    gpu.fail("cuLaunchKernelEx", 700, after=launched)
    assert session.run(made, plan) == session.status["DRIVER_ERROR"]
    assert "cuLaunchKernelEx: CUDA_ERROR_ILLEGAL_ADDRESS (700)" in session.library.error()
    assert len(gpu.log("launch")) == launched
