"""XQA MLA decode's launch code on the recording driver: what is launched, and what is refused in which words."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
from cpu.fake_driver import xqa_mla
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.kernseal_library import Kernseal
from cpu.fake_driver.xqa_mla import (
    OP,
    PARAM_SIZES,
    ROW,
    SCRATCH,
    SMEM,
    Call,
    axes_of,
    library_of,
    random_call,
)

BF16 = axes_of(page_size=16)
E4M3 = axes_of(dtype="e4m3", page_size=128)
ALL = (BF16, E4M3)
UINT8, BFLOAT16, SWIZZLE_64, SWIZZLE_128 = 0, 9, 2, 3


@pytest.fixture(scope="module")
def library(fake_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory) -> Kernseal:
    fake_gpu.reset()
    return library_of(ALL, tmp_path_factory.mktemp("mla"))


def call(axes: dict[str, Any] = BF16, **changes: Any) -> Call:
    """A valid call of moderate size with ``changes``."""
    made = random_call(random.Random(1), axes)
    sizes = {"batch_size": 2, "num_pages": 1000, "max_pages_per_seq": 64, "q_scale": 0.5, "kv_scale": 2.0}
    plain = {"kv_page_stride": 0, "kv_token_stride": 0, "q_scale_ptr": 0, "kv_scale_ptr": 0}
    return Call(axes, {**made.fields, **sizes, **plain, **changes})


def status_of(library: Kernseal, made: Call) -> int:
    handle = library.prepare(OP, made.axes)
    try:
        return int(library.c.kseal_xqa_mla_run(handle, made.args(library)))
    finally:
        assert library.c.kseal_xqa_mla_release(handle) == 0


def launch(library: Kernseal, gpu: FakeGpu, made: Call) -> dict[str, Any]:
    gpu.params(PARAM_SIZES)
    assert status_of(library, made) == 0, library.error()
    (found,) = gpu.log("launch")
    return found


def workspace(library: Kernseal, made: Call) -> int:
    handle, size = library.prepare(OP, made.axes), library.ffi.new("uint64_t *", 77)
    assert library.c.kseal_xqa_mla_workspace_size(handle, made.args(library), size) == 0, library.error()
    library.c.kseal_xqa_mla_release(handle)
    return int(size[0])


@pytest.mark.parametrize("axes", ALL, ids=["bf16", "e4m3"])
def test_the_kernel_gets_the_fields(library: Kernseal, gpu: FakeGpu, axes: dict[str, Any]) -> None:
    made = call(axes, q_scale_ptr=64, kv_scale_ptr=128)
    found = launch(library, gpu, made)
    cache = struct.pack("<QQQQI", made["k"], made["v"], made["page_table"], made["seq_lens"], 64)
    expected = [
        struct.pack("<Q", made["q"]),
        struct.pack("<Q", made["k"]),
        struct.pack("<Q", made["v"]),
        struct.pack("<f", 0.5),
        struct.pack("<Q", 64),
        struct.pack("<Q", made["o"]),
        cache,
        struct.pack("<I", 2),
        struct.pack("<f", 2.0),
        struct.pack("<Q", 128),
        struct.pack("<Q", made["workspace"]),
        bytes(8),
        bytes(8),
    ]
    given = [bytes.fromhex(text)[: len(want)] for text, want in zip(found["params"], expected, strict=True)]
    assert given == expected
    assert (found["grid"], found["block"], found["smem"]) == ([4, 1, 2], [384, 1, 1], SMEM)
    assert found["stream"] == made["stream"]


@pytest.mark.parametrize("axes", ALL, ids=["bf16", "e4m3"])
def test_descriptors_cover_q_and_the_pool_and_no_more(
    library: Kernseal, gpu: FakeGpu, axes: dict[str, Any]
) -> None:
    size, page = xqa_mla.elem_bytes(axes), axes["page_size"]
    made = call(axes, kv_token_stride=640, kv_page_stride=3 * page * 640)
    launch(library, gpu, made)
    small = axes is E4M3
    kind = UINT8 if small else BFLOAT16
    strides = [640 * size, 640 * size, 3 * page * 640 * size]
    tokens = 64 if small else 16
    expected = [
        (kind, made["q"], [ROW, 256], [ROW * size], [64, 128], SWIZZLE_64 if small else SWIZZLE_128),
        (kind, made["k"], [ROW, 1, page, 1000], strides, [64, 1, tokens, 1], 2 if small else 3),
        (kind, made["v"], [ROW, 1, page, 1000], strides, [128 if small else 64, 1, tokens, 1], SWIZZLE_128),
    ]
    names = ("type", "address", "sizes", "strides", "box", "swizzle")
    given = [tuple(line[name] for name in names) for line in gpu.log("encode")]
    assert given == expected


def test_prepare_loads_the_image_and_allows_its_shared_memory(library: Kernseal, gpu: FakeGpu) -> None:
    handle = library.prepare(OP, BF16)
    assert [line["kernel"] for line in gpu.log("get_kernel")] == ["kernel_mha"]
    assert [(line["attribute"], line["value"]) for line in gpu.log("set_attribute")] == [(8, SMEM)]
    library.c.kseal_xqa_mla_release(handle)
    assert len(gpu.log("unload")) == 1


@pytest.mark.parametrize("where", ["cuTensorMapEncodeTiled", "cuLaunchKernelEx"])
def test_a_driver_that_fails_at_the_launch_is_named(library: Kernseal, gpu: FakeGpu, where: str) -> None:
    gpu.fail(where, 700)
    assert status_of(library, call()) == library.c.KSEAL_DRIVER_ERROR
    assert f"{where}: CUDA_ERROR_ILLEGAL_ADDRESS (700)" in library.error()
    assert gpu.log("launch") == []


@pytest.mark.parametrize("encoded", [0, 1, 2])
def test_a_descriptor_that_cannot_be_made_stops_the_launch(
    library: Kernseal, gpu: FakeGpu, encoded: int
) -> None:
    gpu.fail("cuTensorMapEncodeTiled", 700, after=encoded)
    assert status_of(library, call()) == library.c.KSEAL_DRIVER_ERROR
    assert len(gpu.log("encode")) == encoded
    assert gpu.log("launch") == []


def test_an_empty_batch_launches_nothing_and_succeeds(library: Kernseal, gpu: FakeGpu) -> None:
    nothing = dict.fromkeys(("q", "k", "v", "o", "page_table", "seq_lens", "workspace"), 0)
    made = call(batch_size=0, num_q_heads=0, workspace_bytes=0, **nothing)
    assert status_of(library, made) == 0
    assert gpu.log("launch") == []
    assert workspace(library, made) == 0


@pytest.mark.parametrize("pdl", [0, 1])
def test_pdl_is_an_attribute_of_the_launch(library: Kernseal, gpu: FakeGpu, pdl: int) -> None:
    assert launch(library, gpu, call(pdl=pdl))["attributes"] == [[6, struct.pack("<I", pdl).hex()]]


def test_scratch_is_two_buffers_of_weights_a_sequence(library: Kernseal, gpu: FakeGpu) -> None:
    for axes in ALL:
        assert workspace(library, call(axes, batch_size=7)) == 7 * SCRATCH
    assert launch(library, gpu, call(workspace_bytes=2 * SCRATCH))["grid"] == [4, 1, 2]


def test_scales_on_the_device_are_not_asked_for_by_value(library: Kernseal, gpu: FakeGpu) -> None:
    nan = float("nan")
    made = call(q_scale=nan, kv_scale=nan, q_scale_ptr=4, kv_scale_ptr=8)
    assert launch(library, gpu, made)["grid"] == [4, 1, 2]


def test_k_and_v_may_be_one_pool(library: Kernseal, gpu: FakeGpu) -> None:
    launch(library, gpu, call(k=4096, v=4096))
    assert [line["address"] for line in gpu.log("encode")][1:] == [4096, 4096]


INVALID, UNALIGNED, TOO_SMALL = "INVALID_ARGUMENT", "MISALIGNED", "WORKSPACE_TOO_SMALL"
OVERFLOW, UNSUPPORTED = "OVERFLOW", "UNSUPPORTED"
TINY = 2.0**-60
REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    (INVALID, {"batch_size": -1}, ["batch_size is -1"]),
    (OVERFLOW, {"batch_size": 65536}, ["batch_size is 65536", "65535"]),
    (UNSUPPORTED, {"num_q_heads": 64}, ["num_q_heads is 64", "128 are supported"]),
    (UNSUPPORTED, {"num_q_heads": 0}, ["num_q_heads is 0", "128 are supported"]),
    (INVALID, {"num_pages": 0}, ["num_pages is 0", "positive"]),
    (OVERFLOW, {"num_pages": 2**31 + 1}, ["num_pages is 2147483649", "2^31"]),
    (INVALID, {"max_pages_per_seq": 0}, ["max_pages_per_seq is 0"]),
    (OVERFLOW, {"max_pages_per_seq": 2**27}, ["max_pages_per_seq is 134217728", "page_size is 16"]),
    (OVERFLOW, {"max_pages_per_seq": 2**26, "batch_size": 64}, ["B * max_pages_per_seq", "B is 64"]),
    (INVALID, {"pdl": 2}, ["pdl is 2", "0 or 1"]),
    (INVALID, {"q_scale": 0.0}, ["q_scale is 0", "above 0"]),
    (INVALID, {"q_scale": -1.0}, ["q_scale is -1", "above 0"]),
    (INVALID, {"q_scale": float("nan")}, ["q_scale is", "finite"]),
    (INVALID, {"kv_scale": 0.0}, ["kv_scale is 0", "above 0"]),
    (INVALID, {"kv_scale": float("inf")}, ["kv_scale is inf", "finite"]),
    (INVALID, {"q_scale": TINY, "kv_scale": TINY}, ["q_scale is 8.6", "at least 2^-96", "kv_scale is 8.6"]),
    (INVALID, {"q_scale": 1e30, "kv_scale": 1e30}, ["q_scale is 1e+30", "must be finite"]),
    (INVALID, {"kv_page_stride": -576}, ["kv_page_stride is -576", "at least 576", "0 for 9216"]),
    (INVALID, {"kv_token_stride": 512}, ["kv_token_stride is 512", "at least 576"]),
    (UNALIGNED, {"kv_page_stride": 9220}, ["kv_page_stride is 9220", "8 elements, 16 bytes"]),
    (UNALIGNED, {"kv_token_stride": 580}, ["kv_token_stride is 580", "8 elements, 16 bytes"]),
    (UNALIGNED, {"axes": E4M3, "kv_token_stride": 584}, ["kv_token_stride is 584", "16 elements, 16 bytes"]),
    (OVERFLOW, {"kv_page_stride": 2**39}, ["kv_page_stride is 549755813888", "2^40 bytes"]),
    (OVERFLOW, {"kv_token_stride": 2**62}, ["kv_token_stride is 4611686018427387904", "2^40 bytes"]),
    (OVERFLOW, {"kv_page_stride": 2**38, "num_pages": 2**20}, ["last of 1048576", "2^57 bytes"]),
    (UNALIGNED, {"q_scale_ptr": 66}, ["q_scale_ptr is 0x42", "4 bytes"]),
    (UNALIGNED, {"kv_scale_ptr": 66}, ["kv_scale_ptr is 0x42", "4 bytes"]),
    (TOO_SMALL, {"workspace_bytes": 2 * SCRATCH - 1}, ["workspace_bytes is 36863", "36864 are needed"]),
    *((INVALID, {name: 0}, [f"{name} is null"]) for name in xqa_mla.ALIGN),
    *(
        (UNALIGNED, {name: 4096 + align // 2}, [f"{name} is 0x", f"{align} bytes"])
        for name, align in xqa_mla.ALIGN.items()
    ),
]


@pytest.mark.parametrize(
    ("status", "changes", "words"),
    REFUSED,
    ids=[f"{i}-{next(iter(c))}" for i, (_, c, _) in enumerate(REFUSED)],
)
def test_a_refusal_is_a_sentence(
    library: Kernseal, gpu: FakeGpu, status: str, changes: dict[str, Any], words: list[str]
) -> None:
    made = call(changes.get("axes", BF16), **{k: v for k, v in changes.items() if k != "axes"})
    assert status_of(library, made) == getattr(library.c, f"KSEAL_{status}"), library.error()
    assert library.error().startswith("xqa_mla: ")
    assert [word for word in words if word not in library.error()] == [], library.error()
    assert gpu.log("launch") == []


def test_a_page_size_that_no_kernel_has_is_refused_with_what_there_is(
    library: Kernseal, gpu: FakeGpu
) -> None:
    config = library.config(OP, BF16)
    config.page_size = 1
    out = library.ffi.new(f"kseal_{OP} **")
    assert library.c.kseal_xqa_mla_prepare(library.bundle, config, out) == library.c.KSEAL_INVALID_ARGUMENT
    assert "config.page_size is 1; it must be 16 or 32 or 64 or 128" in library.error()


def test_a_variant_that_is_not_built_is_refused_with_those_that_are(library: Kernseal, gpu: FakeGpu) -> None:
    out = library.ffi.new(f"kseal_{OP} **")
    config = library.config(OP, axes_of(page_size=32))
    assert library.c.kseal_xqa_mla_prepare(library.bundle, config, out) == library.c.KSEAL_UNSUPPORTED
    assert "has: bf16_p16, e4m3_p128" in library.error()


def test_a_run_on_another_device_is_refused(library: Kernseal, gpu: FakeGpu) -> None:
    gpu.device((9, 0), count=2)
    handle = library.prepare(OP, BF16)
    gpu.current(1)
    assert library.c.kseal_xqa_mla_run(handle, call().args(library)) == library.c.KSEAL_NOT_PREPARED
    gpu.current(0)
    assert library.c.kseal_xqa_mla_release(handle) == 0
