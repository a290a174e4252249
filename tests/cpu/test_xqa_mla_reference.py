"""The XQA MLA oracle against torch's own attention in float64, and the rules that attention alone does not have."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kernseal.kernels.xqa_mla.reference import decode  # noqa: E402

B, HEADS, ROW, LATENT, SIZE, PAGES = 3, 5, 576, 512, 16, 30
LENGTHS = [1, 33, 128]


def problem() -> dict[str, Any]:
    torch.manual_seed(0)
    pool = torch.randn(PAGES, SIZE, ROW)
    return {
        "q": torch.randn(B, HEADS, ROW, dtype=torch.float64),
        "k": pool,
        "v": pool,
        "page_table": torch.randperm(PAGES)[: B * 8].view(B, 8).to(torch.int32),
        "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32),
    }


def gathered(p: dict[str, Any], row: int) -> Any:
    """The cache rows of one sequence, [length, 576]."""
    return p["k"][p["page_table"][row].long()].reshape(-1, ROW)[: LENGTHS[row]].double()


def test_it_is_attention_of_every_head_over_the_same_rows() -> None:
    p = problem()
    out = decode(**p, q_scale=0.05)
    for row in range(B):
        rows = gathered(p, row).expand(HEADS, -1, -1)
        want = torch.nn.functional.scaled_dot_product_attention(
            p["q"][row].unsqueeze(1), rows, rows[..., :LATENT], scale=0.05
        )
        torch.testing.assert_close(out[row], want.squeeze(1))


def test_nothing_is_divided_by_a_square_root() -> None:
    p = problem()
    p["q"] *= 0.05
    weights = (p["q"][1] @ gathered(p, 1).T).softmax(-1)
    torch.testing.assert_close(decode(**p)[1], weights @ gathered(p, 1)[:, :LATENT])


def test_the_scale_of_the_cache_counts_twice() -> None:
    p = problem()
    scaled = decode(**p, q_scale=0.01, kv_scale=4.0)
    torch.testing.assert_close(scaled, 4.0 * decode(**p, q_scale=0.04))


def test_only_the_latent_of_v_counts_and_it_may_be_another_pool() -> None:
    p = problem()
    before = decode(**p, q_scale=0.05)
    p["v"] = 2.0 * p["k"]
    p["v"][..., LATENT:] = float("nan")
    torch.testing.assert_close(decode(**p, q_scale=0.05), 2.0 * before)


@pytest.mark.parametrize("length", [0, -1, 8 * SIZE + 1])
def test_rows_without_a_usable_length_are_zeros(length: int) -> None:
    p = problem()
    before = decode(**p)
    p["seq_lens"][1] = length
    p["page_table"][1] = 2**31 - 1
    after = decode(**p)
    assert after[1].count_nonzero() == 0
    assert torch.equal(after[[0, 2]], before[[0, 2]])


def test_rounding_the_weights_stays_within_the_precision_of_e4m3() -> None:
    p = problem()
    exact, rounded = decode(**p, q_scale=0.05), decode(**p, q_scale=0.05, rounded=True)
    errors = (rounded - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert errors[0].max() < 1e-12, "one position has weight 1"
    assert 1e-3 < errors[2].mean() < errors.max() < 2**-4


def test_weights_that_e4m3_has_are_not_rounded() -> None:
    p = problem()
    p["q"].zero_()
    torch.testing.assert_close(decode(**p, rounded=True), decode(**p))
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(decode(**p)[row, 0], gathered(p, row)[:, :LATENT].sum(0) / length)
