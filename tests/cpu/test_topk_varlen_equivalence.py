"""A launch of top-k for a decode step is that of CuTe's own host object, and rows are spread as upstream spreads them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cpu.fake_driver import host_objects  # noqa: E402
from cpu.fake_driver.gpu import FakeGpu  # noqa: E402
from cpu.fake_driver.host_objects import HostObject, compiled  # noqa: E402
from cpu.fake_driver.kernseal_library import compiled_library  # noqa: E402
from cpu.fake_driver.reference import Reference, masked  # noqa: E402
from cpu.fake_driver.topk_varlen import OP, random_call  # noqa: E402
from cpu.fake_driver.topk_varlen_upstream import chunk_config  # noqa: E402

from kernseal.export import elf, paths, spec  # noqa: E402
from kernseal.kernels.topk_varlen.reference import spread  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(host_objects.unavailable() is not None, reason=str(host_objects.unavailable())),
]

CASES = 300
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
VARIANTS: list[tuple[str, str | None, dict[str, Any]]] = [
    ("sm_100a", None, {"dtype": "bf16", "values": True}),
    ("sm_120a", None, {}),
    ("sm_120a", "sm_90a", {"values": True}),
]


def smem_of(made: HostObject) -> int:
    op = spec.load_op(paths.kernels() / OP)
    return int(op.data["classes"][made.variant.class_name]["smem_per_block"])


@pytest.mark.parametrize(("sm", "retarget", "changes"), VARIANTS, ids=lambda v: str(v))
def test_our_launch_is_cutes_launch(
    gpu: FakeGpu, tmp_path: Path, sm: str, retarget: str | None, changes: dict[str, Any]
) -> None:
    made = compiled(sm, retarget, op_name=OP, **changes)
    axes, smem = made.variant.axes, smem_of(made)
    reference = Reference(made, tmp_path / "reference")
    cc = divmod(int(made.target.arch.removeprefix("sm_").removesuffix("a")), 10)
    gpu.device(cc, sms=148)
    library = compiled_library([made], tmp_path / "ours")
    reference.load()
    theirs = gpu.log("set_attribute")
    handle = library.prepare(OP, axes)
    assert gpu.log("set_attribute") == theirs * 2, "kernel attributes differ"
    assert {line["kernel"] for line in theirs} == {entry for entry, _ in made.answer.kernels}

    sizes = {entry: made.param_sizes(i) for i, (entry, _) in enumerate(made.answer.kernels)}
    assert len(set(map(tuple, sizes.values()))) == 1
    upstream, rng = chunk_config(), random.Random(f"{sm} {changes}")
    grouped: set[bool] = set()
    for case in range(CASES):
        call = random_call(rng, axes, 148)
        ctas, chunk = upstream(call["max_len"], DTYPES[str(axes["dtype"])], call.rows, 148, smem)
        gpu.reset()
        gpu.device(cc, sms=148)
        gpu.params(next(iter(sizes.values())))
        assert library.c.kseal_topk_varlen_run(handle, call.args(library)) == 0, library.error()
        (ours,) = gpu.log("launch")
        groups = min(148 // ctas, call.rows)
        expected, masks = reference.launch(gpu, call.cutes(chunk, ctas, groups))
        assert all(mask.count(0) <= (8 if len(mask) > 8 else 0) for mask in masks)
        assert masked(ours, masks) == masked(expected, masks), f"case {case}: {call}"
        assert ours["grid"] == [groups * ctas, 1, 1]
        assert ours["kernel"] == made.answer.kernels[int(ctas > 1)][0]
        grouped.add(ctas > 1)
    assert grouped == {False, True}
    assert library.c.kseal_topk_varlen_release(handle) == 0
    library.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smem", [232448, 101376])
def test_the_oracle_spreads_rows_as_upstream_does(dtype: Any, smem: int) -> None:
    upstream, rng, size = chunk_config(), random.Random(smem), dtype.itemsize
    most = (smem - 2304) // size
    edges = [2**i + d for i in range(10, 21) for d in (-1, 0, 1)] + [
        most * n + d for n in (1, 2, 5) for d in (-9, 0, 1)
    ]
    for _ in range(20000):
        sms = rng.choice([48, 132, 148, 170])
        rows = rng.choice([1, 2, 3, sms // 3, sms // 2, sms // 2 + 1, sms, 999, rng.randrange(1, 300)])
        max_len = rng.choice([rng.choice(edges), rng.randrange(1, 2**21)])
        ctas, chunk = upstream(max_len, dtype, rows, sms, smem)
        assert spread(rows, max_len, sms, dtype, smem) == (chunk, ctas), (rows, max_len, sms)


def test_two_kernels_have_all_the_shared_memory_of_the_class() -> None:
    for sm, retarget, changes in VARIANTS:
        made = compiled(sm, retarget, op_name=OP, **changes)
        assert [smem for _, smem in made.answer.kernels] == [smem_of(made)] * 2
        entries = elf.read(made.cubin).entries
        assert {entry.frame for entry in entries.values()} == {0}
        assert all(entry.registers <= 64 for entry in entries.values())
