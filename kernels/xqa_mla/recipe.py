"""How XQA MLA decode is compiled: the macros of upstream's ``mla_sm120.cu``.

Upstream's JIT (``flashinfer.jit.xqa.gen_xqa_module_mla``) sets the same macros, and fast math, which is not set here:
exponentials and divisions are those of ordinary float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernseal.export.job import NvrtcKernel, NvrtcProgram

FIXED = {
    "GENERATE_CUBIN": 1,
    "NDEBUG": 1,
    "BEAM_WIDTH": 1,
    "USE_INPUT_KV": 0,
    "USE_CUSTOM_BARRIER": 1,
    "SLIDING_WINDOW": 0,
    "HEAD_ELEMS": 576,
    "HEAD_GRP_SIZE": 128,
}

ELEMENT = {"e4m3": {"CACHE_ELEM_ENUM": 2}, "bf16": {"CACHE_ELEM_ENUM": 0, "MLA_BF16": 1}}
"""Macros of the element type that q and the cache share."""


def mla(axes: Mapping[str, Any], cls: Mapping[str, Any]) -> NvrtcProgram:
    """``kernel_mha`` of the file for multi-head latent attention."""
    return NvrtcProgram(
        macros={**FIXED, **ELEMENT[axes["dtype"]], "TOKENS_PER_PAGE": axes["page_size"]},
        options=("--std=c++17", "--device-as-default-execution-space"),
        kernels=(NvrtcKernel(cls["name"], dynamic_smem="smemSize"),),
    )
