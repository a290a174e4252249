"""The QSA oracle against torch's own attention in float64 under a mask, and the rules of what a query token sees."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kernseal.kernels.qsa_attention.reference import attention, visible  # noqa: E402

HKV, GROUP, D, PAGE, LENGTH = 2, 3, 16, 16, 61
POSITIONS = [0, 2, 3, 7, 15, 16, 40, 60]
REQUESTS = [1, 0, 0, 1, 0, 1, 1, 0]


def problem(block_size: int, topk: int, count_current: bool) -> dict[str, Any]:
    torch.manual_seed(block_size + topk)
    rows = []
    for position in POSITIONS:
        bound = (position + count_current) // block_size
        chosen = torch.randperm(bound)[:topk]
        rows.append(torch.cat([chosen, torch.full((topk - len(chosen),), -7)]))
    pages = torch.randperm(20)[:8].view(2, 4).to(torch.int32)
    return {
        "q": torch.randn(len(POSITIONS), HKV * GROUP, D, dtype=torch.float64),
        "k": torch.randn(20, HKV, PAGE, D),
        "v": torch.randn(20, HKV, PAGE, D),
        "block_indices": torch.stack(rows).to(torch.int32),
        "block_table": pages,
        "token_to_request": torch.tensor(REQUESTS),
        "query_positions": torch.tensor(POSITIONS),
        "block_size": block_size,
        "max_seq_len": LENGTH,
        "scale": 0.3,
        "out_scale": 1.5,
        "count_current": count_current,
    }


def mask_of(p: dict[str, Any], row: int) -> Any:
    """[positions] of bool, from the sentences of kernel.yaml, position by position."""
    position, size = POSITIONS[row], p["block_size"]
    bound = (position + int(p["count_current"])) // size
    chosen = p["block_indices"][row][: min(p["block_indices"].shape[1], bound)].tolist()
    return torch.tensor([j <= position and (j // size == bound or j // size in chosen) for j in range(64)])


@pytest.mark.parametrize("count_current", [True, False])
@pytest.mark.parametrize(("block_size", "topk"), [(4, 1), (4, 3), (8, 2), (32, 1), (4, 64)])
def test_it_is_attention_under_the_mask(block_size: int, topk: int, count_current: bool) -> None:
    p = problem(block_size, topk, count_current)
    out = attention(**p)
    for row, request in enumerate(REQUESTS):
        pages = p["block_table"][request].long()
        keys, values = (
            p[n][pages].transpose(0, 1).reshape(HKV, 64, D).double().repeat_interleave(GROUP, 0)
            for n in ("k", "v")
        )
        want = torch.nn.functional.scaled_dot_product_attention(
            p["q"][row].unsqueeze(1), keys, values, attn_mask=mask_of(p, row).unsqueeze(0), scale=0.3
        )
        torch.testing.assert_close(out[row], 1.5 * want.squeeze(1))


def test_the_example_of_upstreams_documentation() -> None:
    """flashinfer.attention.prims_ts, QTokenKvBlockSparsePagedTSWrapper.plan: blocks of 8, two of them, position 23."""
    ids = torch.tensor([0, 1])
    assert visible(ids, 23, block_size=8) == list(range(16))
    assert visible(ids, 23, block_size=8, count_current=False) == list(range(24))
    assert visible(ids, 22, block_size=8) == visible(ids, 22, block_size=8, count_current=False)


@pytest.mark.parametrize(
    "change", [{"token_to_request": 2}, {"token_to_request": -1}, {"query_positions": LENGTH}]
)
def test_a_token_that_no_request_has_means_nothing(change: dict[str, int]) -> None:
    p = problem(4, 2, True)
    before = attention(**p)
    for name, value in change.items():
        p[name][3] = value
    after = attention(**p)
    assert after[3].isnan().all()
    others = [i for i in range(len(POSITIONS)) if i != 3]
    assert torch.equal(after[others], before[others])


def test_entries_past_the_bound_are_never_looked_at() -> None:
    p = problem(4, 5, True)
    before = attention(**p)
    p["block_indices"][p["block_indices"] == -7] = 2**31 - 1
    assert torch.equal(attention(**p), before)
