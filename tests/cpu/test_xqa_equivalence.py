"""A launch of ours is, byte for byte, the launch of upstream's own host code; NVRTC's kernel is no worse than nvcc's."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from builds import compile_cache, locked
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.kernseal_library import Kernseal
from cpu.fake_driver.xqa import OP, Call, axes_of, cache_param, library_of, op, param_sizes, random_call
from cpu.fake_driver.xqa_upstream import Launcher
from nvcc import toolkit, upstream

from kernseal.export import build, elf, spec
from kernseal.export.build import Options
from kernseal.export.progress import Silent
from kernseal.export.variant import Built

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(toolkit.unavailable() is not None, reason=str(toolkit.unavailable())),
]

CASES = 150
DEVICES = {"sm_90a": (9, 0), "sm_100a": (10, 0), "sm_120a": (12, 0)}
SMS = (1, 2, 70, 78, 84, 114, 132, 148, 160, 170, 188, 1024)
"""Multiprocessors of the device."""
FILL_DEVICE = -1
"""The kv_splits that is upstream's own formula."""
ONE_TILE = "01000000"
"""The parameter that only our kernels have, where it changes nothing."""
E4M3 = {"kv_dtype": "e4m3"}
EVERYWHERE: dict[str, dict[str, Any]] = {
    "plain": {},
    "f16": {"dtype": "f16", "kv_dtype": "f16", "out_dtype": "f16", "head_dim": 272, "group_size": 16},
    "window": {"head_dim": 64, "group_size": 7, "page_size": 32, "sliding_window": True},
    "fp8": {**E4M3, "group_size": 4, "page_size": 64},
    "fp8_out": {**E4M3, "out_dtype": "e4m3", "sliding_window": True, "head_dim": 80},
    "int8": {"kv_dtype": "i8", "head_dim": 256, "group_size": 2},
    "drafts": {"spec_decode": True},
    "drafts_window": {
        **E4M3,
        "out_dtype": "e4m3",
        "spec_decode": True,
        "sliding_window": True,
        "group_size": 3,
    },
}
SM90: dict[str, dict[str, Any]] = {
    "gmma": {**E4M3, "fp8_math": True},
    "gmma_window": {**E4M3, "fp8_math": True, "sliding_window": True, "head_dim": 256, "group_size": 16},
    "gmma_padded": {
        **E4M3,
        "fp8_math": True,
        "out_dtype": "e4m3",
        "sliding_window": True,
        "head_dim": 80,
        "page_size": 128,
        "group_size": 5,
    },
    "gmma_small": {**E4M3, "fp8_math": True, "dtype": "f16", "out_dtype": "f16", "head_dim": 48},
}
SM120: dict[str, dict[str, Any]] = {
    "nvfp4": {"kv_dtype": "nvfp4"},
    "nvfp4_drafts": {
        "kv_dtype": "nvfp4",
        "spec_decode": True,
        "sliding_window": True,
        "head_dim": 64,
        "group_size": 4,
        "page_size": 128,
    },
}
VARIANTS = {name: axes_of(**changes) for name, changes in {**EVERYWHERE, **SM90, **SM120}.items()}
OF_SM = {"sm_90a": [*EVERYWHERE, *SM90], "sm_100a": [*EVERYWHERE], "sm_120a": [*EVERYWHERE, *SM120]}
PAIRS = [(name, sm) for sm, names in OF_SM.items() for name in names]
NEWEST = dict(PAIRS)
"""The SM for which a variant's host code is compiled: it is the same for all."""


@pytest.fixture(scope="module")
def libraries(fake_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kernseal]:
    def made(sm: str) -> Kernseal:
        return library_of([VARIANTS[name] for name in OF_SM[sm]], sm, tmp_path_factory.mktemp(sm))

    return cache(made)


@pytest.fixture(scope="module")
def launchers(fake_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Launcher]:
    def made(name: str) -> Launcher:
        return Launcher(VARIANTS[name], NEWEST[name], tmp_path_factory.mktemp(name))

    return cache(made)


class Ours:
    """One variant of our library on devices of any size."""

    def __init__(self, gpu: FakeGpu, library: Kernseal, sm: str) -> None:
        self.gpu, self.library, self.cc = gpu, library, DEVICES[sm]

    def run(self, call: Call, sms: int, **changes: Any) -> None:
        """The fake driver's log then has this launch alone, and waits for one of upstream's."""
        self.gpu.reset()
        self.gpu.device(self.cc, sms=sms)
        handle, args = self.library.prepare(OP, call.axes), call.args(self.library, **changes)
        sizes = param_sizes(call.axes)
        self.gpu.params(sizes)
        assert self.library.c.kseal_xqa_decode_run(handle, args) == 0, self.library.error()
        self.gpu.params(sizes[:-1])
        assert self.library.c.kseal_xqa_decode_release(handle) == 0

    def scratch(self, call: Call) -> int:
        handle, size = self.library.prepare(OP, call.axes), self.library.ffi.new("uint64_t *")
        status = self.library.c.kseal_xqa_decode_workspace_size(handle, call.args(self.library), size)
        assert status == 0, self.library.error()
        assert self.library.c.kseal_xqa_decode_release(handle) == 0
        return int(size[0])


def launches(gpu: FakeGpu, axes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All of each launch, but what lies in ``KVCacheList`` after its last field."""
    index, size = cache_param(axes)
    found = []
    for line in gpu.log("launch"):
        params = list(line["params"])
        params[index] = params[index][: 2 * size]
        found.append({**line, "params": params})
    return found


def tensor_maps(gpu: FakeGpu) -> list[tuple[dict[str, Any], int]]:
    """Each call that makes one, and apart from it how many pages it says there are."""
    found = []
    for line in gpu.log("encode"):
        *sizes, pages = line["sizes"]
        found.append(({**line, "sizes": sizes}, pages))
    return found


def same(gpu: FakeGpu, call: Call) -> bool:
    """Whether the two launches that were logged, ours first, are one."""
    ours, upstreams = launches(gpu, call.axes)
    assert ours["params"].pop() == ONE_TILE
    maps = tensor_maps(gpu)
    half = len(maps) // 2
    assert half == (2 if call.axes["fp8_math"] else 0)
    assert [pages for _, pages in maps] == [call["num_pages"]] * half + [1 << 31] * half
    return ours == upstreams and [m for m, _ in maps[:half]] == [m for m, _ in maps[half:]]


@pytest.mark.parametrize(("name", "sm"), PAIRS, ids=[f"{name}-{sm}" for name, sm in PAIRS])
def test_launches_are_upstreams(
    gpu: FakeGpu,
    libraries: Callable[[str], Kernseal],
    launchers: Callable[[str], Launcher],
    name: str,
    sm: str,
) -> None:
    axes, ours, theirs = VARIANTS[name], Ours(gpu, libraries(sm), sm), launchers(name)
    assert [*theirs.param_sizes, 4] == param_sizes(axes)
    rng = random.Random(f"{name} {sm}")
    differ: list[Call] = []
    for _ in range(CASES):
        call, sms = random_call(rng, axes), rng.choice(SMS)
        ours.run(call, sms, kv_splits=FILL_DEVICE)
        theirs.run(call, sms)
        if not same(gpu, call):
            differ.append(call)
    assert differ == []


def test_there_are_a_few_thousand_cases() -> None:
    assert len(PAIRS) * CASES >= 3000


POINTERS = ("q", "k", "v", "o", "page_table", "seq_lens", "sinks", "q_scale_ptr", "kv_scale_ptr")
STRIDES = ("page_stride", "token_stride", "head_stride")


def moved(axes: Mapping[str, Any]) -> dict[str, float]:
    """What is added to a field to make it another that is allowed, for every field that the variant has."""
    fp4, head = axes["kv_dtype"] == "nvfp4", axes["head_dim"]
    found: dict[str, float] = dict.fromkeys((*POINTERS, "semaphores", "workspace", "stream"), 128)
    found |= dict.fromkeys(("q_scale", "kv_scale"), 0.25) | {"batch_size": 1, "max_pages_per_seq": 1}
    found |= {f"kv_{name}": head // 2 if fp4 else head for name in STRIDES}
    if axes["spec_decode"]:
        found |= {"q_len": 1, "q_cu_lens": 128, "mask": 128}
    if axes["sliding_window"]:
        found |= {"window": 1}
    if axes["out_dtype"] == "e4m3":
        found |= {"rcp_out_scale": 0.25}
    if fp4:
        found |= {"k_scales": 128, "v_scales": 128, **{f"scale_{name}": head // 16 for name in STRIDES}}
    return found


@pytest.mark.parametrize("name", ["drafts_window", "gmma_padded", "nvfp4_drafts"])
def test_any_other_field_would_be_noticed(
    gpu: FakeGpu, libraries: Callable[[str], Kernseal], launchers: Callable[[str], Launcher], name: str
) -> None:
    axes, sm = VARIANTS[name], NEWEST[name]
    ours, theirs = Ours(gpu, libraries(sm), sm), launchers(name)
    made = random_call(random.Random(1), axes)
    ragged = {"q_cu_lens": 128} if axes["spec_decode"] else {}
    modest = {"batch_size": 3, "q_rows": 0, "num_pages": 9, "max_pages_per_seq": 5, **ragged}
    call = Call(axes, {**made.fields, **modest})
    for field, more in {"none": 0, **moved(axes)}.items():
        changes = {} if field == "none" else {field: call[field] + more}
        ours.run(call, 132, kv_splits=FILL_DEVICE, **changes)
        theirs.run(call, 132)
        assert same(gpu, call) == (field == "none"), field


@pytest.mark.parametrize("name", VARIANTS)
def test_scratch_is_laid_out_as_upstreams_own_types_say(
    gpu: FakeGpu, libraries: Callable[[str], Kernseal], launchers: Callable[[str], Launcher], name: str
) -> None:
    axes, sm = VARIANTS[name], NEWEST[name]
    ours, theirs, rng = Ours(gpu, libraries(sm), sm), launchers(name), random.Random(name)
    for _ in range(20):
        made = random_call(rng, axes)
        small = {"batch_size": rng.randrange(1, 6), "q_rows": 0, "kv_splits": rng.randrange(2, 40)}
        call = Call(axes, {**made.fields, **small})
        ours.run(call, 132)
        (launch,) = gpu.log("launch")
        x, y, z = launch["grid"]
        assert ours.scratch(call) == theirs.scratch(x * y * z), call


COMPILED: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("sm_90a", {}),
    "large": ("sm_90a", {"head_dim": 256, "group_size": 4}),
    "gmma": ("sm_90a", {**E4M3, "fp8_math": True}),
    "drafts": ("sm_100a", {"spec_decode": True}),
    "nvfp4": ("sm_120a", {"kv_dtype": "nvfp4"}),
}


def built(sm: str, axes: dict[str, Any]) -> Built:
    """The variant, compiled as for a bundle."""
    target = spec.Target(sm)
    variant = op().variant(target, axes)
    options = Options(only=(variant.id,))
    with locked("xqa"), compile_cache():
        made = build.compile_all(build.plan([op()], target, options), options, Silent())
    return made[variant.key]


@pytest.mark.parametrize("name", COMPILED)
def test_the_kernel_is_no_worse_than_nvccs(tmp_path: Path, name: str) -> None:
    """Of every variant of a bundle: ``python -m nvcc.compare``."""
    sm, changes = COMPILED[name]
    axes = axes_of(**changes)
    upstream.unpack(op(), tmp_path)
    made, theirs = built(sm, axes), upstream.compile_kernel(op(), axes, sm, tmp_path)
    entry = elf.read(made.read("kernel.cubin")).entries["kernel_mha"]
    assert [param.size for param in entry.params] == [*theirs.params, 4] == param_sizes(axes)
    (kernel,) = made.kernels
    assert kernel.dynamic_smem == theirs.dynamic_smem
    assert kernel.static_smem == theirs.static_smem
    assert kernel.spill_bytes <= theirs.spill_bytes
    assert (theirs.spill_bytes > 0) == (name == "large"), "what nvcc spills is really read"
