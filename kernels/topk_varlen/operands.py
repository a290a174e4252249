"""Tensor shapes of the call of top-k for a decode step, for the loader's generic caller.

Source of the field meanings: ``kernel.yaml`` (a test compares the names with it).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernseal.loader.operands import Operand, OpSpec


def _operands(config: Mapping[str, Any]) -> dict[str, Operand]:
    selected = ("num_rows", "top_k")
    return {
        "seq_lens": Operand("i32", ("num_requests",)),
        "scores": Operand("dtype", ("num_rows", "max_len"), row_stride="row_stride"),
        "indices": Operand("i32", selected),
        "values": Operand("dtype", selected),
        "semaphores": Operand("bytes", ("semaphores_bytes",)),
    }


def _derive(sizes: Mapping[str, Any]) -> dict[str, int | None]:
    requests, next_n = sizes.get("num_requests"), sizes.get("next_n")
    return {"num_rows": None if requests is None or next_n is None else requests * next_n}


SPEC = OpSpec(
    operands=_operands,
    config_enums={"dtype": "kseal_dtype"},
    derive=_derive,
    config_defaults={"device": -1, "dtype": "f32", "values": False, "stream": 0},
    args_defaults={"next_n": 1, "compress_ratio": 1, "row_stride": 0, "semaphores_bytes": 0},
    tags={"dtype": "", "values": ("", "values")},
)
