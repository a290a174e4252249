"""A launch of ragged prefill is, byte for byte, that of upstream's own host code, and every tile fits its SM."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from cpu.fake_driver.fa2 import MERGE_PARAMS, Call, Plan
from cpu.fake_driver.fa2_upstream import Launcher, built, class_of, launches, recipe_of, sizes
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.kernseal_library import Kernseal, build_library
from cpu.fake_driver.ragged_prefill import (
    DIMS,
    TILE_PARAMS,
    Session,
    axes_of,
    op,
    random_call,
    record,
    tiles,
)
from nvcc import toolkit

from kernseal.export import elf, paths
from kernseal.export.variant import Built

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(toolkit.unavailable() is not None, reason=str(toolkit.unavailable())),
]

CASES = 200
PADDING = (range(116, 120), range(180, 184), range(197, 200))
"""Bytes of the struct that are no field's."""
CALL = """
struct upstream_call {
  uint32_t tile, q_heads, kv_heads, grid, rows, pdl;
  uint32_t q_row, q_head, k_row, k_head, v_row, v_head;
  float sm_scale;
  char *q, *k, *v, *o, *lse, *plan, *parts, *part_lse, *stream;
  uint64_t q_indptr, kv_indptr, requests, q_tiles, kv_tiles, o_indptr, chunk, all_rows, merge_indptr, valid;
};
"""
OFFSETS = (
    *(
        "q_indptr",
        "kv_indptr",
        "requests",
        "q_tiles",
        "kv_tiles",
        "o_indptr",
        "chunk",
        "all_rows",
        "merge_indptr",
    ),
    "valid",
)
VARIANTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "heads of 192": (("sm_120a", "sm_121a"), {"head_dim": 192, "v_dim": 192}),
    "keys of 192, values of 128": (
        ("sm_90a", "sm_100a", "sm_103a"),
        {"head_dim": 192, "causal": False, "dtype": "f16"},
    ),
}
"""Each with the SMs of one class: upstream's launcher is the same for them, and has been told their shared memory."""


class Upstream(Launcher):
    """The launcher of one element type, pair of head dimensions and mask."""

    def __init__(self, axes: Mapping[str, Any], sm: str, folder: Path) -> None:
        super().__init__(op(), axes, sm, folder, CALL)

    def run(self, call: Call, plan: Plan, tile: int | None = None) -> str:
        """Launch ``call``; what upstream throws, or nothing."""
        head, axes, split = plan.head, call.axes, plan.head["split"]
        dense = {"q": call["num_q_heads"], "k": call["num_kv_heads"], "v": call["num_kv_heads"]}
        dims = {"q": axes["head_dim"], "k": axes["head_dim"], "v": axes["v_dim"]}
        strides = {f"{x}_row": call[f"{x}_row_stride"] or dense[x] * dims[x] for x in dense}
        strides |= {f"{x}_head": call[f"{x}_head_stride"] or dims[x] for x in dense}
        values: dict[str, Any] = {
            **{name: head[name] for name in OFFSETS},
            **strides,
            "tile": tile or plan.tile,
            "grid": head["grid"],
            "rows": head["rows"],
            "q_heads": call["num_q_heads"],
            "kv_heads": call["num_kv_heads"],
            **{name: call[name] for name in ("pdl", "sm_scale")},
        }
        addresses = {name: call[name] for name in ("q", "k", "v", "o", "lse", "stream")}
        addresses |= {"plan": call["plan_device"], "parts": call["workspace"] if split else 0}
        addresses["part_lse"] = call["workspace"] + head["part_lse_at"] if split else 0
        return self.launch(values, addresses)


def prepared(made: Built, axes: dict[str, Any], sm: str, folder: Path) -> Session:
    image = made.read("kernel.cubin")
    kernels = tuple(made.kernels)
    path = build_library("sm_90a", None, [(record(axes, image, kernels, sm), None, image)], folder)
    return Session(Kernseal(path), axes)


@pytest.mark.parametrize("name", VARIANTS)
def test_launches_are_upstreams(gpu: FakeGpu, tmp_path: Path, name: str) -> None:
    sms, changes = VARIANTS[name]
    axes = axes_of(**changes)
    theirs = Upstream(axes, sms[0], tmp_path / "upstream")
    for sm in sms:
        made = built(op(), axes, sm)
        entries = elf.read(made.read("kernel.cubin")).entries
        for entry, sizes_of in ((f"prefill_{tiles(axes)[0]}", TILE_PARAMS), ("merge", MERGE_PARAMS)):
            assert [param.size for param in entries[entry].params] == sizes_of
        session = prepared(made, axes, sm, tmp_path / sm)
        rng = random.Random(sm)
        seen = {compare(gpu, session, theirs, random_call(rng, axes)) for _ in range(CASES)} - {None}
        assert seen == {(tile, split) for tile in tiles(axes) for split in (0, 1)}
        session.close()


def compare(gpu: FakeGpu, session: Session, theirs: Upstream, call: Call) -> tuple[int, int] | None:
    """Launch both; the plan's tile and whether it splits."""
    gpu.reset()
    sizes(gpu, TILE_PARAMS)
    plan = session.plan(call)
    if not plan.data:
        return None
    assert session.run(call, plan) == 0, session.library.error()
    ours = launches(gpu, PADDING)
    gpu.reset()
    sizes(gpu, TILE_PARAMS)
    said = theirs.run(call, plan)
    if call.axes["v_dim"] == 192 and len(ours) == 2:
        assert "Unsupported head_dim: 192" in said
        ours.pop()  # upstream has the tiles' launch, and no merge for 192
    else:
        assert said == ""
    assert launches(gpu, PADDING) == ours
    if call.axes["v_dim"] == 192 and ours:
        assert "Invalid configuration" in theirs.run(call, plan, tile=128)
    return plan.tile, plan.head["split"]


@pytest.mark.parametrize("sm", ["sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a"])
def test_every_tile_fits_its_sm(sm: str) -> None:
    """By the rule that the recipe has; the build then checks what the compiler says."""
    recipe = recipe_of(op())
    for head_dim, v_dim in DIMS:
        cls = class_of(op(), axes_of(head_dim=head_dim, v_dim=v_dim), sm)
        for tile in recipe.tiles(v_dim):
            keys = 16 * recipe.mma_kv(tile, head_dim, v_dim, cls["smem"]) * (4 if tile == 16 else 1)
            assert 2 * (tile * head_dim + keys * (head_dim + v_dim)) <= cls["smem"]["per_block"]
            # IsInvalid of upstream's KernelTraits: the fragments of o and of the logits are registers
            fragments = 2 if tile == 128 else 1
            logits = keys // (4 if tile == 16 else 1) // 16
            assert fragments * (8 * (v_dim // 16) + 8 * logits) < 256
            assert v_dim > 64 or logits % 2 == 0


def test_the_classes_have_the_shared_memory_of_their_sms() -> None:
    limits = yaml.safe_load((paths.kernels() / "sms.yaml").read_text())
    for cls in op().data["classes"].values():
        for sm in cls["sms"]:
            assert cls["smem"]["per_sm"] == limits[sm]["max_smem_per_sm"]
            assert cls["smem"]["per_block"] == limits[sm]["max_smem_per_block"]
