"""The float64 oracle of GDN decode against the recurrence written out for one head, and against that of prefill."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kernseal.kernels.gdn_decode.reference import gated_delta_rule_decode  # noqa: E402
from kernseal.kernels.gdn_prefill.reference import gated_delta_rule  # noqa: E402

D, B, T, HQ, HV, ROWS = 8, 3, 4, 2, 6, 7
NAMES = ("q", "k", "v", "a", "b", "a_log", "dt_bias", "pool", "state_indices")


def inputs(rows: list[int] | None = None) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng)

    return {
        "q": normal(B, T, HQ, D),
        "k": normal(B, T, HQ, D),
        "v": normal(B, T, HV, D),
        "a": 12 * normal(B, T, HV),
        "b": normal(B, T, HV),
        "a_log": normal(HV) - 3,
        "dt_bias": normal(HV),
        "pool": normal(ROWS, HV, D, D),
        "state_indices": torch.tensor([5, 0, 2] if rows is None else rows),
    }


def decode(x: dict[str, torch.Tensor], **options: Any) -> Any:
    return gated_delta_rule_decode(*(x[name] for name in NAMES), scale=0.5, **options)


def by_hand(x: dict[str, torch.Tensor], sequence: int, head: int, norm: bool) -> tuple[Any, Any]:
    """One head of one sequence in Python floats: outputs, and the state after each token, S[v][k]."""
    state = x["pool"][x["state_indices"][sequence], head].tolist()
    outputs, states = [], []
    for t in range(T):
        q, k = (x[name][sequence, t, head // (HV // HQ)].tolist() for name in ("q", "k"))
        if norm:
            q, k = ([e / math.sqrt(sum(f * f for f in row) + 1e-6) for e in row] for row in (q, k))
        z = float(x["a"][sequence, t, head].double() + x["dt_bias"][head].double())
        softplus = z if z > 20 else math.log1p(math.exp(z))
        g = math.exp(-math.exp(float(x["a_log"][head])) * softplus)
        beta = 1 / (1 + math.exp(-float(x["b"][sequence, t, head])))
        for i, v in enumerate(x["v"][sequence, t, head].tolist()):
            row = [g * s for s in state[i]]
            error = v - sum(s * kk for s, kk in zip(row, k, strict=True))
            state[i] = [s + beta * error * kk for s, kk in zip(row, k, strict=True)]
        outputs.append([0.5 * sum(s * qq for s, qq in zip(row, q, strict=True)) for row in state])
        states.append([list(row) for row in state])
    return torch.tensor(outputs, dtype=torch.float64), torch.tensor(states, dtype=torch.float64)


@pytest.mark.parametrize("norm", [True, False])
def test_every_head_by_hand(norm: bool) -> None:
    x = inputs()
    assert bool((x["a"] + x["dt_bias"] > 20).any()) and bool((x["a"] + x["dt_bias"] < 20).any())
    got = decode(x, qk_l2norm=norm)
    for sequence in range(B):
        for head in range(HV):
            output, states = by_hand(x, sequence, head, norm)
            assert torch.allclose(got.output[sequence, :, head], output, rtol=0, atol=1e-12)
            assert torch.allclose(got.states[sequence, :, head], states, rtol=0, atol=1e-12)


def test_a_step_is_a_short_prefill_with_the_gates_computed() -> None:
    x = inputs()
    got = decode(x, qk_l2norm=False)
    softplus = torch.nn.functional.softplus(x["a"].double() + x["dt_bias"].double())
    want = gated_delta_rule(
        *(x[name].flatten(0, 1) for name in ("q", "k", "v")),
        [T] * B,
        scale=0.5,
        alpha=torch.exp(-x["a_log"].double().exp() * softplus).flatten(0, 1),
        beta=torch.sigmoid(x["b"].double()).flatten(0, 1),
        initial_state=x["pool"][x["state_indices"]],
    )
    assert torch.allclose(got.output.flatten(0, 1), want.output, rtol=0, atol=1e-7)
    assert torch.allclose(got.states[:, -1], want.final_state, rtol=0, atol=1e-7)


@pytest.mark.parametrize("row", [-1, -(2**31), ROWS, 2**40])
def test_padding_has_zeros_and_no_state_whatever_its_tokens_are(row: int) -> None:
    x = inputs([5, row, 2])
    for name in ("q", "k", "v", "a", "b"):
        x[name][1] = math.nan
    got, want = decode(x), decode(inputs())
    assert not bool(got.output[1].count_nonzero()) and bool(got.states[1].isnan().all())
    assert torch.equal(got.output[[0, 2]], want.output[[0, 2]])
    assert torch.equal(got.states[[0, 2]], want.states[[0, 2]])


def test_a_batch_of_none() -> None:
    x = inputs([])
    x |= {name: x[name][:0] for name in ("q", "k", "v", "a", "b")}
    assert decode(x).output.shape == (0, T, HV, D)
