"""Tensor shapes of the top-k call, for the loader's generic caller.

Source of the field meanings: ``kernel.yaml`` (a test compares the names with it).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernseal.loader.operands import Operand, OpSpec

_PER_ROW = ("lengths", "row_starts", "offsets", "row_to_request", "page_table_starts")


def _operands(config: Mapping[str, Any]) -> dict[str, Operand]:
    selected = ("num_rows", "top_k")
    return {
        "scores": Operand("dtype", ("num_rows", "max_len"), row_stride="row_stride"),
        **{name: Operand("i32", ("num_rows",)) for name in _PER_ROW},
        "page_table": Operand("i32", ("num_requests", "max_pages"), row_stride="page_table_stride"),
        "indices": Operand("i32", selected),
        "values": Operand("dtype", selected),
        "raw_indices": Operand("i32", selected),
        "semaphores": Operand("bytes", ("semaphores_bytes",)),
    }


def _derive(sizes: Mapping[str, Any]) -> dict[str, int | None]:
    return {}


SPEC = OpSpec(
    operands=_operands,
    config_enums={"dtype": "kseal_dtype"},
    derive=_derive,
    config_defaults={"device": -1, "dtype": "f32", "paged": False, "deterministic": True, "stream": 0},
    args_defaults={
        **dict.fromkeys(("page_size", "num_requests", "max_pages", "row_stride", "page_table_stride"), 0),
        "semaphores_bytes": 0,
    },
    tags={"dtype": "", "paged": ("", "paged"), "deterministic": ("", "det")},
)
