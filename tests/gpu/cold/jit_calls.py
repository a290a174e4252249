"""Calls of libraries that compile at run time, on the problem of ``bench_cold``: one table, by library and op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from gpu.cold.problem import inputs

DEVICE = "cuda"
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32, "i64": torch.int64}
SCRATCH = 32 << 20
"""Bytes of workspace of FlashInfer's XQA: far more than so few tokens take."""

Tensors = Mapping[str, torch.Tensor]
Call = Callable[[], Tensors]


def flashinfer_gdn(module: Any, x: Tensors, sizes: Mapping[str, Any]) -> Call:
    """The kernel that kernseal ships. Left to itself FlashInfer takes its context-parallel one here, which compiles more."""

    def call() -> Tensors:
        output, state = module.chunk_gated_delta_rule(
            x["q"],
            x["k"],
            x["v"],
            g=x["alpha"],
            beta=x["beta"],
            scale=sizes["scale"],
            initial_state=x["initial_state"],
            output_final_state=True,
            cu_seqlens=x["cu_seqlens"],
            use_cp=False,
        )
        return {"o": output, "final_state": state}

    return call


def flashinfer_xqa(module: Any, x: Tensors, sizes: Mapping[str, Any]) -> Call:
    q = x["q"][:, None]  # beams
    output = torch.full_like(q, float("nan"))
    workspace = torch.zeros(SCRATCH, dtype=torch.uint8, device=DEVICE)
    semaphores = torch.zeros(1024, dtype=torch.int32, device=DEVICE).view(torch.uint32)
    seq_lens = x["seq_lens"][:, None].view(torch.uint32)

    def call() -> Tensors:
        module.xqa(
            q,
            x["k"],
            x["v"],
            x["page_table"],
            seq_lens,
            output,
            workspace,
            semaphores,
            sizes["num_kv_heads"],
            x["k"].shape[1],
        )
        return {"o": output[:, 0]}

    return call


def triton_gdn(module: Any, x: Tensors, sizes: Mapping[str, Any]) -> Call:
    q, k, v, g, beta = (
        x["q"][None],
        x["k"][None],
        x["v"][None],
        x["alpha"].log()[None],
        x["beta"][None].bfloat16(),
    )
    state = x["initial_state"].transpose(-1, -2).contiguous()

    def call() -> Tensors:
        with torch.no_grad():
            output, after = module.chunk_gated_delta_rule(
                q,
                k,
                v,
                g,
                beta,
                scale=sizes["scale"],
                initial_state=state,
                output_final_state=True,
                cu_seqlens=x["cu_seqlens"],
            )
        return {"o": output[0], "final_state": after.transpose(-1, -2)}

    return call


CALLS: Mapping[tuple[str, str], tuple[str, Callable[[Any, Tensors, Mapping[str, Any]], Call]]] = {
    ("flashinfer", "gdn_prefill"): ("flashinfer.gdn_prefill", flashinfer_gdn),
    ("flashinfer", "xqa_decode"): ("flashinfer.xqa", flashinfer_xqa),
    ("triton", "gdn_prefill"): ("fla.ops.gated_delta_rule", triton_gdn),
}
"""By library and op: the module that has the function, and what makes its call."""


def start() -> None:
    """Make the device's context."""
    torch.zeros(1, device=DEVICE)


def tensors(folder: Path, op: str, problem: Mapping[str, Any]) -> Tensors:
    """The inputs of an op, on the device."""
    return {
        name: _tensor(data, problem["inputs"][name]).to(DEVICE)
        for name, data in inputs(folder, op, problem["inputs"]).items()
    }


def on_host(call: Call) -> Tensors:
    """What the call gives, when it has."""
    return {name: output.cpu() for name, output in call().items()}


def raw(tensor: torch.Tensor) -> bytes:
    """Its elements, in order."""
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def _tensor(data: bytes, of: Mapping[str, Any]) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=DTYPES[of["dtype"]]).reshape(of["shape"])
