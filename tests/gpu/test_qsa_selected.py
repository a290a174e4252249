"""Attention over selected positions on hardware: numbers against a float64 oracle, and what must never change a bit.

Runs on Hopper from the bundle of SM 12.0 that is rebuilt for it. In every problem the cache is NaN where no row looks, and
tables have numbers of pages that do not exist.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu.qsa_selected_problems import (  # noqa: E402
    LIMIT,
    OP,
    SCALE,
    D,
    Problem,
    axes_of,
    make,
    same_bits,
)

WIDTH = 2051
COUNTS = [0, 1, 2, 31, 32, 33, 63, 64, 65, 511, 513, 1000, 2048, 2051]
"""Around the edges of a step (32) and of what 16 to 64 splits take at a time."""
LENGTH = 5000

Axes = dict[str, Any]
Measure = Callable[..., None]


@pytest.fixture(scope="module")
def variants(any_bundle: Any) -> list[Axes]:
    found = [axes_of(v) for v in any_bundle.variants() if v.op == OP]
    if not found:
        pytest.skip("this bundle has no variant of qsa_selected")
    return found


def heads_of(axes: Axes) -> tuple[int, int]:
    return (axes["tile_q"] * 3 // 4 * 2, 2)


def problem(axes: Axes, counts: list[int], **changes: Any) -> Problem:
    sizes: Axes = {"width": WIDTH, "heads": heads_of(axes), "page_size": 64, "length": LENGTH}
    return make(axes, counts, **sizes | changes)


def launch(op: Any, p: Problem, out: Any, workspace: Any = None, splits: int = 0) -> None:
    given = {**p.tensors(), **out, "splits": splits, "scale": SCALE}
    if workspace is None:
        size = op.workspace_size(**given, stream=0)
        workspace = torch.full((max(size, 256),), 0xFF, dtype=torch.uint8, device="cuda")
    op(**given, workspace=workspace)


def run(bundle: Any, p: Problem, splits: int = 0) -> Any:
    out = p.outputs()
    launch(bundle.prepare(OP, **p.axes), p, out, splits=splits)
    torch.cuda.synchronize()
    return out


def some(variants: list[Axes]) -> list[Axes]:
    """One variant of each kind of cache."""
    return list({axes["kv_dtype"]: axes for axes in variants}.values())


@pytest.mark.parametrize("splits", [0, 1, 2, 3, 16, 32, 64])
def test_it_agrees_with_the_oracle(
    any_bundle: Any, variants: list[Axes], measure: Measure, splits: int
) -> None:
    wrong = {}
    for axes in variants:
        p = problem(axes, COUNTS)
        error = p.check(run(any_bundle, p, splits))
        name = "-".join(str(value) for value in axes.values())
        measure(**{name: error})
        if not error <= LIMIT:
            wrong[name] = error
    assert wrong == {}


@pytest.mark.parametrize("rows", [1, 4, 5, 63, 64, 65, 300])
def test_every_number_of_rows_that_changes_the_splits(
    any_bundle: Any, variants: list[Axes], rows: int
) -> None:
    for axes in variants:
        rng = random.Random(rows)
        p = problem(axes, [rng.choice([*COUNTS, rng.randrange(500)]) for _ in range(rows)])
        assert p.check(run(any_bundle, p)) <= LIMIT, axes


@pytest.mark.parametrize("heads", [(1, 1), (16, 1), (24, 2), (5, 5), (16, 8)])
@pytest.mark.parametrize(("page_size", "width"), [(1, 40), (16, 2055), (100, 33), (256, 1)])
def test_sizes_of_all_kinds(
    any_bundle: Any, variants: list[Axes], heads: tuple[int, int], page_size: int, width: int
) -> None:
    for axes in some(variants):
        counts = [0, 1, min(width, 33), width]
        p = problem(axes, counts, heads=heads, page_size=page_size, width=width, length=2100)
        for splits in (0, 1):
            assert p.check(run(any_bundle, p, splits)) <= LIMIT, axes


def test_a_row_has_the_same_bits_in_every_call(any_bundle: Any, variants: list[Axes]) -> None:
    for axes in variants:
        p = problem(axes, COUNTS)
        for splits in (1, 3, 16):
            together = run(any_bundle, p, splits)
            for rows in ([3], [13, 0, 7], list(reversed(range(p.rows)))):
                theirs = {name: None if t is None else t[rows] for name, t in together.items()}
                assert same_bits(run(any_bundle, p.chosen(rows), splits), theirs), axes


def test_the_same_call_gives_the_same_bits_again(any_bundle: Any, variants: list[Axes]) -> None:
    for axes in variants:
        p = problem(axes, COUNTS * 4)
        first = run(any_bundle, p)
        assert all(same_bits(run(any_bundle, p), first) for _ in range(20)), axes


def test_what_counts_for_nothing_changes_no_bit(any_bundle: Any, variants: list[Axes]) -> None:
    for axes in some(variants):
        p = problem(axes, COUNTS)
        before = run(any_bundle, p)
        p.selected_positions[p.selected_positions > p.query_positions[:, None]] = -1
        p.block_table[(p.block_table < 0) | (p.block_table >= p.k.shape[0])] = 2**31 - 1
        assert same_bits(run(any_bundle, p), before), axes


def test_a_layer_of_a_shared_cache_is_its_strides(any_bundle: Any, variants: list[Axes]) -> None:
    for axes in some(variants):
        p = problem(axes, COUNTS)
        plain = run(any_bundle, p)
        pages, size, heads, _ = p.k.shape
        whole = torch.full((pages, 3, 2, heads, size, D), torch.nan).to(p.k.dtype).cuda()
        for index, cache in enumerate((p.k, p.v)):
            whole[:, 1, index] = cache.transpose(1, 2)
        p.k, p.v = (whole[:, 1, index].transpose(1, 2) for index in range(2))
        assert same_bits(run(any_bundle, p), plain), axes


def test_nothing_around_the_output_is_written(any_bundle: Any, variants: list[Axes]) -> None:
    for axes in some(variants):
        for counts in (COUNTS, COUNTS * 5):
            p = problem(axes, counts)
            whole = {n: None if t is None else torch.cat([t, t, t]) for n, t in p.outputs().items()}
            inside = {n: None if t is None else t[p.rows : 2 * p.rows] for n, t in whole.items()}
            launch(any_bundle.prepare(OP, **axes), p, inside)
            torch.cuda.synchronize()
            assert same_bits(inside, run(any_bundle, p))
            for tensor in (t for t in whole.values() if t is not None):
                assert tensor[: p.rows].isnan().all() and tensor[2 * p.rows :].isnan().all()


def test_pages_beyond_what_int32_counts_are_reached(any_bundle: Any, variants: list[Axes]) -> None:
    """A pool of more than 2^31 elements: pages far apart, most of it never touched."""
    for axes in some(variants):
        p = problem(axes, [100, 1, 2051])
        plain = run(any_bundle, p)
        stride = 2**33 // p.k.shape[0] // 16 * 16
        for name in ("k", "v"):
            cache = getattr(p, name)
            sparse = torch.empty(stride * cache.shape[0], dtype=torch.uint8, device="cuda")
            far = sparse.view(cache.dtype).as_strided(
                cache.shape, (stride // cache.itemsize, *cache.stride()[1:])
            )
            far.copy_(cache)
            setattr(p, name, far)
        assert same_bits(run(any_bundle, p), plain), axes


@pytest.mark.parametrize("rows", [1, 14, 100])
def test_a_graph_replays_with_rewritten_buffers(any_bundle: Any, variants: list[Axes], rows: int) -> None:
    for axes in some(variants):

        def other(seed: int, axes: Axes = axes) -> Problem:
            rng = random.Random(seed)
            return problem(axes, [rng.choice(COUNTS) for _ in range(rows)], seed=seed)

        p = other(1)
        out = p.outputs()
        op = any_bundle.prepare(OP, **axes)
        workspace = torch.empty(2**26, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            launch(op, p, out, workspace)
        for seed in (1, 2, 3):
            fresh = other(seed)
            for name, tensor in p.tensors().items():
                if tensor is not None:
                    tensor.copy_(fresh.tensors()[name])
            for tensor in (t for t in out.values() if t is not None):
                tensor.fill_(torch.nan)
            workspace.fill_(0xFF)
            graph.replay()
            torch.cuda.synchronize()
            assert same_bits(out, run(any_bundle, fresh)), axes


def test_no_rows_do_nothing(any_bundle: Any, variants: list[Axes]) -> None:
    for axes in variants:
        assert run(any_bundle, problem(axes, [5]).chosen([]))["o"].shape[0] == 0


def test_requests_that_are_none_give_zeros(any_bundle: Any, variants: list[Axes]) -> None:
    for axes in variants:
        p = problem(axes, COUNTS)
        p.token_to_request[4], p.token_to_request[6] = -1, p.block_table.shape[0]
        p.query_positions[8] = -1
        for splits in (0, 1):
            out = run(any_bundle, p, splits)
            assert out["o"][[4, 6, 8]].eq(0).all()
            assert p.check(out) <= LIMIT, axes


def test_churn_of_a_serving_loop_stays_correct(
    any_bundle: Any, variants: list[Axes], measure: Measure
) -> None:
    rng, worst = random.Random(9), 0.0
    for step in range(40):
        axes = rng.choice(variants)
        counts = [rng.choice([0, rng.randrange(1, 700)]) for _ in range(rng.choice([1, 3, 40, 90]))]
        p = problem(axes, counts, seed=step, width=rng.choice([700, 2051]), length=1500)
        worst = max(worst, p.check(run(any_bundle, p)))
    measure(worst=worst)
    assert worst <= LIMIT
