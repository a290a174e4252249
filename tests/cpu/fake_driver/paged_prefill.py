"""Paged prefill on the fake driver: variants without a compiler, calls in the words of ``kernel.yaml``, plans read back."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cpu.fake_driver import fa2
from cpu.fake_driver.fa2 import SHARED, SMEM, Call, ends_of, random_lengths
from cpu.fake_driver.kernseal_library import IMAGE, Kernseal, stub, stub_library
from cpu.fake_driver.xqa import address

from kernseal.abi.library import KernelRecord, VariantRecord
from kernseal.export import paths, spec
from kernseal.export.spec import Target

OP = "paged_prefill"
DIMS = (64, 128, 256)
PAGES = (1, 5, 16, 64)
ALIGN = {"q": 16, "k": 16, "v": 16, "page_indices": 4, "o": 16, "plan_device": 16, "workspace": 16}
HOST = ("qo_indptr", "page_indptr", "kv_lens")
TILE_PARAMS = [264]
"""Bytes of the one parameter of a tile's kernel."""

HEAD = struct.Struct("<Q6q2i2I2I2I11Q3Q")
HEAD_FIELDS = (
    *("magic", "batch_size", "total_q", "total_pages", "kv_chunk", "head_dim", "v_dim", "num_q_heads"),
    *("num_kv_heads", "fixed_grid", "tile", "grid", "rows", "split", "page_size", "q_indptr"),
    *("page_indptr", "kv_lens"),
    *SHARED,
)
"""What a plan begins with; from ``q_indptr`` to ``valid``, where each array begins, or 0."""


def op() -> spec.Op:
    return spec.load_op(paths.kernels() / OP)


def axes_of(**changes: Any) -> dict[str, Any]:
    return {**op().data["defaults"], **changes}


def tiles(axes: Mapping[str, Any]) -> tuple[int, ...]:
    return (16, 64, 128) if axes["head_dim"] <= 128 else (16, 64)


def record(
    axes: Mapping[str, Any],
    image: bytes = IMAGE,
    kernels: Sequence[KernelRecord] | None = None,
    sm: str = "sm_90a",
) -> VariantRecord:
    made_up = (
        *(KernelRecord(f"prefill_{tile}", 0, 0, 0, SMEM[tile]) for tile in tiles(axes)),
        KernelRecord("merge", 0, 0, 0, SMEM["merge"]),
    )
    return stub(op(), axes, Target(sm), image, made_up if kernels is None else kernels)


def library_of(all_axes: Sequence[Mapping[str, Any]], folder: Path) -> Kernseal:
    return Kernseal(stub_library((record(axes) for axes in all_axes), "sm_90a", folder))


class Session(fa2.Session):
    """A prepared handle and the calls on it."""

    OP = OP
    POINTERS = (*ALIGN, "lse", *HOST, "plan")
    HOST = HOST
    HEAD = HEAD
    HEAD_FIELDS = HEAD_FIELDS


def call_of(
    axes: Mapping[str, Any],
    qo: Sequence[int],
    pages: Sequence[int],
    lens: Sequence[int],
    fields: Mapping[str, Any],
) -> Call:
    """Fields of ``kseal_paged_prefill_args``; where rows and pages of each sequence begin, and how many keys it has."""
    return Call(axes, {"qo_indptr": qo, "page_indptr": pages, "kv_lens": lens}, fields)


def needed(call: Call) -> list[int]:
    """Upstream's kv_indptr: where the pages of each sequence begin, if it has just those that its keys need."""
    return ends_of([-(-length // call["page_size"]) for length in call.host["kv_lens"]])


def random_call(rng: random.Random, axes: Mapping[str, Any]) -> Call:
    """A valid call. Scratch is as large as it ever needs to be: what it must be is another test's."""
    batch = rng.choice([1, 1, 2, 3, 7, 16, 64, rng.randint(1, 200)])
    kv_heads, group = rng.choice([1, 2, 3, 4, 8]), rng.choice([1, 1, 2, 3, 4, 5, 7, 8, 12, 16])
    page, head = rng.choice(PAGES), axes["head_dim"]
    qo, lens = ends_of(random_lengths(rng, batch)), random_lengths(rng, batch)
    spare = rng.choice([0, 0, 1, 7])
    pages = ends_of([-(-length // page) + rng.choice([0, spare]) for length in lens])
    fixed = rng.random() < 0.4
    chunks = [  # those whose parts are not too many
        chunk
        for chunk in (64, 128, 1000, 9000)
        if sum((qo[i + 1] - qo[i]) * -(-lens[i] // chunk) for i in range(batch)) * kv_heads * group * head
        < 2**32
    ]
    row = kv_heads * head
    strides = {
        "q_row_stride": rng.choice([0, kv_heads * group * head + 8 * rng.randint(0, 9)]),
        "q_head_stride": rng.choice([0, head]),
        **rng.choice(
            [
                {"kv_page_stride": 0, "kv_row_stride": 0, "kv_head_stride": 0},
                {"kv_page_stride": 2 * page * row, "kv_row_stride": head, "kv_head_stride": page * head},
                {"kv_page_stride": 2 * page * row + 8, "kv_row_stride": 2 * row, "kv_head_stride": 2 * head},
            ]
        ),
    }
    fields: dict[str, Any] = {
        **strides,
        "num_q_heads": kv_heads * group,
        "num_kv_heads": kv_heads,
        "page_size": page,
        "tile_q": rng.choice([0, 0, rng.choice(tiles(axes))]),
        "fixed_grid": int(fixed),
        "pdl": rng.randrange(2),
        "sm_scale": rng.choice([0.125, rng.uniform(0.01, 2)]),
        "batch_size": batch,
        "total_q": qo[-1] + rng.choice([0, 0, 1, rng.randint(0, 500)]),
        "total_pages": pages[-1] + rng.choice([0, 3]),
        "num_pages": rng.choice([1, 999]),
        "kv_chunk": rng.choice([0, -1] if fixed else [0, -1, -1, page * -(-rng.choice(chunks) // page)]),
        "workspace_bytes": 2**50,
        "stream": rng.choice([0, 1, 2, address(rng, 8)]),
        "lse": rng.choice([0, address(rng, 4)]),
        **{name: address(rng, align) for name, align in ALIGN.items()},
    }
    return call_of(axes, qo, pages, lens, fields)
