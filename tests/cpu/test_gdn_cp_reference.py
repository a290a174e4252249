"""Sequences cut into chunks, in float64, against the recurrence and against matrices written out."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kernseal.kernels.gdn_prefill_cp.reference import gated_delta_rule, in_chunks  # noqa: E402

D = 8


def inputs(tokens: int, hq: int, hk: int, hv: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(tokens)
    heads = max(hq, hv)
    return {
        "q": torch.randn((tokens, hq, D), generator=rng),
        "k": torch.nn.functional.normalize(torch.randn((tokens, hk, D), generator=rng), dim=-1),
        "v": torch.randn((tokens, hv, D), generator=rng),
        "alpha": torch.rand((tokens, heads), generator=rng),
        "beta": torch.rand((tokens, heads), generator=rng),
    }


@pytest.mark.parametrize("start", [True, False], ids=["init", "zero"])
@pytest.mark.parametrize("heads", [(2, 2, 4), (4, 2, 2)], ids=str)
@pytest.mark.parametrize("chunk_len", [1, 2, 7, 16, 1000])
def test_however_sequences_are_cut_the_recurrence_comes_out(
    chunk_len: int, heads: tuple[int, int, int], start: bool
) -> None:
    lengths = [16, 0, 1, 23, 0]
    x = inputs(sum(lengths), *heads)
    states = torch.randn((len(lengths), max(heads), D, D), generator=torch.Generator().manual_seed(1))
    initial = states if start else None
    want = gated_delta_rule(**x, lengths=lengths, scale=0.5, initial_state=initial)
    output, final = in_chunks(**x, lengths=lengths, scale=0.5, chunk_len=chunk_len, initial_state=initial)
    assert torch.allclose(output, want.output, rtol=0, atol=1e-12)
    assert torch.allclose(final, want.final_state, rtol=0, atol=1e-12)
    assert want.output.abs().max() > 0.1 and want.final_state.abs().max() > 0.1


def test_two_tokens_by_hand() -> None:
    """S0 = 0: S1 = b1 v1 k1^T; S2 = a2 S1 (I - b2 k2 k2^T) + b2 v2 k2^T, with numbers in place of matrices."""
    one = torch.ones((2, 1, 1))
    output, final = in_chunks(
        q=one,
        k=one * torch.tensor([[[1.0]], [[0.5]]]),
        v=one * torch.tensor([[[3.0]], [[2.0]]]),
        lengths=[2],
        scale=2.0,
        alpha=torch.tensor([[0.25], [0.5]]),
        beta=torch.tensor([[0.5], [1.0]]),
        chunk_len=1,
    )
    first = 0.5 * 3.0
    second = 0.5 * first * (1 - 1.0 * 0.25) + 1.0 * 2.0 * 0.5
    assert output.flatten().tolist() == [2 * first, 2 * second]
    assert final.flatten().tolist() == [second]


def test_no_sequences() -> None:
    output, final = in_chunks(**inputs(0, 2, 2, 4), lengths=[], scale=1.0, chunk_len=64)
    assert output.shape == (0, 4, D) and final.shape == (0, 4, D, D)
