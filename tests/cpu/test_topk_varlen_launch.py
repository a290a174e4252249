"""The launch code of top-k for a decode step on the recording driver: what is refused in which words, and what is needed."""

from __future__ import annotations

from typing import Any

import pytest
from cpu.fake_driver import host_objects
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.host_objects import HostObject, compiled
from cpu.fake_driver.kernseal_library import Kernseal, compiled_library
from cpu.fake_driver.topk_varlen import OP, POINTERS, STATE, Call

from kernseal.export import paths, spec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(host_objects.unavailable() is not None, reason=str(host_objects.unavailable())),
]

PLAIN: dict[str, Any] = {"dtype": "f32", "values": False}
VALUES: dict[str, Any] = {"dtype": "bf16", "values": True}
MOST = 57536
"""Scores in float32 that one thread block holds."""
ADDRESS = {name: 4096 * (i + 1) for i, name in enumerate(POINTERS)}


@pytest.fixture(scope="module")
def made() -> list[HostObject]:
    return [compiled("sm_90a", None, op_name=OP, **axes) for axes in (PLAIN, VALUES)]


@pytest.fixture(scope="module")
def library(fake_gpu: FakeGpu, made: list[HostObject], tmp_path_factory: pytest.TempPathFactory) -> Kernseal:
    fake_gpu.reset()
    return compiled_library(made, tmp_path_factory.mktemp("varlen"))


def call(axes: dict[str, Any] = PLAIN, **changes: Any) -> Call:
    """A plain call of 200 rows, with ``changes``."""
    sizes: dict[str, Any] = {
        "top_k": 512,
        "next_n": 2,
        "compress_ratio": 4,
        "num_requests": 100,
        "max_len": 1000,
    }
    pointers = {name: at for name, at in ADDRESS.items() if name != "values" or axes["values"]}
    return Call(
        axes, {**sizes, **pointers, "row_stride": 0, "semaphores_bytes": 2**30, "stream": 64, **changes}
    )


def status_of(library: Kernseal, made: Call) -> int:
    handle = library.prepare(OP, made.axes)
    try:
        return int(library.c.kseal_topk_varlen_run(handle, made.args(library)))
    finally:
        assert library.c.kseal_topk_varlen_release(handle) == 0


def launch(library: Kernseal, gpu: FakeGpu, made: Call) -> dict[str, Any]:
    assert status_of(library, made) == 0, library.error()
    return gpu.log("launch")[-1]


def semaphores(library: Kernseal, made: Call) -> int:
    handle, size = library.prepare(OP, made.axes), library.ffi.new("uint64_t *", 77)
    assert library.c.kseal_topk_varlen_semaphores_size(handle, made.args(library), size) == 0, library.error()
    library.c.kseal_topk_varlen_release(handle)
    return int(size[0])


def test_many_rows_take_as_few_blocks_each_as_hold_them(library: Kernseal, gpu: FakeGpu) -> None:
    assert launch(library, gpu, call(max_len=MOST))["grid"] == [132, 1, 1]
    assert launch(library, gpu, call(max_len=MOST + 1))["grid"] == [132, 1, 1]
    assert launch(library, gpu, call(max_len=2 * MOST + 1))["grid"] == [132, 1, 1]
    assert launch(library, gpu, call(max_len=5 * MOST))["grid"] == [130, 1, 1]
    assert launch(library, gpu, call(max_len=132 * MOST))["grid"] == [132, 1, 1]


def test_few_rows_are_spread_over_the_device(library: Kernseal, gpu: FakeGpu) -> None:
    few = {"num_requests": 1, "next_n": 1}
    assert launch(library, gpu, call(max_len=8192, **few))["grid"] == [1, 1, 1]
    assert launch(library, gpu, call(max_len=20000, **few))["grid"] == [3, 1, 1]
    assert launch(library, gpu, call(max_len=131072, **few))["grid"] == [16, 1, 1]
    assert launch(library, gpu, call(max_len=2**20, **few))["grid"] == [128, 1, 1]
    assert launch(library, gpu, call(max_len=16384, **few))["grid"] == [1, 1, 1]
    assert launch(library, gpu, call(max_len=16384, num_requests=66, next_n=1))["grid"] == [66, 1, 1]


def test_semaphores_are_one_state_a_group(library: Kernseal, gpu: FakeGpu) -> None:
    assert semaphores(library, call()) == 0
    assert semaphores(library, call(max_len=MOST + 1)) == 66 * STATE
    assert semaphores(library, call(max_len=131072, num_requests=1, next_n=3)) == 3 * STATE
    assert status_of(library, call(semaphores=0, semaphores_bytes=0)) == 0


def test_numbers_in_the_description_are_those_of_the_launch(library: Kernseal, gpu: FakeGpu) -> None:
    assert semaphores(library, call(VALUES, max_len=2 * MOST)) == 0
    assert semaphores(library, call(VALUES, max_len=2 * MOST + 1)) > 0
    text = " ".join(spec.load_op(paths.kernels() / OP).data["semantics"])
    assert (
        "(57,536 float32 or 115,072 16-bit scores each on SM90 and SM100, 24,768 and 49,536 on SM120)" in text
    )


def test_an_empty_batch_launches_nothing_and_succeeds(library: Kernseal, gpu: FakeGpu) -> None:
    made = call(num_requests=0, top_k=0, max_len=0, semaphores_bytes=0, **dict.fromkeys(POINTERS, 0))
    assert status_of(library, made) == 0
    assert gpu.log("launch") == []
    assert semaphores(library, made) == 0


def test_no_workspace_is_needed_and_sizes_are_still_checked(library: Kernseal, gpu: FakeGpu) -> None:
    handle, size = library.prepare(OP, PLAIN), library.ffi.new("uint64_t *", 77)
    ask = library.c.kseal_topk_varlen_workspace_size
    assert ask(handle, call().args(library), size) == 0
    assert size[0] == 0
    assert ask(handle, call(top_k=0).args(library), size) == library.c.KSEAL_INVALID_ARGUMENT
    library.c.kseal_topk_varlen_release(handle)


INVALID, UNALIGNED, TOO_SMALL, OVERFLOW = "INVALID_ARGUMENT", "MISALIGNED", "WORKSPACE_TOO_SMALL", "OVERFLOW"
REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    (INVALID, {"num_requests": -1}, ["num_requests is -1", "must not be negative"]),
    *(
        (INVALID, {name: n}, [f"{name} is {n}", "positive"])
        for name in ("top_k", "next_n", "max_len")
        for n in (0, -3)
    ),
    (INVALID, {"compress_ratio": 0}, ["compress_ratio is 0", "positive"]),
    (OVERFLOW, {"num_requests": 2**29}, ["num_requests is 536870912", "below 2^30", "next_n is 2"]),
    (OVERFLOW, {"max_len": 2**31}, ["max_len is 2147483648", "below 2^31"]),
    (INVALID, {"row_stride": 999}, ["row_stride is 999", "0 or at least max_len, 1000"]),
    (INVALID, {"row_stride": -1}, ["row_stride is -1"]),
    (
        OVERFLOW,
        {"row_stride": 2**50},
        ["row_stride is 1125899906842624", "200 rows must end below 2^57 bytes"],
    ),
    (OVERFLOW, {"max_len": 132 * MOST + 1}, ["needs 133 thread blocks at once", "up to 132"]),
    (OVERFLOW, {"num_requests": 2**29 - 1, "max_len": 99 * MOST}, ["groups of 99 thread blocks", "in turn"]),
    (
        TOO_SMALL,
        {"max_len": MOST + 1, "semaphores_bytes": 66 * STATE - 1},
        ["semaphores_bytes is 203279", "203280"],
    ),
    (INVALID, {"max_len": MOST + 1, "semaphores": 0}, ["semaphores is null", "needed"]),
    *((INVALID, {name: 0}, [f"{name} is null"]) for name in ("scores", "seq_lens", "indices")),
    (INVALID, {"values": 64}, ["values is 0x40", "must be null, since config.values is 0"]),
    (INVALID, {"axes": VALUES, "values": 0}, ["values is null"]),
    *(
        (UNALIGNED, {name: 4098}, [f"{name} is 0x1002", "4 bytes"])
        for name in ("scores", "seq_lens", "indices")
    ),
    (UNALIGNED, {"axes": VALUES, "values": 4097}, ["values is 0x1001", "2 bytes"]),
    (UNALIGNED, {"semaphores": 4104}, ["semaphores is 0x1008", "16 bytes"]),
]


@pytest.mark.parametrize(
    ("status", "changes", "words"), REFUSED, ids=[f"{i}-{list(c)[-1]}" for i, (_, c, _) in enumerate(REFUSED)]
)
def test_a_refusal_is_a_sentence(
    library: Kernseal, gpu: FakeGpu, status: str, changes: dict[str, Any], words: list[str]
) -> None:
    made = call(changes.get("axes", PLAIN), **{k: v for k, v in changes.items() if k != "axes"})
    assert status_of(library, made) == getattr(library.c, f"KSEAL_{status}"), library.error()
    assert library.error().startswith("topk_varlen: ")
    assert [word for word in words if word not in library.error()] == [], library.error()
    assert gpu.log("launch") == []


def test_a_run_on_another_device_is_refused(library: Kernseal, gpu: FakeGpu) -> None:
    gpu.device((9, 0), count=2)
    handle = library.prepare(OP, PLAIN)
    gpu.current(1)
    assert library.c.kseal_topk_varlen_run(handle, call().args(library)) == library.c.KSEAL_NOT_PREPARED
    gpu.current(0)
    assert library.c.kseal_topk_varlen_release(handle) == 0
