"""XQA decode's launch code on the recording driver: what is launched, and what is refused in which words."""

from __future__ import annotations

import itertools
import random
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from cpu.fake_driver import xqa
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.kernseal_library import Kernseal
from cpu.fake_driver.xqa import OP, SMEM, Call, axes_of, cache_param, library_of, op, param_sizes, random_call

from kernseal.export.spec import Target

Axes = dict[str, Any]

PLAIN = axes_of()
WINDOW = axes_of(sliding_window=True, head_dim=64)
SMALL = axes_of(kv_dtype="e4m3", out_dtype="e4m3", page_size=64)
LARGE = axes_of(head_dim=272, group_size=16)
DRAFTS = axes_of(spec_decode=True)
DRAFTS_SMALL = axes_of(kv_dtype="e4m3", out_dtype="e4m3", spec_decode=True, sliding_window=True, group_size=3)
GMMA = axes_of(kv_dtype="e4m3", fp8_math=True)
GMMA_SMALL = axes_of(
    kv_dtype="e4m3",
    out_dtype="e4m3",
    head_dim=80,
    group_size=5,
    page_size=128,
    sliding_window=True,
    fp8_math=True,
)
FP4 = axes_of(kv_dtype="nvfp4")
FP4_DRAFTS = axes_of(
    kv_dtype="nvfp4", head_dim=64, page_size=128, spec_decode=True, sliding_window=True, group_size=4
)
KINDS: dict[str, Axes] = {
    "plain": PLAIN,
    "window": WINDOW,
    "small": SMALL,
    "large": LARGE,
    "drafts": DRAFTS,
    "drafts_small_window": DRAFTS_SMALL,
    "gmma": GMMA,
    "gmma_small_window": GMMA_SMALL,
    "nvfp4": FP4,
    "nvfp4_drafts_window": FP4_DRAFTS,
}
HEADS, BATCH, Q_LEN = 4, 2, 6
DEVICES = {"sm_90a": (9, 0), "sm_100a": (10, 0), "sm_120a": (12, 0)}


def sm_of(axes: Axes) -> str:
    return "sm_120a" if axes["kv_dtype"] == "nvfp4" else "sm_90a"


class Bench:
    """Libraries of three SMs, each on a device that they are for."""

    def __init__(self, gpu: FakeGpu, libraries: Mapping[str, Kernseal]) -> None:
        self.gpu = gpu
        self.libraries = libraries

    def device(self, axes: Axes, sms: int = 132) -> Kernseal:
        self.gpu.reset()
        self.gpu.device(DEVICES[sm_of(axes)], sms=sms)
        return self.libraries[sm_of(axes)]

    def run(self, made: Call, sms: int = 132) -> tuple[str, str, list[dict[str, Any]]]:
        """Name of the status, the last error, and the launches."""
        library = self.device(dict(made.axes), sms)
        handle = library.prepare(OP, made.axes)
        self.gpu.params(param_sizes(made.axes))
        status = library.c.kseal_xqa_decode_run(handle, made.args(library))
        message = library.error() if status else ""
        launches = self.gpu.log("launch")
        assert library.c.kseal_xqa_decode_release(handle) == 0
        return library.ffi.string(library.c.kseal_status_name(status)).decode(), message, launches

    def launch(self, made: Call, sms: int = 132) -> dict[str, Any]:
        status, message, launches = self.run(made, sms)
        assert status == "ok", message
        (found,) = launches
        return found

    def sizes(self, made: Call, sms: int = 132) -> tuple[int, int]:
        """Bytes of semaphores and of workspace."""
        library = self.device(dict(made.axes), sms)
        handle, found = library.prepare(OP, made.axes), []
        for what in ("semaphores", "workspace"):
            size = library.ffi.new("uint64_t *", 77)
            function = getattr(library.c, f"kseal_xqa_decode_{what}_size")
            assert function(handle, made.args(library), size) == 0, library.error()
            found.append(int(size[0]))
        library.c.kseal_xqa_decode_release(handle)
        return found[0], found[1]


@pytest.fixture(scope="module")
def libraries(fake_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kernseal]:
    made = {}
    for sm in DEVICES:
        fake_gpu.reset()
        mine = [axes for axes in KINDS.values() if sm_of(axes) == sm]
        made[sm] = library_of(mine or [PLAIN], sm, tmp_path_factory.mktemp(sm))
    return made


@pytest.fixture
def bench(gpu: FakeGpu, libraries: dict[str, Kernseal]) -> Bench:
    return Bench(gpu, libraries)


@pytest.fixture
def library(libraries: dict[str, Kernseal]) -> Kernseal:
    return libraries["sm_90a"]


def call(axes: Axes = PLAIN, **changes: Any) -> Call:
    """A valid call of moderate size, without what is optional, with ``changes``."""
    made = random_call(random.Random(1), axes)
    sizes = {
        "num_kv_heads": HEADS,
        "num_q_heads": HEADS * axes["group_size"],
        "batch_size": BATCH,
        "num_pages": 1000,
        "max_pages_per_seq": 64,
        "q_len": Q_LEN if axes["spec_decode"] else 0,
        "q_rows": 0,
    }
    kinds = [(prefix, name) for prefix in ("kv", "scale") for name in ("page", "token", "head")]
    strides = {f"{prefix}_{name}_stride": 0 for prefix, name in kinds}
    none = dict.fromkeys(("sinks", "q_scale_ptr", "kv_scale_ptr", "q_cu_lens"), 0)
    return Call(axes, {**made.fields, **sizes, **strides, **none, **changes})


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def f32(value: float) -> bytes:
    return struct.pack("<f", value)


def ptr(value: int) -> bytes:
    return struct.pack("<Q", value)


def cache_of(made: Call) -> bytes:
    pointers = ["k", "v", *(["k_scales", "v_scales"] if made.axes["kv_dtype"] == "nvfp4" else [])]
    pointers += ["page_table", "seq_lens"]
    return b"".join(ptr(made[name]) for name in pointers) + u32(made["max_pages_per_seq"])


def expected_params(made: Call, dense: list[int]) -> list[bytes]:
    """Parameters of ``kernel_mha`` in its own order; ``dense`` are the strides in heads. Tensor maps are left empty."""
    axes = made.axes
    drafts, window = axes["spec_decode"], axes["sliding_window"]
    small_out, fp4 = axes["out_dtype"] == "e4m3", axes["kv_dtype"] == "nvfp4"
    strides = [u32(stride) for stride in dense]
    order = [
        ("mha", drafts, u32(made["q_len"])),
        ("both", True, u32(made["num_kv_heads"])),
        ("mha", drafts, u32(axes["group_size"])),
        ("mha", drafts, ptr(made["q_cu_lens"])),
        ("both", window, u32(made["window"])),
        ("both", True, f32(made["q_scale"])),
        ("both", True, ptr(made["q_scale_ptr"])),
        ("both", True, ptr(made["o"])),
        ("both", small_out, f32(made["rcp_out_scale"])),
        ("both", True, ptr(made["q"])),
        ("mha", drafts, ptr(made["mask"])),
        ("both", True, ptr(made["sinks"])),
        ("both", True, cache_of(made)),
        ("both", True, u32(made["batch_size"])),
        ("both", True, f32(made["kv_scale"])),
        ("both", True, ptr(made["kv_scale_ptr"])),
        *(("mha", True, stride) for stride in strides),
        *(("mha", fp4, stride) for stride in strides),
        *(("gmma", True, b""),) * 2,
        ("both", True, ptr(made["semaphores"])),
        ("both", True, ptr(made["workspace"])),
        ("both", True, u32(1)),
    ]
    kernel = "gmma" if axes["fp8_math"] else "mha"
    return [value for of, there, value in order if there and of in (kernel, "both")]


def given_params(launch: Mapping[str, Any], expected: list[bytes]) -> list[bytes]:
    """As long as what is expected: the end of ``KVCacheList`` is padding."""
    given = [bytes.fromhex(text) for text in launch["params"]]
    return [value[: len(want)] for value, want in zip(given, expected, strict=True)]


@pytest.mark.parametrize("optional", [False, True], ids=["without", "with"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_gets_the_fields(bench: Bench, kind: str, optional: bool) -> None:
    axes = KINDS[kind]
    pointers: dict[str, int] = {}
    if optional:
        pointers = {"sinks": 0x1004, "q_scale_ptr": 0x1008}
        pointers |= {"kv_scale_ptr": 0x100C} if axes["kv_dtype"] in xqa.SMALL else {}
        pointers |= {"q_cu_lens": 0x1010} if axes["spec_decode"] else {}
    made = call(axes, kv_splits=3, max_pages_per_seq=40, **pointers)
    found = bench.launch(made)
    expected = expected_params(made, [axes["page_size"] * HEADS, HEADS, 1])
    assert given_params(found, expected) == expected
    assert [len(text) // 2 for text in found["params"]] == param_sizes(axes)
    assert found["smem"] == SMEM
    assert found["stream"] == made["stream"]


def test_a_cut_parameter_list_would_be_noticed() -> None:
    for axes in KINDS.values():
        index, set_by_anyone = cache_param(axes)
        assert len(expected_params(call(axes), [1, 1, 1])) == len(param_sizes(axes))
        assert len(cache_of(call(axes))) == set_by_anyone
        assert param_sizes(axes)[index] == set_by_anyone + 4


GRIDS = {
    "plain": ([3, HEADS, BATCH], [128, 1, 2]),
    "window": ([3, HEADS, BATCH], [128, 1, 2]),
    "small": ([3, HEADS, BATCH], [128, 1, 2]),
    "large": ([3, HEADS, BATCH], [128, 1, 2]),
    # 6 tokens of 8 or 3 or 4 heads are 48, 18 or 24 rows, 32 to a block.
    "drafts": ([3, HEADS * 2, BATCH], [128, 1, 2]),
    "drafts_small_window": ([3, HEADS, BATCH], [128, 1, 2]),
    "gmma": ([1, 3, HEADS * BATCH], [128, 1, 3]),
    "gmma_small_window": ([1, 3, HEADS * BATCH], [128, 1, 3]),
    "nvfp4": ([3, HEADS, BATCH], [128, 1, 2]),
    "nvfp4_drafts_window": ([3, HEADS, BATCH], [128, 1, 2]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_grid_is_splits_heads_and_sequences(bench: Bench, kind: str) -> None:
    found = bench.launch(call(KINDS[kind], kv_splits=3))
    assert (found["grid"], found["block"]) == GRIDS[kind]


def test_strides_go_in_as_heads(bench: Bench) -> None:
    kv = {"kv_page_stride": 5 * 64 * HEADS, "kv_token_stride": 64, "kv_head_stride": 128 * 64}
    scales = {"scale_page_stride": 7 * 8 * HEADS, "scale_token_stride": 8, "scale_head_stride": 128 * 8}
    made = call(FP4, **kv, **scales)
    sizes = param_sizes(FP4)
    params = bench.launch(made)["params"]
    at = len(sizes) - 9
    numbers = [struct.unpack("<I", bytes.fromhex(text))[0] for text in params[at : at + 6]]
    assert numbers == [5 * HEADS, 1, 128, 7 * HEADS, 1, 128]


@pytest.mark.parametrize(
    ("kind", "sizes", "strides", "box", "swizzle"),
    [
        ("gmma", [128, HEADS, 16, 1000], [128, 512, 8192], [128, 1, 16, 1], 3),
        ("gmma_small_window", [80, HEADS, 128, 1000], [80, 320, 40960], [128, 1, 64, 1], 3),
    ],
)
def test_the_gmma_kernel_gets_the_cache_as_tensor_maps(
    bench: Bench, kind: str, sizes: list[int], strides: list[int], box: list[int], swizzle: int
) -> None:
    made = call(KINDS[kind])
    found = bench.launch(made)
    expected = [
        {
            "call": "encode",
            "type": 0,
            "address": made[name],
            "interleave": 0,
            "swizzle": swizzle,
            "promotion": 0,
            "fill": 0,
            "sizes": sizes,
            "strides": strides,
            "box": box,
            "element_strides": [1, 1, 1, 1],
        }
        for name in ("k", "v")
    ]
    assert bench.gpu.log("encode") == expected
    maps = [bytes.fromhex(text) for text in found["params"] if len(text) == 256]
    assert [struct.unpack_from("<Q", data)[0] for data in maps] == [made["k"], made["v"]]


def test_a_small_head_has_a_narrow_swizzle(
    fake_gpu: FakeGpu, gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory
) -> None:
    axes = axes_of(kv_dtype="e4m3", fp8_math=True, head_dim=48)
    library = library_of([axes], "sm_90a", tmp_path_factory.mktemp("narrow"))
    handle = library.prepare(OP, axes)
    assert library.c.kseal_xqa_decode_run(handle, call(axes).args(library)) == 0, library.error()
    assert library.c.kseal_xqa_decode_release(handle) == 0
    assert [(line["swizzle"], line["box"]) for line in gpu.log("encode")] == [(2, [64, 1, 16, 1])] * 2


def test_an_hnd_cache_of_one_layer_among_several_goes_into_the_tensor_map(bench: Bench) -> None:
    bench.launch(
        call(GMMA, kv_page_stride=3 * 16 * HEADS * 128, kv_token_stride=128, kv_head_stride=16 * 128)
    )
    strides = [[16 * 128, 128, 3 * 16 * HEADS * 128]] * 2
    assert [line["strides"] for line in bench.gpu.log("encode")] == strides


def test_prepare_loads_the_image_and_allows_its_shared_memory(library: Kernseal, gpu: FakeGpu) -> None:
    handle = library.prepare(OP, PLAIN)
    assert [line["kernel"] for line in gpu.log("get_kernel")] == ["kernel_mha"]
    assert [(line["attribute"], line["value"]) for line in gpu.log("set_attribute")] == [(8, SMEM)]
    library.c.kseal_xqa_decode_release(handle)
    assert len(gpu.log("unload")) == 1


@pytest.mark.parametrize("where", ["cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelSetAttribute"])
def test_a_driver_that_fails_during_prepare_is_named(bench: Bench, library: Kernseal, where: str) -> None:
    bench.gpu.fail(where, 209)
    out = library.ffi.new(f"kseal_{OP} **")
    status = library.c.kseal_xqa_decode_prepare(library.bundle, library.config(OP, PLAIN), out)
    assert status == library.c.KSEAL_DRIVER_ERROR
    assert where in library.error()
    assert out[0] == library.ffi.NULL
    assert bench.launch(call())["smem"] == SMEM, "nothing of the failure stays"


@pytest.mark.parametrize(
    ("axes", "where", "after"),
    [
        (PLAIN, "cuLaunchKernelEx", 0),
        (GMMA, "cuLaunchKernelEx", 0),
        (GMMA, "cuTensorMapEncodeTiled", 0),
        (GMMA, "cuTensorMapEncodeTiled", 1),
    ],
)
def test_a_driver_that_fails_at_the_launch_is_named(
    library: Kernseal, gpu: FakeGpu, axes: Axes, where: str, after: int
) -> None:
    handle = library.prepare(OP, axes)
    gpu.fail(where, 700, after)
    assert library.c.kseal_xqa_decode_run(handle, call(axes).args(library)) == library.c.KSEAL_DRIVER_ERROR
    assert f"{where}: CUDA_ERROR_ILLEGAL_ADDRESS (700)" in library.error()
    assert gpu.log("launch") == []
    assert library.c.kseal_xqa_decode_release(handle) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_launches_nothing_and_succeeds(bench: Bench, kind: str) -> None:
    nothing = dict.fromkeys((*xqa.ALIGN, "semaphores_bytes", "workspace_bytes"), 0)
    made = call(KINDS[kind], batch_size=0, num_kv_heads=0, num_q_heads=0, q_len=0, **nothing)
    assert bench.run(made) == ("ok", "", [])
    assert bench.gpu.log("encode") == []
    assert bench.sizes(made) == (0, 0)


@pytest.mark.parametrize("pdl", [0, 1])
@pytest.mark.parametrize("kind", ["plain", "gmma"])
def test_pdl_is_an_attribute_of_the_launch(bench: Bench, kind: str, pdl: int) -> None:
    assert bench.launch(call(KINDS[kind], pdl=pdl))["attributes"] == [[6, u32(pdl).hex()]]


# ---- how the work is split ----


def splits(bench: Bench, made: Call, sms: int) -> int:
    grid = bench.launch(made, sms)["grid"]
    return int(grid[1] if made.axes["fp8_math"] else grid[0])


def tiles(axes: Mapping[str, Any], length: int) -> int:
    return -(-length // (64 if axes["fp8_math"] else 256))


def longest(made: Call) -> int:
    """The longest sequence that the call allows for."""
    return int(made["max_seq_len"] or made["max_pages_per_seq"] * made.axes["page_size"])


class Shares:
    """How many thread blocks the kernel then gives a sequence of each length."""

    def __init__(self, bench: Bench, made: Call, sms: int) -> None:
        launch = bench.launch(made, sms)
        self.axes = made.axes
        self.most = int(launch["grid"][1 if made.axes["fp8_math"] else 0])
        (self.min_tiles,) = struct.unpack("<I", bytes.fromhex(launch["params"][-1]))

    def of(self, length: int) -> int:
        return min(self.most, max(1, tiles(self.axes, length) // self.min_tiles))


def sized(rng: random.Random, axes: Axes, heads: int, **changes: Any) -> Call:
    pages = rng.choice([rng.randrange(1, 20), rng.randrange(1, 600), rng.randrange(1, 9000)])
    sizes = {
        "num_kv_heads": heads,
        "num_q_heads": axes["group_size"] * heads,
        "batch_size": rng.randrange(1, 60),
        "max_pages_per_seq": pages,
        "max_seq_len": rng.choice([0, rng.randrange(1, pages * axes["page_size"] + 1)]),
    }
    return call(axes, **{**sizes, **changes})


@pytest.mark.parametrize("kind", ["plain", "window", "drafts", "gmma", "nvfp4"])
def test_the_librarys_split_of_a_sequence_follows_from_its_length_heads_and_device_alone(
    bench: Bench, kind: str
) -> None:
    """Whatever the batch, the longest sequence and the width of the page table; and no block is launched for nothing."""
    axes, rng = KINDS[kind], random.Random(kind)
    shared = set()
    for sms in (1, 70, 132, 188):
        for heads in (1, 2, 4, 7, 8, 40, 300):
            pages = 2**22 // axes["page_size"]
            widest = sized(rng, axes, heads, batch_size=1, max_pages_per_seq=pages, max_seq_len=0)
            reference = Shares(bench, widest, sms)
            assert 1 <= reference.most <= 1024
            for _ in range(6):
                made = sized(rng, axes, heads, num_pages=rng.randrange(1, 5000), pdl=rng.randrange(2))
                found, end = Shares(bench, made, sms), longest(made)
                for length in (1, end, *(rng.randrange(1, end + 1) for _ in range(20))):
                    assert found.of(length) == reference.of(length), (sms, heads, length)
                    shared.add(found.of(length))
                assert found.most == reference.of(end), (sms, heads)
    assert len(shared) > 4


@pytest.mark.parametrize("kind", ["plain", "window", "drafts", "nvfp4"])
def test_minus_one_fills_the_device_as_upstream_does(bench: Bench, kind: str) -> None:
    rng = random.Random(kind)
    for _ in range(100):
        sms, heads = rng.choice([1, 70, 132, 188]), rng.randrange(1, 20)
        made = sized(rng, KINDS[kind], heads, kv_splits=-1)
        found = Shares(bench, made, sms)
        expected = min(max(1, sms // (made["batch_size"] * heads)), tiles(made.axes, longest(made)))
        assert (found.most, found.min_tiles) == (expected, 1)


def test_minus_one_fills_the_device_as_upstreams_gmma_launcher_does(bench: Bench) -> None:
    rng = random.Random(4)
    for _ in range(200):
        sms, heads = rng.choice([1, 70, 132, 188]), rng.randrange(1, 20)
        made = sized(rng, GMMA, heads, kv_splits=-1, batch_size=rng.choice([1, 2, 3, rng.randrange(1, 60)]))
        found = Shares(bench, made, sms)
        waves = sms * 3 // (made["batch_size"] * heads) * 0.25
        expected = min(max(1, int(waves + 0.5)), tiles(made.axes, longest(made)))
        assert (found.most, found.min_tiles) == (expected, 1)


def test_a_device_larger_than_the_limit_is_not_filled(bench: Bench) -> None:
    made = call(num_kv_heads=1, num_q_heads=8, batch_size=1, max_pages_per_seq=2**20, kv_splits=-1)
    assert splits(bench, made, 5000) == 1024


@pytest.mark.parametrize("kind", ["plain", "gmma"])
@pytest.mark.parametrize("chosen", [1, 2, 1024])
def test_the_split_can_be_chosen(bench: Bench, kind: str, chosen: int) -> None:
    found = Shares(bench, call(KINDS[kind], kv_splits=chosen, max_seq_len=1), 132)
    assert (found.most, found.min_tiles) == (chosen, 1)


# ---- scratch ----

SCRATCH = {
    # Per block twice 128 bytes of maxima and sums, then rows of 64, 128, 256 or 512 elements of 16 bits, from a multiple of
    # their own size on. 24 blocks of 8 rows of 128: 6144 + 24 * 2048.
    "plain": (32, 55296),
    "window": (32, 6144 + 24 * 1024),
    "small": (32, 55296),
    "large": (32, 16384 + 24 * 16384),
    # Blocks of 32 rows: 48 of them, then 24.
    "drafts": (64, 16384 + 48 * 8192),
    "drafts_small_window": (32, 8192 + 24 * 8192),
    "nvfp4": (32, 55296),
    "nvfp4_drafts_window": (32, 8192 + 24 * 4096),
    # Per block and head 8 bytes of sum and maximum, then heads as they are. 24 * 8 * 8 up to a multiple of 2048.
    "gmma": (32, 2048 + 24 * 2048),
    "gmma_small_window": (32, 1600 + 24 * 800),
}


@pytest.mark.parametrize("kind", KINDS)
def test_scratch_is_as_large_as_the_kernel_lays_it_out(bench: Bench, kind: str) -> None:
    assert bench.sizes(call(KINDS[kind], kv_splits=3)) == SCRATCH[kind]
    assert bench.sizes(call(KINDS[kind], kv_splits=1)) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_wants_exactly_the_scratch_that_the_size_functions_say(bench: Bench, kind: str) -> None:
    axes, rng = KINDS[kind], random.Random(kind)
    for mode in (-1, 0, 1, 2, 3, 17):
        made = sized(rng, axes, rng.randrange(1, 9), kv_splits=mode, batch_size=rng.randrange(1, 9))
        semaphores, workspace = bench.sizes(made)
        exact = {**made.fields, "semaphores_bytes": semaphores, "workspace_bytes": workspace}
        if splits(bench, Call(axes, exact), 132) == 1:
            assert (semaphores, workspace) == (0, 0)
            without = Call(axes, {**exact, "semaphores": 0, "workspace": 0})
            assert splits(bench, without, 132) == 1
            continue
        for name, size in (("semaphores", semaphores), ("workspace", workspace)):
            short = Call(axes, {**exact, f"{name}_bytes": size - 1})
            assert bench.run(short) == (
                "workspace_too_small",
                f"xqa_decode: {name}_bytes is {size - 1}; {size} are needed",
                [],
            )


# ---- refusals ----

INVALID, UNALIGNED, TOO_SMALL, OVERFLOW = "invalid_argument", "misaligned", "workspace_too_small", "overflow"
REFUSED: list[tuple[str, Axes, dict[str, Any], list[str]]] = [
    (INVALID, PLAIN, {"batch_size": -1}, ["batch_size is -1", "not be negative"]),
    (INVALID, PLAIN, {"num_kv_heads": 0}, ["num_kv_heads is 0", "positive"]),
    (INVALID, PLAIN, {"num_kv_heads": -1}, ["num_kv_heads is -1", "positive"]),
    (OVERFLOW, PLAIN, {"num_kv_heads": 65536}, ["num_kv_heads is 65536", "65535"]),
    (INVALID, PLAIN, {"num_q_heads": 31}, ["num_q_heads is 31", "must be 32", "group_size (8)"]),
    (OVERFLOW, PLAIN, {"batch_size": 65536}, ["batch_size is 65536", "65535"]),
    (
        OVERFLOW,
        GMMA,
        {"batch_size": 16384},
        ["batch_size is 16384", "config.fp8_math", "B * Hkv", "65535", "Hkv is 4"],
    ),
    (INVALID, PLAIN, {"q_len": 2}, ["q_len is 2", "0 or 1", "spec_decode is 0"]),
    (INVALID, PLAIN, {"q_len": -1}, ["q_len is -1", "0 or 1"]),
    (INVALID, DRAFTS, {"q_len": 0}, ["q_len is 0", "positive"]),
    (INVALID, DRAFTS, {"q_len": -1}, ["q_len is -1", "positive"]),
    # 4 heads and one block for every 4 tokens.
    (OVERFLOW, DRAFTS, {"q_len": 65533}, ["q_len is 65533", "4 * ceil(q_len * group_size / 32)", "65535"]),
    (OVERFLOW, DRAFTS, {"q_len": 2**31 - 1}, ["q_len is 2147483647", "65535"]),
    (
        OVERFLOW,
        PLAIN,
        {"batch_size": 65535, "num_kv_heads": 65535, "num_q_heads": 65535 * 8},
        ["batch_size is 65535", "B * q_len * Hq", "2^32"],
    ),
    (OVERFLOW, DRAFTS, {"q_len": 65532, "batch_size": 2049}, ["B * q_len * Hq", "q_len is 65532, Hq is 32"]),
    (OVERFLOW, DRAFTS, {"q_len": 65532, "batch_size": 33}, ["q_len is 65532", "ceil(q_len / 32)", "B is 33"]),
    (INVALID, PLAIN, {"q_rows": -1}, ["q_rows is -1", "at most B * q_len, 2 here"]),
    (INVALID, PLAIN, {"q_rows": 3}, ["q_rows is 3", "at most B * q_len, 2 here"]),
    (INVALID, DRAFTS, {"q_rows": 13, "q_cu_lens": 64}, ["q_rows is 13", "at most B * q_len, 12 here"]),
    (INVALID, DRAFTS, {"q_rows": 11}, ["q_rows is 11", "without q_cu_lens", "12 here"]),
    (INVALID, PLAIN, {"q_rows": 1}, ["q_rows is 1", "without q_cu_lens", "2 here"]),
    (INVALID, PLAIN, {"num_pages": 0}, ["num_pages is 0", "positive"]),
    (OVERFLOW, PLAIN, {"num_pages": 2**31 + 1}, ["num_pages is 2147483649", "2^31"]),
    (INVALID, PLAIN, {"max_pages_per_seq": 0}, ["max_pages_per_seq is 0", "positive"]),
    (OVERFLOW, PLAIN, {"max_pages_per_seq": 2**27}, ["max_pages_per_seq is 134217728", "page_size is 16"]),
    (OVERFLOW, PLAIN, {"max_pages_per_seq": 2**62}, ["max_pages_per_seq is", "page_size is 16"]),
    (OVERFLOW, PLAIN, {"max_pages_per_seq": 2**26, "batch_size": 64}, ["B * max_pages_per_seq", "B is 64"]),
    (INVALID, PLAIN, {"max_seq_len": 1025}, ["max_seq_len is 1025", "1024 here"]),
    (INVALID, PLAIN, {"max_seq_len": -1}, ["max_seq_len is -1"]),
    (INVALID, PLAIN, {"kv_splits": -2}, ["kv_splits is -2", "1 to 1024", "0 for", "-1 to fill"]),
    (INVALID, PLAIN, {"kv_splits": 1025}, ["kv_splits is 1025", "1 to 1024"]),
    (INVALID, PLAIN, {"window": 1}, ["window is 1", "must be 0", "sliding_window is 0"]),
    (INVALID, WINDOW, {"window": 0}, ["window is 0", "positive", "sliding_window is 1"]),
    (INVALID, WINDOW, {"window": -5}, ["window is -5", "positive", "sliding_window is 1"]),
    (INVALID, PLAIN, {"pdl": 2}, ["pdl is 2", "0 or 1"]),
    (INVALID, PLAIN, {"q_scale": 0.0}, ["q_scale is 0", "finite"]),
    (INVALID, PLAIN, {"q_scale": float("nan")}, ["q_scale is", "finite"]),
    (INVALID, PLAIN, {"kv_scale": 0.5}, ["kv_scale is 0.5", "0 or 1", "kv_dtype has 16 bits"]),
    (INVALID, SMALL, {"kv_scale": 0.0}, ["kv_scale is 0", "finite"]),
    (INVALID, FP4, {"kv_scale": float("inf")}, ["kv_scale is inf", "finite"]),
    (INVALID, PLAIN, {"rcp_out_scale": 2.0}, ["rcp_out_scale is 2", "0 or 1", "out_dtype has 16 bits"]),
    (INVALID, SMALL, {"rcp_out_scale": float("inf")}, ["rcp_out_scale is inf", "finite"]),
    (INVALID, PLAIN, {"kv_page_stride": -128}, ["kv_page_stride is -128", "positive, or 0 for 8192"]),
    (UNALIGNED, PLAIN, {"kv_page_stride": 100}, ["kv_page_stride is 100", "multiple of 128, one head"]),
    (UNALIGNED, PLAIN, {"kv_token_stride": 64}, ["kv_token_stride is 64", "multiple of 128, one head"]),
    (UNALIGNED, PLAIN, {"kv_head_stride": 1}, ["kv_head_stride is 1", "multiple of 128, one head"]),
    (UNALIGNED, FP4, {"kv_head_stride": 96}, ["kv_head_stride is 96", "multiple of 64, one head"]),
    (UNALIGNED, FP4, {"scale_head_stride": 12}, ["scale_head_stride is 12", "multiple of 8, one head"]),
    (INVALID, FP4, {"scale_token_stride": -8}, ["scale_token_stride is -8", "positive, or 0 for 32"]),
    (OVERFLOW, PLAIN, {"num_pages": 2**27}, ["kv_page_stride is 8192", "2^32 heads of 128"]),
    (OVERFLOW, PLAIN, {"kv_token_stride": 2**40}, ["kv_token_stride is 1099511627776", "2^32 heads"]),
    (OVERFLOW, PLAIN, {"kv_head_stride": 2**38}, ["kv_head_stride is 274877906944", "2^32 heads"]),
    (
        OVERFLOW,
        PLAIN,
        {"kv_head_stride": 2**39, "num_kv_heads": 1, "num_q_heads": 8},
        ["kv_head_stride is 549755813888", "the last of 1", "2^32 heads"],
    ),
    (OVERFLOW, FP4, {"scale_page_stride": 2**33}, ["scale_page_stride is", "2^32 heads of 8 elements"]),
    *(
        (INVALID, axes, {f"scale_{name}_stride": 8}, [f"scale_{name}_stride is 8", "must be 0", "not nvfp4"])
        for axes in (PLAIN, SMALL)
        for name in ("page", "token", "head")
    ),
    (INVALID, PLAIN, {"kv_scale_ptr": 64}, ["kv_scale_ptr is 0x40", "must be null", "kv_dtype has 16 bits"]),
    *(
        (INVALID, axes, {name: 64}, [f"{name} is 0x40", "must be null", "config.kv_dtype is not nvfp4"])
        for axes in (PLAIN, GMMA, DRAFTS)
        for name in ("k_scales", "v_scales")
    ),
    *(
        (INVALID, axes, {name: 64}, [f"{name} is 0x40", "must be null", "config.spec_decode is 0"])
        for axes in (PLAIN, GMMA, FP4)
        for name in ("q_cu_lens", "mask")
    ),
    (TOO_SMALL, PLAIN, {"kv_splits": 2, "semaphores_bytes": 31}, ["semaphores_bytes is 31", "32 are needed"]),
    (TOO_SMALL, PLAIN, {"kv_splits": 2, "workspace_bytes": 36863}, ["workspace_bytes is 36863", "36864 are"]),
    (
        OVERFLOW,
        PLAIN,
        {"kv_splits": 1024, "batch_size": 1024},
        ["kv_splits is 1024; scratch of 1024 blocks", "B is 1024"],
    ),
    (
        OVERFLOW,
        GMMA,
        {"kv_splits": 1024, "batch_size": 1024},
        ["kv_splits is 1024; scratch of 1024 blocks", "2^32"],
    ),
    (
        OVERFLOW,
        PLAIN,
        {"batch_size": 60000, "max_pages_per_seq": 2**16},
        ["kv_splits is 0; scratch of ", " blocks a sequence, ", "below 2^32", "B is 60000"],
    ),
    *((INVALID, PLAIN, {name: 0, "kv_splits": 2}, [f"{name} is null", "needed"]) for name in xqa.ALWAYS),
    *((INVALID, FP4, {name: 0}, [f"{name} is null", "needed"]) for name in ("k_scales", "v_scales")),
    (INVALID, DRAFTS, {"mask": 0}, ["mask is null", "needed"]),
    *(
        (UNALIGNED, FP4_DRAFTS, {name: 4096 + align // 2}, [f"{name} is 0x", f"aligned to {align} bytes"])
        for name, align in xqa.ALIGN.items()
    ),
]


@pytest.mark.parametrize(
    ("status", "axes", "changes", "words"),
    REFUSED,
    ids=[f"{i}-{next(iter(changes))}" for i, (_, _, changes, _) in enumerate(REFUSED)],
)
def test_a_refusal_is_a_sentence(
    bench: Bench, status: str, axes: Axes, changes: dict[str, Any], words: list[str]
) -> None:
    found, message, launches = bench.run(call(axes, **changes))
    assert (found, launches) == (status, []), message
    assert message.startswith("xqa_decode: ")
    assert [word for word in words if word not in message] == [], message


def sentences() -> list[str]:
    """A pattern for each sentence of the op's own."""
    text = "".join((op().folder / name).read_text() for name in ("launch.c", "pages.h"))
    quoted = re.findall(r'REFUSE\(KSEAL_\w+,\s*((?:"[^"]*"\s*)+)', text)
    formats = ["".join(re.findall(r'"([^"]*)"', part)) for part in quoted]
    assert len(formats) == text.count("REFUSE(KSEAL_")
    return [re.sub(r"%(?:d|u|lld|llu|g|p|s)", ".*", re.escape(found)) for found in formats]


def test_every_sentence_of_the_launch_code_is_reached(bench: Bench) -> None:
    said = [bench.run(call(axes, **changes))[1] for _, axes, changes, _ in REFUSED]
    silent = [s for s in sentences() if not any(re.fullmatch(f"xqa_decode: {s}", text) for text in said)]
    assert silent == []


def test_every_pointer_has_the_alignment_that_is_documented() -> None:
    data = op().data
    assert data["limits"]["align"] == xqa.ALIGN
    assert {f["name"] for f in data["abi"]["args"] if f["type"].startswith("ptr")} == set(xqa.ALIGN)


@pytest.mark.parametrize(
    "changes",
    [
        {"q_rows": BATCH * Q_LEN},
        {"q_cu_lens": 64, "q_rows": 0},
        {"q_cu_lens": 64, "q_rows": 1},
        {"q_cu_lens": 64, "q_rows": BATCH * Q_LEN},
    ],
    ids=["all", "ragged", "ragged_one", "ragged_all"],
)
def test_ragged_drafts_may_have_any_number_of_rows(bench: Bench, changes: dict[str, int]) -> None:
    assert bench.launch(call(DRAFTS, kv_splits=3, **changes))["grid"] == [3, HEADS * 2, BATCH]


@pytest.mark.parametrize("changes", [{"q_len": 1}, {"q_rows": BATCH}, {"q_len": 1, "q_rows": BATCH}])
def test_one_token_may_be_said(bench: Bench, changes: dict[str, int]) -> None:
    assert bench.launch(call(**changes))["grid"][1:] == [HEADS, BATCH]


def test_a_scale_on_the_device_replaces_the_one_of_the_host(bench: Bench) -> None:
    nan = float("nan")
    made = call(SMALL, q_scale=nan, q_scale_ptr=64, kv_scale=nan, kv_scale_ptr=128)
    assert ptr(128).hex() in bench.launch(made)["params"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 100}, ["config.head_dim is 100", "it must be 16 or 32", "or 512"]),
        ({"group_size": 17}, ["config.group_size is 17", "or 16"]),
        ({"page_size": 8}, ["config.page_size is 8", "16 or 32 or 64 or 128"]),
        ({"spec_decode": 2}, ["config.spec_decode is 2", "0 or 1"]),
        ({"fp8_math": 2}, ["config.fp8_math is 2", "0 or 1"]),
        ({"kv_dtype": 3}, ["config.kv_dtype is 3", "nvfp4"]),
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


def excluded_point(rule: Mapping[str, Any]) -> tuple[str, Axes]:
    """An SM and axes to which ``rule`` is the first that applies."""
    when = rule["when"]
    sixteen_bit = when.get("dtype") or ("f16" if "f16" in when.values() else "bf16")
    fitting = {
        "dtype": sixteen_bit,
        "kv_dtype": "e4m3" if when.get("fp8_math") else sixteen_bit,
        "out_dtype": sixteen_bit,
    }
    if "class" in rule:
        sm = op().data["classes"][rule["class"]]["sms"][0]
    else:
        sm = "sm_120a" if when.get("kv_dtype") == "nvfp4" and not when.get("fp8_math") else "sm_90a"
    return sm, axes_of(**{**fitting, **when})


def excluded_singly() -> Iterator[dict[str, Any]]:
    """The rules of excludes, one for each of their points."""
    for rule in op().data["excludes"]:
        for values in itertools.product(*rule["when"].values()):
            yield {**rule, "when": dict(zip(rule["when"], values, strict=True))}


@pytest.mark.parametrize(
    "rule",
    list(excluded_singly()),
    ids=lambda rule: "-".join([rule.get("class", "any"), *(f"{a}={v}" for a, v in rule["when"].items())]),
)
def test_a_combination_that_no_class_has_is_refused_with_the_reason(
    libraries: dict[str, Kernseal], gpu: FakeGpu, rule: Mapping[str, Any]
) -> None:
    sm, axes = excluded_point(rule)
    library = libraries[sm]
    gpu.device(DEVICES[sm])
    out = library.ffi.new(f"kseal_{OP} **")
    config = library.config(OP, axes)
    assert library.c.kseal_xqa_decode_prepare(library.bundle, config, out) == library.c.KSEAL_UNSUPPORTED
    class_name = op().class_for(Target(sm), axes)
    assert class_name is not None
    assert op().excluded(class_name, axes) == rule["why"]
    assert f"; {rule['why']}; this bundle ({sm}) has: " in library.error()


def test_a_variant_that_is_not_in_this_bundle_is_refused_with_those_that_are(
    library: Kernseal, gpu: FakeGpu
) -> None:
    out = library.ffi.new(f"kseal_{OP} **")
    config = library.config(OP, axes_of(head_dim=96))
    assert library.c.kseal_xqa_decode_prepare(library.bundle, config, out) == library.c.KSEAL_UNSUPPORTED
    assert "head_dim=96" in library.error()
    assert "this bundle (sm_90a) has: bf16_kvbf16_obf16_d128_g8_p16, " in library.error()


def test_a_prepare_under_capture_is_refused(library: Kernseal, gpu: FakeGpu) -> None:
    gpu.capturing(1)
    out = library.ffi.new(f"kseal_{OP} **")
    status = library.c.kseal_xqa_decode_prepare(library.bundle, library.config(OP, PLAIN), out)
    assert status == library.c.KSEAL_CAPTURING
    gpu.reset()


@pytest.mark.parametrize("kind", ["plain", "gmma"])
def test_a_run_on_another_device_is_refused(library: Kernseal, gpu: FakeGpu, kind: str) -> None:
    gpu.device((9, 0), count=2)
    handle = library.prepare(OP, KINDS[kind])
    gpu.current(1)
    made = call(KINDS[kind])
    assert library.c.kseal_xqa_decode_run(handle, made.args(library)) == library.c.KSEAL_NOT_PREPARED
    gpu.current(0)
    assert library.c.kseal_xqa_decode_release(handle) == 0
