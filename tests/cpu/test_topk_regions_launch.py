"""Top-k's launch code on the recording driver: what is launched, and what is refused in which words."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.kernseal_library import Kernseal
from cpu.fake_driver.topk_regions import (
    FIXED_SMEM,
    KERNELS,
    OP,
    PARAM_SIZES,
    POINTERS,
    SCRATCH,
    STATE,
    Call,
    axes_of,
    library_of,
    op,
)

PLAIN = axes_of()
HALF = axes_of(dtype="bf16", deterministic=False)
PAGED = axes_of(paged=True)
ALL = (PLAIN, HALF, PAGED)
CHUNK, SHARE = 57528, 57524
"""Scores in float32 that one thread block holds, alone and of a group."""
ADDRESS = {name: 4096 * (i + 1) for i, name in enumerate(POINTERS)}
PAGED_ONLY = ("page_table", "row_to_request", "page_table_starts", "raw_indices")
UNPAGED_ONLY = ("offsets", "values")


@pytest.fixture(scope="module")
def library(fake_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory) -> Kernseal:
    fake_gpu.reset()
    return library_of(ALL, tmp_path_factory.mktemp("topk"))


@pytest.fixture(scope="module")
def small_library(fake_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory) -> Kernseal:
    """Of the class for SM120."""
    fake_gpu.reset()
    return library_of(ALL, tmp_path_factory.mktemp("topk120"), "sm_120a")


def call(axes: dict[str, Any] = PLAIN, **changes: Any) -> Call:
    """A call with every pointer that its variant takes, with ``changes``."""
    sizes: dict[str, Any] = {"top_k": 512, "num_rows": 3, "max_len": 1000, "semaphores_bytes": 2**30}
    if axes["paged"]:
        sizes |= {"page_size": 16, "num_requests": 5, "max_pages": 63}
    unwanted = UNPAGED_ONLY if axes["paged"] else PAGED_ONLY
    pointers = {name: at for name, at in ADDRESS.items() if name not in unwanted}
    return Call(axes, {**sizes, **pointers, "stream": 64, **changes})


def status_of(library: Kernseal, made: Call) -> int:
    handle = library.prepare(OP, made.axes)
    try:
        return int(library.c.kseal_topk_regions_run(handle, made.args(library)))
    finally:
        assert library.c.kseal_topk_regions_release(handle) == 0


def launch(library: Kernseal, gpu: FakeGpu, made: Call) -> dict[str, Any]:
    gpu.params(PARAM_SIZES)
    assert status_of(library, made) == 0, library.error()
    return gpu.log("launch")[-1]


def semaphores(library: Kernseal, made: Call) -> int:
    handle, size = library.prepare(OP, made.axes), library.ffi.new("uint64_t *", 77)
    assert library.c.kseal_topk_regions_semaphores_size(handle, made.args(library), size) == 0, (
        library.error()
    )
    library.c.kseal_topk_regions_release(handle)
    return int(size[0])


def packed(found: dict[str, Any]) -> list[int]:
    """Parameters as numbers; the page-table policy as three."""
    params = [bytes.fromhex(text) for text in found["params"]]
    return [int.from_bytes(p, "little") for p in params[:16]] + list(struct.unpack("<QqI4x", params[16]))


def test_a_row_in_one_thread_block(library: Kernseal, gpu: FakeGpu) -> None:
    found = launch(library, gpu, call(row_starts=0, row_stride=1002))
    given = [ADDRESS[n] for n in ("scores", "indices", "values", "offsets", "lengths")]
    chunk = 1000
    assert packed(found) == [*given, 0, 0, 0, 0, 512, 1000, 3, ADDRESS["semaphores"], 0, chunk, 1, 0, 1002, 0]
    assert (found["kernel"], found["grid"], found["block"]) == (KERNELS[0], [3, 1, 1], [1024, 1, 1])
    assert (found["smem"], found["stream"]) == (FIXED_SMEM + 4 * chunk, 64)


def test_a_row_in_a_group_of_thread_blocks(library: Kernseal, gpu: FakeGpu) -> None:
    found = launch(library, gpu, call(num_rows=100, max_len=3 * CHUNK + 1, row_starts=0))
    groups, chunk = 132 // 4, 43147
    assert (found["kernel"], found["grid"]) == (KERNELS[1], [groups * 4, 1, 1])
    values = packed(found)
    assert values[11:16] == [100, ADDRESS["semaphores"], ADDRESS["semaphores"] + groups * STATE, chunk, 4]
    assert found["smem"] == FIXED_SMEM + 4 * chunk


def test_without_determinism_a_group_has_no_scratch(library: Kernseal, gpu: FakeGpu) -> None:
    made = call(HALF, max_len=2**18)
    assert packed(launch(library, gpu, made))[13] == 0
    assert semaphores(library, made) == 3 * STATE
    assert semaphores(library, call(max_len=2**18)) == 3 * (STATE + SCRATCH)


def test_page_tables(library: Kernseal, gpu: FakeGpu) -> None:
    values = packed(launch(library, gpu, call(PAGED, page_table_stride=64)))
    names = ("page_table", "lengths", "row_starts", "page_table_starts", "row_to_request")
    assert values[2:8] == [0, *(ADDRESS[name] for name in names)]
    assert values[8] == 64
    assert values[16:] == [ADDRESS["raw_indices"], 1000, 4]


def test_pages_of_one_begin_where_rows_do_and_strides_are_dense(library: Kernseal, gpu: FakeGpu) -> None:
    made = call(PAGED, page_size=1, page_table_starts=0, row_to_request=0, num_requests=3, raw_indices=0)
    values = packed(launch(library, gpu, made))
    assert (values[6], values[7], values[8]) == (ADDRESS["row_starts"], 0, 63)
    assert values[16:] == [0, 1000, 0]


def test_only_what_a_row_must_have_is_needed(library: Kernseal, gpu: FakeGpu) -> None:
    optional = dict.fromkeys(("lengths", "row_starts", "offsets", "values", "semaphores"), 0)
    values = packed(launch(library, gpu, call(**optional, semaphores_bytes=0)))
    assert values[2:9] == [0] * 7
    assert values[12] == 0


@pytest.mark.parametrize(
    ("max_len", "row_stride", "row_starts", "chunk"),
    [(1001, 0, 0, 1001), (1001, 1004, 0, 1004), (1001, 1004, 4096, 1001), (1001, 1006, 0, 1002)],
)
def test_chunks_are_whole_vectors_of_the_stride(
    library: Kernseal, gpu: FakeGpu, max_len: int, row_stride: int, row_starts: int, chunk: int
) -> None:
    made = call(max_len=max_len, row_stride=row_stride, row_starts=row_starts)
    assert packed(launch(library, gpu, made))[14] == chunk


@pytest.mark.parametrize(("address", "axes"), [(4100, PLAIN), (4098, HALF)])
def test_where_scores_lie_does_not_change_how_rows_are_cut(
    library: Kernseal, gpu: FakeGpu, address: int, axes: dict[str, Any]
) -> None:
    here = packed(launch(library, gpu, call(axes, max_len=2**20)))
    there = packed(launch(library, gpu, call(axes, max_len=2**20, scores=address)))
    assert there[1:] == here[1:]


def test_a_chunk_is_what_the_sm_holds(library: Kernseal, small_library: Kernseal, gpu: FakeGpu) -> None:
    """The numbers in kernel.yaml."""
    whole = {"SM90": (library, CHUNK, 115056), "SM120": (small_library, 24760, 49520)}
    for made_for, longest, longest_half in whole.values():
        half = axes_of(dtype="bf16")
        assert half["deterministic"]
        for length, ctas in ((longest, 1), (longest + 1, 2)):
            found = launch(made_for, gpu, call(max_len=length, row_starts=0))
            assert packed(found)[15] == ctas
        assert longest_half == 2 * longest
    text = " ".join(op().data["semantics"])
    assert "(57,528 float32 or 115,056 16-bit scores on SM90 and SM100, 24,760 and 49,520 on SM120" in text


def test_groups_fill_the_device_but_no_more(library: Kernseal, gpu: FakeGpu) -> None:
    gpu.device((9, 0), sms=100)
    assert launch(library, gpu, call(num_rows=99))["grid"] == [99, 1, 1]
    assert launch(library, gpu, call(num_rows=101))["grid"] == [100, 1, 1]
    assert launch(library, gpu, call(num_rows=101, max_len=3 * SHARE, row_starts=0))["grid"] == [99, 1, 1]
    most = {"max_len": 100 * SHARE, "row_starts": 0}
    assert launch(library, gpu, call(**most))["grid"] == [100, 1, 1]


def test_prepare_lets_both_kernels_have_all_shared_memory(library: Kernseal, gpu: FakeGpu) -> None:
    handle = library.prepare(OP, PLAIN)
    assert [line["kernel"] for line in gpu.log("get_kernel")] == list(KERNELS)
    assert [(line["attribute"], line["value"]) for line in gpu.log("set_attribute")] == [
        (8, 232448 - 256),
        (8, 232448 - 272),
    ]
    library.c.kseal_topk_regions_release(handle)


def test_an_empty_batch_launches_nothing_and_succeeds(library: Kernseal, gpu: FakeGpu) -> None:
    made = call(num_rows=0, top_k=0, max_len=0, semaphores_bytes=0, **dict.fromkeys(POINTERS, 0))
    assert status_of(library, made) == 0
    assert gpu.log("launch") == []
    assert semaphores(library, made) == 0


def test_semaphores_do_for_every_run_of_the_same_sizes(library: Kernseal, gpu: FakeGpu) -> None:
    """What row_starts is, the size does not ask; with it, chunks are other multiples."""
    for length in range(CHUNK - 4, CHUNK + 6):
        sizes: dict[str, Any] = {"max_len": length, "row_stride": 2**20, "num_rows": 50}
        size = semaphores(library, call(**sizes))
        for row_starts in (0, 4096):
            made = call(**sizes, row_starts=row_starts, semaphores_bytes=size)
            assert status_of(library, made) == 0, library.error()


def test_no_workspace_is_needed_and_sizes_are_still_checked(library: Kernseal, gpu: FakeGpu) -> None:
    handle, size = library.prepare(OP, PLAIN), library.ffi.new("uint64_t *", 77)
    ask = library.c.kseal_topk_regions_workspace_size
    assert ask(handle, call().args(library), size) == 0
    assert size[0] == 0
    assert ask(handle, call(top_k=0).args(library), size) == library.c.KSEAL_INVALID_ARGUMENT
    library.c.kseal_topk_regions_release(handle)


def test_a_driver_that_fails_at_the_launch_is_named(library: Kernseal, gpu: FakeGpu) -> None:
    gpu.fail("cuLaunchKernelEx", 700)
    assert status_of(library, call()) == library.c.KSEAL_DRIVER_ERROR
    assert "cuLaunchKernelEx: CUDA_ERROR_ILLEGAL_ADDRESS (700)" in library.error()


INVALID, UNALIGNED, TOO_SMALL, OVERFLOW = "INVALID_ARGUMENT", "MISALIGNED", "WORKSPACE_TOO_SMALL", "OVERFLOW"
LONG = {"max_len": 2 * SHARE, "row_starts": 0}
REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    (INVALID, {"num_rows": -1}, ["num_rows is -1", "must not be negative"]),
    (INVALID, {"top_k": 0}, ["top_k is 0", "positive"]),
    (INVALID, {"top_k": -5}, ["top_k is -5", "positive"]),
    (OVERFLOW, {"num_rows": 2**23, "top_k": 512}, ["num_rows is 8388608", "below 2^32", "top_k is 512"]),
    (INVALID, {"max_len": 0}, ["max_len is 0", "positive"]),
    (OVERFLOW, {"max_len": 2**31}, ["max_len is 2147483648", "below 2^31"]),
    (INVALID, {"row_stride": 999}, ["row_stride is 999", "0 or at least max_len, 1000"]),
    (INVALID, {"row_stride": -1}, ["row_stride is -1", "at least max_len"]),
    (
        OVERFLOW,
        {"row_stride": 2**54},
        ["row_stride is 18014398509481984", "3 rows must end below 2^57 bytes"],
    ),
    (
        OVERFLOW,
        {"max_len": 132 * SHARE + 1, "row_starts": 0},
        ["needs 133 thread blocks at once", "up to 132"],
    ),
    (
        OVERFLOW,
        {"max_len": 9 * SHARE, "row_starts": 0, "top_k": 1, "num_rows": 2**32 - 1},
        ["groups of 9 thread blocks"],
    ),
    (INVALID, {"page_size": 1}, ["page_size is 1", "must be 0, since config.paged is 0"]),
    (INVALID, {"num_requests": 3}, ["num_requests is 3", "config.paged is 0"]),
    (INVALID, {"max_pages": 3}, ["max_pages is 3", "config.paged is 0"]),
    (INVALID, {"page_table_stride": 3}, ["page_table_stride is 3", "config.paged is 0"]),
    (INVALID, {"axes": PAGED, "page_size": 0}, ["page_size is 0", "power of two up to 2^30"]),
    (INVALID, {"axes": PAGED, "page_size": 48}, ["page_size is 48", "power of two"]),
    (INVALID, {"axes": PAGED, "page_size": -(2**31)}, ["page_size is -2147483648", "power of two"]),
    (INVALID, {"axes": PAGED, "num_requests": 0}, ["num_requests is 0", "positive"]),
    (OVERFLOW, {"axes": PAGED, "num_requests": 2**31 + 1}, ["num_requests is 2147483649", "2^31"]),
    (INVALID, {"axes": PAGED, "row_to_request": 0}, ["num_requests is 5", "must be num_rows, 3"]),
    (INVALID, {"axes": PAGED, "max_pages": 0}, ["max_pages is 0", "positive"]),
    (OVERFLOW, {"axes": PAGED, "max_pages": 2**32}, ["max_pages is 4294967296", "below 2^32"]),
    (
        INVALID,
        {"axes": PAGED, "page_table_stride": 62},
        ["page_table_stride is 62", "at least max_pages, 63"],
    ),
    (OVERFLOW, {"axes": PAGED, "page_table_stride": 2**53}, ["page_table_stride is", "5 rows must end"]),
    (
        INVALID,
        {"axes": PAGED, "page_table_starts": 0},
        ["page_table_starts is null", "row_starts", "page_size of 16"],
    ),
    (TOO_SMALL, {**LONG, "semaphores_bytes": 15455}, ["semaphores_bytes is 15455", "15456 are needed"]),
    (INVALID, {**LONG, "semaphores": 0}, ["semaphores is null", "needed"]),
    (INVALID, {"scores": 0}, ["scores is null"]),
    (INVALID, {"indices": 0}, ["indices is null"]),
    (INVALID, {"axes": PAGED, "page_table": 0}, ["page_table is null"]),
    *(
        (INVALID, {name: 64}, [f"{name} is 0x40", "must be null, since config.paged is 0"])
        for name in PAGED_ONLY
    ),
    *(
        (INVALID, {"axes": PAGED, name: 64}, [f"{name} is 0x40", "must be null, since config.paged is 1"])
        for name in UNPAGED_ONLY
    ),
    *(
        (UNALIGNED, {name: 4098}, [f"{name} is 0x1002", "4 bytes"])
        for name in POINTERS
        if name not in (*PAGED_ONLY, "semaphores")
    ),
    *((UNALIGNED, {"axes": PAGED, name: 4098}, [f"{name} is 0x1002", "4 bytes"]) for name in PAGED_ONLY),
    (UNALIGNED, {"axes": HALF, "scores": 4097}, ["scores is 0x1001", "2 bytes"]),
    (UNALIGNED, {"semaphores": 4104}, ["semaphores is 0x1008", "16 bytes"]),
]


@pytest.mark.parametrize(
    ("status", "changes", "words"),
    REFUSED,
    ids=[f"{i}-{list(c)[-1]}" for i, (_, c, _) in enumerate(REFUSED)],
)
def test_a_refusal_is_a_sentence(
    library: Kernseal, gpu: FakeGpu, status: str, changes: dict[str, Any], words: list[str]
) -> None:
    made = call(changes.get("axes", PLAIN), **{k: v for k, v in changes.items() if k != "axes"})
    assert status_of(library, made) == getattr(library.c, f"KSEAL_{status}"), library.error()
    assert library.error().startswith("topk_regions: ")
    assert [word for word in words if word not in library.error()] == [], library.error()
    assert gpu.log("launch") == []


def test_a_group_of_more_than_256_is_refused_if_deterministic(library: Kernseal, gpu: FakeGpu) -> None:
    """The kernel has room for the counts of 256 blocks; no device has as many multiprocessors yet."""
    gpu.device((9, 0), sms=300)
    assert status_of(library, call(max_len=256 * SHARE, row_starts=0)) == 0
    assert status_of(library, call(max_len=256 * SHARE + 1, row_starts=0)) == library.c.KSEAL_OVERFLOW
    assert "needs 257 thread blocks at once, up to 256" in library.error()
    gpu.reset()
    gpu.device((9, 0), sms=300)
    assert status_of(library, call(HALF, max_len=257 * 2 * SHARE, row_starts=0)) == 0, library.error()


def test_rows_in_turn_end_before_a_group_cannot_count_its_arrivals(library: Kernseal, gpu: FakeGpu) -> None:
    """The bound in the message is the last that is taken."""
    gpu.device((9, 0), sms=2)
    sizes: dict[str, Any] = {"max_len": 2 * CHUNK - 999, "row_starts": 0, "top_k": 1}
    turns = ((2**31 - 1) // 2 - 1) // 7
    assert status_of(library, call(**sizes, num_rows=turns + 1)) == library.c.KSEAL_OVERFLOW
    assert f"can take {turns} rows in turn" in library.error()
    assert status_of(library, call(**sizes, num_rows=turns)) == 0, library.error()


def test_a_run_on_another_device_is_refused(library: Kernseal, gpu: FakeGpu) -> None:
    gpu.device((9, 0), count=2)
    handle = library.prepare(OP, PLAIN)
    gpu.current(1)
    assert library.c.kseal_topk_regions_run(handle, call().args(library)) == library.c.KSEAL_NOT_PREPARED
    gpu.current(0)
    assert library.c.kseal_topk_regions_release(handle) == 0
