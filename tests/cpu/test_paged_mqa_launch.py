"""Paged MQA logits and their schedules on the recording driver: launches are CuTe's own, refusals are sentences."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.host_objects import HostObject
from cpu.fake_driver.kernseal_library import Kernseal, compiled_library
from cpu.fake_driver.paged_mqa import (
    ALIGN,
    ARGUMENTS,
    LOGITS,
    RANDOM,
    SCHEDULE,
    SMS,
    Call,
    scorer_arguments,
    scorer_call,
    scorer_ctas,
)
from cpu.fake_driver.reference import Reference, masked

pytestmark = pytest.mark.slow

CASES = 40
SM = "sm_100a"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "schedule": (SCHEDULE, {}),
    "schedule-atoms": (SCHEDULE, {"atoms": 2}),
    "fp8": (LOGITS, {}),
    "fp8-8x256": (LOGITS, {"num_heads": 8, "head_dim": 256, "page_size": 32, "next_n": 3}),
    "fp4-atoms": (LOGITS, {"kv_dtype": "fp4", "out_dtype": "bf16", "next_n": 4}),
}


@pytest.fixture(scope="module")
def variants(built_variant: Callable[..., HostObject]) -> Mapping[str, HostObject]:
    return {name: built_variant(SM, op_name=op, **axes) for name, (op, axes) in VARIANTS.items()}


@pytest.fixture(scope="module")
def library(
    fake_gpu: FakeGpu, variants: Mapping[str, HostObject], tmp_path_factory: pytest.TempPathFactory
) -> Kernseal:
    fake_gpu.reset()
    fake_gpu.device((10, 0), sms=SMS)
    return compiled_library(list(variants.values()), tmp_path_factory.mktemp("mqa"))


@pytest.fixture(autouse=True)
def blackwell(gpu: FakeGpu) -> None:
    gpu.device((10, 0), sms=SMS)


def call_of(variants: Mapping[str, HostObject], name: str, **changes: Any) -> Call:
    """A valid call of moderate size with ``changes``."""
    axes = variants[name].variant.axes
    made = RANDOM[VARIANTS[name][0]](random.Random(1), axes)
    sizes: dict[str, Any] = {"num_ctas": 0, "batch_size": 2, "seq_len_stride": 0}
    if made.op == LOGITS:
        sizes |= {"num_pages": 100, "max_pages_per_seq": 16, "max_seq_len": 1000}
        sizes |= dict.fromkeys(("kv_page_stride", "page_table_stride", "logits_stride"), 0)
    return made.changed(**sizes | changes)


def status_of(library: Kernseal, made: Call) -> int:
    handle = library.prepare(made.op, made.axes)
    try:
        return made.run(library, handle)
    finally:
        assert getattr(library.c, f"kseal_{made.op}_release")(handle) == 0


@pytest.mark.parametrize("name", VARIANTS)
def test_our_launch_is_cutes_launch(
    library: Kernseal, variants: Mapping[str, HostObject], gpu: FakeGpu, tmp_path: Path, name: str
) -> None:
    made, (op, _) = variants[name], VARIANTS[name]
    reference = Reference(made, tmp_path)
    reference.load()
    theirs = gpu.log("set_attribute")
    handle = library.prepare(op, made.variant.axes)
    assert gpu.log("set_attribute") == theirs * 2 and theirs

    gpu.params(made.param_sizes())
    rng = random.Random(name)
    for case in range(CASES):
        call = RANDOM[op](rng, made.variant.axes)
        assert call.run(library, handle) == 0, library.error()
        ours = gpu.log("launch")[-1]
        expected, masks = reference.launch(gpu, ARGUMENTS[op](call))
        assert masked(ours, masks) == masked(expected, masks), f"case {case}: {call.fields}"
        # A descriptor's second half and words between fields may be unset, nothing of a number.
        assert all(all(m[:64]) if len(m) == 128 else m.count(0) <= 12 for m in masks)
        assert ours["kernel"] == made.answer.kernels[0][0]
        assert ours["grid"] == ([1, 1, 1] if op == SCHEDULE else [1, 1, call.fields["num_ctas"] or SMS])
        assert ours["stream"] == call.fields["stream"]
    assert getattr(library.c, f"kseal_{op}_release")(handle) == 0


@pytest.mark.parametrize(("name", "row"), [("fp8-8x256", 256), ("fp4-atoms", 64)])
def test_a_descriptor_begins_at_each_array_and_at_the_scales_of_a_page(
    library: Kernseal, variants: Mapping[str, HostObject], gpu: FakeGpu, name: str, row: int
) -> None:
    made = call_of(variants, name)
    gpu.params(variants[name].param_sizes())
    assert status_of(library, made) == 0, library.error()
    (found,) = gpu.log("launch")
    maps = [bytes.fromhex(text) for text in found["params"] if len(text) == 256]
    f = made.fields
    wanted = {f["kv"], f["kv"] + made.axes["page_size"] * row, f["q"], f["weights"], f.get("q_scales")}
    assert {int.from_bytes(m[:8], "little") for m in maps} == wanted - {None}


def test_an_empty_call_launches_nothing_and_succeeds(
    library: Kernseal, variants: Mapping[str, HostObject], gpu: FakeGpu
) -> None:
    for name, (op, _) in VARIANTS.items():
        nothing = dict.fromkeys(("seq_lens", "schedule"), 0)
        assert status_of(library, call_of(variants, name, **nothing | {"batch_size": 0})) == 0
        if op == LOGITS:
            assert status_of(library, call_of(variants, name, **nothing | {"max_seq_len": 0})) == 0
    assert gpu.log("launch") == []


def test_no_scratch_is_needed(library: Kernseal, variants: Mapping[str, HostObject], gpu: FakeGpu) -> None:
    for name, (op, _) in VARIANTS.items():
        made = call_of(variants, name)
        handle, size = library.prepare(op, made.axes), library.ffi.new("uint64_t *", 77)
        assert getattr(library.c, f"kseal_{op}_workspace_size")(handle, made.args(library), size) == 0
        assert size[0] == 0
        assert getattr(library.c, f"kseal_{op}_release")(handle) == 0


INVALID, UNALIGNED, OVERFLOW = "INVALID_ARGUMENT", "MISALIGNED", "OVERFLOW"
REFUSED: list[tuple[str, str, dict[str, Any], list[str]]] = [
    ("schedule", INVALID, {"batch_size": -1}, ["batch_size is -1", "not be negative"]),
    ("schedule", OVERFLOW, {"batch_size": 8193}, ["batch_size is 8193", "up to 8192", "config.atoms is 1"]),
    ("schedule-atoms", OVERFLOW, {"batch_size": 4097}, ["batch_size is 4097", "up to 4096", "config.atoms is 2"]),
    ("schedule", INVALID, {"num_ctas": -1}, ["num_ctas is -1", "1 to 16383", "0 for the SMs"]),
    ("schedule", INVALID, {"num_ctas": 16384}, ["num_ctas is 16384", "1 to 16383"]),
    ("schedule", INVALID, {"seq_len_stride": -1}, ["seq_len_stride is -1", "2^40 - 1"]),
    ("schedule", INVALID, {"seq_len_stride": 2**40}, ["seq_len_stride is 1099511627776"]),
    ("schedule", INVALID, {"seq_lens": 0}, ["seq_lens is null"]),
    ("schedule", INVALID, {"schedule": 0}, ["schedule is null"]),
    ("schedule", UNALIGNED, {"seq_lens": 4098}, ["seq_lens is 0x1002", "4 bytes"]),
    ("schedule", UNALIGNED, {"schedule": 4104}, ["schedule is 0x1008", "16 bytes"]),
    ("fp8", INVALID, {"batch_size": -1}, ["batch_size is -1"]),
    ("fp8", INVALID, {"max_seq_len": -1}, ["max_seq_len is -1"]),
    ("fp8", INVALID, {"num_ctas": -1}, ["num_ctas is -1", "1 to 16383"]),
    ("fp8", INVALID, {"num_ctas": 16384}, ["num_ctas is 16384", "1 to 16383"]),
    ("fp4-atoms", OVERFLOW, {"batch_size": 2**29}, ["batch_size is 536870912", "next_n is 4"]),
    ("fp8", INVALID, {"num_pages": 0}, ["num_pages is 0", "positive"]),
    ("fp8", OVERFLOW, {"num_pages": 2**31}, ["num_pages is 2147483648", "below 2^31"]),
    ("fp8", INVALID, {"max_pages_per_seq": 0}, ["max_pages_per_seq is 0", "positive"]),
    ("fp8", OVERFLOW, {"max_pages_per_seq": 2**31}, ["max_pages_per_seq is 2147483648", "page_size is 64"]),
    ("fp8", OVERFLOW, {"max_seq_len": 2**31 - 255}, ["max_seq_len is 2147483393", "2^31 - 256"]),
    ("fp8", INVALID, {"kv_page_stride": 64 * 132 - 16}, ["kv_page_stride is 8432", "at least 8448"]),
    ("fp4-atoms", INVALID, {"kv_page_stride": 16}, ["kv_page_stride is 16", "at least 4352"]),
    ("fp8", UNALIGNED, {"kv_page_stride": 64 * 132 + 8}, ["kv_page_stride is 8456", "multiple of 16"]),
    ("fp8", OVERFLOW, {"kv_page_stride": 2**40}, ["kv_page_stride is 1099511627776", "2^40"]),
    ("fp8", OVERFLOW, {"kv_page_stride": 2**39, "num_pages": 2**18}, ["2^57", "num_pages is 262144"]),
    ("fp8", INVALID, {"page_table_stride": 15}, ["page_table_stride is 15", "at least 16"]),
    ("fp8", INVALID, {"seq_len_stride": -1}, ["seq_len_stride is -1", "at least 1"]),
    ("fp8", INVALID, {"logits_stride": 1000}, ["logits_stride is 1000", "at least 1024"]),
    ("fp8", OVERFLOW, {"logits_stride": 2**30}, ["logits_stride is 1073741824", "B is 2", "next_n is 1"]),
    ("fp8-8x256", OVERFLOW, {"max_seq_len": 2**29}, ["logits_stride is 536870912", "next_n is 3"]),
    ("fp8", OVERFLOW, {"max_pages_per_seq": 2**25}, ["max_pages_per_seq is 33554432", "* page_size must be below 2^31"]),
    ("fp8", INVALID, {"q_scales": 4096}, ["q_scales is 0x1000", "not fp4"]),
    ("fp4-atoms", INVALID, {"q_scales": 0}, ["q_scales is null"]),
    ("fp4-atoms", UNALIGNED, {"q_scales": 4104}, ["q_scales is 0x1008", "16 bytes"]),
    *(
        case
        for name, align in ALIGN[LOGITS].items()
        for case in [
            ("fp8", INVALID, {name: 0}, [f"{name} is null"]),
            ("fp8", UNALIGNED, {name: 4096 + align // 2}, [f"{name} is 0x1", f"{align} bytes"]),
        ]
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "status", "changes", "words"), REFUSED, ids=[f"{n}-{'-'.join(c)}" for n, _, c, _ in REFUSED]
)
def test_a_refusal_is_a_sentence(
    library: Kernseal,
    variants: Mapping[str, HostObject],
    gpu: FakeGpu,
    name: str,
    status: str,
    changes: dict[str, Any],
    words: list[str],
) -> None:
    made = call_of(variants, name, **changes)
    assert status_of(library, made) == getattr(library.c, f"KSEAL_{status}"), library.error()
    assert library.error().startswith(f"{made.op}: ")
    assert [word for word in words if word not in library.error()] == [], library.error()
    assert gpu.log("launch") == []


def test_what_is_largest_is_launched(
    library: Kernseal, variants: Mapping[str, HostObject], gpu: FakeGpu
) -> None:
    gpu.params(variants["fp8"].param_sizes())
    made = call_of(variants, "fp8", num_ctas=16383, num_pages=2**31 - 1, kv_page_stride=64 * 132)
    assert status_of(library, made.changed(logits_stride=2**30 - 1, max_seq_len=2**30 - 256)) == 0, (
        library.error()
    )
    gpu.params(variants["schedule-atoms"].param_sizes())
    assert status_of(library, call_of(variants, "schedule-atoms", num_ctas=16383, batch_size=4096)) == 0
    assert [line["grid"] for line in gpu.log("launch")] == [[1, 1, 16383], [1, 1, 1]]


def test_a_run_on_another_device_is_refused(
    library: Kernseal, variants: Mapping[str, HostObject], gpu: FakeGpu
) -> None:
    gpu.device((10, 0), count=2)
    for name, (op, _) in VARIANTS.items():
        made = call_of(variants, name)
        handle = library.prepare(op, made.axes)
        gpu.current(1)
        assert made.run(library, handle) == library.c.KSEAL_NOT_PREPARED
        gpu.current(0)
        assert getattr(library.c, f"kseal_{op}_release")(handle) == 0


def test_a_driver_that_fails_at_the_launch_is_named(
    library: Kernseal, variants: Mapping[str, HostObject], gpu: FakeGpu
) -> None:
    gpu.fail("cuLaunchKernelEx", 700)
    for name in VARIANTS:
        assert status_of(library, call_of(variants, name)) == library.c.KSEAL_DRIVER_ERROR
        assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in library.error()
    assert gpu.log("launch") == []


def test_a_geometry_that_no_kernel_has_says_why(library: Kernseal, gpu: FakeGpu) -> None:
    out = library.ffi.new(f"kseal_{LOGITS} **")
    full = {"kv_dtype": "e4m3", "out_dtype": "f32", "epi_dtype": "f32", "acc_dtype": "f32", "num_heads": 64}
    axes = {**full, "head_dim": 128, "next_n": 5, "page_size": 64, "interleaved": False}
    for changes, words in [
        ({}, "next_n * num_heads may be at most 256"),
        ({"next_n": 1, "head_dim": 256}, "shared memory holds"),
        ({"next_n": 1, "kv_dtype": "fp4", "num_heads": 32}, "FP4 logits have 64 heads"),
        ({"next_n": 1, "kv_dtype": "fp4", "interleaved": True}, "interleaved scales need pages of 128"),
    ]:
        config = library.config(LOGITS, {**axes, **changes})
        status = library.c.kseal_paged_mqa_logits_prepare(library.bundle, config, out)
        assert status == library.c.KSEAL_UNSUPPORTED
        assert words in library.error()


@pytest.fixture(scope="module")
def scorer(built_variant: Callable[..., HostObject]) -> HostObject:
    return built_variant("sm_120a", op_name=LOGITS, num_heads=32, next_n=3)


@pytest.fixture(scope="module")
def scorer_library(
    fake_gpu: FakeGpu, scorer: HostObject, tmp_path_factory: pytest.TempPathFactory
) -> Kernseal:
    fake_gpu.reset()
    fake_gpu.device((12, 0), sms=SMS)
    return compiled_library([scorer], tmp_path_factory.mktemp("scorer"))


def test_a_launch_of_the_sm120_class_is_cutes_launch(
    scorer_library: Kernseal, scorer: HostObject, gpu: FakeGpu, tmp_path: Path
) -> None:
    gpu.device((12, 0), sms=SMS)
    reference = Reference(scorer, tmp_path)
    reference.load()
    theirs = gpu.log("set_attribute")
    handle = scorer_library.prepare(LOGITS, scorer.variant.axes)
    assert gpu.log("set_attribute") == theirs * 2

    gpu.params(scorer.param_sizes())
    rng = random.Random("scorer")
    for case in range(CASES):
        call = scorer_call(rng, scorer.variant.axes)
        assert call.run(scorer_library, handle) == 0, scorer_library.error()
        ours = gpu.log("launch")[-1]
        expected, masks = reference.launch(gpu, scorer_arguments(call))
        assert masked(ours, masks) == masked(expected, masks), f"case {case}: {call.fields}"
        assert all(all(m[:64]) if len(m) == 128 else m.count(0) <= 12 for m in masks)
        assert ours["grid"] == [call.fields["batch_size"] * 3, scorer_ctas(call), 1]
    assert scorer_library.c.kseal_paged_mqa_logits_release(handle) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule": 4096}, ["schedule is 0x1000", "must be null", "works without one"]),
        ({"q_scales": 4096}, ["q_scales is 0x1000", "not fp4"]),
        ({"kv": 0}, ["kv is null"]),
    ],
)
def test_the_sm120_class_refuses_in_sentences(
    scorer_library: Kernseal, scorer: HostObject, gpu: FakeGpu, changes: dict[str, Any], words: list[str]
) -> None:
    gpu.device((12, 0), sms=SMS)
    made = scorer_call(random.Random(1), scorer.variant.axes).changed(**changes)
    assert status_of(scorer_library, made) == scorer_library.c.KSEAL_INVALID_ARGUMENT
    assert [word for word in words if word not in scorer_library.error()] == []
    assert gpu.log("launch") == []
