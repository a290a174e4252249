"""The gated delta rule in float64, token by token: the oracle of the tests. Slow and plain on purpose.

Written from the recurrence in ``kernel.yaml``, not from any kernel::

    S = alpha_t * S
    S = S + beta_t * (v_t - S k_t) k_t^T
    o_t = scale * S q_t
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Result:
    """What a call computes, in float64.

    Attributes:
        output: [T, H, D].
        final_state: [N, H, V, K].
        checkpoints: [count, H, V, K], states after each ``checkpoint_every`` tokens, in order of sequence.
    """

    output: torch.Tensor
    final_state: torch.Tensor
    checkpoints: torch.Tensor


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    *,
    scale: float,
    alpha: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    checkpoint_every: int = 0,
) -> Result:
    """Run the recurrence over packed sequences, all sequences and heads at once, one token after the other.

    Args:
        q: [T, Hq, D]; head h of H = max(Hq, Hv) uses q head h // (H / Hq).
        k: [T, Hk, D], likewise.
        v: [T, Hv, D], likewise.
        lengths: tokens of each sequence; zeros are allowed.
        scale: multiplies the output.
        alpha: [T, H] LINEAR decay; None is 1.
        beta: [T, H]; None is 1.
        initial_state: [N, H, V, K]; None is zeros.
        checkpoint_every: 0 for no checkpoints.
    """
    heads = max(q.shape[1], v.shape[1])
    q, k, v = (_spread(x.double(), heads) for x in (q, k, v))
    ones = torch.ones(q.shape[:2], dtype=torch.float64, device=q.device)
    alpha = ones if alpha is None else alpha.double()
    beta = ones if beta is None else beta.double()
    shape = (len(lengths), heads, v.shape[2], k.shape[2])
    state = torch.zeros(shape, dtype=torch.float64, device=q.device)
    if initial_state is not None:
        state += initial_state.double()
    output = torch.empty_like(v)
    kept: list[list[torch.Tensor]] = [[] for _ in lengths]

    # Longest first, so that the sequences still running at step t are a prefix.
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    starts = [sum(lengths[:i]) for i in order]
    first = torch.tensor(starts, dtype=torch.int64, device=q.device)
    running = state[order]
    for t in range(max(lengths, default=0)):
        count = sum(length > t for length in lengths)
        row = first[:count] + t
        s = running[:count] * alpha[row][..., None, None]
        error = v[row] - (s @ k[row][..., None])[..., 0]
        s = s + (beta[row][..., None] * error)[..., None] * k[row][..., None, :]
        output[row] = scale * (s @ q[row][..., None])[..., 0]
        running[:count] = s
        if checkpoint_every and (t + 1) % checkpoint_every == 0:
            for place in range(count):
                kept[order[place]].append(s[place].clone())
    state[order] = running
    flat = [one for sequence in kept for one in sequence]
    checkpoints = torch.stack(flat) if flat else state.new_zeros((0, *shape[1:]))
    return Result(output, state, checkpoints)


def _spread(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1)
