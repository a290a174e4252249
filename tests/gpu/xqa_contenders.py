"""Decode attention by others, on the problems of ``xqa_problems``: FlashInfer's XQA and FA2, and a paged split-KV decode in
Triton.

The Triton one is SGLang's, as in the wheel ``sglang==0.5.6``: repository sgl-project/sglang, tag v0.5.6, path
``python/sglang/srt/layers/attention/triton_ops/decode_attention.py`` (Apache-2.0). It is read from a file that the caller
has and is no part of this repository. It takes the pool token by token, and how many splits of each sequence is the
caller's choice: the fastest of all powers of two is taken for each problem.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from gpu.contenders import Contender
from gpu.timing import device_us
from gpu.xqa_problems import DTYPES, Problem

TRITON_SHA256 = "2673adaad3d71209ff4f44788060913b1d6cce5021bbf1bf38334a09acf3d251"
FLASHINFER_WORKSPACE = 512 << 20
TILE = 32
"""Positions that SGLang's kernel takes at once: no split is shorter."""
MOST_SPLITS = 128
BLOCKS_PER_SM = 16
"""More thread blocks than this many an SM are not tried."""

Geometry = tuple[str, int, int]
"""Type of the cache, head_dim, group_size."""


def flashinfer_modules(geometries: Iterable[Geometry], page_size: int) -> list[Any]:
    """What FlashInfer would compile one at a time when it is called: its descriptions of these modules."""
    from flashinfer.jit.attention.modules import gen_batch_decode_module, gen_batch_prefill_module
    from flashinfer.jit.xqa import gen_xqa_module

    q, index, plain = torch.bfloat16, torch.int32, (0, False, False)  # no positions, window, soft cap
    found = {}
    for kv_dtype, dim, group in geometries:
        kv = DTYPES[kv_dtype]
        types = (q, kv, q, index, dim, dim, *plain)
        for made in (
            gen_xqa_module(q, kv, page_size, dim, group, False, q, 1, False),
            gen_batch_decode_module(*types),
            gen_batch_prefill_module("fa2", *types, False),
        ):
            found[made.name] = made
    return list(found.values())


def compile_flashinfer(geometries: Iterable[Geometry], page_size: int) -> int:
    """Compile those modules all at once; returns how many there are. Needs no GPU with FLASHINFER_CUDA_ARCH_LIST set."""
    from flashinfer.jit.core import build_jit_specs

    modules = flashinfer_modules(geometries, page_size)
    build_jit_specs(modules)
    return len(modules)


def length_of(p: Problem) -> int:
    """Of every sequence: these contenders are called with sequences of one length."""
    length = int(p.seq_lens[0])
    assert bool((p.seq_lens == length).all())
    return length


def pages_of(p: Problem) -> torch.Tensor:
    """[B, pages of a sequence]: the page table without room to grow."""
    return p.page_table[:, : math.ceil(length_of(p) / p.axes["page_size"])].contiguous()


def flashinfer_xqa(p: Problem) -> Contender:
    """The same kernel as ours, compiled by FlashInfer where it is called, with its own split of a sequence."""
    from flashinfer.xqa import xqa

    q, out, table = p.q.unsqueeze(1), torch.empty_like(p.q).unsqueeze(1), pages_of(p)
    lengths = p.seq_lens.view(torch.uint32).unsqueeze(1)
    workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=p.q.device)
    semaphores = torch.zeros(8 << 20, dtype=torch.uint8, device=p.q.device).view(torch.uint32)
    scale = float(p.call.get("kv_scale", 1.0))

    def call() -> None:
        xqa(
            q,
            p.k,
            p.v,
            table,
            lengths,
            out,
            workspace,
            semaphores,
            p.kv_heads,
            p.axes["page_size"],
            kv_scale=scale,
            enable_pdl=False,
        )

    return Contender(call, lambda: out.squeeze(1))


def flashinfer_fa2(p: Problem, use_tensor_cores: bool) -> Contender:
    """FlashInfer's FA2 decode, planned beforehand. The result lacks kv_scale, which would cost a kernel of its own."""
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

    device, table, size = p.q.device, pages_of(p), p.axes["page_size"]
    batch, columns = table.shape
    workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=use_tensor_cores, backend="fa2"
    )
    wrapper.plan(
        torch.arange(0, batch * columns + 1, columns, dtype=torch.int32, device=device),
        table.flatten(),
        torch.full((batch,), (length_of(p) - 1) % size + 1, dtype=torch.int32, device=device),
        p.q.shape[1],
        p.kv_heads,
        p.axes["head_dim"],
        size,
        q_data_type=p.q.dtype,
        kv_data_type=p.k.dtype,
    )
    out, scale = torch.empty_like(p.q), p.call.get("kv_scale")

    def call() -> None:
        wrapper.run(p.q, (p.k, p.v), k_scale=scale, out=out, enable_pdl=False)

    return Contender(call, lambda: out * (scale or 1.0))


def load_triton(path: Path) -> ModuleType:
    """Import SGLang's file without SGLang, of which it needs one function.

    Raises:
        ValueError: it is another version.
    """
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != TRITON_SHA256:
        raise ValueError(
            f"{path.name}: SHA-256 {found[:16]}, supported is {TRITON_SHA256[:16]} (sglang 0.5.6)"
        )
    stand_in = ModuleType("sglang.srt.utils")
    stand_in.is_hip = lambda: False  # type: ignore[attr-defined]
    for name, module in {
        "sglang": ModuleType("sglang"),
        "sglang.srt": ModuleType("sglang.srt"),
        "sglang.srt.utils": stand_in,
    }.items():
        sys.modules.setdefault(name, module)
    spec = importlib.util.spec_from_file_location("sglang_decode_attention", path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def token_rows(p: Problem) -> torch.Tensor:
    """[B * length] int64: where each token of each sequence lies in the pool."""
    size, length = p.axes["page_size"], length_of(p)
    within = torch.arange(size, device=p.q.device)
    rows = pages_of(p).long()[:, :, None] * size + within
    return rows.flatten(1)[:, :length].flatten()


def splits_to_try(batch: int, kv_heads: int, length: int, sms: int) -> list[int]:
    """Powers of two: no split shorter than a tile, no more thread blocks than could help."""
    powers = [2**i for i in range(MOST_SPLITS.bit_length())]
    return [
        n
        for n in powers
        if n == 1 or (n * TILE <= length and batch * kv_heads * n <= BLOCKS_PER_SM * sms and n <= MOST_SPLITS)
    ]


def triton_with(module: ModuleType, p: Problem, splits: int) -> Contender:
    batch, heads, dim = p.q.shape
    device, length = p.q.device, length_of(p)
    k, v = p.k.view(-1, p.kv_heads, dim), p.v.view(-1, p.kv_heads, dim)
    starts = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)
    rows, out = token_rows(p), torch.empty_like(p.q)
    partial = torch.empty(batch, heads, splits, dim, dtype=torch.float32, device=device)
    sums = torch.empty(batch, heads, splits, dtype=torch.float32, device=device)
    counts = torch.full((batch,), splits, dtype=torch.int32, device=device)
    scale = p.call.get("kv_scale", 1.0)

    def call() -> None:
        module.decode_attention_fwd(
            p.q, k, v, out, starts, rows, partial, sums, counts, splits, scale / math.sqrt(dim)
        )

    return Contender(call, lambda: out * scale)


def triton_decode(module: ModuleType, p: Problem, sms: int, chosen: Callable[[int], None]) -> Contender:
    """With the number of splits that is fastest here, of which ``chosen`` is told."""
    taken: dict[int, tuple[float, Contender]] = {}
    for splits in splits_to_try(p.q.shape[0], p.kv_heads, length_of(p), sms):
        made = triton_with(module, p, splits)
        made.call()
        taken[splits] = (statistics.median(device_us(made.call) for _ in range(3)), made)
    best = min(taken, key=lambda splits: taken[splits][0])
    chosen(best)
    return taken[best][1]
