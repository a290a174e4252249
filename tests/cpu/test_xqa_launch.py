"""XQA decode's launch code on the recording driver: what is launched, and what is refused in which words."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
from cpu.fake_driver import xqa
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.kernseal_library import Kernseal
from cpu.fake_driver.xqa import OP, SMEM, Call, axes_of, library_of, param_sizes, random_call

PLAIN = axes_of()
WINDOW = axes_of(sliding_window=True, head_dim=64)
SMALL = axes_of(kv_dtype="e4m3", out_dtype="e4m3", page_size=64)
ALL = (PLAIN, WINDOW, SMALL)


@pytest.fixture(scope="module")
def library(fake_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory) -> Kernseal:
    fake_gpu.reset()
    return library_of(ALL, tmp_path_factory.mktemp("xqa"))


def call(axes: dict[str, Any] = PLAIN, **changes: Any) -> Call:
    """A valid call of moderate size with ``changes``."""
    made = random_call(random.Random(1), axes)
    heads = 4
    sizes = {
        "num_kv_heads": heads,
        "num_q_heads": heads * axes["group_size"],
        "batch_size": 2,
        "num_pages": 1000,
    }
    strides = dict.fromkeys(("kv_page_stride", "kv_token_stride", "kv_head_stride"), 0)
    pages = {"max_pages_per_seq": 64, "sinks": 0, "q_scale_ptr": 0, "kv_scale_ptr": 0}
    return Call(axes, {**made.fields, **sizes, **strides, **pages, **changes})


def status_of(library: Kernseal, made: Call) -> int:
    handle = library.prepare(OP, made.axes)
    try:
        return int(library.c.kseal_xqa_decode_run(handle, made.args(library)))
    finally:
        assert library.c.kseal_xqa_decode_release(handle) == 0


def launch(library: Kernseal, gpu: FakeGpu, made: Call) -> dict[str, Any]:
    gpu.params(param_sizes(made.axes))
    assert status_of(library, made) == 0, library.error()
    (found,) = gpu.log("launch")
    return found


def workspace(library: Kernseal, made: Call) -> int:
    handle, size = library.prepare(OP, made.axes), library.ffi.new("uint64_t *", 77)
    assert library.c.kseal_xqa_decode_workspace_size(handle, made.args(library), size) == 0, library.error()
    library.c.kseal_xqa_decode_release(handle)
    return int(size[0])


@pytest.mark.parametrize("axes", ALL, ids=["plain", "window", "small"])
def test_the_kernel_gets_the_fields(library: Kernseal, gpu: FakeGpu, axes: dict[str, Any]) -> None:
    made = call(axes, kv_splits=3, max_pages_per_seq=40)
    found = launch(library, gpu, made)
    dim, heads = axes["head_dim"], 4
    strides = (axes["page_size"] * heads, heads, 1)
    cache = struct.pack("<QQQQI", made["k"], made["v"], made["page_table"], made["seq_lens"], 40)
    expected = [
        struct.pack("<I", heads),
        *([struct.pack("<I", made["window"])] if axes["sliding_window"] else []),
        struct.pack("<f", made["q_scale"]),
        bytes(8),
        struct.pack("<Q", made["o"]),
        *([struct.pack("<f", made["rcp_out_scale"])] if axes["out_dtype"] == "e4m3" else []),
        struct.pack("<Q", made["q"]),
        bytes(8),
        cache,
        struct.pack("<I", 2),
        struct.pack("<f", made["kv_scale"]),
        bytes(8),
        *(struct.pack("<I", stride) for stride in strides),
        struct.pack("<Q", made["semaphores"]),
        struct.pack("<Q", made["workspace"]),
    ]
    assert dim in (64, 128)
    given = [bytes.fromhex(text)[: len(want)] for text, want in zip(found["params"], expected, strict=True)]
    assert given == expected
    assert (found["grid"], found["block"], found["smem"]) == ([3, heads, 2], [128, 1, 2], SMEM)
    assert found["stream"] == made["stream"]


def test_prepare_loads_the_image_and_allows_its_shared_memory(library: Kernseal, gpu: FakeGpu) -> None:
    handle = library.prepare(OP, PLAIN)
    assert [line["kernel"] for line in gpu.log("get_kernel")] == ["kernel_mha"]
    assert [(line["attribute"], line["value"]) for line in gpu.log("set_attribute")] == [(8, SMEM)]
    library.c.kseal_xqa_decode_release(handle)
    assert len(gpu.log("unload")) == 1


@pytest.mark.parametrize("where", ["cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelSetAttribute"])
def test_a_driver_that_fails_during_prepare_is_named(library: Kernseal, gpu: FakeGpu, where: str) -> None:
    gpu.fail(where, 209)
    out = library.ffi.new(f"kseal_{OP} **")
    status = library.c.kseal_xqa_decode_prepare(library.bundle, library.config(OP, PLAIN), out)
    assert status == library.c.KSEAL_DRIVER_ERROR
    assert where in library.error()
    assert out[0] == library.ffi.NULL
    gpu.reset()
    assert launch(library, gpu, call())["smem"] == SMEM, "nothing of the failure stays"


def test_a_driver_that_fails_at_the_launch_is_named(library: Kernseal, gpu: FakeGpu) -> None:
    gpu.fail("cuLaunchKernelEx", 700)
    assert status_of(library, call()) == library.c.KSEAL_DRIVER_ERROR
    assert "cuLaunchKernelEx: CUDA_ERROR_ILLEGAL_ADDRESS (700)" in library.error()


def test_an_empty_batch_launches_nothing_and_succeeds(library: Kernseal, gpu: FakeGpu) -> None:
    nothing = dict.fromkeys(("q", "k", "v", "o", "page_table", "seq_lens", "semaphores", "workspace"), 0)
    made = call(batch_size=0, num_kv_heads=0, num_q_heads=0, semaphores_bytes=0, workspace_bytes=0, **nothing)
    assert status_of(library, made) == 0
    assert gpu.log("launch") == []
    assert workspace(library, made) == 0


@pytest.mark.parametrize("pdl", [0, 1])
def test_pdl_is_an_attribute_of_the_launch(library: Kernseal, gpu: FakeGpu, pdl: int) -> None:
    assert launch(library, gpu, call(pdl=pdl))["attributes"] == [[6, struct.pack("<I", pdl).hex()]]


def test_the_split_follows_from_sizes_alone(library: Kernseal, gpu: FakeGpu) -> None:
    rng = random.Random(3)
    for _ in range(200):
        heads, batch = rng.randrange(1, 20), rng.randrange(1, 60)
        pages, sms = rng.randrange(1, 600), rng.choice([1, 70, 132, 188])
        longest = rng.choice([0, rng.randrange(1, pages * 16 + 1)])
        gpu.reset()
        gpu.device((9, 0), sms=sms)
        made = call(
            num_kv_heads=heads,
            num_q_heads=8 * heads,
            batch_size=batch,
            max_pages_per_seq=pages,
            max_seq_len=longest,
        )
        tiles = -(-(longest or pages * 16) // xqa.TILE)
        assert launch(library, gpu, made)["grid"] == [
            min(max(1, sms // (batch * heads)), tiles),
            heads,
            batch,
        ]


def test_the_split_can_be_chosen(library: Kernseal, gpu: FakeGpu) -> None:
    assert launch(library, gpu, call(kv_splits=1024))["grid"][0] == 1024


@pytest.mark.parametrize("axes", ALL, ids=["plain", "window", "small"])
def test_scratch_is_as_large_as_the_kernel_lays_it_out(
    library: Kernseal, gpu: FakeGpu, axes: dict[str, Any]
) -> None:
    for splits in (2, 3, 17):
        made = call(axes, kv_splits=splits)
        blocks = splits * 2 * 4
        partial = axes["group_size"] * axes["head_dim"] * 2
        begin = -(-2 * blocks * 128 // partial) * partial
        assert workspace(library, made) == begin + blocks * partial
    assert workspace(library, call(axes, kv_splits=1)) == 0


def test_one_block_a_sequence_needs_no_scratch(library: Kernseal, gpu: FakeGpu) -> None:
    made = call(kv_splits=1, workspace=0, semaphores=0, workspace_bytes=0, semaphores_bytes=0)
    assert launch(library, gpu, made)["grid"][0] == 1


def test_scratch_of_exactly_the_needed_size_will_do(library: Kernseal, gpu: FakeGpu) -> None:
    made = call(kv_splits=4)
    exact = {"workspace_bytes": workspace(library, made), "semaphores_bytes": 4 * 2 * 4}
    assert launch(library, gpu, call(kv_splits=4, **exact))["grid"][0] == 4


INVALID, UNALIGNED, TOO_SMALL, OVERFLOW = "INVALID_ARGUMENT", "MISALIGNED", "WORKSPACE_TOO_SMALL", "OVERFLOW"
REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    (INVALID, {"batch_size": -1}, ["batch_size is -1"]),
    (OVERFLOW, {"batch_size": 65536}, ["batch_size is 65536", "65535"]),
    (INVALID, {"num_kv_heads": 0}, ["num_kv_heads is 0", "positive"]),
    (OVERFLOW, {"num_kv_heads": 65536}, ["num_kv_heads is 65536", "65535"]),
    (INVALID, {"num_q_heads": 31}, ["num_q_heads is 31", "must be 32", "group_size (8)"]),
    (OVERFLOW, {"batch_size": 65535, "num_kv_heads": 65535, "num_q_heads": 65535 * 8}, ["B * Hq", "2^32"]),
    (INVALID, {"num_pages": 0}, ["num_pages is 0"]),
    (OVERFLOW, {"num_pages": 2**31 + 1}, ["num_pages is 2147483649", "2^31"]),
    (INVALID, {"max_pages_per_seq": 0}, ["max_pages_per_seq is 0"]),
    (OVERFLOW, {"max_pages_per_seq": 2**27}, ["max_pages_per_seq is 134217728", "page_size is 16"]),
    (OVERFLOW, {"max_pages_per_seq": 2**26, "batch_size": 64}, ["B * max_pages_per_seq"]),
    (INVALID, {"max_seq_len": 1025}, ["max_seq_len is 1025", "1024 here"]),
    (INVALID, {"max_seq_len": -1}, ["max_seq_len is -1"]),
    (INVALID, {"kv_splits": -1}, ["kv_splits is -1", "1 to 1024"]),
    (INVALID, {"kv_splits": 1025}, ["kv_splits is 1025", "1 to 1024"]),
    (OVERFLOW, {"kv_splits": 1024, "batch_size": 1024}, ["kv_splits is 1024", "scratch", "2^32"]),
    (INVALID, {"window": 1}, ["window is 1", "must be 0", "sliding_window is 0"]),
    (INVALID, {"axes": WINDOW, "window": 0}, ["window is 0", "positive", "sliding_window is 1"]),
    (INVALID, {"pdl": 2}, ["pdl is 2", "0 or 1"]),
    (INVALID, {"q_scale": 0.0}, ["q_scale is 0", "finite"]),
    (INVALID, {"q_scale": float("nan")}, ["q_scale is", "finite"]),
    (INVALID, {"kv_scale": 0.5}, ["kv_scale is 0.5", "0 or 1", "kv_dtype has 16 bits"]),
    (INVALID, {"axes": SMALL, "kv_scale": 0.0}, ["kv_scale is 0", "finite"]),
    (INVALID, {"rcp_out_scale": 2.0}, ["rcp_out_scale is 2", "out_dtype has 16 bits"]),
    (INVALID, {"axes": SMALL, "rcp_out_scale": float("inf")}, ["rcp_out_scale is inf"]),
    (INVALID, {"kv_page_stride": -128}, ["kv_page_stride is -128"]),
    (UNALIGNED, {"kv_page_stride": 100}, ["kv_page_stride is 100", "head_dim, 128"]),
    (UNALIGNED, {"kv_token_stride": 64}, ["kv_token_stride is 64", "head_dim, 128"]),
    (UNALIGNED, {"kv_head_stride": 1}, ["kv_head_stride is 1", "head_dim, 128"]),
    (OVERFLOW, {"num_pages": 2**27}, ["kv_page_stride is 8192", "2^32 heads"]),
    (OVERFLOW, {"kv_token_stride": 2**40}, ["kv_token_stride is 1099511627776", "2^32 heads"]),
    (OVERFLOW, {"kv_head_stride": 2**38}, ["kv_head_stride is 274877906944", "2^32 heads"]),
    (INVALID, {"kv_scale_ptr": 64}, ["kv_scale_ptr is 0x40", "must be null", "16 bits"]),
    (UNALIGNED, {"sinks": 66}, ["sinks is 0x42", "4 bytes"]),
    (UNALIGNED, {"q_scale_ptr": 66}, ["q_scale_ptr is 0x42", "4 bytes"]),
    (TOO_SMALL, {"kv_splits": 2, "semaphores_bytes": 31}, ["semaphores_bytes is 31", "32 are needed"]),
    (TOO_SMALL, {"kv_splits": 2, "workspace_bytes": 36863}, ["workspace_bytes is 36863", "36864 are needed"]),
    *((INVALID, {name: 0, "kv_splits": 2}, [f"{name} is null"]) for name in xqa.ALIGN),
    *(
        (UNALIGNED, {name: 4096 + align // 2}, [f"{name} is 0x", f"{align} bytes"])
        for name, align in xqa.ALIGN.items()
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
    made = call(changes.get("axes", PLAIN), **{k: v for k, v in changes.items() if k != "axes"})
    assert status_of(library, made) == getattr(library.c, f"KSEAL_{status}"), library.error()
    assert library.error().startswith("xqa_decode: ")
    assert [word for word in words if word not in library.error()] == [], library.error()
    assert gpu.log("launch") == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 100}, ["config.head_dim is 100", "it must be 16 or 32", "or 512"]),
        ({"group_size": 17}, ["config.group_size is 17", "or 16"]),
        ({"page_size": 8}, ["config.page_size is 8", "16 or 32 or 64 or 128"]),
    ],
)
def test_a_geometry_that_no_kernel_has_is_refused_with_what_there_is(
    library: Kernseal, gpu: FakeGpu, change: dict[str, int], words: list[str]
) -> None:
    config = library.config(OP, PLAIN)
    for name, value in change.items():
        setattr(config, name, value)
    out = library.ffi.new(f"kseal_{OP} **")
    assert library.c.kseal_xqa_decode_prepare(library.bundle, config, out) == library.c.KSEAL_INVALID_ARGUMENT
    assert [word for word in words if word not in library.error()] == [], library.error()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kv_dtype": "f16"}, "a 16-bit cache has the element type of q"),
        ({"out_dtype": "f16"}, "a 16-bit o has the element type of q"),
        ({"out_dtype": "e4m3"}, "an e4m3 o needs an e4m3 cache"),
        ({"head_dim": 96}, "this bundle (sm_90a) has: bf16_kvbf16_obf16_d128_g8_p16"),
    ],
)
def test_a_pair_that_no_variant_has_is_refused_with_the_reason(
    library: Kernseal, gpu: FakeGpu, change: dict[str, Any], why: str
) -> None:
    out = library.ffi.new(f"kseal_{OP} **")
    config = library.config(OP, axes_of(**change))
    assert library.c.kseal_xqa_decode_prepare(library.bundle, config, out) == library.c.KSEAL_UNSUPPORTED
    assert why in library.error()


def test_a_prepare_under_capture_is_refused(library: Kernseal, gpu: FakeGpu) -> None:
    gpu.capturing(1)
    out = library.ffi.new(f"kseal_{OP} **")
    status = library.c.kseal_xqa_decode_prepare(library.bundle, library.config(OP, PLAIN), out)
    assert status == library.c.KSEAL_CAPTURING
    gpu.reset()


def test_a_run_on_another_device_is_refused(library: Kernseal, gpu: FakeGpu) -> None:
    gpu.device((9, 0), count=2)
    handle = library.prepare(OP, PLAIN)
    gpu.current(1)
    assert library.c.kseal_xqa_decode_run(handle, call().args(library)) == library.c.KSEAL_NOT_PREPARED
    gpu.current(0)
    assert library.c.kseal_xqa_decode_release(handle) == 0
