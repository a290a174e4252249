"""The float64 reference of paged prefill against attention written out key by key, and that of packed keys."""

from __future__ import annotations

import math
import random

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kernseal.kernels.paged_prefill.reference import prefill  # noqa: E402
from kernseal.kernels.ragged_prefill import reference as ragged  # noqa: E402

D, HQ, HKV, PAGES = 6, 4, 2, 40


def made(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def ends(lengths: list[int]) -> list[int]:
    found = [0]
    for length in lengths:
        found.append(found[-1] + length)
    return found


def by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages: list[int], seen: int, head: int, scale: float
) -> tuple[list[float], float]:
    """One row of q over the first ``seen`` keys: o and lse."""
    if seen <= 0:
        return [0.0] * D, -math.inf
    size, kv_head = k.shape[1], head // (HQ // HKV)
    where = [(pages[t // size], t % size, kv_head) for t in range(seen)]
    weights = [math.exp(scale * sum(float(q[head, d] * k[(*at, d)]) for d in range(D))) for at in where]
    total = sum(weights)
    out = [
        sum(w * float(v[(*at, d)]) for w, at in zip(weights, where, strict=True)) / total for d in range(D)
    ]
    return out, math.log2(total)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_every_row_is_what_it_is_by_hand(causal: bool, page_size: int) -> None:
    rng = random.Random(page_size)
    rows, lens = [3, 0, 4, 1, 2, 5], [5, 4, 2, 1, 0, 5]
    spare = [0, 2, 0, 1, 3, 0]
    qo, indptr = ends(rows), ends([-(-n // page_size) + s for n, s in zip(lens, spare, strict=True)])
    indices = rng.sample(range(PAGES), indptr[-1])
    q, k, v = made(qo[-1] + 2, HQ, D), made(PAGES, page_size, HKV, D), made(PAGES, page_size, HKV, D)
    out, lse = prefill(q, k, v, qo, indptr, indices, lens, sm_scale=0.7, causal=causal)
    for b, length in enumerate(lens):
        for i in range(rows[b]):
            seen = length - rows[b] + i + 1 if causal else length
            for head in range(HQ):
                row = qo[b] + i
                o, total = by_hand(q[row], k, v, indices[indptr[b] :], seen, head, 0.7)
                assert out[row, head].tolist() == pytest.approx(o, abs=1e-12)
                assert float(lse[row, head]) == pytest.approx(total)
    assert out[qo[-1] :].isnan().all() and lse[qo[-1] :].isnan().all()


@pytest.mark.parametrize("causal", [False, True])
def test_pages_of_one_key_in_order_are_packed_keys(causal: bool) -> None:
    rows, lens = [3, 2, 7], [5, 9, 4]
    qo, kv = ends(rows), ends(lens)
    q, k, v = made(qo[-1], HQ, D), made(kv[-1], HKV, D), made(kv[-1], HKV, D)
    scale = {"sm_scale": 0.4, "causal": causal}
    packed = ragged.prefill(q, k, v, qo, kv, **scale)
    paged = prefill(q, k[:, None], v[:, None], qo, kv, range(kv[-1]), lens, **scale)
    for first, second in zip(packed, paged, strict=True):
        assert torch.equal(first, second)


def test_what_no_key_needs_changes_no_bit() -> None:
    """Entries beyond the last page, pages of nobody, and the last page's rows past the keys."""
    rows, lens, size = [3, 2], [5, 8], 4
    qo, indptr = ends(rows), [0, 4, 8]
    q, k, v = made(qo[-1], HQ, D), made(PAGES, size, HKV, D), made(PAGES, size, HKV, D)
    first = prefill(q, k, v, qo, indptr, [7, 3, 0, 0, 9, 1, 0, 0], lens, sm_scale=1.0, causal=True)
    for pool in (k, v):
        pool[3, 1:] = math.nan
        pool[[page for page in range(PAGES) if page not in (7, 3, 9, 1)]] = math.nan
    second = prefill(q, k, v, qo, indptr, [7, 3, -1, 10**9, 9, 1, -5, 77], lens, sm_scale=1.0, causal=True)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
