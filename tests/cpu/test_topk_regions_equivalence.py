"""A launch of top-k is, byte for byte, that of upstream's own host code, and its programs fit what it launches."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from builds import compile_cache, locked
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.topk_regions import (
    KERNELS,
    OP,
    PARAM_SIZES,
    SCRATCH,
    STATE,
    Call,
    axes_of,
    elem_bytes,
    library_of,
    op,
    random_call,
    smem_per_block,
    static_smem,
)
from cpu.fake_driver.topk_upstream import Upstream
from nvcc import toolkit

from kernseal.export import build, elf, spec
from kernseal.export.build import Options
from kernseal.export.progress import Silent
from kernseal.export.variant import Built
from kernseal.loader.errors import BuildFailed

pytestmark = pytest.mark.slow
needs_nvcc = pytest.mark.skipif(toolkit.unavailable() is not None, reason=str(toolkit.unavailable()))

CASES = 1500
NOT_SUPPORTED, INVALID_CONFIGURATION = 801, 9
VARIANTS = [
    (sm, axes_of(dtype=dtype, paged=paged, deterministic=deterministic))
    for sm in ("sm_90a", "sm_120a")
    for dtype in ("f32", "bf16")
    for paged in (False, True)
    for deterministic in (False, True)
]
TARGETS = [spec.Target("sm_90a"), spec.Target("sm_120a"), spec.Target("sm_120a", "sm_90a")]


@pytest.fixture(scope="module")
def upstream(fake_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory) -> Upstream:
    return Upstream(tmp_path_factory.mktemp("upstream"))


def chunk_of(axes: dict[str, Any], sm: str) -> int:
    return int((smem_per_block(sm) - 2080) // elem_bytes(axes))


def kernel_of(name: str) -> str:
    """Which of our kernels upstream's instantiation is."""
    found = re.search(r"ILj1024ELj\d+ELb([01])ELb([01])ELNS0_13RadixTopKModeE(\d)E", name)
    assert found is not None, name
    return KERNELS[found[1] == "0"] + f" deterministic={found[2]}"


def launches(gpu: FakeGpu, axes: dict[str, Any]) -> list[dict[str, Any]]:
    """What was launched, in our words, without the policy that upstream leaves out where its defaults do."""
    found = []
    for line in gpu.log("launch"):
        name = line["kernel"]
        ours = name in KERNELS
        kernel = f"{name} deterministic={int(axes['deterministic'])}" if ours else kernel_of(name)
        attributes = [] if line["attributes"] in ([], [[6, "00000000"]]) else line["attributes"]
        found.append({**line, "kernel": kernel, "attributes": attributes, "params": line["params"][:16]})
    return found


def policies(gpu: FakeGpu) -> list[str]:
    """The bytes of ConfigurablePageTableKernelPolicy that are not padding."""
    return [line["params"][16][:40] for line in gpu.log("launch")]


@needs_nvcc
@pytest.mark.parametrize(
    ("sm", "axes"), VARIANTS, ids=[f"{sm}-{'-'.join(map(str, a.values()))}" for sm, a in VARIANTS]
)
def test_launches_are_upstreams(
    upstream: Upstream, gpu: FakeGpu, tmp_path: Path, sm: str, axes: dict[str, Any]
) -> None:
    library = library_of([axes], tmp_path, sm)
    rng = random.Random(f"{sm}{axes}")
    differ: list[Call] = []
    grouped = 0
    for sms in (20, 48, 132, 170):
        gpu.device((9, 0), sms=sms)
        handle = library.prepare(OP, axes)
        for _ in range(CASES // 4):
            call = random_call(rng, axes, chunk_of(axes, sm), sms)
            gpu.reset()
            gpu.params(PARAM_SIZES)
            status = library.c.kseal_topk_regions_run(handle, call.args(library))
            if status == library.c.KSEAL_OVERFLOW:
                assert "thread blocks at once" in library.error()
                continue
            assert status == 0, library.error()
            ours, our_policies = launches(gpu, axes), policies(gpu)
            configurable = call.fields.get("page_size", 0) > 1 or "raw_indices" in call.fields
            configurable |= axes["paged"] and call["row_stride"] != call["max_len"]
            gpu.reset()
            gpu.params(PARAM_SIZES if configurable else PARAM_SIZES[:16])
            assert upstream.run(call, sms, smem_per_block(sm)) == 0
            same = ours == launches(gpu, axes) and (not configurable or our_policies == policies(gpu))
            differ += [] if same else [call]
            grouped += ours[0]["kernel"].startswith(KERNELS[1])
        assert library.c.kseal_topk_regions_release(handle) == 0
    assert differ == []
    assert grouped > CASES // 10


@needs_nvcc
def test_more_blocks_than_fit_at_once_are_launched_by_upstream_and_refused_here(
    upstream: Upstream, gpu: FakeGpu, tmp_path: Path
) -> None:
    axes = axes_of(deterministic=False)
    library, call = library_of([axes], tmp_path, "sm_120a"), random_call(random.Random(1), axes, 9, 48)
    call = Call(axes, {**call.fields, "max_len": 49 * chunk_of(axes, "sm_120a")})
    gpu.device((9, 0), sms=48)
    handle = library.prepare(OP, axes)
    gpu.params(PARAM_SIZES[:16])
    assert upstream.run(call, 48, smem_per_block("sm_120a")) == 0
    assert gpu.log("launch")[0]["grid"] == [50, 1, 1]
    assert library.c.kseal_topk_regions_run(handle, call.args(library)) == library.c.KSEAL_OVERFLOW
    assert "needs 50 thread blocks at once, up to 48" in library.error()
    assert library.c.kseal_topk_regions_release(handle) == 0


def built(target: spec.Target, axes: dict[str, Any]) -> Built:
    """The variant, compiled as for a bundle."""
    variant = op().variant(target, axes)
    options = Options(profile="full", only=(variant.id,))
    with locked(OP), compile_cache():
        made = build.compile_all(build.plan([op()], target, options), options, Silent())
    return made[variant.key]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_program_is_what_the_launch_code_takes_it_for(target: spec.Target, deterministic: bool) -> None:
    axes = axes_of(dtype="bf16", paged=True, deterministic=deterministic)
    made = built(target, axes)
    cubin = made.read("kernel.cubin")
    smem = smem_per_block(target.sm)
    found = {k.entry: (k.static_smem, k.static_smem + k.dynamic_smem, k.spill_bytes) for k in made.kernels}
    assert found == {k: (s, smem, 0) for k, s in zip(KERNELS, static_smem(axes), strict=True)}
    params = {name: [p.size for p in entry.params] for name, entry in elf.read(cubin).entries.items()}
    assert params == dict.fromkeys(KERNELS, PARAM_SIZES)
    sizes = [elf.constant_u32(cubin, name) for name in ("groupStateBytes", "groupScratchBytes")]
    assert sizes == [STATE, SCRATCH]


def test_a_variant_with_more_shared_memory_than_the_sm_has_is_not_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The class for SM90 on SM120, whose thread blocks have less than half of its shared memory."""
    classes = op().data["classes"]
    larger = {**classes["radix_sm120"], "smem_per_block": classes["radix_sm90"]["smem_per_block"]}
    given = spec.Op(OP, op().folder, {**op().data, "classes": {**classes, "radix_sm120": larger}})
    target = spec.Target("sm_120a")
    variant = given.variant(target, axes_of(deterministic=False))
    options = Options(profile="full", only=(variant.id,))
    words = r"f32 for sm_120a: shared memory 232448 bytes \(0 static\); sm_120a allows 101376 a block"
    with locked(OP), compile_cache(), pytest.raises(BuildFailed, match=words):
        build.compile_all(build.plan([given], target, options), options, Silent())
