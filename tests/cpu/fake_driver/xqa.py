"""XQA decode on the fake driver: variants without a compiler, and calls in the words of ``kernel.yaml``."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpu.fake_driver.kernseal_library import IMAGE, Kernseal, stub, stub_library

from kernseal.abi.library import KernelRecord, VariantRecord
from kernseal.export import paths, spec
from kernseal.export.spec import Target

OP = "xqa_decode"
SMEM = 98765
SMALL = ("e4m3", "i8", "nvfp4")
"""Element types that come with a scale."""
ALIGN = {
    "q": 16,
    "k": 16,
    "v": 16,
    "k_scales": 4,
    "v_scales": 4,
    "o": 16,
    "page_table": 4,
    "seq_lens": 4,
    "q_cu_lens": 4,
    "mask": 4,
    "sinks": 4,
    "q_scale_ptr": 4,
    "kv_scale_ptr": 4,
    "semaphores": 4,
    "workspace": 128,
}
"""Every pointer but the stream."""
ALWAYS = ("q", "k", "v", "o", "page_table", "seq_lens", "semaphores", "workspace")
"""Pointers that every kind of variant takes."""


def op() -> spec.Op:
    return spec.load_op(paths.kernels() / OP)


def axes_of(**changes: Any) -> dict[str, Any]:
    return {**op().data["defaults"], **changes}


def record(axes: Mapping[str, Any], sm: str, image: bytes = IMAGE, dynamic_smem: int = SMEM) -> VariantRecord:
    return stub(op(), axes, Target(sm), image, (KernelRecord("kernel_mha", 0, 0, 0, dynamic_smem),))


def build(all_axes: Sequence[Mapping[str, Any]], sm: str, folder: Path) -> Path:
    return stub_library((record(axes, sm) for axes in all_axes), sm, folder)


def library_of(all_axes: Sequence[Mapping[str, Any]], sm: str, folder: Path) -> Kernseal:
    return Kernseal(build(all_axes, sm, folder))


def param_sizes(axes: Mapping[str, Any]) -> list[int]:
    """Bytes of every parameter of ``kernel_mha``. The last, a block's fewest tiles, is a patch's; upstream lacks it."""
    window = [4] if axes["sliding_window"] else []
    out_scale = [4] if axes["out_dtype"] in SMALL else []
    if axes["fp8_math"]:
        return [4, *window, 4, 8, 8, *out_scale, 8, 8, 40, 4, 4, 8, 128, 128, 8, 8, 4]
    q_len, group_and_rows, mask = ([4], [4, 8], [8]) if axes["spec_decode"] else ([], [], [])
    cache, scale_strides = (56, [4, 4, 4]) if axes["kv_dtype"] == "nvfp4" else (40, [])
    head = [*q_len, 4, *group_and_rows, *window, 4, 8, 8, *out_scale, 8, *mask, 8]
    return [*head, cache, 4, 4, 8, 4, 4, 4, *scale_strides, 8, 8, 4]


def cache_param(axes: Mapping[str, Any]) -> tuple[int, int]:
    """Where ``KVCacheList`` is among the parameters, and how many of its bytes anybody sets; the rest is padding."""
    sizes = param_sizes(axes)
    size = 56 if axes["kv_dtype"] == "nvfp4" else 40
    return sizes.index(size), size - 4


@dataclass(frozen=True)
class Call:
    """Fields of ``kseal_xqa_decode_args``, strides filled in."""

    axes: Mapping[str, Any]
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.fields.get(name, 0)

    def args(self, library: Kernseal, **changes: Any) -> Any:
        return library.args(OP, {**self.fields, **changes}, (*ALIGN, "stream"))


def address(rng: random.Random, align: int) -> int:
    return rng.randrange(1, 2**46 // align) * align


def _strides(rng: random.Random, page: int, heads: int, unit: int, prefix: str) -> dict[str, int]:
    """Of a dense cache, of one with its heads outside, or of one layer among several; in elements, ``unit`` a head."""
    page_stride = page * heads * unit
    token, head = rng.choice([(heads * unit, unit), (unit, page * unit)])
    layers = rng.choice([1, 1, rng.randrange(1, 5)])
    made = {"page": layers * page_stride, "token": token, "head": head}
    return {f"{prefix}_{name}_stride": stride for name, stride in made.items()}


def random_call(rng: random.Random, axes: Mapping[str, Any]) -> Call:
    """A valid call. Scratch is as large as it ever needs to be: what it must be is another test's."""
    head_dim, group, page = axes["head_dim"], axes["group_size"], axes["page_size"]
    fp4, drafts, scaled = axes["kv_dtype"] == "nvfp4", axes["spec_decode"], axes["kv_dtype"] in SMALL
    heads = rng.choice([1, 2, 4, 8, 10, rng.randrange(1, 97)])
    batch = rng.choice([1, 2, 3, 7, 64, rng.randrange(1, 512)])
    head = head_dim // 2 if fp4 else head_dim
    strides = _strides(rng, page, heads, head, "kv")
    pages = (2**32 - 1) // (strides["kv_page_stride"] // head)
    optional = ["sinks", "q_scale_ptr", *(["kv_scale_ptr"] if scaled else [])]
    needed = [*ALWAYS]
    fields: dict[str, Any] = {}
    if fp4:
        strides |= _strides(rng, page, heads, head_dim // 16, "scale")
        pages = min(pages, (2**32 - 1) // (strides["scale_page_stride"] // (head_dim // 16)))
        needed += ["k_scales", "v_scales"]
    if drafts:
        q_len = rng.choice([1, 2, 4, 8, rng.randrange(1, 70)])
        optional.append("q_cu_lens")
        needed.append("mask")
        fields |= {"q_len": q_len, "q_rows": rng.choice([0, batch * q_len])}
    fields |= {
        **strides,
        "num_q_heads": heads * group,
        "num_kv_heads": heads,
        "kv_splits": 0,
        "window": rng.randrange(1, 5000) if axes["sliding_window"] else 0,
        "pdl": rng.randrange(2),
        "q_scale": rng.choice([1.0, -0.5, rng.uniform(0.01, 3)]),
        "kv_scale": rng.uniform(0.01, 2) if scaled else 1.0,
        "rcp_out_scale": rng.uniform(0.5, 9) if axes["out_dtype"] in SMALL else 1.0,
        "batch_size": batch,
        "num_pages": rng.randrange(1, pages),
        "max_pages_per_seq": rng.choice([1, 2, 15, 16, 17, 2048, rng.randrange(1, 4000)]),
        "max_seq_len": 0,
        "semaphores_bytes": 2**40,
        "workspace_bytes": 2**40,
        "stream": rng.choice([0, 1, 2, address(rng, 8)]),
        **{name: address(rng, ALIGN[name]) for name in needed},
        **{name: address(rng, 4) if rng.random() < 0.5 else 0 for name in optional},
    }
    return Call(axes, fields)
