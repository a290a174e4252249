"""The float64 reference of ragged prefill against attention written out key by key, and torch's own."""

from __future__ import annotations

import math
import random

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kernseal.kernels.ragged_prefill.reference import prefill  # noqa: E402

D, V, HQ, HKV = 6, 4, 4, 2


def sequences(lengths: list[tuple[int, int]], spare: int = 2) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    rows, keys = (sum(n[i] for n in lengths) + spare for i in (0, 1))

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    return made(rows, HQ, D), made(keys, HKV, D), made(keys, HKV, V)


def ends(lengths: list[tuple[int, int]], which: int) -> list[int]:
    found = [0]
    for length in lengths:
        found.append(found[-1] + length[which])
    return found


def by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: int, head: int, scale: float
) -> tuple[list[float], float]:
    """One row of q over the first ``seen`` keys: o and lse."""
    if seen <= 0:
        return [0.0] * V, -math.inf
    kv_head = head // (HQ // HKV)
    weights = [
        math.exp(scale * sum(float(q[head, d] * k[t, kv_head, d]) for d in range(D))) for t in range(seen)
    ]
    total = sum(weights)
    out = [sum(w * float(v[t, kv_head, d]) for t, w in enumerate(weights)) / total for d in range(V)]
    return out, math.log2(total)


@pytest.mark.parametrize("causal", [False, True])
def test_every_row_is_what_it_is_by_hand(causal: bool) -> None:
    lengths = [(3, 5), (0, 4), (4, 2), (1, 1), (2, 0), (5, 5)]
    q, k, v = sequences(lengths)
    qo, kv = ends(lengths, 0), ends(lengths, 1)
    out, lse = prefill(q, k, v, qo, kv, sm_scale=0.7, causal=causal)
    for b, (rows, keys) in enumerate(lengths):
        for i in range(rows):
            seen = keys - rows + i + 1 if causal else keys
            for head in range(HQ):
                row = qo[b] + i
                o, total = by_hand(q[row], k[kv[b] :], v[kv[b] :], seen, head, 0.7)
                assert out[row, head].tolist() == pytest.approx(o, abs=1e-12)
                assert float(lse[row, head]) == pytest.approx(total)
    assert out[qo[-1] :].isnan().all() and lse[qo[-1] :].isnan().all()


def test_rows_that_see_nothing_are_exact_zeros() -> None:
    q, k, v = sequences([(3, 1)], spare=0)
    out, lse = prefill(q, k, v, [0, 3], [0, 1], sm_scale=1.0, causal=True)
    assert torch.equal(out[:2], torch.zeros(2, HQ, V, dtype=torch.float64))
    assert (lse[:2] == -math.inf).all() and lse[2].isfinite().all()


def test_it_is_torchs_attention() -> None:
    rng = random.Random(2)
    for causal in (False, True):
        length = rng.randint(1, 40)
        q, k, v = sequences([(length, length)], spare=0)
        out, _ = prefill(q, k, v, [0, length], [0, length], sm_scale=0.3, causal=causal)
        wide = [x.repeat_interleave(HQ // x.shape[1], 1).transpose(0, 1) for x in (q, k, v)]
        theirs = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=causal, scale=0.3)
        assert torch.allclose(out, theirs.transpose(0, 1), atol=1e-12)


def test_what_lies_outside_the_sequences_changes_no_bit() -> None:
    lengths = [(3, 5), (2, 4)]
    q, k, v = sequences(lengths)
    made = [prefill(q, k, v, ends(lengths, 0), ends(lengths, 1), sm_scale=1.0, causal=True)]
    for tensor, which in ((q, 0), (k, 1), (v, 1)):
        tensor[ends(lengths, which)[-1] :] = math.nan
    made.append(prefill(q, k, v, ends(lengths, 0), ends(lengths, 1), sm_scale=1.0, causal=True))
    for first, second in zip(*made, strict=True):
        assert torch.equal(first[:5], second[:5])
