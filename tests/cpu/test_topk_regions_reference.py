"""The oracle of top-k against a walk through the kernel's steps in plain Python, and its edges."""

from __future__ import annotations

import math
import random
import struct
from pathlib import Path

import pytest
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.topk_regions import (
    OP,
    PARAM_SIZES,
    axes_of,
    elem_bytes,
    library_of,
    random_call,
    smem_per_block,
)

torch = pytest.importorskip("torch", reason="torch is not installed")

from kernseal.kernels.topk_regions.reference import THREADS, chunk_of, keys, regions, select  # noqa: E402

NAN, INF = float("nan"), math.inf
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def pattern(value: float) -> int:
    """The ordered integer that the kernel compares, for float32."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return ~bits & 0xFFFFFFFF if bits >> 31 else int(bits) ^ 0x80000000


def radix_select(patterns: list[int], k: int) -> int:
    """The k-th largest by four rounds of 8 bits over a histogram, as the kernel finds it."""
    prefix, remaining = 0, k
    for shift in (24, 16, 8, 0):
        mask = 0xFFFFFFFF << (shift + 8) & 0xFFFFFFFF
        histogram = [0] * 256
        for p in patterns:
            if p & mask == prefix:
                histogram[p >> shift & 255] += 1
        bucket, above = 255, 0
        while above + histogram[bucket] < remaining:
            above += histogram[bucket]
            bucket -= 1
        prefix, remaining = prefix | bucket << shift, remaining - above
    return prefix


def kernel(row: list[float], k: int, chunk: int) -> list[int]:
    """Selected indices, as thread blocks write them: each thread in turn walks its columns of the chunk."""
    if len(row) <= k:
        return list(range(len(row)))
    patterns = [pattern(value) for value in row]
    pivot = radix_select(patterns, k)
    walk = [
        begin + column
        for begin in range(0, len(row), chunk)
        for thread in range(THREADS)
        for column in range(thread, min(chunk, len(row) - begin), THREADS)
    ]
    above = [i for i in walk if patterns[i] > pivot]
    equal = [i for i in walk if patterns[i] == pivot]
    return (above + equal)[:k]


@pytest.mark.parametrize("levels", [1, 3, 50, 10**6])
def test_selection_is_that_of_the_kernels_steps(levels: int) -> None:
    rng = random.Random(levels)
    for _ in range(12):
        length, chunk = rng.randrange(1, 5000), rng.choice([1000, 1024, 1500, 2500, 9999])
        row = [float(rng.randrange(levels)) - levels / 2 for _ in range(length)]
        k = rng.choice([1, 7, 512, length, max(1, length - 1)])
        assert select(torch.tensor(row), k, chunk).tolist() == kernel(row, k, chunk)


def test_the_largest_are_those_of_torch() -> None:
    scores = torch.randn(4, 3000, generator=torch.Generator().manual_seed(1))
    found = regions(scores, 100, chunk=1024)
    expected = scores.topk(100)
    assert torch.equal(found.values.sort(descending=True).values, expected.values)
    assert torch.equal(found.indices.sort().values, expected.indices.int().sort().values)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_the_order_is_that_of_bit_patterns(dtype: torch.dtype) -> None:
    line = torch.tensor([-NAN, -INF, -2.0, -1.0, -0.0, 0.0, 1.0, 2.0, INF, NAN], dtype=dtype)
    line[0] = line[0].copysign(line[1])
    assert line.signbit().tolist() == [True] * 5 + [False] * 5
    order = keys(line)
    assert torch.equal(order, order.sort().values)
    assert order.unique().numel() == line.numel()
    assert select(line, 3, 1024).sort().values.tolist() == [7, 8, 9]


def test_keys_are_the_kernels() -> None:
    values = [-INF, -3.5, -1e-40, -0.0, 0.0, 1e-40, 7.25, INF, NAN]
    ordered = [pattern(v) - 0x80000000 for v in values]
    assert keys(torch.tensor(values)).tolist() == ordered


def test_rows_that_are_not_filled_end_with_minus_one() -> None:
    scores = torch.arange(12.0).reshape(3, 4)
    lengths = torch.tensor([0, 2, -7], dtype=torch.int32)
    offsets = torch.tensor([100, 200, 300], dtype=torch.int32)
    found = regions(scores, 3, chunk=4, lengths=lengths, offsets=offsets)
    assert found.indices.tolist() == [[-1] * 3, [200, 201, -1], [-1] * 3]
    assert found.raw_indices.tolist() == [[-1] * 3, [0, 1, -1], [-1] * 3]
    assert found.values.tolist() == [[-INF] * 3, [4.0, 5.0, -INF], [-INF] * 3]


def test_a_row_is_its_window_and_no_longer_than_max_len() -> None:
    scores = torch.tensor([[9.0, 1.0, 3.0, 2.0, 9.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    starts, lengths = torch.tensor([1, 0]), torch.tensor([3, 99])
    found = regions(scores, 2, chunk=5, lengths=lengths, row_starts=starts)
    assert found.indices.tolist() == [[1, 2], [4, 3]]


def test_indices_are_looked_up_in_pages() -> None:
    scores = torch.tensor([[0.0, 5.0, 1.0, 7.0, 6.0, 2.0]] * 2)
    table = torch.tensor([[11, 12, 13, 14]])
    starts = torch.tensor([0, 1])
    found = regions(
        *(scores, 3),
        chunk=6,
        page_table=table,
        page_size=2,
        row_to_request=torch.tensor([0, 0]),
        page_table_starts=starts,
    )
    assert found.raw_indices.tolist() == [[3, 4, 1]] * 2
    assert found.indices.tolist() == [[12 * 2 + 1, 13 * 2, 11 * 2 + 1], [13 * 2 + 1, 14 * 2, 12 * 2 + 1]]


def test_without_starts_a_page_table_begins_where_the_row_does() -> None:
    scores, table = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[10, 20, 30, 40]])
    where = {"row_starts": torch.tensor([1]), "lengths": torch.tensor([2])}
    found = regions(scores, 1, chunk=4, page_table=table, **where)
    assert (found.raw_indices.tolist(), found.indices.tolist()) == ([[1]], [[30]])


def test_chunks_are_those_that_are_launched(fake_gpu: FakeGpu, tmp_path: Path) -> None:
    fake_gpu.reset()
    for sm in ("sm_90a", "sm_120a"):
        every = [axes_of(dtype=d, deterministic=det) for d in ("f32", "bf16") for det in (False, True)]
        library = library_of(every, tmp_path / sm, sm)
        rng = random.Random(sm)
        for axes in every:
            handle, smem = library.prepare(OP, axes), smem_per_block(sm)
            for _ in range(100):
                call = random_call(rng, axes, smem // elem_bytes(axes), 132)
                fake_gpu.reset()
                fake_gpu.params(PARAM_SIZES)
                if library.c.kseal_topk_regions_run(handle, call.args(library)) != 0:
                    continue
                (launch,) = fake_gpu.log("launch")
                expected = chunk_of(
                    *(call["max_len"], call["max_len"], F32 if axes["dtype"] == "f32" else BF16),
                    row_starts="row_starts" in call.fields,
                    deterministic=axes["deterministic"],
                    smem_per_block=smem,
                )
                assert int.from_bytes(bytes.fromhex(launch["params"][14]), "little") == expected, call
            assert library.c.kseal_topk_regions_release(handle) == 0
