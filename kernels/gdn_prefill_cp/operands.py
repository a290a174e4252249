"""Tensor shapes of the context-parallel GDN prefill call, for the loader's generic caller: those of ``gdn_prefill``,
whose gates this op always takes, and two more lengths.

Source of the field meanings: ``kernel.yaml`` (a test compares the names with it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from kernseal.kernels.gdn_prefill import operands

_GATES = ("alpha", "beta")
Value = TypeVar("Value")


def _without_gates(fields: Mapping[str, Value]) -> dict[str, Value]:
    return {name: value for name, value in fields.items() if name not in _GATES}


SPEC = replace(
    operands.SPEC,
    config_defaults=_without_gates(operands.SPEC.config_defaults),
    # 0 is upstream's choice of chunk_len, and total_tokens for max_seqlen.
    args_defaults={**operands.SPEC.args_defaults, "chunk_len": 0, "max_seqlen": 0},
    tags=_without_gates(operands.SPEC.tags),
)
