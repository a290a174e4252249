"""A launch of ragged prefill is, byte for byte, that of upstream's own host code, and every tile fits its SM."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cffi
import pytest
import yaml
from builds import compile_cache, locked
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.kernseal_library import Kernseal, build_library
from cpu.fake_driver.ragged_prefill import (
    DIMS,
    MERGE_PARAMS,
    TILE_PARAMS,
    Call,
    Plan,
    Session,
    axes_of,
    op,
    random_call,
    record,
    tiles,
)
from nvcc import toolkit

from kernseal.export import build, elf, patch, paths, source, spec
from kernseal.export.build import Options
from kernseal.export.progress import Silent
from kernseal.export.recipe import load_recipe
from kernseal.export.variant import Built

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(toolkit.unavailable() is not None, reason=str(toolkit.unavailable())),
]

HERE = Path(__file__).resolve().parent / "fake_driver"
CASES = 200
PROGRAM = "flashinfer/data/include/ragged_prefill.cu"
PADDING = (range(116, 120), range(180, 184), range(197, 200))
"""Bytes of the struct that are no field's."""
CDEF = """
struct upstream_call {
  uint32_t tile, q_heads, kv_heads, grid, rows, pdl;
  uint32_t q_row, q_head, k_row, k_head, v_row, v_head;
  float sm_scale;
  char *q, *k, *v, *o, *lse, *plan, *parts, *part_lse, *stream;
  uint64_t q_indptr, kv_indptr, requests, q_tiles, kv_tiles, o_indptr, chunk, all_rows, merge_indptr, valid;
};
int upstream_launch(const struct upstream_call *call, char *error);
void upstream_device(int per_sm, int per_block);
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


def macros(axes: Mapping[str, Any], sm: str) -> dict[str, str | int]:
    cls = op().data["classes"][op().variant(spec.Target(sm), axes).class_name]
    made = load_recipe(str(op().folder / op().data["recipe"])).fa2(axes, cls)
    return {name: value for name, value in made.macros.items() if "MMA_KV" not in name}


def unpack(folder: Path) -> None:
    """Upstream's headers as they are, and the program that our patch adds."""
    opened, _ = source.open_source(None, source.upstream())
    for name in opened.names("flashinfer/data/include/flashinfer"):
        if name.endswith((".cuh", ".h")):
            path = folder / Path(name).relative_to("flashinfer/data/include")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(opened.read(name) or b"")
    ours = patch.apply({}, patch.load(paths.patches(), op().data["patches"][:1]))
    (folder / Path(PROGRAM).name).write_bytes(ours[PROGRAM])


class Upstream:
    """The launcher of one element type, pair of head dimensions and mask."""

    def __init__(self, axes: Mapping[str, Any], sm: str, folder: Path) -> None:
        unpack(folder)
        for name in ("ragged_prefill_upstream.cu", "ragged_prefill_runtime.c"):
            shutil.copy(HERE / name, folder)
        code = sm.replace("sm_", "compute_")
        toolkit.nvcc(
            [
                *(f"-gencode=arch={code},code={code}", "-std=c++17", "-w", "-shared", "-cudart", "none"),
                *("-Xcicc", "-O0", "-Xcompiler", "-fPIC", "-Xlinker", "-Bsymbolic", "-I.", f"-I{HERE}"),
                *(f"-D{name}={value}" for name, value in macros(axes, sm).items()),
                *("-o", "upstream.so", "ragged_prefill_upstream.cu", "ragged_prefill_runtime.c"),
            ],
            folder,
        )
        self.ffi: Any = cffi.FFI()
        self.ffi.cdef(CDEF)
        self.c: Any = self.ffi.dlopen(str(folder / "upstream.so"), self.ffi.RTLD_LAZY | self.ffi.RTLD_LOCAL)
        smem = op().data["classes"][op().variant(spec.Target(sm), axes).class_name]["smem"]
        self.c.upstream_device(smem["per_sm"], smem["per_block"])

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
        values |= {name: self.ffi.cast("char *", address) for name, address in addresses.items()}
        error = self.ffi.new("char[512]")
        status = self.c.upstream_launch(self.ffi.new("struct upstream_call *", values), error)
        assert status in (0, -2), status
        return str(self.ffi.string(error).decode())


def built(sm: str, axes: dict[str, Any]) -> Built:
    """The variant, compiled as for a bundle."""
    target = spec.Target(sm)
    variant = op().variant(target, axes)
    options = Options(profile="full", only=(variant.id,))
    with locked("ragged_prefill"), compile_cache():
        made = build.compile_all(build.plan([op()], target, options), options, Silent())
    return made[variant.key]


def prepared(made: Built, axes: dict[str, Any], sm: str, folder: Path) -> Session:
    image = made.read("kernel.cubin")
    kernels = tuple(made.kernels)
    path = build_library("sm_90a", None, [(record(axes, image, kernels, sm), None, image)], folder)
    return Session(Kernseal(path), axes)


def sizes(gpu: FakeGpu) -> None:
    gpu.params(TILE_PARAMS)
    gpu.params(MERGE_PARAMS, "merge")


def launches(gpu: FakeGpu) -> list[dict[str, Any]]:
    """What was launched, in words that both have: one of upstream's kernels has one name whatever its tile."""
    found = []
    for line in gpu.log("launch"):
        params = [bytes.fromhex(text) for text in line["params"]]
        if line["kernel"] != "merge":
            cleared = bytearray(params[0])
            for padding in PADDING:
                cleared[padding.start : padding.stop] = bytes(len(padding))
            params = [bytes(cleared)]
        pdl = [value for number, value in line["attributes"] if number == 6]
        kernel = "merge" if line["kernel"] == "merge" else "tile"
        found.append({**line, "kernel": kernel, "params": params, "attributes": pdl in (["01000000"],)})
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_launches_are_upstreams(gpu: FakeGpu, tmp_path: Path, name: str) -> None:
    sms, changes = VARIANTS[name]
    axes = axes_of(**changes)
    theirs = Upstream(axes, sms[0], tmp_path / "upstream")
    for sm in sms:
        made = built(sm, axes)
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
    sizes(gpu)
    plan = session.plan(call)
    if not plan.data:
        return None
    assert session.run(call, plan) == 0, session.library.error()
    ours = launches(gpu)
    gpu.reset()
    sizes(gpu)
    said = theirs.run(call, plan)
    if call.axes["v_dim"] == 192 and len(ours) == 2:
        assert "Unsupported head_dim: 192" in said
        ours.pop()  # upstream has the tiles' launch, and no merge for 192
    else:
        assert said == ""
    assert launches(gpu) == ours
    if call.axes["v_dim"] == 192 and ours:
        assert "Invalid configuration" in theirs.run(call, plan, tile=128)
    return plan.tile, plan.head["split"]


@pytest.mark.parametrize("sm", ["sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a"])
def test_every_tile_fits_its_sm(sm: str) -> None:
    """By the rule that the recipe has; the build then checks what the compiler says."""
    recipe = load_recipe(str(op().folder / op().data["recipe"]))
    for head_dim, v_dim in DIMS:
        cls = op().data["classes"][
            op().variant(spec.Target(sm), axes_of(head_dim=head_dim, v_dim=v_dim)).class_name
        ]
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
