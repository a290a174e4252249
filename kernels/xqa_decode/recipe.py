"""How XQA decode is compiled: the macros of upstream's ``mha.cu`` and ``mha_sm90.cu``.

Upstream's JIT (``flashinfer.jit.xqa.gen_xqa_module``) sets the same macros, and fast math, which is not set here:
exponentials and divisions are those of ordinary float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernseal.export.job import NvrtcKernel, NvrtcProgram

CACHE_ELEMENT = {"i8": 1, "e4m3": 2, "nvfp4": 3}
"""``CACHE_ELEM_ENUM``; 0 is the element type of q."""

FIXED = {
    "GENERATE_CUBIN": 1,
    "NDEBUG": 1,
    "BEAM_WIDTH": 1,
    "USE_INPUT_KV": 0,
    "USE_CUSTOM_BARRIER": 1,
}


def mha(axes: Mapping[str, Any], cls: Mapping[str, Any]) -> NvrtcProgram:
    """``kernel_mha`` of ``mha.cu``."""
    macros = _macros(axes)
    if cls["compile"]["tiles"] == "small":
        macros["KSEAL_SMALL_TILES"] = 1
    return _program(macros, cls)


def gmma(axes: Mapping[str, Any], cls: Mapping[str, Any]) -> NvrtcProgram:
    """``kernel_mha`` of ``mha_sm90.cu``."""
    return _program(_macros(axes), cls)


def _macros(axes: Mapping[str, Any]) -> dict[str, str | int]:
    macros: dict[str, str | int] = {
        **FIXED,
        "INPUT_FP16": int(axes["dtype"] == "f16"),
        "CACHE_ELEM_ENUM": CACHE_ELEMENT.get(axes["kv_dtype"], 0),
        "LOW_PREC_OUTPUT": int(axes["out_dtype"] == "e4m3"),
        "HEAD_ELEMS": axes["head_dim"],
        "HEAD_GRP_SIZE": axes["group_size"],
        "TOKENS_PER_PAGE": axes["page_size"],
        "SLIDING_WINDOW": int(axes["sliding_window"]),
        "SPEC_DEC": int(axes["spec_decode"]),
    }
    if axes["spec_decode"]:
        # Drafts are linear: a mask row is a position, so that a window can be cut for each.
        macros["IS_SPEC_DEC_TREE"] = 0
    return macros


def _program(macros: Mapping[str, str | int], cls: Mapping[str, Any]) -> NvrtcProgram:
    return NvrtcProgram(
        macros=macros,
        options=("--std=c++17", "--device-as-default-execution-space"),
        kernels=(NvrtcKernel(cls["name"], dynamic_smem="smemSize"),),
    )
