"""A launch of XQA MLA is, byte for byte, that of upstream's own host code; NVRTC's kernel is no worse than nvcc's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from builds import compile_cache, locked
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.kernseal_library import Kernseal, build_library
from cpu.fake_driver.xqa_mla import OP, PARAM_SIZES, SCRATCH, Call, axes_of, op, random_call, record
from cpu.fake_driver.xqa_mla_upstream import Upstream
from nvcc import toolkit

from kernseal.export import build, elf, spec
from kernseal.export.build import Options
from kernseal.export.progress import Silent
from kernseal.export.variant import Built

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(toolkit.unavailable() is not None, reason=str(toolkit.unavailable())),
]

CASES = 1000
CACHE_LIST, CACHE_LIST_BYTES = 6, 36
"""Of the 40 bytes of KVCacheList; the rest is padding that nobody sets."""
PARTIAL_RESULTS = 12
"""Upstream points it past its scratch; one cluster a sequence has none, and ours is null."""
ALL_PAGES = 2**31
"""Pages that upstream's descriptors reach; ours end with the pool."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("sm_120a", {}),
    "e4m3": ("sm_120a", {"dtype": "e4m3"}),
    "small pages": ("sm_120a", {"page_size": 16}),
    "sm121": ("sm_121a", {"dtype": "e4m3", "page_size": 128}),
}


def built(target: spec.Target, axes: dict[str, Any]) -> Built:
    """The variant, compiled as for a bundle."""
    variant = op().variant(target, axes)
    options = Options(profile="full", only=(variant.id,))
    with locked("xqa"), compile_cache():
        made = build.compile_all(build.plan([op()], target, options), options, Silent())
    return made[variant.key]


def prepared(made: Built, axes: dict[str, Any], folder: Path) -> tuple[Kernseal, Any]:
    image = made.read("kernel.cubin")
    path = build_library(
        "sm_90a", None, [(record(axes, image, made.kernels[0].dynamic_smem), None, image)], folder
    )
    library = Kernseal(path)
    return library, library.prepare(OP, axes)


def launches(gpu: FakeGpu) -> list[dict[str, Any]]:
    """What was launched, without the bytes that may differ."""
    found = []
    for line in gpu.log("launch"):
        params = list(line["params"])
        params[CACHE_LIST] = params[CACHE_LIST][: 2 * CACHE_LIST_BYTES]
        found.append({**line, "params": params[:PARTIAL_RESULTS]})
    return found


def descriptors(gpu: FakeGpu, pages: int) -> list[dict[str, Any]]:
    """Descriptors for Q, K and V; the number of pages, which must be ``pages``, left out."""
    found = []
    for line in gpu.log("encode"):
        sizes = list(line["sizes"])
        if len(sizes) == 4:
            assert sizes.pop() == pages
        found.append({**line, "sizes": sizes})
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_launches_are_upstreams(gpu: FakeGpu, tmp_path: Path, name: str) -> None:
    sm, changes = VARIANTS[name]
    axes = axes_of(**changes)
    made, theirs = built(spec.Target(sm), axes), Upstream(axes, sm, tmp_path / "upstream")
    image = made.read("kernel.cubin")
    entry = elf.read(image).entries["kernel_mha"]
    assert [param.size for param in entry.params] == PARAM_SIZES
    (kernel,) = made.kernels
    assert kernel.dynamic_smem == theirs.smem
    assert entry.frame + kernel.spill_bytes <= theirs.local_bytes
    library, handle = prepared(made, axes, tmp_path / "ours")
    rng = random.Random(name)
    differ: list[Call] = []
    for _ in range(CASES):
        call = random_call(rng, axes)
        gpu.reset()
        gpu.params(PARAM_SIZES)
        assert library.c.kseal_xqa_mla_run(handle, call.args(library)) == 0, library.error()
        (ours,), our_maps = launches(gpu), descriptors(gpu, call["num_pages"])
        assert gpu.log("launch")[0]["params"][PARTIAL_RESULTS] == "00" * 8
        gpu.reset()
        gpu.params(PARAM_SIZES)
        theirs.run(call, 132)
        if [ours] != launches(gpu) or our_maps != descriptors(gpu, ALL_PAGES):
            differ.append(call)
    assert differ == []
    assert library.c.kseal_xqa_mla_release(handle) == 0


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
@pytest.mark.parametrize("target", [spec.Target("sm_120a"), spec.Target("sm_120a", "sm_90a")])
def test_scratch_is_as_large_as_the_kernel_has_it(target: spec.Target, dtype: str) -> None:
    made = built(target, axes_of(dtype=dtype))
    assert elf.constant_u32(made.read("kernel.cubin"), "scratchBytesPerRow") == SCRATCH
    assert op().data["limits"]["workspace_per_seq"] == SCRATCH
