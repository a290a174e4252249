"""The float64 oracle against the recurrence written out for one head, and against itself."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kernseal.kernels.gdn_prefill.reference import gated_delta_rule  # noqa: E402

D = 16


def inputs(tokens: int, hq: int, hk: int, hv: int, seed: int = 0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    heads = max(hq, hv)
    return {
        "q": torch.randn((tokens, hq, D), generator=rng),
        "k": torch.nn.functional.normalize(torch.randn((tokens, hk, D), generator=rng), dim=-1),
        "v": torch.randn((tokens, hv, D), generator=rng),
        "alpha": torch.rand((tokens, heads), generator=rng),
        "beta": torch.rand((tokens, heads), generator=rng),
    }


def by_hand(
    x: dict[str, torch.Tensor], head: int, q_head: int, k_head: int, v_head: int, state: list[list[float]]
):
    """One head in Python floats: outputs and final state, S[v][k]."""
    outputs = []
    for t in range(x["q"].shape[0]):
        q, k, v = x["q"][t, q_head].tolist(), x["k"][t, k_head].tolist(), x["v"][t, v_head].tolist()
        a, b = float(x["alpha"][t, head]), float(x["beta"][t, head])
        for i in range(D):
            row = [a * s for s in state[i]]
            error = v[i] - sum(s * kk for s, kk in zip(row, k, strict=True))
            state[i] = [s + b * error * kk for s, kk in zip(row, k, strict=True)]
        outputs.append([0.5 * sum(s * qq for s, qq in zip(row, q, strict=True)) for row in state])
    return torch.tensor(outputs, dtype=torch.float64), torch.tensor(state, dtype=torch.float64)


@pytest.mark.parametrize("heads", [(2, 2, 4), (4, 2, 2), (2, 2, 2)], ids=str)
def test_one_head_by_hand(heads: tuple[int, int, int]) -> None:
    hq, hk, hv = heads
    count = max(hq, hv)
    x = inputs(9, hq, hk, hv)
    start = torch.randn((1, count, D, D), generator=torch.Generator().manual_seed(1))
    got = gated_delta_rule(**x, lengths=[9], scale=0.5, initial_state=start)
    for head in range(count):
        sources = (head * hq // count, head * hk // count, head * hv // count)
        output, state = by_hand(x, head, *sources, start[0, head].tolist())
        assert torch.allclose(got.output[:, head], output, rtol=0, atol=1e-12)
        assert torch.allclose(got.final_state[0, head], state, rtol=0, atol=1e-12)


def test_a_pack_is_its_sequences_one_by_one() -> None:
    lengths = [5, 0, 9, 1]
    x = inputs(sum(lengths), 2, 2, 4)
    states = torch.randn((4, 4, D, D), generator=torch.Generator().manual_seed(2))
    pack = gated_delta_rule(**x, lengths=lengths, scale=1.0, initial_state=states, checkpoint_every=4)
    start, checkpoints = 0, []
    for i, length in enumerate(lengths):
        part = {name: t[start : start + length] for name, t in x.items()}
        one = gated_delta_rule(
            **part, lengths=[length], scale=1.0, initial_state=states[i : i + 1], checkpoint_every=4
        )
        assert torch.allclose(pack.output[start : start + length], one.output, rtol=0, atol=1e-13)
        assert torch.allclose(pack.final_state[i], one.final_state[0], rtol=0, atol=1e-13)
        checkpoints.append(one.checkpoints)
        start += length
    assert torch.equal(pack.final_state[1], states[1].double())
    assert pack.checkpoints.shape[0] == 1 + 0 + 2 + 0
    assert torch.allclose(pack.checkpoints, torch.cat(checkpoints), rtol=0, atol=1e-13)


def test_a_checkpoint_is_the_final_state_of_the_prefix() -> None:
    x = inputs(8, 2, 2, 2)
    whole = gated_delta_rule(**x, lengths=[8], scale=1.0, checkpoint_every=4)
    prefix = gated_delta_rule(**{n: t[:4] for n, t in x.items()}, lengths=[4], scale=1.0)
    assert torch.equal(whole.checkpoints[0], prefix.final_state[0])
    assert torch.equal(whole.checkpoints[1], whole.final_state[0])


def test_absent_gates_and_state_are_ones_and_zeros() -> None:
    x = inputs(6, 2, 2, 4)
    ones = torch.ones(6, 4)
    bare = gated_delta_rule(x["q"], x["k"], x["v"], [6], scale=1.0)
    explicit = gated_delta_rule(
        x["q"], x["k"], x["v"], [6], scale=1.0, alpha=ones, beta=ones, initial_state=torch.zeros(1, 4, D, D)
    )
    assert torch.equal(bare.output, explicit.output)
    assert torch.equal(bare.final_state, explicit.final_state)
    assert math.isfinite(float(bare.output.abs().max()))
