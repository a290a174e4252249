"""The oracle of attention over selected positions against torch's own under a mask, and what a row does not see."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kernseal.kernels.qsa_selected.reference import attention  # noqa: E402

HKV, GROUP, D, PAGE, PAGES = 2, 3, 16, 5, 12
REQUESTS = [1, 0, 0, 1]
POSITIONS = [0, 7, 19, 14]
LENGTH = 20


def problem() -> dict[str, Any]:
    torch.manual_seed(3)
    rows = []
    for position in POSITIONS:
        chosen = torch.randperm(LENGTH)[:9]
        rows.append(torch.cat([chosen, torch.tensor([-1, position, LENGTH, 2**31 - 1, -(2**31)])]))
        rows[-1][:9][chosen == position] = -1  # each position once
    return {
        "q": torch.randn(4, HKV * GROUP, D, dtype=torch.float64),
        "k": torch.randn(PAGES, PAGE, HKV, D),
        "v": torch.randn(PAGES, PAGE, HKV, D),
        "selected_positions": torch.stack(rows).to(torch.int32),
        "block_table": torch.randperm(PAGES)[:8].view(2, 4).to(torch.int32),
        "token_to_request": torch.tensor(REQUESTS),
        "query_positions": torch.tensor(POSITIONS),
        "scale": 0.3,
    }


def dense(p: dict[str, Any], row: int, name: str) -> Any:
    """[Hq, LENGTH, D] of the row's request, float64."""
    pages = p["block_table"][REQUESTS[row]].long()
    return p[name][pages].reshape(LENGTH, HKV, D).transpose(0, 1).double().repeat_interleave(GROUP, 0)


def test_it_is_attention_under_the_mask() -> None:
    p = problem()
    out, lse = attention(**p, k_descale=0.5, v_descale=1.5)
    for row, position in enumerate(POSITIONS):
        chosen = p["selected_positions"][row].tolist()
        mask = torch.tensor([j <= position and j in chosen for j in range(LENGTH)])
        assert mask.any()
        q, k, v = p["q"][row].unsqueeze(1), 0.5 * dense(p, row, "k"), 1.5 * dense(p, row, "v")
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[None], scale=0.3)
        torch.testing.assert_close(out[row], want.squeeze(1))
        logits = (0.3 * q @ k.transpose(1, 2)).squeeze(1).masked_fill(~mask, -torch.inf)
        torch.testing.assert_close(lse[row].exp(), logits.exp().sum(-1))


@pytest.mark.parametrize(
    ("name", "value"),
    [("token_to_request", 2), ("token_to_request", -1), ("query_positions", -1), ("selected_positions", -1)],
)
def test_a_row_that_sees_nothing_is_zero(name: str, value: int) -> None:
    p = problem()
    before, _ = attention(**p)
    p[name][2] = value
    out, lse = attention(**p)
    assert out[2].eq(0).all() and lse[2].eq(-torch.inf).all()
    others = [0, 1, 3]
    assert torch.equal(out[others], before[others])


@pytest.mark.parametrize("page", [-1, PAGES, 2**31 - 1])
def test_a_page_that_is_none_is_not_seen(page: int) -> None:
    p, without = problem(), problem()
    p["block_table"][0, 1] = page
    gone = without["selected_positions"]
    gone[1:3][(gone[1:3] >= PAGE) & (gone[1:3] < 2 * PAGE)] = -1
    assert not torch.equal(gone, p["selected_positions"])
    for mine, theirs in zip(attention(**p), attention(**without), strict=True):
        assert torch.equal(mine, theirs)


def test_a_position_that_stands_twice_counts_twice() -> None:
    p = problem()
    p["selected_positions"][:] = -1
    p["selected_positions"][2, :3] = torch.tensor([4, 4, 9])
    out, lse = attention(**p)
    logits = (0.3 * p["q"][2].unsqueeze(1) @ dense(p, 2, "k").transpose(1, 2)).squeeze(1)[:, [4, 4, 9]]
    want = torch.einsum("hn,hnd->hd", logits.softmax(-1), dense(p, 2, "v")[:, [4, 4, 9]])
    torch.testing.assert_close(out[2], want)
    torch.testing.assert_close(lse[2], logits.logsumexp(-1))
