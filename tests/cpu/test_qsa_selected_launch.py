"""Attention over selected positions on the recording driver: launches are CuTe's own, refusals are sentences."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.host_objects import HostObject
from cpu.fake_driver.kernseal_library import Kernseal
from cpu.fake_driver.qsa_selected import (
    OP,
    POINTERS,
    Call,
    D,
    library_of,
    random_call,
    upstream_limits,
    upstream_splits,
    upstream_warps,
)
from cpu.fake_driver.reference import Reference, masked, params_of

pytestmark = pytest.mark.slow

CASES = 60
SM = "sm_120a"
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "e4m3": {"kv_dtype": "e4m3", "request_dtype": "i64", "tile_q": 32, "lse": True},
}
HEADS_PER_KV = 32  # most that a tile holds


@pytest.fixture(scope="module")
def variants(built_variant: Callable[..., HostObject]) -> Mapping[str, HostObject]:
    return {name: built_variant(SM, op_name=OP, **axes) for name, axes in VARIANTS.items()}


@pytest.fixture(scope="module")
def library(
    fake_gpu: FakeGpu, variants: Mapping[str, HostObject], tmp_path_factory: pytest.TempPathFactory
) -> Kernseal:
    fake_gpu.reset()
    fake_gpu.device((12, 0))
    return library_of(list(variants.values()), tmp_path_factory.mktemp(OP))


@pytest.fixture(autouse=True)
def blackwell(gpu: FakeGpu) -> None:
    gpu.device((12, 0))


def call(variants: Mapping[str, HostObject], name: str = "bf16", **changes: Any) -> Call:
    """A valid call of moderate size with ``changes``."""
    axes = variants[name].variant.axes
    sizes = {"num_q_heads": 24, "num_kv_heads": 2, "page_size": 64, "selection_width": 2051, "splits": 0}
    counts = {
        "num_rows": 4,
        "num_requests": 3,
        "max_pages_per_request": 40,
        "num_pages": 100,
        "scale": 0.0625,
    }
    dense = dict.fromkeys(("kv_page_stride", "kv_token_stride", "kv_head_stride"), 0)
    return random_call(random.Random(1), axes).but(**sizes, **counts, **dense).but(**changes)


def workspace(library: Kernseal, handle: Any, made: Call) -> tuple[int, int]:
    """Status and size; 77 where nothing was written."""
    size = library.ffi.new("uint64_t *", 77)
    return library.c.kseal_qsa_selected_workspace_size(handle, made.args(library), size), int(size[0])


def status_of(library: Kernseal, made: Call) -> str:
    handle = library.prepare(OP, made.axes)
    status = library.c.kseal_qsa_selected_run(handle, made.args(library))
    message = library.error()
    assert library.c.kseal_qsa_selected_release(handle) == 0
    found = library.ffi.string(library.c.kseal_status_name(status)).decode()
    return found if status == 0 else f"{found}: {message}"


@pytest.mark.parametrize("name", VARIANTS)
def test_our_launches_are_cutes_launches(
    library: Kernseal, variants: Mapping[str, HostObject], gpu: FakeGpu, tmp_path: Path, name: str
) -> None:
    made = variants[name]
    reference = Reference(made, tmp_path)
    for index, (entry, _) in enumerate(made.answer.kernels):
        gpu.params(made.param_sizes(index), entry)
    reference.load()
    theirs = gpu.log("set_attribute")
    handle = library.prepare(OP, made.variant.axes)
    assert gpu.log("set_attribute") == theirs * 2 and len(theirs) >= len(made.answer.kernels) == 4

    rng, smem, seen = random.Random(name), dict(made.answer.kernels), set()
    for case in range(CASES):
        one = random_call(rng, made.variant.axes)
        assert workspace(library, handle, one) == (0, one.sums * (D + 1) * 4), f"case {case}: {one}"
        before = len(gpu.log("launch"))
        args = one.but(workspace_bytes=one.sums * (D + 1) * 4).args(library)
        assert library.c.kseal_qsa_selected_run(handle, args) == 0, library.error()
        ours = gpu.log("launch")[before:]
        expected = reference.launches(gpu, one.arguments())
        assert len(ours) == len(expected) == len(one.grids())
        for launch, (wanted, masks), (word, grid) in zip(ours, expected, one.grids(), strict=True):
            assert masked(launch, masks) == masked(wanted, masks), f"case {case}: {one}"
            assert all(all(mask) for mask in masks), "bytes that nobody sets"
            assert word in launch["kernel"] and launch["grid"] == grid, f"case {case}: {one}"
            assert launch["smem"] == smem[launch["kernel"]] and launch["stream"] == one["stream"]
            seen.add(launch["kernel"])
    assert seen == set(smem), "kernels that no case launches"
    assert library.c.kseal_qsa_selected_release(handle) == 0


def numbers(launch: Mapping[str, Any]) -> list[int]:
    return [int.from_bytes(param, "little") for param in params_of(launch)]


def test_what_a_kernel_is_given_stands_in_its_order(
    library: Kernseal, variants: Mapping[str, HostObject], gpu: FakeGpu
) -> None:
    """Against the parameter lists of upstream's kernels, patched: CuTe's host object takes what the recipe hands it."""
    made = variants["e4m3"]
    for index, (entry, _) in enumerate(made.answer.kernels):
        gpu.params(made.param_sizes(index), entry)
    one = call(variants, "e4m3", num_rows=3)
    assert status_of(library, one) == "ok"
    split, merge = (numbers(launch) for launch in gpu.log("launch"))
    scratch, lse = one["workspace"], one["workspace"] + 3 * 32 * 24 * D * 4
    pointers = (
        "q",
        "k",
        "v",
        "k_descale",
        "v_descale",
        "block_table",
        "token_to_request",
        "selected_positions",
    )
    assert split[:8] == [one[name] for name in pointers]
    assert split[8:12] == [one["query_positions"], scratch, lse, one["o"]]
    assert split[12:15] == [100, 3, 40]
    assert split[16:] == [32, 2051, 12, 2, 64, 64 * 2 * D, 2 * D, D]
    assert merge == [scratch, lse, one["o"], one["lse"], 32, 24]
    assert status_of(library, one.but(num_rows=65)) == "ok"
    direct = numbers(gpu.log("launch")[-1])
    assert direct[10:12] == [one["lse"], one["o"]] and direct[16] == 1


# ---- policy ----


def test_splits_are_upstreams_for_every_number_of_rows(
    library: Kernseal, variants: Mapping[str, HostObject], gpu: FakeGpu
) -> None:
    rule, limits = upstream_splits(), upstream_limits()
    handle = library.prepare(OP, variants["bf16"].variant.axes)
    for rows in [*range(1, 300), 65535, 65536, 2**31 - 1]:
        one = call(variants, num_rows=rows)
        splits = rule(rows)
        assert (splits == 1) == (rows > limits["MAX_SPLIT_ROWS"]) and splits <= limits["MAX_SPLITS"]
        wanted = rows * splits * 24 * (D + 1) * 4 if splits > 1 else 0
        assert workspace(library, handle, one) == (0, wanted), rows
        assert library.c.kseal_qsa_selected_run(handle, one.args(library)) == 0, library.error()
    first = [launch for launch in gpu.log("launch") if "SelectedPosition" in launch["kernel"]]
    assert [launch["grid"] for launch in first] == [
        [rows, 2, rule(rows)] for rows in [*range(1, 300), 65535, 65536, 2**31 - 1]
    ]
    assert library.c.kseal_qsa_selected_release(handle) == 0


def test_the_tile_is_upstreams_for_every_number_of_heads(
    library: Kernseal, variants: Mapping[str, HostObject]
) -> None:
    config = library.config(OP, variants["bf16"].variant.axes)
    choose = library.c.kseal_qsa_selected_choose
    for kv_heads in (1, 2, 7, 65535):
        for group in range(1, HEADS_PER_KV + 1):
            one = call(variants, num_q_heads=group * kv_heads, num_kv_heads=kv_heads)
            config.tile_q = 0
            assert choose(one.args(library), 170, config) == 0, library.error()
            assert config.tile_q == 16 * upstream_warps(group)


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        ((33, 1), "num_q_heads is 33; it must be 1 to 32 times num_kv_heads (1)"),
        ((5, 2), "num_q_heads is 5; it must be 1 to 32 times num_kv_heads (2)"),
        ((0, 1), "num_q_heads is 0; it must be 1 to 32"),
        ((4, 0), "num_kv_heads is 0; it must be from 1 to 65535"),
    ],
)
def test_heads_that_no_tile_holds_have_no_choice(
    library: Kernseal, variants: Mapping[str, HostObject], heads: tuple[int, int], words: str
) -> None:
    one = call(variants, num_q_heads=heads[0], num_kv_heads=heads[1])
    config = library.config(OP, one.axes)
    status = library.c.kseal_qsa_selected_choose(one.args(library), 170, config)
    assert status == library.c.KSEAL_INVALID_ARGUMENT
    assert library.error().startswith(f"qsa_selected: {words}")


# ---- refusals ----

INVALID, APART, OVER = "invalid_argument", "misaligned", "overflow"
SIZES: list[tuple[str, dict[str, Any], str]] = [
    ("bf16", {"num_rows": -1}, f"{INVALID}: num_rows is -1; it must not be negative"),
    (
        "bf16",
        {"num_rows": 65536, "splits": 2},
        f"{OVER}: num_rows is 65536; it must be at most 65535 with splits (2)",
    ),
    ("bf16", {"num_rows": 2**31}, f"{OVER}: num_rows is 2147483648; it must be below 2^31"),
    (
        "bf16",
        {"splits": -1},
        f"{INVALID}: splits is -1; it must be from 1 to 64, or 0 for FlashInfer's choice",
    ),
    ("bf16", {"splits": 65}, f"{INVALID}: splits is 65; it must be from 1 to 64"),
    ("bf16", {"head_dim": 128}, f"{INVALID}: head_dim is 128; it must be 256"),
    ("bf16", {"num_kv_heads": 0}, f"{INVALID}: num_kv_heads is 0; it must be from 1 to 65535"),
    ("bf16", {"num_kv_heads": 65536}, f"{INVALID}: num_kv_heads is 65536; it must be from 1 to 65535"),
    ("bf16", {"num_q_heads": 34}, f"{INVALID}: num_q_heads is 34; it must be 1 to 16 times num_kv_heads (2)"),
    ("e4m3", {"num_q_heads": 66}, f"{INVALID}: num_q_heads is 66; it must be 1 to 32 times num_kv_heads (2)"),
    ("bf16", {"num_q_heads": 23}, f"{INVALID}: num_q_heads is 23; it must be 1 to 16 times num_kv_heads (2)"),
]
"""Also refused when the size of the workspace is asked for."""
RUNS: list[tuple[str, dict[str, Any], str]] = [
    *(
        ("bf16", {name: value}, f"{INVALID}: {name} is {value}; it must be from 1 to 2147483647")
        for name in ("num_requests", "max_pages_per_request", "num_pages")
        for value in (0, -1, 2**31)
    ),
    ("bf16", {"page_size": 0}, f"{INVALID}: page_size is 0; it must be positive"),
    ("bf16", {"selection_width": 0}, f"{INVALID}: selection_width is 0; it must be from 1 to 1073741824"),
    ("bf16", {"selection_width": 2**30 + 1}, f"{INVALID}: selection_width is 1073741825; it must be from 1"),
    *(
        ("bf16", {"scale": value}, f"{INVALID}: scale is {text}; it must be finite and above 0")
        for value, text in ((0.0, "0"), (-1.0, "-1"), (float("nan"), "nan"), (float("inf"), "inf"))
    ),
    *(
        (name, {f"kv_{what}_stride": value}, words)
        for what in ("page", "token", "head")
        for name, value, words in (
            ("bf16", -8, f"{INVALID}: kv_{what}_stride is -8; it must be positive"),
            ("bf16", 2**39, f"{INVALID}: kv_{what}_stride is 549755813888; it must be positive and below 2^40 bytes"),
            ("bf16", 4, f"{APART}: kv_{what}_stride is 4; it must be a multiple of 16 bytes"),
            ("e4m3", 8, f"{APART}: kv_{what}_stride is 8; it must be a multiple of 16 bytes"),
        )
    ),
    ("bf16", {"page_size": 2**31 - 1}, f"{INVALID}: kv_page_stride is 1099511627264; it must be positive and below 2^40"),
    ("bf16", {"kv_page_stride": 2**38, "num_pages": 2**30}, f"{OVER}: kv_page_stride is 274877906944; the cache must be"),
    *(
        ("bf16", {name: 0}, f"{INVALID}: {name} is null; it is needed")
        for name in POINTERS
        if name not in ("k_descale", "v_descale", "lse")
    ),
    *(
        (name, {pointer: value}, f"{INVALID}: {pointer} is {text}, since config.{axis}")
        for name, pointer, value, text, axis in (
            ("bf16", "k_descale", 64, "0x40; it must be null", "kv_dtype is bf16"),
            ("bf16", "v_descale", 64, "0x40; it must be null", "kv_dtype is bf16"),
            ("bf16", "lse", 64, "0x40; it must be null", "lse is 0"),
            ("e4m3", "k_descale", 0, "null; it is needed", "kv_dtype is e4m3"),
            ("e4m3", "v_descale", 0, "null; it is needed", "kv_dtype is e4m3"),
            ("e4m3", "lse", 0, "null; it is needed", "lse is 1"),
        )
    ),
    *(
        ("e4m3", {name: 2**20 + size // 2}, f"{APART}: {name} is {2**20 + size // 2:#x}; it must be aligned to {size} bytes")
        for name, align in POINTERS.items()
        for size in [8 if name == "token_to_request" else align]
    ),
    ("bf16", {"token_to_request": 2**20 + 2}, f"{APART}: token_to_request is 0x100002; it must be aligned to 4 bytes"),
    ("bf16", {"workspace_bytes": 4 * 32 * 24 * 257 * 4 - 1}, "workspace_too_small: workspace_bytes is 3158015; 3158016"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "words"), SIZES + RUNS, ids=lambda v: str(v)[:70])
def test_a_refusal_is_a_sentence(
    library: Kernseal,
    variants: Mapping[str, HostObject],
    gpu: FakeGpu,
    name: str,
    changes: dict[str, Any],
    words: str,
) -> None:
    one = call(variants, name, **changes)
    status, _, sentence = words.partition(": ")
    found = status_of(library, one)
    assert found.startswith(f"{status}: qsa_selected: {sentence}"), found
    assert gpu.log("launch") == []
    handle = library.prepare(OP, one.axes)
    refused, size = workspace(library, handle, one)
    assert (refused != 0, size == 77) == ((name, changes, words) in SIZES,) * 2
    assert library.c.kseal_qsa_selected_release(handle) == 0


def test_no_rows_are_a_no_op_whatever_the_rest(
    library: Kernseal, variants: Mapping[str, HostObject], gpu: FakeGpu
) -> None:
    for name in VARIANTS:
        nothing = Call(variants[name].variant.axes, {"num_rows": 0})
        assert status_of(library, nothing) == "ok"
        handle = library.prepare(OP, nothing.axes)
        assert workspace(library, handle, nothing) == (0, 0)
        assert library.c.kseal_qsa_selected_release(handle) == 0
    assert gpu.log("launch") == []


def test_one_kernel_needs_no_workspace(
    library: Kernseal, variants: Mapping[str, HostObject], gpu: FakeGpu
) -> None:
    for changes in ({"splits": 1}, {"num_rows": 65}):
        assert status_of(library, call(variants, workspace=0, workspace_bytes=0, **changes)) == "ok"
    assert len(gpu.log("launch")) == 2


def test_a_run_on_another_device_is_refused(
    library: Kernseal, variants: Mapping[str, HostObject], gpu: FakeGpu
) -> None:
    gpu.device((12, 0), count=2)
    one = call(variants)
    handle = library.prepare(OP, one.axes)
    gpu.current(1)
    assert library.c.kseal_qsa_selected_run(handle, one.args(library)) == library.c.KSEAL_NOT_PREPARED
    gpu.current(0)
    assert library.c.kseal_qsa_selected_release(handle) == 0


def test_a_driver_that_fails_at_the_second_launch_is_named(
    library: Kernseal, variants: Mapping[str, HostObject], gpu: FakeGpu
) -> None:
    gpu.fail("cuLaunchKernelEx", 700, after=1)
    assert status_of(library, call(variants)).startswith("driver_error")
    assert len(gpu.log("launch")) == 1
