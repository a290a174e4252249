"""What the op computes, and how, in float64: slow and plain on purpose.

``gated_delta_rule`` is the oracle, the recurrence token by token, and ``gdn_prefill``'s: one definition for both ops.
``in_chunks`` cuts every sequence first, as the kernels do, and must agree with it whatever the length of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernseal.kernels.gdn_prefill.reference import Result, gated_delta_rule

__all__ = ["Result", "gated_delta_rule", "in_chunks"]


def in_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    *,
    scale: float,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    chunk_len: int,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [T, H, D] and final states [N, H, V, K]; arguments as of ``gated_delta_rule``, states [N, H, V, K].

    A chunk acts on the state before it as S M + N: M, [K, K], is the product of its tokens' alpha (I - beta k k^T), and N,
    [V, K], is the state it makes of zeros. Chunks do not wait for each other for those. A scan gives the state before each,
    and each can then go through its tokens by itself.
    """
    heads, start = max(q.shape[1], v.shape[1]), 0
    q, k, v = (x.double().repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k, v))
    alpha, beta = alpha.double(), beta.double()
    outputs, states = torch.empty_like(v), []
    for index, length in enumerate(lengths):
        state = v.new_zeros((heads, v.shape[2], k.shape[2]))
        if initial_state is not None:
            state = state + initial_state[index].double()
        chunks = [
            range(at, min(at + chunk_len, start + length)) for at in range(start, start + length, chunk_len)
        ]
        summaries = [_summary(k, v, alpha, beta, chunk) for chunk in chunks]
        for chunk, (transfer, added) in zip(chunks, summaries, strict=True):
            outputs[chunk.start : chunk.stop] = _outputs(q, k, v, alpha, beta, chunk, state) * scale
            state = state @ transfer + added
        states.append(state)
        start += length
    return outputs, torch.stack(states) if states else v.new_zeros((0, heads, v.shape[2], k.shape[2]))


def _summary(
    k: torch.Tensor, v: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, chunk: range
) -> tuple[torch.Tensor, torch.Tensor]:
    """M and N of one chunk, [H, K, K] and [H, V, K]."""
    transfer = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).repeat(k.shape[1], 1, 1)
    added = v.new_zeros((v.shape[1], v.shape[2], k.shape[2]))
    for t in chunk:
        step = _step(k[t], alpha[t], beta[t])
        transfer = transfer @ step
        added = added @ step + _outer(beta[t][:, None] * v[t], k[t])
    return transfer, added


def _outputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    chunk: range,
    state: torch.Tensor,
) -> torch.Tensor:
    """S q for every token of one chunk, from the state before it."""
    rows = []
    for t in chunk:
        state = state @ _step(k[t], alpha[t], beta[t]) + _outer(beta[t][:, None] * v[t], k[t])
        rows.append((state @ q[t][..., None])[..., 0])
    return torch.stack(rows)


def _step(k: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """alpha (I - beta k k^T), [H, K, K]."""
    eye = torch.eye(k.shape[1], dtype=k.dtype, device=k.device)
    return alpha[:, None, None] * (eye - beta[:, None, None] * _outer(k, k))


def _outer(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a[:, :, None] * b[:, None, :]
