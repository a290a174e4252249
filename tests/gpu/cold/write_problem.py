"""Writes the problem of ``bench_cold``: one sequence of GDN prefill, and a small step of XQA decode."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu.cold.jit_calls import raw
from gpu.problems import SCALE, Case, ends, make_inputs

from kernseal.kernels.gdn_prefill.reference import gated_delta_rule
from kernseal.kernels.xqa_decode.reference import decode

Tensors = dict[str, torch.Tensor]
NAMES = {torch.bfloat16: "bf16", torch.float32: "f32", torch.int32: "i32", torch.int64: "i64"}
ALSO = (
    ("gdn_prefill", Case(state_dtype="bf16", pooled=True).axes),
    ("gdn_decode", {"tokens": 1, "wide": False, "tile_v": 16}),
)
"""What else an engine prepares for a hybrid model, beside the two variants that run: prefill into a pool of bfloat16 states,
and decode over it."""


@dataclass(frozen=True)
class Sizes:
    """GDN in Qwen3-Next's geometry; XQA with what FlashInfer's own tests of it use.

    Attributes:
        heads: of q, k and v of GDN prefill.
        kv_lens: cached tokens of each sequence of XQA decode; each has a page of its own.
        also: variants that are prepared with the model's and do not run.
    """

    tokens: int = 128
    heads: tuple[int, int, int] = (16, 16, 32)
    kv_lens: tuple[int, ...] = (16, 16)
    kv_heads: int = 4
    group_size: int = 8
    head_dim: int = 128
    page_size: int = 16
    also: tuple[tuple[str, dict[str, Any]], ...] = field(default=ALSO, hash=False)


def write(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Write all of it, and return what ``problem.json`` says."""
    problems = {"gdn_prefill": _gdn(folder, sizes), "xqa_decode": _xqa(folder, sizes)}
    found = {"problems": problems, "also": [{"op": op, "axes": axes} for op, axes in sizes.also]}
    (folder / "problem.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def _gdn(folder: Path, sizes: Sizes) -> dict[str, Any]:
    case = Case(lengths=(sizes.tokens,), heads=sizes.heads)
    x = make_inputs(case, device="cpu")
    beta = x.beta.bfloat16().float()  # fla-core is given bfloat16: the same numbers for all
    reference = gated_delta_rule(
        x.q, x.k, x.v, case.lengths, scale=SCALE, alpha=x.alpha, beta=beta, initial_state=x.state
    )
    given = {"q": x.q, "k": x.k, "v": x.v, "alpha": x.alpha, "beta": beta, "initial_state": x.state}
    given["cu_seqlens"] = ends(case.lengths, case.index_dtype, device="cpu")
    results = {"o": (reference.output, torch.bfloat16), "final_state": (reference.final_state, torch.float32)}
    hq, hk, hv = case.heads
    call: dict[str, Any] = {"num_q_heads": hq, "num_k_heads": hk, "num_v_heads": hv, "head_dim": 128}
    call |= {"total_tokens": case.tokens, "num_seqs": 1, "scale": SCALE}
    return _written(folder, "gdn_prefill", case.axes, call, given, results)


def _xqa(folder: Path, sizes: Sizes) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(0)
    batch, pages = len(sizes.kv_lens), len(sizes.kv_lens) + 1
    assert max(sizes.kv_lens) <= sizes.page_size

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).bfloat16()

    q = normal(batch, sizes.kv_heads * sizes.group_size, sizes.head_dim)
    k, v = (normal(pages, sizes.page_size, sizes.kv_heads, sizes.head_dim) for _ in range(2))
    table = torch.arange(batch, 0, -1, dtype=torch.int32).reshape(batch, 1)
    given = {"q": q, "k": k, "v": v, "page_table": table}
    given["seq_lens"] = torch.tensor(sizes.kv_lens, dtype=torch.int32)
    results = {"o": (decode(q, k, v, table, given["seq_lens"]), torch.bfloat16)}
    axes = {"head_dim": sizes.head_dim, "group_size": sizes.group_size, "page_size": sizes.page_size}
    call = {"num_kv_heads": sizes.kv_heads, "num_q_heads": q.shape[1], "num_pages": pages}
    call |= {"batch_size": batch, "max_pages_per_seq": 1}
    return _written(folder, "xqa_decode", axes, call, given, results)


def _written(
    folder: Path,
    op: str,
    axes: dict[str, Any],
    call: dict[str, Any],
    given: Tensors,
    results: dict[str, tuple[torch.Tensor, torch.dtype]],
) -> dict[str, Any]:
    for name, tensor in given.items():
        (folder / f"{op}.{name}").write_bytes(raw(tensor))
    for name, (tensor, _) in results.items():
        (folder / f"{op}.{name}.expected").write_bytes(raw(tensor.float()))
    outputs = {name: _said(tensor, dtype) for name, (tensor, dtype) in results.items()}
    shown = {name: _said(tensor, tensor.dtype) for name, tensor in given.items()}
    return {"axes": axes, "sizes": call, "inputs": shown, "outputs": outputs}


def _said(tensor: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    return {"dtype": NAMES[dtype], "shape": list(tensor.shape)}
