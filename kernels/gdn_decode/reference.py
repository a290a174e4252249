"""GDN decode in float64, token by token: the oracle of the tests. Slow and plain on purpose.

Written from the sentences in ``kernel.yaml``, not from any kernel::

    g = exp(-exp(a_log) * softplus(a + dt_bias));  beta = sigmoid(b)
    S = g * S
    S = S + beta * (v - S k) k^T
    o = scale * S q
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

EPSILON = 1e-6
SOFTPLUS_END = 20.0


@dataclass(frozen=True)
class Result:
    """What a call computes, in float64.

    Attributes:
        output: [B, T, Hv, V]; zeros for padding.
        states: [B, T, Hv, V, K], the state after each token; NaN for padding, which has none.
    """

    output: torch.Tensor
    states: torch.Tensor


def gated_delta_rule_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    pool: torch.Tensor,
    state_indices: torch.Tensor,
    *,
    scale: float,
    qk_l2norm: bool = True,
) -> Result:
    """Run the recurrence, all sequences and heads at once, one token after the other.

    Args:
        q: [B, T, Hq, D].
        k: [B, T, Hq, D].
        v: [B, T, Hv, D]; head h uses head h // (Hv / Hq) of q and k.
        a: [B, T, Hv].
        b: [B, T, Hv].
        a_log: [Hv].
        dt_bias: [Hv].
        pool: [rows, Hv, V, K].
        state_indices: [B] rows; one outside the pool marks padding.
        scale: multiplies the output.
        qk_l2norm: normalise q and k first.
    """
    q, k, v, a, b = (x.double() for x in (q, k, v, a, b))
    if qk_l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + EPSILON).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    x = a + dt_bias.double()
    softplus = torch.where(x > SOFTPLUS_END, x, x.clamp(max=SOFTPLUS_END).exp().log1p())
    g, beta = torch.exp(-a_log.double().exp() * softplus), torch.sigmoid(b)

    rows = state_indices.long()
    alive = (rows >= 0) & (rows < pool.shape[0])
    state = pool[torch.where(alive, rows, 0)].double()
    output, states = torch.empty_like(v), v.new_empty((*v.shape, k.shape[-1]))
    for t in range(v.shape[1]):
        state = state * g[:, t, :, None, None]
        error = v[:, t] - (state @ k[:, t, :, :, None])[..., 0]
        state = state + (beta[:, t, :, None] * error)[..., None] * k[:, t, :, None, :]
        output[:, t] = scale * (state @ q[:, t, :, :, None])[..., 0]
        states[:, t] = state
    output[~alive] = 0
    states[~alive] = torch.nan
    return Result(output, states)
