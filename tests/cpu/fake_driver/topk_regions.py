"""Top-k on the fake driver: variants without a compiler, and calls in the words of ``kernel.yaml``."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpu.fake_driver.kernseal_library import Kernseal, stub, stub_library
from cpu.fake_driver.xqa import address

from kernseal.abi.library import KernelRecord, VariantRecord
from kernseal.export import paths, spec
from kernseal.export.spec import Target

OP = "topk_regions"
PER_ROW = ("lengths", "row_starts", "offsets", "row_to_request", "page_table_starts")
POINTERS = ("scores", *PER_ROW, "page_table", "indices", "values", "raw_indices", "semaphores")
PARAM_SIZES = [8] * 9 + [4] * 3 + [8] * 2 + [4] * 2 + [24]
"""Bytes of every parameter of both kernels."""
KERNELS = ("topk_one_cta", "topk_cta_group")
STATE, SCRATCH = 3104, 2048
"""Bytes that a group of thread blocks has in semaphores; the second only if deterministic."""
FIXED_SMEM = 2080


def op() -> spec.Op:
    return spec.load_op(paths.kernels() / OP)


def axes_of(**changes: Any) -> dict[str, Any]:
    return {**op().data["defaults"], **changes}


def elem_bytes(axes: Mapping[str, Any]) -> int:
    return 4 if axes["dtype"] == "f32" else 2


def smem_per_block(sm: str) -> int:
    return 101376 if sm.startswith("sm_12") else 232448


def static_smem(axes: Mapping[str, Any]) -> tuple[int, int]:
    """Of the two kernels: what a scan over the block needs, and a flag."""
    scan = 256 if axes["deterministic"] else 0
    return scan, scan + 16


def record(axes: Mapping[str, Any], sm: str) -> VariantRecord:
    static = dict(zip(KERNELS, static_smem(axes), strict=True))
    kernels = [KernelRecord(k, 0, 0, s, smem_per_block(sm) - s) for k, s in static.items()]
    return stub(op(), axes, Target(sm), kernels=kernels)


def library_of(all_axes: Sequence[Mapping[str, Any]], folder: Path, sm: str = "sm_90a") -> Kernseal:
    """A library with these variants of the class for ``sm``."""
    return Kernseal(stub_library((record(axes, sm) for axes in all_axes), "sm_90a", folder))


@dataclass(frozen=True)
class Call:
    """Fields of ``kseal_topk_regions_args``."""

    axes: Mapping[str, Any]
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def args(self, library: Kernseal) -> Any:
        return library.args(OP, self.fields, (*POINTERS, "stream"))


def random_call(rng: random.Random, axes: Mapping[str, Any], chunk: int, sms: int) -> Call:
    """A valid call such as one of upstream's launchers serves, with scores aligned as theirs must be.

    Args:
        chunk: about as many scores as a thread block holds; rows end near multiples of it.
    """
    ctas = rng.choice([1, 1, 2, 3, rng.randrange(1, sms)])
    near = chunk * ctas + rng.choice([0, 1, -1, rng.randrange(-900, 300)])
    max_len = max(1, rng.choice([1, 7, 1024, 32768, rng.randrange(1, chunk), near, near & -16, near & -2]))
    rows = rng.choice([1, 2, sms // 2, sms, rng.randrange(1, 5000)])
    kind = "paged" if axes["paged"] else rng.choice(["plain", "ragged"])
    given = {
        "plain": {"values"} if rng.random() < 0.5 else set(),
        "ragged": {"lengths", "offsets"} | ({"row_starts"} if rng.random() < 0.3 else set()),
        "paged": {"lengths", "page_table"} | set(rng.choice([(), ("row_to_request",), ("raw_indices",)])),
    }[kind]
    fields: dict[str, Any] = {
        "top_k": rng.choice([1, 64, 512, 2048, rng.randrange(1, 5000)]),
        "num_rows": rows,
        "max_len": max_len,
        "semaphores_bytes": 2**40,
        "stream": rng.choice([0, 1, 2, address(rng, 8)]),
    }
    if kind == "paged":
        padded = max_len + rng.choice([0, 0, 1, 8, rng.randrange(999)])
        given |= {"row_starts", "page_table_starts"} if rng.random() < 0.3 else set()
        fields |= {
            "page_size": 1 << rng.choice([0, 0, 4, 6, 30]),
            "row_stride": padded,
            "num_requests": rows if "row_to_request" not in given else rng.randrange(1, 500),
            "max_pages": 77,
            "page_table_stride": rng.choice([77, 80, 2**33]),
        }
    always = {"scores", "indices", "semaphores"}
    return Call(axes, {**fields, **{name: address(rng, 16) for name in POINTERS if name in given | always}})
