"""Ragged prefill on the fake driver: variants without a compiler, calls in the words of ``kernel.yaml``, plans read back."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cpu.fake_driver import fa2
from cpu.fake_driver.fa2 import MERGE_PARAMS, SHARED, SMEM, Call, Plan, ends_of, random_lengths
from cpu.fake_driver.kernseal_library import IMAGE, Kernseal, stub, stub_library
from cpu.fake_driver.xqa import address

from kernseal.abi.library import KernelRecord, VariantRecord
from kernseal.export import paths, spec
from kernseal.export.spec import Target

__all__ = ["MERGE_PARAMS", "SMEM", "Call", "Plan", "ends_of"]

OP = "ragged_prefill"
DIMS = ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256))
ALIGN = {"q": 16, "k": 16, "v": 16, "o": 16, "plan_device": 16, "workspace": 16}
HOST = ("qo_indptr", "kv_indptr")
TILE_PARAMS = [200]
"""Bytes of the one parameter of a tile's kernel."""

HEAD = struct.Struct("<Q6q2i2I2I2I10Q3Q")
HEAD_FIELDS = (
    *("magic", "batch_size", "total_q", "total_kv", "kv_chunk", "head_dim", "v_dim", "num_q_heads"),
    *("num_kv_heads", "fixed_grid", "tile", "grid", "rows", "split", "page_size", "q_indptr", "kv_indptr"),
    *SHARED,
)
"""What a plan begins with; from ``q_indptr`` to ``valid``, where each array begins, or 0."""


def op() -> spec.Op:
    return spec.load_op(paths.kernels() / OP)


def axes_of(**changes: Any) -> dict[str, Any]:
    return {**op().data["defaults"], **changes}


def tiles(axes: Mapping[str, Any]) -> tuple[int, ...]:
    return (16, 64, 128) if axes["v_dim"] <= 128 else (16, 64)


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


def call_of(axes: Mapping[str, Any], qo: Sequence[int], kv: Sequence[int], fields: Mapping[str, Any]) -> Call:
    """Fields of ``kseal_ragged_prefill_args``, and the sequences' ends."""
    return Call(axes, {"qo_indptr": qo, "kv_indptr": kv}, fields)


def random_call(rng: random.Random, axes: Mapping[str, Any]) -> Call:
    """A valid call. Scratch is as large as it ever needs to be: what it must be is another test's."""
    batch = rng.choice([1, 1, 2, 3, 7, 16, 64, rng.randint(1, 200)])
    kv_heads, group = rng.choice([1, 2, 3, 4, 8]), rng.choice([1, 1, 2, 3, 4, 5, 7, 8, 12, 16])
    qo, kv = ends_of(random_lengths(rng, batch)), ends_of(random_lengths(rng, batch))
    fixed = rng.random() < 0.4
    spare = rng.choice([0, 0, 1, rng.randint(0, 500)])
    head, v = axes["head_dim"], axes["v_dim"]
    lengths = [(qo[i + 1] - qo[i], kv[i + 1] - kv[i]) for i in range(batch)]
    chunks = [  # those whose parts are not too many
        chunk
        for chunk in (64, 128, 1000, 9000)
        if sum(rows * -(-keys // chunk) for rows, keys in lengths) * kv_heads * group * v < 2**32
    ]
    strides = {
        "q_row_stride": rng.choice([0, kv_heads * group * head + 8 * rng.randint(0, 9)]),
        "q_head_stride": rng.choice([0, head]),
        "k_row_stride": rng.choice([0, kv_heads * (head + v)]),
        "k_head_stride": rng.choice([0, head + v]),
        "v_row_stride": rng.choice([0, kv_heads * (head + v) + 8]),
        "v_head_stride": rng.choice([0, v + 8]),
    }
    fields: dict[str, Any] = {
        **strides,
        "num_q_heads": kv_heads * group,
        "num_kv_heads": kv_heads,
        "tile_q": rng.choice([0, 0, rng.choice(tiles(axes))]),
        "fixed_grid": int(fixed),
        "pdl": rng.randrange(2),
        "sm_scale": rng.choice([0.125, rng.uniform(0.01, 2)]),
        "batch_size": batch,
        "total_q": qo[-1] + spare,
        "total_kv": kv[-1] + rng.choice([0, 3]),
        "kv_chunk": rng.choice([0, -1] if fixed else [0, -1, -1, rng.choice(chunks)]),
        "workspace_bytes": 2**50,
        "stream": rng.choice([0, 1, 2, address(rng, 8)]),
        "lse": rng.choice([0, address(rng, 4)]),
        **{name: address(rng, align) for name, align in ALIGN.items()},
    }
    return call_of(axes, qo, kv, fields)
