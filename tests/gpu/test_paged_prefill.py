"""Paged prefill on hardware: numbers against a float64 oracle, and what must never change a bit.

In every problem the rows of q past the last sequence, the rows of the last page past a sequence's length and the pages of no
sequence are NaN, as are plans, outputs and scratch before a run; entries of the page table that no key needs are no pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu.fa2_problems import (  # noqa: E402
    LENGTHS,
    SPLIT_LIMIT,
    i32,
    tiles,
    unseen_are_zeros,
    worst_lse,
    worst_row,
)
from gpu.paged_prefill_problems import (  # noqa: E402
    LAYOUTS,
    Problem,
    Runner,
    axes_of,
    div_up,
    make,
    name_of,
    oracle,
)
from gpu.variants import variants_of  # noqa: E402

LIMIT = {"bf16": 8e-3, "f16": 1.5e-3}
"""Largest ||error|| / ||reference|| of one head of one row: the softmax weights and o are rounded to the element type."""
LSE_LIMIT = {"bf16": 4e-3, "f16": 5e-4}
"""In units of log2: the sum is of weights that are rounded to the element type, by a relative 2^-9 or 2^-12 at most."""
CHUNKS = (0, 128, -1)
SHAPES = (
    *(((4, 4), 16, "NHD"), ((4, 2), 1, "HND"), ((6, 2), 5, "NHD"), ((8, 2), 64, "HND")),
    *(((5, 1), 16, "layers"), ((12, 2), 5, "HND"), ((7, 1), 64, "one tensor"), ((8, 1), 1, "NHD")),
)
"""Heads of q and of k, page size and layout: groups of 1 to 8, so that tiles end within a row's heads."""
FAR = 2**30 + 8
"""Elements from one page to the next: the third is beyond what int32 counts."""

Measure = Callable[..., None]
Axes = dict[str, Any]


@pytest.fixture(scope="module")
def bundle(any_bundle: Any) -> Any:
    """Every bundle that has variants of this op, and so every test here on all of them."""
    return any_bundle


@pytest.fixture(scope="module")
def runners(bundle: Any) -> list[Runner]:
    return [Runner(bundle, axes_of(variant)) for variant in variants_of(bundle, "paged_prefill")]


@pytest.fixture(scope="module")
def runner(runners: list[Runner]) -> Runner:
    """One variant: heads of 128 with a mask where there."""
    wanted = (128, True)
    return next((r for r in runners if (r.axes["head_dim"], r.axes["causal"]) == wanted), runners[0])


def in_pages(chunk: int, p: Problem) -> int:
    """A part of about so many keys, in whole pages."""
    return div_up(chunk, p.page_size) * p.page_size if chunk > 0 else chunk


def limit_of(axes: Axes, chunk: int) -> float:
    return (SPLIT_LIMIT if chunk else LIMIT)[axes["dtype"]]


def check(
    runner: Runner, p: Problem, expected: tuple[torch.Tensor, torch.Tensor] | None = None, **changes: Any
) -> tuple[float, float]:
    """The largest errors of o and lse."""
    out, lse = runner.run(p, **changes)
    wanted, wanted_lse = oracle(p) if expected is None else expected
    assert unseen_are_zeros(p, out, lse), changes
    return worst_row(p, out, wanted), worst_lse(p, lse, wanted_lse)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"g{s[0][0] // s[0][1]}-p{s[1]}-{s[2].split()[0]}")
def test_every_tile_and_page_size_agrees(runners: list[Runner], measure: Measure, shape: Any) -> None:
    heads, page_size, layout = shape
    wrong = {}
    for runner in runners:
        p = make(runner.axes, LENGTHS, heads, page_size, layout)
        expected = oracle(p)
        for tile in tiles(runner.axes):
            for chunk in CHUNKS:
                error, lse = check(runner, p, expected, tile_q=tile, kv_chunk=in_pages(chunk, p))
                name = f"{name_of(runner.axes)}-t{tile}-c{chunk}"
                measure(**{name: {"worst": error, "lse": lse}})
                if not (error <= limit_of(runner.axes, chunk) and lse <= LSE_LIMIT[runner.axes["dtype"]]):
                    wrong[name] = (error, lse)
    assert wrong == {}


@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 8192)],
        [(1, 397 * i % 1200) for i in range(7)],
        [(1, 797 * i % 8193) for i in range(128)],
        [(4, 5 + 331 * i % 4000) for i in range(9)],
        [(512, 4096), (256, 256), (100, 3000), (1, 2000), (1, 0), (1, 17)],
        [(1500, 6000)],
        [(1 + 7 * i % 50, 900 - i) for i in range(150)],
    ],
    ids=["one", "steps", "many steps", "drafts", "chunks", "prefill", "many"],
)
def test_what_a_plan_over_pages_chooses_agrees(
    runners: list[Runner], measure: Measure, lengths: list[tuple[int, int]]
) -> None:
    for runner in runners:
        p = make(runner.axes, lengths, (4, 1))
        expected = oracle(p)
        for chunk in (0, 1024, -1):
            error, lse = check(runner, p, expected, kv_chunk=chunk)
            measure(**{f"{name_of(runner.axes)}-c{chunk}": {"worst": error, "lse": lse}})
            assert error <= limit_of(runner.axes, chunk) and lse <= LSE_LIMIT[runner.axes["dtype"]]


@pytest.mark.parametrize("scale", [1e-3, 0.5, 3.0])
def test_flat_and_sharp_softmax(runners: list[Runner], scale: float) -> None:
    for runner in runners:
        p = make(runner.axes, LENGTHS)
        p.call["sm_scale"] = scale
        error, _ = check(runner, p)
        assert error <= LIMIT[runner.axes["dtype"]], name_of(runner.axes)


@pytest.mark.parametrize("fixed_grid", [0, 1])
@pytest.mark.parametrize(
    "lengths", [[(5, 0)] * 4, [(0, 9)] * 4, [(0, 0), (3, 0), (0, 0)], [(300, 2), (500, 1)]]
)
def test_sequences_without_keys_or_queries(
    runners: list[Runner], lengths: list[tuple[int, int]], fixed_grid: int
) -> None:
    for runner in runners:
        for chunk in (0, -1):
            p = make(runner.axes, lengths)
            error, _ = check(runner, p, fixed_grid=fixed_grid, kv_chunk=chunk)
            assert error <= limit_of(runner.axes, chunk)


def test_an_empty_batch_does_nothing(runner: Runner) -> None:
    args = runner.arguments(make(runner.axes, [(3, 3)]))
    args |= {"qo_indptr": i32([0]), "page_indptr": i32([0]), "kv_lens": i32([])}
    assert runner.op.plan(**args) == 0
    runner.op.run(**args)
    torch.cuda.synchronize()
    assert args["o"].isnan().all()


@pytest.mark.parametrize("chunk", [0, 128])
def test_a_sequence_gets_the_same_bits_in_every_batch(runners: list[Runner], chunk: int) -> None:
    """With a fixed tile, and no parts or parts of a fixed length."""
    for runner in runners:
        for tile in tiles(runner.axes):
            p = make(runner.axes, LENGTHS)
            together, lse = runner.run(p, tile_q=tile, kv_chunk=chunk)
            alone = [[b] for b in range(len(LENGTHS))]
            for batch in (*alone, [3, 9, 11, 16, 5], list(reversed(range(len(LENGTHS))))):
                some = p.only(batch)
                out, some_lse = runner.run(some, tile_q=tile, kv_chunk=chunk)
                for at, b in enumerate(batch):
                    assert torch.equal(out[some.rows(at)], together[p.rows(b)])
                    assert torch.equal(some_lse[some.rows(at)], lse[p.rows(b)])


def test_the_same_call_gives_the_same_bits_again(runners: list[Runner]) -> None:
    for runner in runners:
        p = make(runner.axes, LENGTHS)
        rows = p.qo[-1]
        for chunk in CHUNKS:
            first = runner.run(p, kv_chunk=chunk)
            for _ in range(10):
                again = runner.run(p, kv_chunk=chunk)
                assert all(torch.equal(a[:rows], b[:rows]) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("rest", [0.0, 1e4, float("-inf")])
def test_what_is_outside_the_sequences_changes_no_bit(runners: list[Runner], rest: float) -> None:
    """Rows of q, rows of last pages, pages and entries of the page table."""
    for runner in runners:
        for page_size in (5, 64):
            p = make(runner.axes, LENGTHS, page_size=page_size)
            other = p.laid_out("NHD")
            other.q = p.q.clone()
            other.q[p.qo[-1] :] = rest
            for pool in (other.k, other.v):
                pool[p.unused()] = rest
            used = [div_up(keys, page_size) for keys in p.kv_lens]
            other.tables = [t[:n] + [0] * (len(t) - n) for t, n in zip(p.tables, used, strict=True)]
            for chunk in CHUNKS:
                before, after = (runner.run(x, kv_chunk=in_pages(chunk, x)) for x in (p, other))
                assert all(
                    torch.equal(a[: p.qo[-1]], b[: p.qo[-1]]) for a, b in zip(before, after, strict=True)
                )


def test_where_the_keys_lie_changes_no_bit(runners: list[Runner]) -> None:
    """The size of the pages, their order and the layout of the pool."""
    for runner in runners:
        p = make(runner.axes, LENGTHS)
        others = [make(runner.axes, LENGTHS, page_size=size) for size in (1, 5, 64)]
        others += [p.laid_out(layout) for layout in LAYOUTS]
        for tile in tiles(runner.axes):
            before = runner.run(p, tile_q=tile)
            for other in others:
                after = runner.run(other, tile_q=tile)
                assert all(
                    torch.equal(a[: p.qo[-1]], b[: p.qo[-1]]) for a, b in zip(before, after, strict=True)
                )


def test_rows_of_q_may_lie_apart(runners: list[Runner]) -> None:
    for runner in runners:
        p = make(runner.axes, LENGTHS)
        before = runner.run(p)[0][: p.qo[-1]]
        nan = torch.full_like(p.q, float("nan"))
        for q in (
            torch.cat([p.q, nan], 1)[:, : p.q.shape[1]],
            p.q.transpose(0, 1).contiguous().transpose(0, 1),
        ):
            p.q = q
            assert torch.equal(runner.run(p)[0][: p.qo[-1]], before)


def test_a_pool_may_reach_beyond_what_int32_counts(runner: Runner) -> None:
    p = make(runner.axes, [(1, 40), (3, 17), (20, 61)], page_size=64)
    _, size, heads, dim = p.k.shape
    assert 2 * FAR + 2 * size * heads * dim > 2**31
    memory = torch.empty(2 * FAR + 2 * size * heads * dim, dtype=p.k.dtype, device="cuda")
    strides = (FAR, heads * dim, dim, 1)
    far = {
        name: memory.as_strided((3, size, heads, dim), strides, at * size * heads * dim)
        for at, name in enumerate("kv")
    }
    numbers = [table[0] for table in p.tables]
    for name, pool in far.items():
        pool.copy_(getattr(p, name)[numbers])
    expected = runner.run(p)[0][: p.qo[-1]]
    moved = Problem(p.axes, p.lengths, p.q, far["k"], far["v"], [[0], [1], [2]], p.call)
    assert torch.equal(runner.run(moved)[0][: p.qo[-1]], expected)
    del memory, far, moved
    torch.cuda.empty_cache()


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_fixed_grid_gives_the_same_bits(runners: list[Runner], chunk: int) -> None:
    for runner in runners:
        p = make(runner.axes, LENGTHS)
        for tile in tiles(runner.axes):
            free = runner.run(p, tile_q=tile, kv_chunk=chunk)
            fixed = runner.run(p, tile_q=tile, kv_chunk=chunk, fixed_grid=1)
            assert torch.equal(free[0][: p.qo[-1]], fixed[0][: p.qo[-1]])
        if chunk:
            assert check(runner, p, fixed_grid=1, kv_chunk=chunk)[0] <= SPLIT_LIMIT[runner.axes["dtype"]]


def test_lse_is_optional(runners: list[Runner]) -> None:
    for runner in runners:
        p = make(runner.axes, LENGTHS)
        for chunk in CHUNKS:
            args = runner.arguments(p, kv_chunk=chunk, lse=None)
            runner.plan(args)
            runner.op.run(**args)
            torch.cuda.synchronize()
            assert torch.equal(args["o"][: p.qo[-1]], runner.run(p, kv_chunk=chunk)[0][: p.qo[-1]])


@pytest.mark.parametrize("pdl", [0, 1])
@pytest.mark.parametrize("chunk", [0, -1])
def test_a_graph_replays_other_plans(runners: list[Runner], chunk: int, pdl: int) -> None:
    """One capture; then plans with other lengths and pages, copied to the same places, give what eager runs give, bit for
    bit."""
    shapes = [[(100, 700), (30, 30), (0, 5)], [(1, 900), (1, 0), (1, 3)], [(64, 65), (65, 64), (1, 600)]]
    for runner in runners:
        axes = runner.axes
        whole = make(axes, [(130, 735), (0, 400), (0, 100)])
        args = runner.arguments(whole, fixed_grid=1, kv_chunk=chunk, pdl=pdl)
        runner.plan(args)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            runner.op.run(**{**args, "stream": torch.cuda.current_stream()})
        for seed, lengths in enumerate(shapes):
            p = make(axes, lengths, seed=seed + 1)
            for name, rest in (
                ("q", float("nan")),
                ("k", float("nan")),
                ("v", float("nan")),
                ("page_indices", -1),
            ):
                mine = i32(p.page_indices).cuda() if name == "page_indices" else getattr(p, name)
                args[name].fill_(rest)[: len(mine)].copy_(mine)
            args["o"].fill_(float("nan"))
            args |= runner.lengths(p)
            runner.plan(args)
            graph.replay()
            torch.cuda.synchronize()
            replayed = args["o"][: p.qo[-1]].clone()
            args["o"].fill_(float("nan"))
            runner.op.run(**args)
            torch.cuda.synchronize()
            assert torch.equal(replayed, args["o"][: p.qo[-1]])
            assert args["o"][p.qo[-1] :].isnan().all()
            assert worst_row(p, replayed, oracle(p)[0]) <= limit_of(axes, chunk)


@pytest.mark.parametrize("pdl", [0, 1])
def test_a_step_is_planned_while_the_one_before_it_runs(runner: Runner, pdl: int) -> None:
    """Host and device memory of plans alternate; nothing waits in between."""
    problems = [
        make(runner.axes, lengths, seed=n)
        for n, lengths in enumerate(([(700, 900)] * 9, [(1, 40)] * 30, LENGTHS))
    ]
    for chunk in (0, -1):
        expected = [runner.run(p, kv_chunk=chunk)[0][: p.qo[-1]] for p in problems]
        steps = [runner.arguments(problems[step % 3], kv_chunk=chunk, pdl=pdl) for step in range(12)]
        for args in steps:
            runner.plan(args)
            for _ in range(3):
                runner.op.run(**args)
        torch.cuda.synchronize()
        for step, args in enumerate(steps):
            assert torch.equal(args["o"][: len(expected[step % 3])], expected[step % 3])


def test_nothing_around_output_and_scratch_is_written(runners: list[Runner]) -> None:
    for runner in runners:
        p = make(runner.axes, LENGTHS)
        args = runner.arguments(p, kv_chunk=-1, fixed_grid=1)
        guarded = {}
        for name in ("o", "lse", "workspace", "plan_device"):
            memory = torch.full((args[name].nbytes + 2048,), 0xA5, dtype=torch.uint8, device="cuda")
            guarded[name] = memory
            args[name] = memory[1024:-1024].view(args[name].dtype).view(args[name].shape)
        runner.plan(args)
        runner.op.run(**args)
        torch.cuda.synchronize()
        for name, memory in guarded.items():
            assert (memory[:1024] == 0xA5).all() and (memory[-1024:] == 0xA5).all(), name
        assert worst_row(p, args["o"], oracle(p)[0]) <= SPLIT_LIMIT[runner.axes["dtype"]]


def test_a_serving_loop_over_pages_stays_correct(runners: list[Runner], measure: Measure) -> None:
    """Chunks of a prefill that shrink, beside steps of decode."""
    generator = torch.Generator().manual_seed(9)
    for step in range(40):
        runner = runners[step % len(runners)]
        batch = int(torch.randint(1, 40, (1,), generator=generator))
        lengths = [(1, int(n)) for n in torch.randint(1, 2000, (batch,), generator=generator)]
        chunk = 512 >> step % 9
        lengths.append((chunk, chunk + 64 * (step % 5)))
        p = make(runner.axes, lengths, (6, 2), (1, 5, 16, 64)[step % 4], LAYOUTS[step % 3], seed=step)
        worst = check(runner, p, kv_chunk=in_pages(CHUNKS[step % 3], p))[0]
        measure(**{f"step {step}": {"worst": worst}})
        assert worst <= SPLIT_LIMIT[runner.axes["dtype"]]


def table_of(p: Problem) -> list[torch.Tensor]:
    """The page table as FlashInfer has it: no entry that no key needs."""
    used = [div_up(keys, p.page_size) for keys in p.kv_lens]
    entries = [page for table, n in zip(p.tables, used, strict=True) for page in table[:n]]
    last = [(keys - 1) % p.page_size + 1 if keys else 0 for keys in p.kv_lens]
    ends = [0]
    for count in used:
        ends.append(ends[-1] + count)
    return [i32(values).cuda() for values in (ends, entries, last)]


@pytest.mark.parametrize("layout", ["NHD", "HND", "one tensor"])
def test_flashinfers_prefill_wrapper_gives_the_same(bundle: Any, runners: list[Runner], layout: str) -> None:
    from kernseal.kernels.paged_prefill.torch_api import BatchPrefillWithPagedKVCacheWrapper
    from kernseal.loader import serving

    undo = serving.serve(bundle, 0)
    try:
        for runner in runners:
            axes, p = runner.axes, make(runner.axes, LENGTHS, layout=layout)
            scratch = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
            made = BatchPrefillWithPagedKVCacheWrapper(scratch, "HND" if layout == "HND" else "NHD")
            how = {"causal": axes["causal"], "q_data_type": p.q.dtype}
            made.plan(i32(p.qo), *table_of(p), 8, 2, axes["head_dim"], 16, **how, disable_split_kv=True)
            k, v = (x.transpose(1, 2) if layout == "HND" else x for x in (p.k, p.v))
            cache = torch.stack([k, v], 1) if layout == "one tensor" else (k, v)
            out, lse = made.run(p.q[: p.qo[-1]], cache, return_lse=True)
            torch.cuda.synchronize()
            expected, expected_lse = runner.run(p)
            assert torch.equal(out, expected[: p.qo[-1]]) and torch.equal(lse, expected_lse[: p.qo[-1]])
    finally:
        undo()


@contextmanager
def wrapper_of(bundle: Any) -> Iterator[Callable[..., Any]]:
    """FlashInfer's wrapper of steps, on the bundle; called with the buffers of a graph where there is one."""
    from kernseal.kernels.paged_prefill.torch_api import BatchDecodeWithPagedKVCacheWrapper
    from kernseal.loader import serving

    undo = serving.serve(bundle, 0)
    try:
        scratch = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        yield lambda *kept: BatchDecodeWithPagedKVCacheWrapper(scratch, "NHD", bool(kept), True, *kept)
    finally:
        undo()


def plan_step(made: Any, p: Problem, rows: int) -> None:
    how = {"q_len_per_req": rows, "q_data_type": p.q.dtype}
    made.plan(*table_of(p), 8, 2, p.axes["head_dim"], 16, **how)


def test_flashinfers_decode_wrapper_gives_the_same(bundle: Any, runners: list[Runner]) -> None:
    """Steps, and drafts where the variant is causal."""
    with wrapper_of(bundle) as wrapper:
        for runner in runners:
            rows, made = 4 if runner.axes["causal"] else 1, wrapper()
            for seed, keys in enumerate(([1, 8000, 17, 900, 32], [700, 3, 64, 2000, 5])):
                p = make(runner.axes, [(rows, n) for n in keys], seed=seed)
                plan_step(made, p, rows)
                out = made.run(p.q[: p.qo[-1]], (p.k, p.v))
                torch.cuda.synchronize()
                assert worst_row(p, out, oracle(p)[0]) <= SPLIT_LIMIT[runner.axes["dtype"]]


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("full", [False, True], ids=["split", "full"])
def test_a_captured_step_replays_other_plans(
    bundle: Any, runners: list[Runner], rows: int, full: bool
) -> None:
    """Of one token and of drafts: what was captured after one plan is right after another. A split aims at two thread blocks
    an SM over all KV heads, here two, so with more sequences than SMs there is none."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    batch = sms + 1 if full else 5
    plans = ([300 + 37 * b % 900 for b in range(batch)], [1 + 53 * b % 300 for b in range(batch)])
    if not full:
        plans = ([1, 8000, 17, 900, 32], [700, 3, 64, 2000, 5])
    mine = [r for r in runners if r.axes["causal"] == (rows > 1)]
    if not mine:
        pytest.skip("the bundle has no variant for as many rows")
    with wrapper_of(bundle) as wrapper:
        for runner in mine:
            counts = (batch + 1, sum(div_up(n, 16) for n in plans[0]), batch)
            made = wrapper(*(torch.zeros(n, dtype=torch.int32, device="cuda") for n in counts))
            first, second = (
                make(runner.axes, [(rows, n) for n in keys], seed=seed) for seed, keys in enumerate(plans)
            )
            plan_step(made, first, rows)
            assert made._planned.fields["kv_chunk"] == (0 if full else -1)
            q, k, v = first.q[: first.qo[-1]].clone(), first.k.clone(), first.v.clone()
            made.run(q, (k, v))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = made.run(q, (k, v))
            for p in (first, second, first):
                plan_step(made, p, rows)
                for held, other in ((q, p.q[: p.qo[-1]]), (k, p.k), (v, p.v)):
                    held.fill_(float("nan"))[: len(other)].copy_(other)
                out.fill_(float("nan"))
                graph.replay()
                torch.cuda.synchronize()
                replayed = out.clone()
                assert worst_row(p, replayed, oracle(p)[0]) <= SPLIT_LIMIT[runner.axes["dtype"]]
                assert torch.equal(replayed, made.run(q, (k, v)))
