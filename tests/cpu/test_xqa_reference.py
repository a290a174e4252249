"""The XQA decode oracle against torch's own attention in float64, and the rules that attention alone does not have."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kernseal.kernels.xqa_decode.reference import decode  # noqa: E402

B, HKV, GROUP, D, SIZE, PAGES = 3, 2, 4, 32, 16, 12
LENGTHS = [1, 33, 64]


def problem() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "q": torch.randn(B, HKV * GROUP, D, dtype=torch.float64),
        "k": torch.randn(PAGES, SIZE, HKV, D),
        "v": torch.randn(PAGES, SIZE, HKV, D),
        "page_table": torch.randperm(PAGES)[: B * 4].view(B, 4).to(torch.int32),
        "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32),
    }


def gathered(p: dict[str, Any], row: int, begin: int = 0) -> tuple[Any, Any]:
    """K and V of one sequence as [Hq, length, D]."""
    length = LENGTHS[row]
    pages = p["page_table"][row].long()
    return tuple(
        p[name][pages].reshape(-1, HKV, D)[begin:length].double().repeat_interleave(GROUP, 1).transpose(0, 1)
        for name in ("k", "v")
    )


@pytest.mark.parametrize("window", [0, 1, 20, 33, 100])
def test_it_is_attention_over_the_pages(window: int) -> None:
    p = problem()
    out = decode(**p, window=window)
    for row, length in enumerate(LENGTHS):
        keys, values = gathered(p, row, max(0, length - window) if window else 0)
        want = torch.nn.functional.scaled_dot_product_attention(p["q"][row].unsqueeze(1), keys, values)
        torch.testing.assert_close(out[row], want.squeeze(1))


def test_scales_multiply_logits_and_values() -> None:
    p = problem()
    scaled = decode(**p, q_scale=0.5, kv_scale=4.0)
    p["q"] *= 2.0
    torch.testing.assert_close(scaled, 4.0 * decode(**p))


def test_a_sink_is_a_logit_without_a_value() -> None:
    p = problem()
    sinks = torch.linspace(-1, 3, HKV * GROUP, dtype=torch.float64)
    out = decode(**p, sinks=sinks)
    for row in range(B):
        keys, values = gathered(p, row)
        logits = torch.einsum("hd,hnd->hn", p["q"][row], keys) / D**0.5
        weights = logits.exp() / (logits.exp().sum(-1, keepdim=True) + sinks.exp().unsqueeze(-1))
        torch.testing.assert_close(out[row], torch.einsum("hn,hnd->hd", weights, values))


@pytest.mark.parametrize("length", [0, -1, 4 * SIZE + 1])
def test_rows_without_a_usable_length_are_zeros(length: int) -> None:
    p = problem()
    before = decode(**p)
    p["seq_lens"][1] = length
    p["page_table"][1] = 2**31 - 1
    after = decode(**p)
    assert after[1].count_nonzero() == 0
    assert torch.equal(after[[0, 2]], before[[0, 2]])
