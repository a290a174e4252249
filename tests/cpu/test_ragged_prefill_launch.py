"""Ragged prefill's launch code on the recording driver: what is launched, what is refused and in which words."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.kernseal_library import Kernseal
from cpu.fake_driver.ragged_prefill import (
    ALIGN,
    HEAD,
    MERGE_PARAMS,
    OP,
    SMEM,
    TILE_PARAMS,
    Call,
    Plan,
    Session,
    axes_of,
    call_of,
    library_of,
    tiles,
)

PLAIN = axes_of()
WIDE = axes_of(head_dim=192, v_dim=192)
NARROW_V = axes_of(head_dim=192, v_dim=128)
ALL = (PLAIN, WIDE, NARROW_V)
STRIDES = [f"{name}_{what}_stride" for name in "qkv" for what in ("row", "head")]
PARAMS = struct.Struct("<7Q3IiIf2I6Ii")
"""The kernel's parameter up to the arrays of the plan."""


@pytest.fixture(scope="module")
def library(fake_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory) -> Kernseal:
    fake_gpu.reset()
    return library_of(ALL, tmp_path_factory.mktemp("ragged"))


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
    """Three sequences, one of them empty, with ``changes``."""
    qo, kv = changes.pop("qo", [0, 100, 100, 130]), changes.pop("kv", [0, 400, 450, 480])
    fields: dict[str, Any] = {
        **dict.fromkeys(
            (*STRIDES, "tile_q", "fixed_grid", "pdl", "kv_chunk", "workspace_bytes", "stream"), 0
        ),
        "num_q_heads": 8,
        "num_kv_heads": 2,
        "sm_scale": 0.25,
        "batch_size": len(qo) - 1,
        "total_q": 130,
        "total_kv": 480,
        "lse": 4096,
        **{name: 2**20 * (n + 1) for n, name in enumerate(ALIGN)},
    }
    return call_of(axes, qo, kv, {**fields, **changes})


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
    blocks = -(-400 // tile) + -(-120 // tile)
    assert (found["kernel"], found["smem"]) == (f"prefill_{tile}", SMEM[tile])
    assert found["grid"] == [blocks, 1, 2]
    assert found["block"] == ([32, 1, 4] if tile == 16 else [32, 4, 1])


def test_the_kernel_gets_the_fields(session: Session, gpu: FakeGpu) -> None:
    made = call(
        q_row_stride=2048, k_row_stride=768, k_head_stride=256, v_row_stride=520, v_head_stride=136, pdl=1
    )
    plan = session.plan(made)
    (found,) = launches(session, gpu, made, plan)
    given = PARAMS.unpack_from(bytes.fromhex(found["params"][0]))
    device, head = made["plan_device"], plan.head
    pointers = (
        made["q"],
        made["k"],
        made["v"],
        device + head["q_indptr"],
        device + head["kv_indptr"],
        made["o"],
        4096,
    )
    assert given == (*pointers, *(4, 0, 0), 2, 4, 0.25, *(8, 2), *(2048, 128, 768, 256, 520, 136), -1)
    arrays = struct.unpack_from("<7QI4xQIB", bytes.fromhex(found["params"][0]), 120)
    places = [
        head[name]
        for name in ("requests", "q_tiles", "kv_tiles", "merge_indptr", "o_indptr", "chunk", "valid")
    ]
    assert arrays[:7] == tuple(place and device + place for place in places)
    assert arrays[7:] == (130, 0, head["grid"], 0)
    assert found["attributes"] == [[6, "01000000"]]


@pytest.mark.parametrize("group", [*range(1, 130), 255, 256, 257, 1000, 65535, 65537, 2**20 - 1, 3 * 2**20])
def test_the_fast_division_divides(session: Session, gpu: FakeGpu, group: int) -> None:
    """As the kernel does it (cuda/cmath of the patch), up to the largest packed row."""
    made = call(num_q_heads=group, num_kv_heads=1, q_row_stride=128, q_head_stride=128, qo=[0, 1], kv=[0, 1])
    made = made.but(total_q=1, total_kv=1)
    found = launches(session, gpu, made)
    divisor, multiplier, add, shift, value = struct.unpack_from(
        "<IIIiI", bytes.fromhex(found[0]["params"][0]), 56
    )
    assert (divisor, value) == (group, group)
    rng = random.Random(group)
    for n in (0, 1, group - 1, group, group + 1, 2**31 - 1, *(rng.randrange(2**31) for _ in range(50))):
        quotient = (n + add) * multiplier >> 32 >> shift if multiplier else n >> shift
        assert quotient == n // group, n


def test_split_sequences_are_merged(session: Session, gpu: FakeGpu) -> None:
    made = call(kv_chunk=128, workspace_bytes=2**40)
    plan = session.plan(made)
    tile, merge = launches(session, gpu, made, plan)
    params = bytes.fromhex(tile["params"][0])
    parts, part_lse = made["workspace"], made["workspace"] + plan.head["part_lse_at"]
    assert struct.unpack_from("<2Q", params, 40) == (parts, part_lse) and params[196] == 1
    given = [int.from_bytes(bytes.fromhex(text), "little") for text in merge["params"]]
    indptr = made["plan_device"] + plan.head["merge_indptr"]
    assert given == [parts, part_lse, indptr, made["o"], made["lse"], 130, 0, 8]
    assert (merge["kernel"], merge["smem"], merge["block"]) == ("merge", SMEM["merge"], [16, 8, 1])
    assert merge["grid"] == [132 * 8, 1, 1]


def test_a_merge_has_no_more_blocks_than_work(session: Session, gpu: FakeGpu) -> None:
    made = call(kv_chunk=128, workspace_bytes=2**40, qo=[0, 1, 1, 2])
    assert launches(session, gpu, made)[1]["grid"] == [132, 1, 1]


def test_sequences_within_a_chunk_are_not_split(session: Session, gpu: FakeGpu) -> None:
    (found,) = launches(session, gpu, call(kv_chunk=400, workspace_bytes=2**40))
    assert bytes.fromhex(found["params"][0])[196] == 0


def test_a_fixed_grid_is_the_same_for_every_batch(session: Session, gpu: FakeGpu) -> None:
    """Launches, and so what a graph holds, do not follow from the lengths; how many rows there are is read on the device."""
    for chunk in (0, -1):
        found = []
        for qo, kv in (
            ([0, 100, 100, 130], [0, 400, 450, 480]),
            ([0, 1, 2, 3], [0, 0, 0, 0]),
            ([0, 0, 0, 0], [0, 1, 2, 3]),
        ):
            gpu.reset()
            made = call(fixed_grid=1, kv_chunk=chunk, workspace_bytes=2**40, qo=qo, kv=kv)
            plan = session.plan(made)
            assert plan.ints("all_rows", 1) == [qo[-1]]
            found.append(launches(session, gpu, made, plan))
        assert found[0] == found[1] == found[2]
        assert len(found[0]) == (1 if chunk == 0 else 2)


@pytest.mark.parametrize("changes", [{"qo": [0], "kv": [0]}, {"qo": [0, 0], "kv": [0, 5], "total_q": 0}])
def test_nothing_to_do_is_done(session: Session, gpu: FakeGpu, changes: dict[str, Any]) -> None:
    """Nothing else is looked at: no plan, no pointer."""
    bare = dict.fromkeys((*ALIGN, "lse", "num_q_heads", "num_kv_heads", "sm_scale"), 0)
    made = call(**bare, **changes)
    assert (session.size(made), session.size(made, "workspace")) == (0, 0)
    assert session.plan(made).data == b""
    assert session.run(made, Plan(b"", {})) == 0
    assert gpu.log("launch") == []


def test_sequences_without_queries_launch_nothing(session: Session, gpu: FakeGpu) -> None:
    assert launches(session, gpu, call(qo=[0, 0, 0, 0])) == []


def test_no_keys_need_no_memory(session: Session, gpu: FakeGpu) -> None:
    made = call(kv=[0, 0, 0, 0], total_kv=0, k=0, v=0)
    assert len(launches(session, gpu, made)) == 1


@pytest.mark.parametrize("what", ["plan", "workspace"])
def test_sizes_are_enough_for_every_batch(session: Session, what: str) -> None:
    """What ``plan`` asks for is never more, and for one sequence of everything it is close."""
    made = call(kv_chunk=-1, workspace_bytes=2**40, qo=[0, 0, 0, 130], kv=[0, 0, 0, 480])
    needed = session.plan(made).head["bytes" if what == "plan" else "workspace_bytes"]
    assert needed <= session.size(made, what)
    assert session.size(call(kv_chunk=0), "workspace") == 0


# ---- what is refused ----

REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"batch_size": -1}, "INVALID_ARGUMENT", "batch_size is -1; it must not be negative"),
    ({"total_q": -1}, "INVALID_ARGUMENT", "total_q is -1"),
    ({"total_kv": -5}, "INVALID_ARGUMENT", "total_kv is -5"),
    ({"batch_size": 2**31 - 1}, "OVERFLOW", "batch_size is 2147483647; it must be below 2^31 - 1"),
    ({"total_kv": 2**40}, "OVERFLOW", "total_kv is 1099511627776"),
    ({"sm_scale": 0.0}, "INVALID_ARGUMENT", "sm_scale is 0; it must be finite and above 0"),
    ({"sm_scale": -1.0}, "INVALID_ARGUMENT", "sm_scale is -1"),
    ({"sm_scale": float("nan")}, "INVALID_ARGUMENT", "sm_scale is "),
    ({"sm_scale": float("inf")}, "INVALID_ARGUMENT", "sm_scale is inf"),
    ({"num_kv_heads": 0}, "INVALID_ARGUMENT", "num_kv_heads is 0; 1 to 65535 are supported"),
    ({"num_kv_heads": 65536}, "INVALID_ARGUMENT", "num_kv_heads is 65536"),
    (
        {"num_q_heads": 0},
        "INVALID_ARGUMENT",
        "num_q_heads is 0; it must be a positive multiple of num_kv_heads, 2",
    ),
    ({"num_q_heads": 7}, "INVALID_ARGUMENT", "num_q_heads is 7"),
    (
        {"total_q": 2**30},
        "OVERFLOW",
        "total_q is 1073741824; total_q * num_q_heads / num_kv_heads must be below",
    ),
    ({"tile_q": 32}, "UNSUPPORTED", "tile_q is 32; 0, 16, 64, 128 are supported with a v_dim of 128"),
    ({"fixed_grid": 2}, "INVALID_ARGUMENT", "fixed_grid is 2; it must be 0 or 1"),
    ({"pdl": 2}, "INVALID_ARGUMENT", "pdl is 2; it must be 0 or 1"),
    ({"kv_chunk": -2}, "INVALID_ARGUMENT", "kv_chunk is -2; -1, 0 and lengths below 2^31 are supported"),
    ({"kv_chunk": 2**31}, "INVALID_ARGUMENT", "kv_chunk is 2147483648"),
    (
        {"kv_chunk": 5, "fixed_grid": 1},
        "UNSUPPORTED",
        "kv_chunk is 5; with fixed_grid 1, 0 and -1 are supported",
    ),
    (
        {"total_q": 2**23, "num_q_heads": 256, "num_kv_heads": 256},
        "OVERFLOW",
        "total_q is 8388608; times q_row_stride, 32768",
    ),
    (
        {"total_q": 2**23, "num_q_heads": 256, "num_kv_heads": 256, "q_row_stride": 128},
        "OVERFLOW",
        "total_q is 8388608; times num_q_heads * v_dim, 32768",
    ),
    ({"total_kv": 2**24}, "OVERFLOW", "total_kv is 16777216; times k_row_stride, 256"),
    ({"total_kv": 2**24, "k_row_stride": 128}, "OVERFLOW", "total_kv is 16777216; times v_row_stride, 256"),
    *(
        ({name: 120}, "INVALID_ARGUMENT", f"{name} is 120; it must be at least 128, or 0 for ")
        for name in STRIDES
    ),
    *(({name: -128}, "INVALID_ARGUMENT", f"{name} is -128") for name in STRIDES),
    *(
        ({name: 1001}, "MISALIGNED", f"{name} is 1001; it must be a multiple of 8 elements, 16 bytes")
        for name in STRIDES
    ),
    *(({name: 2**28}, "OVERFLOW", f"{name} is 268435456; it must be below 2^28") for name in STRIDES),
    *(
        (
            {"num_q_heads": 64, "num_kv_heads": 64, f"{x}_head_stride": 2**26},
            "OVERFLOW",
            f"{heads} is 64; times {x}_head_stride",
        )
        for x, heads in (("q", "num_q_heads"), ("k", "num_kv_heads"), ("v", "num_kv_heads"))
    ),
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
    made = call(WIDE, tile_q=128)
    status, _ = wide.try_plan(made, wide.library.ffi.new("char[64]"))
    assert status == wide.status["UNSUPPORTED"]
    assert "tile_q is 128; 0, 16, 64 are supported with a v_dim of 192" in wide.library.error()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"qo": [1, 100, 100, 130]}, "qo_indptr[0] is 1; it must be 0"),
        ({"kv": [-1, 400, 450, 480]}, "kv_indptr[0] is -1; it must be 0"),
        ({"qo": [0, 100, 99, 130]}, "qo_indptr[2] is 99; it must not be below the one before it, 100"),
        ({"kv": [0, 400, 500, 480]}, "kv_indptr[3] is 480; it must not be below the one before it, 500"),
        ({"qo": [0, 100, 100, 131]}, "qo_indptr[3] is 131; it must not be above total_q, 130"),
        ({"kv": [0, 400, 450, 481]}, "kv_indptr[3] is 481; it must not be above total_kv, 480"),
    ],
)
def test_ends_that_are_none_are_refused(session: Session, changes: dict[str, Any], words: str) -> None:
    made = call(plan_bytes=4096, **changes)
    status, size = session.try_plan(made, session.library.ffi.new("char[4096]"))
    assert (status, size) == (session.status["INVALID_ARGUMENT"], 77)
    assert words in session.library.error()


@pytest.mark.parametrize("name", ["qo_indptr", "kv_indptr", "plan"])
def test_memory_that_a_plan_needs(session: Session, name: str) -> None:
    made = call(plan_bytes=4096)
    size = session.library.ffi.new("uint64_t *")
    there = {**session.arrays(made), "plan": session.library.ffi.new("char[4096]")}
    host = {key: int(session.library.ffi.cast("uintptr_t", value)) for key, value in there.items()}
    cases = [(host[name] + 2, "MISALIGNED", f"it must be {8 if name == 'plan' else 4}-byte aligned")]
    cases += [(0, "INVALID_ARGUMENT", f"{name} is null")] if name != "plan" else []
    for value, status, words in cases:
        args = session.args(made, **{**host, name: value})
        assert session.call("plan", args, size) == session.status[status]
        assert words in session.library.error() and name in session.library.error()


@pytest.mark.parametrize("chunk", [0, 128])
def test_too_little_memory_is_refused_with_what_is_needed(session: Session, chunk: int) -> None:
    made = call(kv_chunk=chunk, workspace_bytes=2**40)
    plan = session.plan(made)
    memory = session.library.ffi.new("char[]", len(plan.data))
    less = made.but(plan_bytes=len(plan.data) - 1)
    assert session.try_plan(less, memory)[0] == session.status["WORKSPACE_TOO_SMALL"]
    assert f"plan_bytes is {len(plan.data) - 1}; this plan needs {len(plan.data)}" in session.library.error()
    if chunk:
        needed = plan.head["workspace_bytes"]
        short = made.but(plan_bytes=2**20, workspace_bytes=needed - 1)
        assert session.try_plan(short, memory)[0] == session.status["WORKSPACE_TOO_SMALL"]
        assert f"workspace_bytes is {needed - 1}; this plan needs {needed}" in session.library.error()
        assert f"the plan needs {needed}" in refused(session, short, plan, "WORKSPACE_TOO_SMALL")
    assert f"a plan has at least {HEAD.size}" in refused(
        session, call(kv_chunk=chunk, plan_bytes=HEAD.size - 1), plan, "WORKSPACE_TOO_SMALL"
    )


@pytest.mark.parametrize("fixed_grid", [0, 1])
@pytest.mark.parametrize("chunk", [0, 128, -1])
def test_without_memory_a_plan_says_how_much_it_takes(session: Session, chunk: int, fixed_grid: int) -> None:
    if chunk > 0 and fixed_grid:
        return
    made = call(kv_chunk=chunk, fixed_grid=fixed_grid, workspace_bytes=0)
    status, size = session.try_plan(made, 0)
    assert (status, size) == (
        0,
        len(session.plan(call(kv_chunk=chunk, fixed_grid=fixed_grid, workspace_bytes=2**40)).data),
    )


def test_parts_that_cannot_be_counted_are_refused(session: Session) -> None:
    made = call(
        kv_chunk=1, workspace_bytes=2**60, qo=[0, 100000], kv=[0, 100000], total_q=100000, total_kv=100000
    )
    status, _ = session.try_plan(made.but(plan_bytes=2**40), 0)
    assert status == session.status["OVERFLOW"]
    memory = session.library.ffi.new("char[64]")
    status, _ = session.try_plan(made.but(plan_bytes=64), memory)
    assert status == session.status["OVERFLOW"]
    assert "kv_chunk is 1; it makes " in session.library.error()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 2}, "batch_size is 2; the plan was made for 3"),
        ({"total_q": 131}, "total_q is 131; the plan was made for 130"),
        ({"total_kv": 481}, "total_kv is 481; the plan was made for 480"),
        ({"num_q_heads": 4}, "num_q_heads is 4; the plan was made for 8"),
        ({"num_q_heads": 8, "num_kv_heads": 1}, "num_kv_heads is 1; the plan was made for 2"),
        ({"kv_chunk": 128}, "kv_chunk is 128; the plan was made for 0"),
        ({"fixed_grid": 1}, "fixed_grid is 1; the plan was made for 0"),
    ],
)
def test_a_plan_of_another_step_is_refused(session: Session, changes: dict[str, Any], words: str) -> None:
    assert words in refused(session, call(**changes), session.plan(call()), "INVALID_ARGUMENT")


def test_memory_without_a_plan_is_refused(session: Session) -> None:
    plan = session.plan(call())
    assert "plan holds no plan" in refused(
        session, call(), Plan(bytes(len(plan.data)), plan.head), "INVALID_ARGUMENT"
    )


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        (PLAIN, "head_dim is 192; the plan was made for 128"),
        (NARROW_V, "v_dim is 192; the plan was made for 128"),
    ],
)
def test_a_plan_for_a_variant_with_other_heads_is_refused(
    library: Kernseal, wide: Session, axes: dict[str, Any], words: str
) -> None:
    sizes: dict[str, Any] = {"kv_chunk": 128, "tile_q": 64, "workspace_bytes": 2**40}
    other = Session(library, axes)
    plan = other.plan(call(axes, **sizes))
    assert words in refused(wide, call(WIDE, **sizes), plan, "INVALID_ARGUMENT")
    other.close()


@pytest.mark.parametrize("name", [*ALIGN, "lse"])
def test_pointers_are_checked(session: Session, gpu: FakeGpu, name: str) -> None:
    sizes = {"kv_chunk": 128, "workspace_bytes": 2**40}
    plan = session.plan(call(**sizes))
    odd = call(**sizes)[name] + 2
    assert f"{name} is {odd:#x}; it must be " in refused(
        session, call(**sizes, **{name: odd}), plan, "MISALIGNED"
    )
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


def test_head_dims_that_do_not_go_together_say_so(library: Kernseal, gpu: FakeGpu) -> None:
    out = library.ffi.new(f"kseal_{OP} **")
    config = library.config(OP, axes_of(v_dim=64))
    assert library.c.kseal_ragged_prefill_prepare(library.bundle, config, out) == library.c.KSEAL_UNSUPPORTED
    assert "v_dim must be head_dim, or 128 with a head_dim of 192" in library.error()
