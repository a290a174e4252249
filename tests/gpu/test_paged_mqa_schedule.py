"""Schedules of paged MQA logits on hardware, against FlashInfer's host arithmetic in Python integers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kernseal.kernels.paged_mqa_schedule.reference import schedule  # noqa: E402

OP = "paged_mqa_schedule"
MAX_ROWS = 8192
EDGES = [0, 0, 1, 2, 3, 255, 256, 257, 258, 511, 512, 513, 8192, 100_000]
UNTOUCHED = 0x5A5A5A5A


@pytest.fixture(scope="module", params=[1, 2])
def atoms(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def op(bundle: Any, atoms: int) -> Any:
    if all(v.op != OP for v in bundle.variants()):
        pytest.skip("this bundle has no variant of paged_mqa_schedule")
    return bundle.prepare(OP, atoms=atoms)


def run(op: Any, lengths: Any, ctas: int) -> list[tuple[int, int]]:
    """The schedule, and nothing written around it."""
    whole = torch.full((ctas + 1 + 16, 2), UNTOUCHED, dtype=torch.int32, device="cuda")
    op.run(seq_lens=lengths, schedule=whole[8:-8], stream=torch.cuda.current_stream())
    torch.cuda.synchronize()
    assert whole[:8].eq(UNTOUCHED).all() and whole[-8:].eq(UNTOUCHED).all()
    return [tuple(row) for row in whole[8:-8].tolist()]


def lengths_of(rng: random.Random, batch: int) -> list[int]:
    return [rng.choice([*EDGES, rng.randrange(20_000)]) for _ in range(batch)]


def on_gpu(values: list[int]) -> Any:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("ctas", [1, 31, 32, 33, 132, 148, 160, 188, 1000])
def test_every_start_is_the_references(op: Any, atoms: int, ctas: int) -> None:
    rng = random.Random(ctas)
    most = MAX_ROWS // atoms
    for batch in (
        1,
        2,
        7,
        31,
        32,
        33,
        127,
        255,
        256,
        257,
        1000,
        most - 1,
        most,
        *rng.sample(range(1, most), 8),
    ):
        given = lengths_of(rng, batch)
        assert run(op, on_gpu(given), ctas) == schedule(given, ctas, atoms), f"batch {batch}"


@pytest.mark.parametrize("length", [0, 1, 256, 257, 2**31 - 256])
def test_equal_lengths(op: Any, atoms: int, length: int) -> None:
    given = [length] * 7
    assert run(op, on_gpu(given), 132) == schedule(given, 132, atoms)


def test_lengths_may_be_apart(op: Any, atoms: int) -> None:
    given = lengths_of(random.Random(3), 300)
    apart = torch.full((300, 5), -(2**31), dtype=torch.int32, device="cuda")
    apart[:, 2] = on_gpu(given)
    out = torch.empty(133, 2, dtype=torch.int32, device="cuda")
    op.run(
        seq_lens=apart.data_ptr() + 2 * 4,
        seq_len_stride=5,
        batch_size=300,
        schedule=out,
        stream=torch.cuda.current_stream(),
    )
    torch.cuda.synchronize()
    assert [tuple(row) for row in out.tolist()] == schedule(given, 132, atoms)


def test_an_empty_batch_writes_nothing(op: Any) -> None:
    assert run(op, on_gpu([]), 4) == [(UNTOUCHED, UNTOUCHED)] * 5


def test_a_graph_replays_with_other_lengths(op: Any, atoms: int) -> None:
    rng = random.Random(4)
    lengths, out = on_gpu([0] * 200), torch.empty(149, 2, dtype=torch.int32, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        op.run(seq_lens=lengths, schedule=out, stream=torch.cuda.current_stream())
    for _ in range(10):
        given = lengths_of(rng, 200)
        lengths.copy_(on_gpu(given))
        graph.replay()
        torch.cuda.synchronize()
        replayed = [tuple(row) for row in out.tolist()]
        assert replayed == run(op, lengths, 148) == schedule(given, 148, atoms)


def test_the_same_lengths_give_the_same_schedule(op: Any, atoms: int) -> None:
    lengths = on_gpu(lengths_of(random.Random(5), MAX_ROWS // atoms))
    first = run(op, lengths, 132)
    for _ in range(50):
        assert run(op, lengths, 132) == first


@pytest.mark.parametrize("batch", [1, 64, 512, 4096])
def test_a_hundred_schedules_in_a_graph(
    op: Any, atoms: int, batch: int, measure: Callable[..., None]
) -> None:
    lengths = on_gpu(lengths_of(random.Random(6), batch))
    out = torch.empty(133, 2, dtype=torch.int32, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(100):
            op.run(seq_lens=lengths, schedule=out, stream=torch.cuda.current_stream())
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    microseconds = start.elapsed_time(end) * 10
    measure(microseconds=microseconds)
    assert [tuple(row) for row in out.tolist()] == run(op, lengths, 132)
