"""XQA decode on the fake driver: variants without a compiler, and calls in the words of ``kernel.yaml``."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpu.fake_driver.kernseal_library import Kernseal, build_library
from cpu.fake_driver.native import ZIG

from kernseal.abi.library import VariantRecord
from kernseal.export import paths, spec

OP = "xqa_decode"
SMEM = 98765
SMALL = ("e4m3", "i8")
TILE = 256
ALIGN = {
    "q": 16,
    "k": 16,
    "v": 16,
    "o": 16,
    "page_table": 4,
    "seq_lens": 4,
    "semaphores": 4,
    "workspace": 128,
}


def op() -> spec.Op:
    return spec.load_op(paths.kernels() / OP)


def axes_of(**changes: Any) -> dict[str, Any]:
    return {**op().data["defaults"], **changes}


def record(axes: Mapping[str, Any], image: bytes, dynamic_smem: int = SMEM) -> VariantRecord:
    """A variant whose image is just bytes."""
    name = spec.variant_id(op().data, axes)
    return VariantRecord(
        op=OP,
        variant=name,
        class_name="mha",
        axes=dict(axes),
        entry="kernel_mha",
        file=f"cubin/{OP}/{name}.cubin",
        size=len(image),
        sha256=hashlib.sha256(image).hexdigest(),
        registers=0,
        spill_bytes=0,
        static_smem=0,
        dynamic_smem=dynamic_smem,
        evidence="inspected",
        host_prefix=None,
        host_function=None,
    )


def library_of(all_axes: Sequence[Mapping[str, Any]], folder: Path) -> Kernseal:
    """A library with these variants, in which undefined behaviour traps."""
    image, command = bytes(range(64)), (*ZIG, "-fsanitize=undefined", "-fsanitize-trap=undefined")
    variants = [(record(axes, image), None, image) for axes in all_axes]
    return Kernseal(build_library("sm_90a", None, variants, folder, command))


def param_sizes(axes: Mapping[str, Any]) -> list[int]:
    """Bytes of every parameter of ``kernel_mha``."""
    window = [4] if axes["sliding_window"] else []
    out_scale = [4] if axes["out_dtype"] in SMALL else []
    return [4, *window, 4, 8, 8, *out_scale, 8, 8, 40, 4, 4, 8, 4, 4, 4, 8, 8]


@dataclass(frozen=True)
class Call:
    """Fields of ``kseal_xqa_decode_args``, strides filled in."""

    axes: Mapping[str, Any]
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def args(self, library: Kernseal, **changes: Any) -> Any:
        ffi, values = library.ffi, {**self.fields, **changes}
        for name, value in values.items():
            if name in (*ALIGN, "sinks", "q_scale_ptr", "kv_scale_ptr", "stream"):
                values[name] = ffi.cast("void *", value)
        return library.struct(f"kseal_{OP}_args", **values)


def address(rng: random.Random, align: int) -> int:
    return rng.randrange(1, 2**46 // align) * align


def random_call(rng: random.Random, axes: Mapping[str, Any]) -> Call:
    """A valid call. Scratch is as large as it ever needs to be: what it must be is another test's."""
    head_dim, group, page = axes["head_dim"], axes["group_size"], axes["page_size"]
    heads = rng.choice([1, 2, 4, 8, 10, rng.randrange(1, 97)])
    batch = rng.choice([1, 2, 3, 7, 64, rng.randrange(1, 512)])
    dense = {
        "kv_page_stride": page * heads * head_dim,
        "kv_token_stride": heads * head_dim,
        "kv_head_stride": head_dim,
    }
    hnd = {
        "kv_page_stride": page * heads * head_dim,
        "kv_token_stride": head_dim,
        "kv_head_stride": page * head_dim,
    }
    layers = {**dense, "kv_page_stride": rng.randrange(1, 5) * dense["kv_page_stride"]}
    strides = rng.choice([dense, hnd, layers])
    fields: dict[str, Any] = {
        **strides,
        "num_q_heads": heads * group,
        "num_kv_heads": heads,
        "kv_splits": 0,
        "window": rng.randrange(1, 5000) if axes["sliding_window"] else 0,
        "pdl": rng.randrange(2),
        "q_scale": rng.choice([1.0, -0.5, rng.uniform(0.01, 3)]),
        "kv_scale": rng.uniform(0.01, 2) if axes["kv_dtype"] in SMALL else 1.0,
        "rcp_out_scale": rng.uniform(0.5, 9) if axes["out_dtype"] in SMALL else 1.0,
        "batch_size": batch,
        "num_pages": rng.randrange(1, (2**32 - 1) // (strides["kv_page_stride"] // head_dim)),
        "max_pages_per_seq": rng.choice([1, 2, 15, 16, 17, 2048, rng.randrange(1, 4000)]),
        "max_seq_len": 0,
        "semaphores_bytes": 2**40,
        "workspace_bytes": 2**40,
        "stream": rng.choice([0, 1, 2, address(rng, 8)]),
        **{name: address(rng, align) for name, align in ALIGN.items()},
    }
    optional = ["sinks", "q_scale_ptr", *(["kv_scale_ptr"] if axes["kv_dtype"] in SMALL else [])]
    fields |= {name: address(rng, 4) if rng.random() < 0.5 else 0 for name in optional}
    return Call(axes, fields)
