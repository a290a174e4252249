"""XQA MLA decode on the fake driver: variants without a compiler, and calls in the words of ``kernel.yaml``."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpu.fake_driver.kernseal_library import IMAGE, Kernseal, stub, stub_library
from cpu.fake_driver.xqa import address

from kernseal.abi.library import KernelRecord, VariantRecord
from kernseal.export import paths, spec
from kernseal.export.spec import Target

OP = "xqa_mla"
SMEM = 98765
ROW = 576
SCRATCH = 18432
ALIGN = {"q": 16, "k": 16, "v": 16, "o": 16, "page_table": 4, "seq_lens": 4, "workspace": 128}
OPTIONAL = ("q_scale_ptr", "kv_scale_ptr")
PARAM_SIZES = [128, 128, 128, 4, 8, 8, 40, 4, 4, 8, 8, 8, 8]
"""Bytes of every parameter of ``kernel_mha``."""


def op() -> spec.Op:
    return spec.load_op(paths.kernels() / OP)


def axes_of(**changes: Any) -> dict[str, Any]:
    return {**op().data["defaults"], **changes}


def elem_bytes(axes: Mapping[str, Any]) -> int:
    return {"bf16": 2, "e4m3": 1}[axes["dtype"]]


def record(axes: Mapping[str, Any], image: bytes = IMAGE, dynamic_smem: int = SMEM) -> VariantRecord:
    kernel = KernelRecord("kernel_mha", 0, 0, 0, dynamic_smem)
    return stub(op(), axes, Target("sm_120a"), image, (kernel,))


def library_of(all_axes: Sequence[Mapping[str, Any]], folder: Path) -> Kernseal:
    return Kernseal(stub_library((record(axes) for axes in all_axes), "sm_90a", folder))


@dataclass(frozen=True)
class Call:
    """Fields of ``kseal_xqa_mla_args``, strides filled in."""

    axes: Mapping[str, Any]
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def args(self, library: Kernseal) -> Any:
        return library.args(OP, self.fields, (*ALIGN, *OPTIONAL, "stream"))


def random_call(rng: random.Random, axes: Mapping[str, Any]) -> Call:
    """A valid call. Scratch is as large as it ever needs to be: what it must be is another test's."""
    page = axes["page_size"]
    step = 16 // elem_bytes(axes)
    token = ROW + step * rng.choice([0, 0, 8, rng.randrange(100)])
    strides = {
        "kv_token_stride": token,
        "kv_page_stride": page * token * rng.randrange(1, 62) + step * rng.choice([0, rng.randrange(100)]),
    }
    pool = address(rng, 16)
    fields: dict[str, Any] = {
        **strides,
        "num_q_heads": 128,
        "pdl": rng.randrange(2),
        "q_scale": rng.choice([1.0, 0.07216878, rng.uniform(0.01, 3)]),
        "kv_scale": rng.choice([1.0, rng.uniform(0.01, 2)]),
        "batch_size": rng.choice([1, 2, 3, 7, 64, rng.randrange(1, 512)]),
        "num_pages": rng.choice([1, rng.randrange(1, 2**20), 2**31]),
        "max_pages_per_seq": rng.choice([1, 2, 15, 16, 17, 2048, rng.randrange(1, 4000)]),
        "workspace_bytes": 2**40,
        "stream": rng.choice([0, 1, 2, address(rng, 8)]),
        **{name: address(rng, align) for name, align in ALIGN.items()},
        "k": pool,
        "v": rng.choice([pool, address(rng, 16)]),
    }
    fields |= {name: address(rng, 4) if rng.random() < 0.5 else 0 for name in OPTIONAL}
    return Call(axes, fields)
