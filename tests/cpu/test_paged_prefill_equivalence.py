"""A launch of paged prefill is, byte for byte, that of upstream's own host code, and every tile fits its SM."""

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
from cpu.fake_driver.paged_prefill import (
    DIMS,
    PAGES,
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

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(toolkit.unavailable() is not None, reason=str(toolkit.unavailable())),
]

CASES = 200
PADDING = (range(244, 248), range(261, 264))
"""Bytes of the struct that are no field's."""
CALL = """
struct upstream_call {
  uint32_t tile, q_heads, kv_heads, page_size, batch_size, grid, rows, pdl;
  uint32_t q_row, q_head, kv_page, kv_row, kv_head;
  float sm_scale;
  char *q, *k, *v, *page_indices, *o, *lse, *plan, *parts, *part_lse, *stream;
  uint64_t q_indptr, page_indptr, kv_lens, requests, q_tiles, kv_tiles, o_indptr, chunk, all_rows, merge_indptr, valid;
};
"""
OFFSETS = (
    *("q_indptr", "page_indptr", "kv_lens", "requests", "q_tiles", "kv_tiles", "o_indptr", "chunk"),
    *("all_rows", "merge_indptr", "valid"),
)
VARIANTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "heads of 256": (("sm_120a", "sm_121a"), {"head_dim": 256}),
    "heads of 128": (("sm_90a", "sm_100a", "sm_103a"), {"causal": False, "dtype": "f16"}),
    "heads of 64": (("sm_120a",), {"head_dim": 64, "dtype": "f16"}),
}
"""Each with SMs of one class: upstream's launcher is the same for them, and has been told their shared memory."""


class Upstream(Launcher):
    """The launcher of one element type, head dimension and mask."""

    def __init__(self, axes: Mapping[str, Any], sm: str, folder: Path) -> None:
        super().__init__(op(), axes, sm, folder, CALL)

    def run(self, call: Call, plan: Plan) -> str:
        """Launch ``call``; what upstream throws, or nothing."""
        head, d, split = plan.head, call.axes["head_dim"], plan.head["split"]
        row = call["num_kv_heads"] * d
        values = {
            **{name: head[name] for name in (*OFFSETS, "grid", "rows")},
            "tile": plan.tile,
            "q_heads": call["num_q_heads"],
            "kv_heads": call["num_kv_heads"],
            "q_row": call["q_row_stride"] or call["num_q_heads"] * d,
            "q_head": call["q_head_stride"] or d,
            "kv_page": call["kv_page_stride"] or call["page_size"] * row,
            "kv_row": call["kv_row_stride"] or row,
            "kv_head": call["kv_head_stride"] or d,
            **{name: call[name] for name in ("page_size", "batch_size", "pdl", "sm_scale")},
        }
        addresses = {name: call[name] for name in ("q", "k", "v", "page_indices", "o", "lse", "stream")}
        addresses |= {"plan": call["plan_device"], "parts": call["workspace"] if split else 0}
        addresses["part_lse"] = call["workspace"] + head["part_lse_at"] if split else 0
        return self.launch(values, addresses)


@pytest.mark.parametrize("name", VARIANTS)
def test_launches_are_upstreams(gpu: FakeGpu, tmp_path: Path, name: str) -> None:
    sms, changes = VARIANTS[name]
    axes = axes_of(**changes)
    theirs = Upstream(axes, sms[0], tmp_path / "upstream")
    for sm in sms:
        made = built(op(), axes, sm)
        image = made.read("kernel.cubin")
        entries = elf.read(image).entries
        for entry in (*(f"prefill_{tile}" for tile in tiles(axes)), "merge"):
            expected = MERGE_PARAMS if entry == "merge" else TILE_PARAMS
            assert [param.size for param in entries[entry].params] == expected
        variant = record(axes, image, tuple(made.kernels), sm)
        session = Session(
            Kernseal(build_library("sm_90a", None, [(variant, None, image)], tmp_path / sm)), axes
        )
        rng = random.Random(sm)
        seen: set[tuple[int, int]] = set()
        pages: set[int] = set()
        for _ in range(CASES):
            call = random_call(rng, axes)
            if (found := compare(gpu, session, theirs, call)) is not None:
                seen.add(found)
                pages.add(call["page_size"])
        assert seen == {(tile, split) for tile in tiles(axes) for split in (0, 1)} and pages == set(PAGES)
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
    assert theirs.run(call, plan) == ""
    assert launches(gpu, PADDING) == ours
    return plan.tile, plan.head["split"]


@pytest.mark.parametrize("sm", ["sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a"])
def test_every_tile_fits_its_sm(sm: str) -> None:
    """By the rule that the recipe has; the build then checks what the compiler says."""
    recipe = recipe_of(op())
    for head_dim in DIMS:
        smem = class_of(op(), axes_of(head_dim=head_dim), sm)["smem"]
        for tile in recipe.tiles(head_dim):
            logits = recipe.mma_kv(tile, head_dim, smem)
            keys = 16 * logits * (4 if tile == 16 else 1)
            assert 2 * (tile * head_dim + keys * 2 * head_dim) <= smem["per_block"]
            # IsInvalid of upstream's KernelTraits: the fragments of o and of the logits are registers
            assert (2 if tile == 128 else 1) * (8 * (head_dim // 16) + 8 * logits) < 256
            assert head_dim > 64 or logits % 2 == 0


def test_the_classes_have_the_shared_memory_of_their_sms() -> None:
    limits = yaml.safe_load((paths.kernels() / "sms.yaml").read_text())
    for cls in op().data["classes"].values():
        for sm in cls["sms"]:
            assert cls["smem"]["per_sm"] == limits[sm]["max_smem_per_sm"]
            assert cls["smem"]["per_block"] == limits[sm]["max_smem_per_block"]
