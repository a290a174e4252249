"""Upstream's own function that spreads rows over thread blocks, taken out of a module that needs a GPU to be imported."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any, cast

import torch

from kernseal.export import source

MODULE = "flashinfer/topk_varlen/topk_varlen.py"
WANTED = (
    "_RADIX_NUM_COPY_BITS",
    "_RADIX_SMEM_OVERHEAD",
    "_radix_ordered_elem_size",
    "_radix_compute_max_chunk",
    "_radix_get_chunk_config",
)


def chunk_config() -> Callable[[int, torch.dtype, int, int, int], tuple[int, int]]:
    """``_radix_get_chunk_config(N, dtype, num_rows, num_sms, smem_capacity)``: blocks a row, and scores of a block."""
    opened, _ = source.open_source(None, source.upstream())
    text = opened.read(MODULE)
    assert text is not None
    found = [node for node in ast.parse(text).body if _name(node) in WANTED]
    assert len(found) == len(WANTED)
    names: dict[str, Any] = {"math": math, "torch": torch, "Tuple": tuple}
    exec(compile(ast.Module(found, []), MODULE, "exec"), names)
    return cast(
        Callable[[int, torch.dtype, int, int, int], tuple[int, int]], names["_radix_get_chunk_config"]
    )


def _name(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return node.name if isinstance(node, ast.FunctionDef) else None
