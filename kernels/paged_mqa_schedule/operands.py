"""Tensor shapes of the schedule call, for the loader's generic caller.

Source of the field meanings: ``kernel.yaml`` (a test compares the names with it).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernseal.loader.operands import Operand, OpSpec


def _operands(config: Mapping[str, Any]) -> dict[str, Operand]:
    return {
        "seq_lens": Operand("i32", ("batch_size",)),
        "schedule": Operand("i32", ("num_ctas+1", "two")),
    }


SPEC = OpSpec(
    operands=_operands,
    config_enums={},
    derive=lambda sizes: {"two": 2},
    config_defaults={"device": -1, "atoms": 1, "stream": 0},
    args_defaults={"num_ctas": 0, "seq_len_stride": 0},
    tags={"atoms": "a"},
)
