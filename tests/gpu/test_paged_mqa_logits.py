"""Paged MQA logits on hardware: numbers against a float64 oracle, and what must never change a bit.

In every problem the rows of the pool that no sequence has are NaN, and the page numbers that no length reaches do not exist.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu.paged_mqa_problems import (  # noqa: E402
    LENGTHS,
    OP,
    SEGMENT,
    UNTOUCHED,
    Runner,
    axes_of,
    make,
    output,
    same_bits,
    specified,
    worst_row,
)
from gpu.variants import variants_of  # noqa: E402

LIMIT = {"f32": 1e-3, "f16": 1e-2, "bf16": 1e-2}
"""Largest error of a row, see ``worst_row``, by the coarsest type of the variant. Hopper sums e4m3 products in fewer bits
than float32 has, hence more than float32's own."""

Measure = Callable[..., None]
Axes = dict[str, Any]


@pytest.fixture(scope="module")
def variants(bundle: Any) -> list[Axes]:
    return [axes_of(variant) for variant in variants_of(bundle, OP)]


@pytest.fixture(scope="module", params=["e4m3-1", "e4m3-2", "e4m3-4", "fp4-1", "fp4-4"])
def axes(request: pytest.FixtureRequest, variants: list[Axes]) -> Axes:
    """One variant of each cache type, with one query position and with several."""
    kv_dtype, next_n = request.param.split("-")
    found = [a for a in variants if a["kv_dtype"] == kv_dtype and a["next_n"] == int(next_n)]
    if not found:
        pytest.skip(f"this bundle has no variant of paged_mqa_logits for {request.param}")
    return found[0]


@pytest.fixture(scope="module")
def runner(bundle: Any, axes: Axes) -> Runner:
    return Runner(bundle, axes)


def limit_of(axes: Axes) -> float:
    return max(LIMIT[axes[name]] for name in ("out_dtype", "epi_dtype", "acc_dtype"))


def test_logits_agree_with_the_oracle(bundle: Any, variants: list[Axes], measure: Measure) -> None:
    wrong = {}
    for axes in variants:
        p = make(axes, LENGTHS)
        error = worst_row(p, Runner(bundle, axes).run(p))
        name = "_".join(str(value) for value in axes.values())
        measure(**{name: error})
        if not error <= limit_of(axes):
            wrong[name] = error
    assert wrong == {}


def test_logits_of_long_sequences(runner: Runner, axes: Axes, measure: Measure) -> None:
    p = make(axes, [131072, 65535, 1, 100_001])
    error = worst_row(p, runner.run(p))
    measure(worst=error)
    assert error <= limit_of(axes)


def test_many_sequences_with_empty_ones_between(runner: Runner, axes: Axes, measure: Measure) -> None:
    rng = random.Random(1)
    p = make(axes, [rng.choice([0, 0, 1, 256, 257, rng.randrange(3000)]) for _ in range(300)])
    error = worst_row(p, runner.run(p))
    measure(worst=error)
    assert error <= limit_of(axes)


def test_no_column_past_the_segment_of_a_length_is_written(bundle: Any, variants: list[Axes]) -> None:
    for axes in variants:
        p = make(axes, LENGTHS)
        out = Runner(bundle, axes).run(p, longest=max(LENGTHS) + 1000)
        for b, length in enumerate(LENGTHS):
            rows = out[b * axes["next_n"] : (b + 1) * axes["next_n"]]
            assert rows[:, -(-length // SEGMENT) * SEGMENT :].eq(UNTOUCHED).all(), f"{axes} {length}"


def test_nothing_around_the_logits_is_written(runner: Runner, axes: Axes) -> None:
    p = make(axes, LENGTHS)
    longest = max(LENGTHS)
    plain = output(p, longest)
    runner.launch(p, plain, longest)
    rows, width = plain.shape
    whole = torch.full((rows + 2, width + 512), UNTOUCHED, dtype=plain.dtype, device="cuda")
    inside = whole[1:-1, :width]
    runner.launch(p, inside, longest)
    torch.cuda.synchronize()
    assert same_bits(specified(p, inside), specified(p, plain))
    assert whole[0].eq(UNTOUCHED).all() and whole[-1].eq(UNTOUCHED).all()
    assert whole[:, width:].eq(UNTOUCHED).all()


@pytest.mark.parametrize("padding", [-1, 2**31 - 1, -(2**31), 3])
def test_padding_of_the_page_table_changes_no_bit(runner: Runner, axes: Axes, padding: int) -> None:
    p = make(axes, LENGTHS, columns=300)
    before = specified(p, runner.run(p))
    p.page_table[p.page_table == 2**31 - 1] = padding
    assert same_bits(specified(p, runner.run(p)), before)


@pytest.mark.parametrize("fill", [0x00, 0x7F, 0xFF])
def test_pages_that_no_sequence_has_change_no_bit(runner: Runner, axes: Axes, fill: int) -> None:
    p = make(axes, LENGTHS)
    before = specified(p, runner.run(p))
    size = axes["page_size"]
    used = {int(n) for row, length in enumerate(LENGTHS) for n in p.page_table[row, : -(-length // size)]}
    free = [page for page in range(p.pages.shape[0]) if page not in used]
    p.pages[free] = fill
    assert same_bits(specified(p, runner.run(p)), before)


def test_a_request_gets_the_same_bits_in_every_batch(runner: Runner, axes: Axes) -> None:
    p, next_n = make(axes, LENGTHS), axes["next_n"]
    together = specified(p, runner.run(p))
    for row in range(len(LENGTHS)):
        alone = p.rows([row])
        mine = together[row * next_n : (row + 1) * next_n]
        assert same_bits(specified(alone, runner.run(alone)), mine), LENGTHS[row]
    chosen = random.Random(2).sample(range(len(LENGTHS)), 9)
    some = p.rows(chosen)
    theirs = [t for row in chosen for t in together[row * next_n : (row + 1) * next_n]]
    assert same_bits(specified(some, runner.run(some)), theirs)


def test_the_same_call_gives_the_same_bits_again(bundle: Any, variants: list[Axes]) -> None:
    for axes in variants:
        p, made = make(axes, LENGTHS), Runner(bundle, axes)
        first = specified(p, made.run(p))
        for _ in range(20):
            assert same_bits(specified(p, made.run(p)), first)


@pytest.mark.parametrize("ctas", [1, 2, 57])
def test_the_number_of_ctas_changes_no_bit(runner: Runner, axes: Axes, ctas: int) -> None:
    p = make(axes, LENGTHS)
    before = specified(p, runner.run(p))
    if runner.schedules is None:
        again = runner.run(p, num_ctas=ctas)
    else:
        schedule = torch.empty(ctas + 1, 2, dtype=torch.int32, device="cuda")
        runner.schedules.run(seq_lens=p.seq_lens, schedule=schedule, stream=torch.cuda.current_stream())
        again = runner.run(p, schedule=schedule)
    assert same_bits(specified(p, again), before)


def test_a_pool_of_all_layers_is_its_stride(runner: Runner, axes: Axes) -> None:
    p = make(axes, LENGTHS)
    before = specified(p, runner.run(p))
    layers = torch.full((p.pages.shape[0], 3, p.pages.shape[1]), 0xFF, dtype=torch.uint8, device="cuda")
    layers[:, 1] = p.pages
    p.pages = layers[:, 1]
    assert same_bits(specified(p, runner.run(p)), before)


def test_a_graph_replays_with_rewritten_buffers(runner: Runner, axes: Axes) -> None:
    columns, longest = 64, 64 * axes["page_size"]
    p = make(axes, [700, 30, 0, 1024], columns=columns)
    pool = torch.zeros(400, p.pages.shape[1], dtype=torch.uint8, device="cuda")
    out = output(p, longest)
    pool[: p.pages.shape[0]] = p.pages
    p.pages = pool
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        runner.launch(p, out, longest)
    for seed, lengths in enumerate([[700, 30, 0, 1024], [0, 1024, 5, 16], [1, 0, 0, 257], [0, 0, 0, 0]]):
        other = make(axes, lengths, seed=seed + 1, columns=columns)
        for name in ("q", "q_scales", "weights", "seq_lens", "page_table"):
            if getattr(p, name) is not None:
                getattr(p, name).copy_(getattr(other, name))
        pool[: other.pages.shape[0]] = other.pages
        out.fill_(UNTOUCHED)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(specified(p, out), specified(p, runner.run(p, longest)))
        assert worst_row(other, out) <= limit_of(axes)


def test_churn_of_a_serving_loop_stays_correct(runner: Runner, axes: Axes, measure: Measure) -> None:
    rng, worst = random.Random(9), 0.0
    for step in range(60):
        lengths = [rng.choice([0, rng.randrange(1, 4096)]) for _ in range(rng.randrange(1, 40))]
        p = make(axes, lengths, seed=step)
        worst = max(worst, worst_row(p, runner.run(p)))
    measure(worst=worst)
    assert worst <= limit_of(axes)


def test_an_empty_batch_does_nothing(runner: Runner, axes: Axes) -> None:
    p = make(axes, [5])
    assert runner.run(p.rows([]), longest=10).shape[0] == 0


def test_a_batch_of_empty_sequences_writes_nothing(runner: Runner, axes: Axes) -> None:
    p = make(axes, [0] * 9)
    assert runner.run(p, longest=1000).eq(UNTOUCHED).all()
