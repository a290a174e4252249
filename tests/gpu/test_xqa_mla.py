"""XQA MLA decode on hardware: numbers against a float64 oracle, and what must never change a bit.

In every problem the rows of the pool that no sequence has are NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu.variants import variants_of  # noqa: E402
from gpu.xqa_mla_problems import (  # noqa: E402
    HEADS,
    LATENT,
    LENGTHS,
    ROW,
    Runner,
    axes_of,
    errors_of,
    make,
    oracle,
    output,
    worst_row,
)

LIMIT = {"bf16": 8e-3, "e4m3": 4e-2}
"""Largest ||error|| / ||reference|| of one head of one sequence. e4m3 weights have 4 bits: 3.2e-2 in a simulation."""
ROUNDED_MEAN = 4e-3
"""Largest mean of it where the oracle rounds its weights too: what is left is bfloat16 and a weight here and there."""
SCRATCH = 18432

Measure = Callable[..., None]
Axes = dict[str, Any]


@pytest.fixture(scope="module")
def bundle(any_bundle: Any) -> Any:
    """Every bundle that has variants of this op, and so every test here on all of them."""
    return any_bundle


@pytest.fixture(scope="module")
def variants(bundle: Any) -> list[Axes]:
    return [axes_of(variant) for variant in variants_of(bundle, "xqa_mla")]


@pytest.fixture(scope="module", params=["bf16", "e4m3"])
def axes(request: pytest.FixtureRequest, variants: list[Axes]) -> Axes:
    """One variant of each element type, with pages of 64 where there."""
    found = [a for a in variants if a["dtype"] == request.param]
    if not found:
        pytest.skip(f"this bundle has no variant of xqa_mla for {request.param}")
    return next((a for a in found if a["page_size"] == 64), found[0])


@pytest.fixture(scope="module")
def runner(bundle: Any, axes: Axes) -> Runner:
    return Runner(bundle, axes)


def test_mla_agrees_with_the_oracle(bundle: Any, variants: list[Axes], measure: Measure) -> None:
    wrong = {}
    for axes in variants:
        p = make(axes, LENGTHS)
        errors = errors_of(Runner(bundle, axes).run(p), oracle(p))
        name = f"{axes['dtype']}-p{axes['page_size']}"
        by_length = dict(zip(LENGTHS, errors.amax(-1).tolist(), strict=True))
        measure(**{name: {"worst": float(errors.max()), "mean": float(errors.mean())}})
        wrong |= {f"{name}-{n}": e for n, e in by_length.items() if not e <= LIMIT[axes["dtype"]]}
    assert wrong == {}


def test_weights_of_an_e4m3_cache_are_rounded_as_described(
    bundle: Any, variants: list[Axes], measure: Measure
) -> None:
    for axes in [a for a in variants if a["dtype"] == "e4m3"]:
        p = make(axes, LENGTHS)
        out = Runner(bundle, axes).run(p)
        means = errors_of(out, oracle(p, rounded=True)).mean(-1)
        measure(**{f"p{axes['page_size']}": float(means.max())})
        assert means.max() <= ROUNDED_MEAN, dict(zip(LENGTHS, means.tolist(), strict=True))


@pytest.mark.parametrize("scale", [1e-3, 0.5, 3.0])
def test_flat_and_sharp_softmax(runner: Runner, axes: Axes, measure: Measure, scale: float) -> None:
    p = make(axes, LENGTHS)
    error = worst_row(runner.run(p, q_scale=scale), oracle(p, q_scale=scale))
    measure(worst=error)
    assert error <= LIMIT[axes["dtype"]]


def test_mla_long_sequences(runner: Runner, axes: Axes, measure: Measure) -> None:
    p = make(axes, [65536, 65535, 1])
    error = worst_row(runner.run(p), oracle(p))
    measure(worst=error)
    assert error <= LIMIT[axes["dtype"]]


def test_more_clusters_than_fit_at_once(runner: Runner, axes: Axes, measure: Measure) -> None:
    lengths = [1 + 37 * i % 300 for i in range(700)]
    p = make(axes, lengths)
    out, chosen = runner.run(p), list(range(0, 700, 23))
    error = worst_row(out[chosen], oracle(p.rows(chosen)))
    measure(worst=error)
    assert error <= LIMIT[axes["dtype"]]
    assert not out.isnan().any()


def test_v_is_read_from_v(runner: Runner, axes: Axes) -> None:
    p = make(axes, LENGTHS)
    other = -p.k.to(torch.float32)
    other[..., LATENT:] = float("nan")
    p.v = other.to(p.k.dtype)
    assert worst_row(runner.run(p), oracle(p)) <= LIMIT[axes["dtype"]]


def test_empty_rows_are_exact_zeros(bundle: Any, variants: list[Axes]) -> None:
    for axes in variants:
        p = make(axes, [0, 300, 0, 1, 0], pages=40)
        out = Runner(bundle, axes).run(p)
        assert torch.equal(out[[0, 2, 4]], torch.zeros_like(out[[0, 2, 4]]))
        assert worst_row(out[[1, 3]], oracle(p)[[1, 3]]) <= LIMIT[axes["dtype"]]


def test_a_batch_of_empty_rows_only(runner: Runner, axes: Axes) -> None:
    p = make(axes, [0] * 9)
    out = runner.run(p)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("length", [-1, -(2**31), "one more", 2**31 - 1])
def test_a_length_over_the_capacity_gives_zeros_and_reads_no_page(
    runner: Runner, axes: Axes, length: int | str
) -> None:
    p = make(axes, [500, 1024, 200])
    capacity = p.page_table.shape[1] * axes["page_size"]
    before = runner.run(p)
    p.seq_lens[1] = capacity + 1 if length == "one more" else length
    p.page_table[1] = 2**31 - 1
    after = runner.run(p)
    assert torch.equal(after[1], torch.zeros_like(after[1]))
    assert torch.equal(after[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("padding", [-1, 0, 2**31 - 1, -(2**31), 7])
def test_padding_of_the_page_table_changes_no_bit(bundle: Any, variants: list[Axes], padding: int) -> None:
    for axes in variants:
        p, made = make(axes, LENGTHS, pages=600), Runner(bundle, axes)
        before = made.run(p)
        p.page_table[p.page_table == -1] = padding
        assert torch.equal(made.run(p), before)


@pytest.mark.parametrize("rest", [0.0, 300.0, float("-inf")])
def test_what_is_in_a_page_past_a_length_changes_no_bit(
    bundle: Any, variants: list[Axes], rest: float
) -> None:
    for axes in variants:
        p, made = make(axes, LENGTHS), Runner(bundle, axes)
        before = made.run(p)
        assert not before.isnan().any()
        p.fill_unused(rest)
        assert torch.equal(made.run(p), before)


@pytest.mark.parametrize("outside", [-1, -(2**31), 2**31 - 1, "end"])
def test_a_page_outside_the_pool_is_a_page_of_zeros(
    bundle: Any, variants: list[Axes], outside: int | str
) -> None:
    for axes in variants:
        p, made = make(axes, [300, 129, 700]), Runner(bundle, axes)
        number = int(p.page_table[0, 1])
        p.k[number].view(torch.uint8).zero_()
        expected = made.run(p)
        p.page_table[0, 1] = p.k.shape[0] if outside == "end" else outside
        assert torch.equal(made.run(p), expected)


def test_a_request_gets_the_same_bits_in_every_batch(runner: Runner, axes: Axes) -> None:
    p = make(axes, LENGTHS)
    together = runner.run(p)
    generator = torch.Generator().manual_seed(5)
    for row in range(len(LENGTHS)):
        assert torch.equal(runner.run(p.rows([row])), together[[row]])
    for count in (3, 10, len(LENGTHS)):
        chosen = torch.randperm(len(LENGTHS), generator=generator)[:count].tolist()
        assert torch.equal(runner.run(p.rows(chosen)), together[chosen])


def test_the_same_call_gives_the_same_bits_again(bundle: Any, variants: list[Axes]) -> None:
    for axes in variants:
        p, made = make(axes, LENGTHS), Runner(bundle, axes)
        first = made.run(p)
        for _ in range(50):
            assert torch.equal(made.run(p), first)


@pytest.mark.parametrize("layout", ["layers", "wide rows", "token major"])
def test_layouts_are_strides(runner: Runner, axes: Axes, layout: str) -> None:
    p = make(axes, LENGTHS)
    before = runner.run(p)
    pages, size = p.k.shape[:2]
    nan = torch.full((), float("nan"), device="cuda").to(p.k.dtype)
    if layout == "layers":
        whole = nan.expand(pages, 3, size, ROW).contiguous()
        pool = whole[:, 1]
    elif layout == "wide rows":
        whole = nan.expand(pages, size, 656).contiguous()
        pool = whole[..., 32 : 32 + ROW]
    else:
        whole = nan.expand(size, pages, ROW).contiguous()
        pool = whole.transpose(0, 1)
    pool.copy_(p.k)
    p.k = p.v = pool
    assert not pool.is_contiguous()
    assert torch.equal(runner.run(p), before)


def test_scales_can_be_on_the_device(bundle: Any, variants: list[Axes]) -> None:
    for axes in variants:
        p, made = make(axes, LENGTHS), Runner(bundle, axes)
        p.call |= {"q_scale": 0.0625, "kv_scale": 0.75}
        before = made.run(p)
        assert worst_row(before, oracle(p)) <= LIMIT[axes["dtype"]]
        for given in (("q_scale",), ("kv_scale",), ("q_scale", "kv_scale")):
            pointers: dict[str, Any] = {}
            for name in given:
                pointers[f"{name}_ptr"] = torch.tensor([p.call[name]], device="cuda")
                pointers[name] = 0.0
            assert torch.equal(made.run(p, **pointers), before)


@pytest.mark.parametrize("pdl", [0, 1])
def test_a_graph_replays_with_rewritten_buffers(runner: Runner, axes: Axes, pdl: int) -> None:
    p = make(axes, [700, 30, 0, 1024])
    out = output(p)
    args = runner.arguments(p, out, pdl=pdl)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(3):
            runner.op.run(**{**args, "stream": torch.cuda.current_stream()})
    for seed, lengths in enumerate(
        [[700, 30, 0, 1024], [0, 1024, 5, 16], [1, 0, 0, 257], [512, 513, 511, 0]]
    ):
        other = make(axes, lengths, seed=seed + 1, pages=p.page_table.shape[1])
        p.q.copy_(other.q)
        p.seq_lens.copy_(other.seq_lens)
        count = min(p.k.shape[0], other.k.shape[0])
        p.k[:count].copy_(other.k[:count])
        p.page_table.copy_(other.page_table.clamp_max(count - 1))
        p.k.copy_(torch.nan_to_num(p.k.to(torch.float32)).to(p.k.dtype))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, runner.run(p))
        live = p.seq_lens > 0
        assert worst_row(out[live], oracle(p)[live]) <= LIMIT[axes["dtype"]]
        assert out[~live].count_nonzero() == 0


@pytest.mark.parametrize("pdl", [0, 1])
def test_runs_one_after_the_other_share_buffers(runner: Runner, axes: Axes, pdl: int) -> None:
    """Each run reads lengths, q and a scale that the kernels just before it wrote, and shares scratch with the last."""
    problems = [make(axes, [400, 65, 1, 900], seed=seed, pages=32) for seed in range(4)]
    expected = [runner.run(p) for p in problems]
    q, seq_lens = torch.empty_like(problems[0].q), torch.empty_like(problems[0].seq_lens)
    scale = torch.zeros(1, device="cuda")
    outs = []
    for step in range(40):
        p, out = problems[step % 4], output(problems[step % 4])
        args = runner.arguments(p, out, pdl=pdl, q=q, seq_lens=seq_lens, q_scale_ptr=scale)
        q.copy_(p.q)
        scale.fill_(p.call["q_scale"])
        seq_lens.copy_(p.seq_lens)
        runner.op.run(**args)
        runner.op.run(**args)
        outs.append(out)
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected[step % 4]) for step, out in enumerate(outs))


def test_mla_churn_of_a_serving_loop_stays_correct(runner: Runner, axes: Axes, measure: Measure) -> None:
    generator = torch.Generator().manual_seed(9)
    p = make(axes, [1024] * 6)
    worst = 0.0
    for step in range(100):
        p.seq_lens.copy_(torch.randint(0, 1025, (6,), generator=generator))
        chosen = torch.randperm(6, generator=generator)[: 1 + step % 6].tolist()
        batch = p.rows(chosen)
        out, live = runner.run(batch), batch.seq_lens > 0
        assert out[~live].count_nonzero() == 0
        if live.any():
            worst = max(worst, worst_row(out[live], oracle(batch)[live]))
    measure(worst=worst)
    assert worst <= LIMIT[axes["dtype"]]


def test_an_empty_batch_does_nothing(runner: Runner, axes: Axes) -> None:
    assert runner.run(make(axes, [5]).rows([])).shape[0] == 0


def test_nothing_around_output_and_scratch_is_written(runner: Runner, axes: Axes) -> None:
    p = make(axes, [*LENGTHS[:12], 0])
    count = len(p.seq_lens)
    whole = torch.full((count + 2, HEADS, LATENT), 7.0, device="cuda", dtype=torch.bfloat16)
    scratch = torch.full(((count + 2) * SCRATCH,), 0xA5, device="cuda", dtype=torch.uint8)
    args = runner.arguments(p, whole[1:-1])
    runner.op.run(**{**args, "workspace": scratch[SCRATCH:-SCRATCH]})
    torch.cuda.synchronize()
    assert not whole[1:-1].eq(7.0).all()
    for edge in (whole[0], whole[-1]):
        assert torch.equal(edge, torch.full_like(edge, 7.0))
    for part in (scratch[:SCRATCH], scratch[-SCRATCH:]):
        assert torch.equal(part, torch.full_like(part, 0xA5))
