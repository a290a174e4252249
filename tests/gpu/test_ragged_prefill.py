"""Ragged prefill on hardware: numbers against a float64 oracle, and what must never change a bit.

In every problem the rows of q, k and v past the last sequence are NaN, as are plans, outputs and scratch before a run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu.fa2_problems import (  # noqa: E402
    LENGTHS,
    SPLIT_LIMIT,
    tiles,
    unseen_are_zeros,
    worst_lse,
    worst_row,
)
from gpu.ragged_prefill_problems import (  # noqa: E402
    HEADS,
    Problem,
    Runner,
    axes_of,
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

Measure = Callable[..., None]
Axes = dict[str, Any]


@pytest.fixture(scope="module")
def bundle(any_bundle: Any) -> Any:
    """Every bundle that has variants of this op, and so every test here on all of them."""
    return any_bundle


@pytest.fixture(scope="module")
def variants(bundle: Any) -> list[Axes]:
    return [axes_of(variant) for variant in variants_of(bundle, "ragged_prefill")]


@pytest.fixture(scope="module")
def runners(bundle: Any, variants: list[Axes]) -> list[Runner]:
    return [Runner(bundle, axes) for axes in variants]


@pytest.fixture(scope="module")
def runner(runners: list[Runner]) -> Runner:
    """One variant: heads of 128 with a mask where there."""
    wanted = (128, True)
    return next((r for r in runners if (r.axes["head_dim"], r.axes["causal"]) == wanted), runners[0])


def check(runner: Runner, p: Problem, **changes: Any) -> tuple[float, float]:
    out, lse = runner.run(p, **changes)
    expected, expected_lse = oracle(p)
    assert unseen_are_zeros(p, out, lse), changes
    return worst_row(p, out, expected), worst_lse(p, lse, expected_lse)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_every_tile_agrees_with_the_oracle(runners: list[Runner], measure: Measure, chunk: int) -> None:
    wrong = {}
    for runner in runners:
        limit = (SPLIT_LIMIT if chunk else LIMIT)[runner.axes["dtype"]]
        for tile in tiles(runner.axes):
            for heads in HEADS:
                p = make(runner.axes, LENGTHS, heads)
                error, lse = check(runner, p, tile_q=tile, kv_chunk=chunk)
                name = f"{name_of(runner.axes)}-t{tile}-h{heads[0]}x{heads[1]}"
                measure(**{name: {"worst": error, "lse": lse}})
                if not (error <= limit and lse <= LSE_LIMIT[runner.axes["dtype"]]):
                    wrong[name] = (error, lse)
    assert wrong == {}


@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 5000)] * 3,
        [(40, 3000)] * 5,
        [(2000, 2000), (1, 1)],
        [(8192, 8192)],
        [(1 + 7 * i % 50, 900 - i) for i in range(200)],
    ],
    ids=["decode", "chunks", "prefill", "long", "many"],
)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_what_the_plan_chooses_agrees(
    runners: list[Runner], measure: Measure, lengths: list[tuple[int, int]], chunk: int
) -> None:
    for runner in runners:
        p = make(runner.axes, lengths, (4, 2))
        error, lse = check(runner, p, kv_chunk=chunk)
        measure(**{name_of(runner.axes): {"worst": error, "lse": lse}})
        dtype = runner.axes["dtype"]
        assert error <= (SPLIT_LIMIT if chunk else LIMIT)[dtype] and lse <= LSE_LIMIT[dtype]


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
            check(runner, make(runner.axes, lengths), fixed_grid=fixed_grid, kv_chunk=chunk)


def test_an_empty_batch_does_nothing(runner: Runner) -> None:
    p = make(runner.axes, [(3, 3)])
    args = runner.arguments(p)
    args |= {"qo_indptr": torch.zeros(1, dtype=torch.int32), "kv_indptr": torch.zeros(1, dtype=torch.int32)}
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
            for chosen in (
                ([b] for b in range(len(LENGTHS))),
                ([3, 9, 11, 16, 5],),
                (range(len(LENGTHS) - 1, -1, -1),),
            ):
                for batch in chosen:
                    some = p.only(list(batch))
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
            for _ in range(20):
                again = runner.run(p, kv_chunk=chunk)
                assert all(torch.equal(a[:rows], b[:rows]) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("rest", [0.0, 1e4, float("-inf")])
def test_what_is_outside_the_sequences_changes_no_bit(runners: list[Runner], rest: float) -> None:
    for runner in runners:
        p = make(runner.axes, LENGTHS)
        for chunk in CHUNKS:
            before, rows = runner.run(p, kv_chunk=chunk)[0], p.qo[-1]
            for tensor, end in ((p.q, rows), (p.k, p.kv[-1]), (p.v, p.kv[-1])):
                tensor[end:] = rest
            after = runner.run(p, kv_chunk=chunk)[0]
            assert torch.equal(before[:rows], after[:rows])
            for tensor, end in ((p.q, rows), (p.k, p.kv[-1]), (p.v, p.kv[-1])):
                tensor[end:] = float("nan")


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


@pytest.mark.parametrize("layout", ["heads first", "keys and values together", "wide rows"])
def test_layouts_are_strides(runners: list[Runner], layout: str) -> None:
    for runner in runners:
        p = make(runner.axes, LENGTHS)
        before = runner.run(p)[0][: p.qo[-1]]
        q, k, v = p.q, p.k, p.v
        if layout == "heads first":
            p.q, p.k, p.v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
        elif layout == "keys and values together":
            both = torch.cat([k, v], -1)
            p.k, p.v = both[..., : k.shape[-1]], both[..., k.shape[-1] :]
        else:
            p.q, p.k, p.v = (
                torch.cat([x, torch.full_like(x, float("nan"))], 1)[:, : x.shape[1]] for x in (q, k, v)
            )
        assert not p.k.is_contiguous()
        assert torch.equal(runner.run(p)[0][: p.qo[-1]], before)


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
def test_a_graph_replays_other_plans(runner: Runner, chunk: int, pdl: int) -> None:
    """One capture; then plans with other lengths, copied to the same place, give what eager runs give, bit for bit."""
    axes, shapes = (
        runner.axes,
        [[(100, 700), (30, 30), (0, 5)], [(1, 900), (1, 0), (1, 3)], [(64, 65), (65, 64), (1, 600)]],
    )
    whole = make(axes, [(130, 735), (0, 200), (0, 0)])
    args = runner.arguments(whole, fixed_grid=1, kv_chunk=chunk, pdl=pdl)
    runner.plan(args)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        runner.op.run(**{**args, "stream": torch.cuda.current_stream()})
    for seed, lengths in enumerate(shapes):
        p = make(axes, lengths, seed=seed + 1)
        for name in ("q", "k", "v"):
            args[name].fill_(float("nan"))
            args[name][: len(getattr(p, name))].copy_(getattr(p, name))
        args["o"].fill_(float("nan"))
        args |= {
            "qo_indptr": torch.tensor(p.qo, dtype=torch.int32),
            "kv_indptr": torch.tensor(p.kv, dtype=torch.int32),
        }
        runner.plan(args)
        graph.replay()
        torch.cuda.synchronize()
        replayed = args["o"][: p.qo[-1]].clone()
        args["o"].fill_(float("nan"))
        runner.op.run(**args)
        torch.cuda.synchronize()
        assert torch.equal(replayed, args["o"][: p.qo[-1]])
        assert args["o"][p.qo[-1] :].isnan().all()
        assert worst_row(p, replayed, oracle(p)[0]) <= (SPLIT_LIMIT if chunk else LIMIT)[axes["dtype"]]


@pytest.mark.parametrize("pdl", [0, 1])
def test_a_step_is_planned_while_the_one_before_it_runs(runner: Runner, pdl: int) -> None:
    """Host and device memory of plans alternate; nothing waits in between."""
    problems = [
        make(runner.axes, lengths, seed=n)
        for n, lengths in enumerate(([(700, 900)] * 9, [(1, 40)] * 30, LENGTHS))
    ]
    expected = [runner.run(p)[0][: p.qo[-1]] for p in problems]
    steps = [runner.arguments(problems[step % 3], pdl=pdl) for step in range(24)]
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


def test_churn_of_a_serving_loop_stays_correct(runner: Runner, measure: Measure) -> None:
    """Chunks of a prefill that shrink, beside steps of decode."""
    generator = torch.Generator().manual_seed(9)
    worst = 0.0
    for step in range(60):
        batch = int(torch.randint(1, 40, (1,), generator=generator))
        lengths = [(1, int(n)) for n in torch.randint(1, 2000, (batch,), generator=generator)]
        chunk = 512 >> step % 9
        lengths.append((chunk, chunk + 64 * (step % 5)))
        p = make(runner.axes, lengths, seed=step)
        worst = max(worst, check(runner, p, kv_chunk=CHUNKS[step % 3])[0])
    measure(worst=worst)
    assert worst <= SPLIT_LIMIT[runner.axes["dtype"]]


def test_flashinfers_wrapper_gives_the_same(bundle: Any, runner: Runner) -> None:
    from kernseal.kernels.ragged_prefill.torch_api import BatchPrefillWithRaggedKVCacheWrapper
    from kernseal.loader import serving

    undo = serving.serve(bundle, 0)
    try:
        p = make(runner.axes, LENGTHS)
        made = BatchPrefillWithRaggedKVCacheWrapper(torch.empty(128 << 20, dtype=torch.uint8, device="cuda"))
        ends = [torch.tensor(e, dtype=torch.int32, device="cuda") for e in (p.qo, p.kv)]
        axes = runner.axes
        made.plan(
            *ends,
            8,
            2,
            axes["head_dim"],
            axes["v_dim"],
            causal=axes["causal"],
            q_data_type=p.q.dtype,
            disable_split_kv=True,
        )
        out, lse = made.run(p.q[: p.qo[-1]], p.k, p.v, return_lse=True)
        torch.cuda.synchronize()
        expected, expected_lse = runner.run(p)
        assert torch.equal(out, expected[: p.qo[-1]]) and torch.equal(lse, expected_lse[: p.qo[-1]])
    finally:
        undo()
