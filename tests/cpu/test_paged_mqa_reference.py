"""The float64 reference of paged MQA logits against numbers worked out one by one."""

from __future__ import annotations

import math
import random

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kernseal.kernels.paged_mqa_logits import reference  # noqa: E402


def naive(
    q: list[list[list[list[float]]]],
    pages: list[list[list[float]]],
    scales: list[list[float]],
    weights: list[list[float]],
    table: list[list[int]],
    seq_lens: list[int],
) -> list[list[float]]:
    rows = []
    for b, length in enumerate(seq_lens):
        for t in range(len(q[b])):
            row = []
            for p in range(length - len(q[b]) + t + 1):
                page, at = table[b][p // len(pages[0])], p % len(pages[0])
                total = 0.0
                for head, weight in zip(q[b][t], weights[b * len(q[b]) + t], strict=True):
                    dot = sum(x * y for x, y in zip(head, pages[page][at], strict=True))
                    total += weight * max(0.0, dot)
                row.append(total * scales[page][at])
            rows.append(row)
    return rows


@pytest.mark.parametrize(("next_n", "seed"), [(1, 0), (2, 1), (3, 2)])
def test_every_logit_is_the_sum_over_heads(next_n: int, seed: int) -> None:
    rng = random.Random(seed)
    batch, heads, dim, size, pool, columns = 4, 3, 5, 4, 6, 3

    def numbers(*shape: int) -> list:
        if not shape:
            return rng.uniform(-2, 2)
        return [numbers(*shape[1:]) for _ in range(shape[0])]

    q, pages, scales = numbers(batch, next_n, heads, dim), numbers(pool, size, dim), numbers(pool, size)
    weights = numbers(batch * next_n, heads)
    table = [[rng.randrange(pool) for _ in range(columns)] for _ in range(batch)]
    lengths = [0, 1, size, rng.randrange(2, columns * size + 1)]
    as_double = [torch.tensor(x, dtype=torch.float64) for x in (q, pages, scales, weights)]
    found = reference.paged_mqa_logits(*as_double, torch.tensor(table), lengths)
    expected = naive(q, pages, scales, weights, table, lengths)
    assert [len(row) for row in found] == [len(row) for row in expected]
    assert [len(row) for row in found[: 2 * next_n]] == [0] * (2 * next_n - 1) + [1]
    for have, want in zip(found, expected, strict=True):
        assert have.tolist() == pytest.approx(want, abs=1e-12)
    assert any(x < 0 for row in expected for x in row)


def test_what_lies_past_a_length_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(1, 2, 4, 8, generator=generator), torch.randn(3, 4, 8, generator=generator)
    weights = torch.randn(2, 4, generator=generator)
    once = reference.paged_mqa_logits(q, k, None, weights, torch.tensor([[1, 2]]), [5])
    k[2, 1:] = math.nan
    k[0] = math.nan
    again = reference.paged_mqa_logits(q, k, None, weights, torch.tensor([[1, 2, 77]]), [5])
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_four_bit_values_are_sign_exponent_and_mantissa() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | codes[1::2] << 4).repeat(2)[None]
    powers = torch.tensor([[130]], dtype=torch.uint8)
    found = reference.unpack_fp4(packed, powers)[0]
    for code, value in enumerate(found[:16].tolist()):
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
        assert value == (-size if sign else size) * 2**3
    assert torch.equal(found[:16], found[16:])


def test_each_group_of_32_has_its_own_power() -> None:
    packed = torch.full((1, 64), 0x22, dtype=torch.uint8)  # ones
    powers = torch.tensor([[127, 128, 126, 0]], dtype=torch.uint8)
    found = reference.unpack_fp4(packed, powers)[0]
    assert found[::32].tolist() == [1.0, 2.0, 0.5, 2.0**-127]
    assert found[31::32].tolist() == found[::32].tolist()


def test_interleaved_scales_go_round_robin_through_four_runs_of_tokens() -> None:
    powers = torch.arange(128 * 4, dtype=torch.int32).reshape(1, 128, 4)
    found = reference.interleave(powers)[0].reshape(128, 4)
    for slot in range(128):
        assert found[slot].tolist() == powers[0, slot % 4 * 32 + slot // 4].tolist()


def test_a_page_is_all_values_then_all_scales() -> None:
    values = torch.arange(2 * 3 * 4, dtype=torch.uint8).reshape(2, 3, 4)
    scales = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    found = reference.pack_pages(values, scales)
    assert tuple(found.shape) == (2, 3 * (4 + 4))
    assert found[1, :12].tolist() == list(range(12, 24))
    assert found[1, 12:].view(torch.float32).tolist() == [4.0, 5.0, 6.0]
