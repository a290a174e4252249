"""A launch of ours is, byte for byte, the launch of upstream's own host code; NVRTC's kernel is no worse than nvcc's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from builds import compile_cache, locked
from cpu.fake_driver import xqa_upstream
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.kernseal_library import Kernseal, build_library
from cpu.fake_driver.xqa import OP, Call, axes_of, op, param_sizes, random_call, record
from cpu.fake_driver.xqa_upstream import Upstream

from kernseal.export import build, elf, spec
from kernseal.export.build import Options
from kernseal.export.progress import Silent
from kernseal.export.variant import Built

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(xqa_upstream.unavailable() is not None, reason=str(xqa_upstream.unavailable())),
]

CASES = 400
CACHE_LIST_BYTES = 36
"""Of the 40 bytes of KVCacheList; the rest is padding that nobody sets."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("sm_90a", {}),
    "window": ("sm_90a", {"head_dim": 64, "sliding_window": True}),
    "fp8": ("sm_90a", {"kv_dtype": "e4m3", "group_size": 4}),
    "sm120": ("sm_120a", {"head_dim": 256, "group_size": 4}),
}


def built(sm: str, axes: dict[str, Any]) -> Built:
    """The variant, compiled as for a bundle."""
    target = spec.Target(sm)
    variant = op().variant(target, axes)
    options = Options(only=(variant.id,))
    with locked("xqa"), compile_cache():
        made = build.compile_all(build.plan([op()], target, options), options, Silent())
    return made[variant.key]


def prepared(gpu: FakeGpu, made: Built, axes: dict[str, Any], folder: Path) -> tuple[Kernseal, Any]:
    image = made.read("kernel.cubin")
    path = build_library("sm_90a", None, [(record(axes, image, made.dynamic_smem), None, image)], folder)
    library = Kernseal(path)
    return library, library.prepare(OP, axes)


def launches(gpu: FakeGpu, sizes: list[int]) -> list[dict[str, Any]]:
    found = []
    for line in gpu.log("launch"):
        params = list(line["params"])
        cache = sizes.index(40)
        params[cache] = params[cache][: 2 * CACHE_LIST_BYTES]
        found.append({**line, "params": params})
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_launches_are_upstreams(gpu: FakeGpu, tmp_path: Path, name: str) -> None:
    sm, changes = VARIANTS[name]
    axes = axes_of(**changes)
    made, theirs = built(sm, axes), Upstream(axes, sm, tmp_path / "upstream")
    entry = elf.read(made.read("kernel.cubin")).entries["kernel_mha"]
    sizes = [param.size for param in entry.params]
    assert sizes == param_sizes(axes)
    assert made.dynamic_smem == theirs.smem
    assert made.spill_bytes <= theirs.spill_bytes
    library, handle = prepared(gpu, made, axes, tmp_path / "ours")
    rng = random.Random(name)
    differ: list[Call] = []
    for _ in range(CASES):
        call, sms = random_call(rng, axes), 132
        gpu.reset()
        gpu.params(sizes)
        assert library.c.kseal_xqa_decode_run(handle, call.args(library)) == 0, library.error()
        theirs.run(call, sms)
        ours, upstreams = launches(gpu, sizes)
        if ours != upstreams:
            differ.append(call)
    assert differ == []
    assert library.c.kseal_xqa_decode_release(handle) == 0
