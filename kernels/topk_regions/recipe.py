"""How top-k is compiled: the macros that our patches give upstream's ``topk.cuh``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernseal.export.job import NvrtcKernel, NvrtcProgram

SCORES = {"f32": "float", "bf16": "nv_bfloat16", "f16": "half"}


def radix(axes: Mapping[str, Any], cls: Mapping[str, Any]) -> NvrtcProgram:
    """``RadixTopKKernel_Unified`` for a row that one CTA holds, and for one that a group shares."""
    return NvrtcProgram(
        macros={
            "GENERATE_CUBIN": 1,
            "TOPK_SCORES": SCORES[axes["dtype"]],
            "TOPK_PAGED": int(axes["paged"]),
            "TOPK_DETERMINISTIC": int(axes["deterministic"]),
            "TOPK_SMEM_PER_BLOCK": cls["smem_per_block"],
        },
        options=("--std=c++17", "--device-as-default-execution-space"),
        kernels=tuple(NvrtcKernel(name, f"{name}_smem") for name in ("topk_one_cta", "topk_cta_group")),
    )
