"""Functions of FlashInfer's attn_scores.py, taken out of the pinned wheel and run as they are, without a GPU."""

from __future__ import annotations

import ast
import functools
from types import SimpleNamespace
from typing import Any

import numpy
import torch

from kernseal.export import source

FILE = "flashinfer/attn_scores/attn_scores.py"
PLAIN = (ast.Assign, ast.AnnAssign, ast.ImportFrom)
SMEM = 232448  # bytes of shared memory that a CTA may have on SM100 and SM103


class OnGpu:
    """What the functions ask of a tensor before they use its memory."""

    is_cuda = True
    device = "cuda:0"

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype = shape, dtype

    def dim(self) -> int:
        return len(self.shape)

    def stride(self, dimension: int) -> int:
        return int(numpy.prod(self.shape[dimension + 1 :], dtype=int))


def _plain(function: ast.FunctionDef) -> ast.FunctionDef:
    """Without decorators, which need the package."""
    return ast.FunctionDef(**{**vars(function), "decorator_list": []})


@functools.cache
def upstream(cutlass: Any = None, minor: int = 0) -> SimpleNamespace:
    """Every function and plain constant of the file that can be had without importing it.

    Args:
        cutlass: what the functions call ``cutlass``.
        minor: they run on SM 10.minor.
    """
    opened, _ = source.open_source(None, source.upstream())
    text = opened.read(FILE)
    assert text is not None
    tree = ast.parse(text)
    body: list[ast.stmt] = [_plain(node) for node in tree.body if isinstance(node, ast.FunctionDef)]
    body[:0] = [node for node in tree.body if isinstance(node, PLAIN) and _is_plain(node)]
    cuda = SimpleNamespace(
        get_device_capability=lambda device: (10, minor), is_current_stream_capturing=lambda: False
    )
    names: dict[str, Any] = {
        "torch": _Torch(cuda),
        "np": numpy,
        "cutlass": cutlass,
        "get_device_index": lambda device: 0,
        "functools": functools,
    }
    exec(compile(ast.fix_missing_locations(ast.Module(body, [])), FILE, "exec"), names)
    names["_cached_max_smem_per_block"] = lambda index: SMEM
    return SimpleNamespace(**names)


@functools.cache
def _scorer() -> Any:
    """The functions of b12x's host code that say how many CTAs a row of logits has."""
    opened, _ = source.open_source(None, source.upstream())
    text = opened.read("flashinfer/experimental/b12x/attention/dsa_indexer/kernel.py")
    assert text is not None
    wanted = ("_default_dsa_persistent_ctas", "_resolve_dsa_persistent_ctas")
    found = (n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name in wanted)
    body: list[ast.stmt] = [_plain(node) for node in found]
    return compile(ast.fix_missing_locations(ast.Module(body, [])), "kernel.py", "exec")


def scorer_ctas(sms: int, q_rows: int) -> int:
    """CTAs of a row of logits on SM120, from b12x's host code."""
    properties = SimpleNamespace(multi_processor_count=sms)
    cuda = SimpleNamespace(get_device_properties=lambda index: properties)
    names: dict[str, Any] = {"torch": SimpleNamespace(cuda=cuda)}
    exec(_scorer(), names)
    return int(names["_resolve_dsa_persistent_ctas"](device_index=0, q_rows=q_rows))


class _Torch:
    """torch, but for its device."""

    def __init__(self, cuda: SimpleNamespace) -> None:
        self.cuda = cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _is_plain(node: ast.stmt) -> bool:
    """Constants, and what typing and the future have; not what calls into the package."""
    if isinstance(node, ast.ImportFrom):
        return node.module in ("typing", "__future__")
    called = {n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    return not called
