"""How XQA decode is compiled: the macros of upstream's ``mha.cu``.

Upstream's JIT (``flashinfer.jit.xqa``) sets the same macros and otherwise nvcc's defaults: no fast math.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernseal.export.job import NvrtcProgram

CACHE_ELEMENT = {"i8": 1, "e4m3": 2}
"""``CACHE_ELEM_ENUM``; 0 is the element type of q."""

FIXED = {
    "GENERATE_CUBIN": 1,
    "NDEBUG": 1,
    "BEAM_WIDTH": 1,
    "USE_INPUT_KV": 0,
    "USE_CUSTOM_BARRIER": 1,
    "SPEC_DEC": 0,
}


def mha(axes: Mapping[str, Any], cls: Mapping[str, Any]) -> NvrtcProgram:
    """``kernel_mha``, for one query token a sequence."""
    macros = {
        **FIXED,
        "INPUT_FP16": int(axes["dtype"] == "f16"),
        "CACHE_ELEM_ENUM": CACHE_ELEMENT.get(axes["kv_dtype"], 0),
        "LOW_PREC_OUTPUT": int(axes["out_dtype"] == "e4m3"),
        "HEAD_ELEMS": axes["head_dim"],
        "HEAD_GRP_SIZE": axes["group_size"],
        "TOKENS_PER_PAGE": axes["page_size"],
        "SLIDING_WINDOW": int(axes["sliding_window"]),
    }
    if cls["compile"]["tiles"] == "small":
        macros["KSEAL_SMALL_TILES"] = 1
    return NvrtcProgram(
        macros=macros,
        options=("--std=c++17", "--device-as-default-execution-space"),
        entry=cls["name"],
        dynamic_smem="smemSize",
    )
