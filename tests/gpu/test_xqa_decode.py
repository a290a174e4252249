"""XQA decode on hardware: numbers against a float64 oracle, and what must never change a bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu.xqa_problems import LENGTHS, Runner, axes_of, make, oracle, worst_row  # noqa: E402

LIMIT = 8e-3
"""Largest ||error|| / ||reference|| of one head of one sequence in bfloat16."""
SPLITS = [0, 1, 2, 3, 8]

Measure = Callable[..., None]


@pytest.fixture(scope="module")
def variants(bundle: Any) -> list[dict[str, Any]]:
    found = [axes_of(v) for v in bundle.variants() if v.op == "xqa_decode"]
    if not found:
        pytest.skip("this bundle has no variant of xqa_decode")
    return found


@pytest.fixture(scope="module")
def plain(variants: list[dict[str, Any]]) -> dict[str, Any]:
    """The first variant without a window and with a 16-bit cache; head_dim 128 and group 8 where there."""
    ordinary = [a for a in variants if not a["sliding_window"] and a["kv_dtype"] == a["dtype"]]
    return next((a for a in ordinary if (a["head_dim"], a["group_size"]) == (128, 8)), ordinary[0])


@pytest.fixture(scope="module")
def runner(bundle: Any, plain: dict[str, Any]) -> Runner:
    return Runner(bundle, plain)


def test_every_variant_agrees_with_the_oracle(
    bundle: Any, variants: list[dict[str, Any]], measure: Measure
) -> None:
    errors = {}
    for axes in variants:
        p, made = make(axes, LENGTHS), Runner(bundle, axes)
        expected = oracle(p)
        for splits in SPLITS:
            name = f"{axes['kv_dtype']}-d{axes['head_dim']}-g{axes['group_size']}-w{axes['sliding_window']:d}-{splits}"
            errors[name] = worst_row(made.run(p, kv_splits=splits), expected)
            assert made.semaphores.count_nonzero() == 0, name
    measure(worst=max(errors.values()), errors={name: round(value, 6) for name, value in errors.items()})
    assert {name: value for name, value in errors.items() if not value <= LIMIT} == {}


@pytest.mark.parametrize("length", [8192, 32768])
def test_long_sequences(runner: Runner, plain: dict[str, Any], measure: Measure, length: int) -> None:
    p = make(plain, [length, length - 1, 1], kv_heads=4)
    error = worst_row(runner.run(p), oracle(p))
    measure(worst=error)
    assert error <= LIMIT


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 255, 256, 257, 300, 5000])
def test_windows(bundle: Any, variants: list[dict[str, Any]], measure: Measure, window: int) -> None:
    worst = 0.0
    for axes in [a for a in variants if a["sliding_window"]]:
        p, made = make(axes, LENGTHS), Runner(bundle, axes)
        p.call["window"] = window
        worst = max(worst, *(worst_row(made.run(p, kv_splits=s), oracle(p)) for s in (1, 3)))
    measure(worst=worst)
    assert worst <= LIMIT


@pytest.mark.parametrize("splits", SPLITS)
def test_sinks(bundle: Any, variants: list[dict[str, Any]], measure: Measure, splits: int) -> None:
    worst = 0.0
    for axes in variants:
        p = make(axes, LENGTHS)
        sinks = torch.linspace(-4, 6, p.q.shape[1], device="cuda")
        worst = max(
            worst,
            worst_row(Runner(bundle, axes).run(p, sinks=sinks, kv_splits=splits), oracle(p, sinks=sinks)),
        )
    measure(worst=worst)
    assert worst <= LIMIT


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_empty_rows_are_exact_zeros(
    bundle: Any, variants: list[dict[str, Any]], splits: int, with_sinks: bool
) -> None:
    for axes in variants:
        p, made = make(axes, [0, 300, 0, 1, 0], pages=40), Runner(bundle, axes)
        sinks = {"sinks": torch.zeros(p.q.shape[1], device="cuda")} if with_sinks else {}
        out = made.run(p, kv_splits=splits, **sinks).to(torch.float32)
        assert torch.equal(out[[0, 2, 4]], torch.zeros_like(out[[0, 2, 4]]))
        assert worst_row(out[[1, 3]], oracle(p, **sinks)[[1, 3]]) <= LIMIT
        assert made.semaphores.count_nonzero() == 0


@pytest.mark.parametrize("length", [-1, -(2**31), 1025, 2**31 - 1])
@pytest.mark.parametrize("splits", [1, 3])
def test_a_length_over_the_capacity_gives_zeros_and_reads_no_page(
    runner: Runner, plain: dict[str, Any], length: int, splits: int
) -> None:
    p = make(plain, [500, 1024, 200])
    before = runner.run(p, kv_splits=splits)
    p.seq_lens[1] = length
    p.page_table[1] = 2**31 - 1
    after = runner.run(p, kv_splits=splits)
    assert p.page_table.shape[1] * plain["page_size"] == 1024
    assert torch.equal(after[1].float(), torch.zeros_like(after[1].float()))
    assert torch.equal(after[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("padding", [-1, 0, 2**31 - 1, -(2**31), 7])
@pytest.mark.parametrize("splits", [1, 3])
def test_padding_of_the_page_table_changes_no_bit(
    bundle: Any, variants: list[dict[str, Any]], padding: int, splits: int
) -> None:
    for axes in variants:
        p, made = make(axes, LENGTHS, pages=200), Runner(bundle, axes)
        before = made.run(p, kv_splits=splits)
        p.page_table[p.page_table == -1] = padding
        assert torch.equal(made.run(p, kv_splits=splits).view(torch.uint8), before.view(torch.uint8))


def test_rows_past_a_length_may_hold_nan(runner: Runner, plain: dict[str, Any]) -> None:
    p = make(plain, LENGTHS)
    before = runner.run(p)
    for row, length in enumerate(LENGTHS):
        page, used = divmod(length, plain["page_size"])
        if used:
            number = int(p.page_table[row, page])
            p.k[number, used:] = float("nan")
            p.v[number, used:] = float("nan")
    assert torch.equal(runner.run(p), before)


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_a_request_gets_the_same_bits_in_every_batch(
    runner: Runner, plain: dict[str, Any], splits: int
) -> None:
    p = make(plain, LENGTHS)
    together = runner.run(p, kv_splits=splits)
    generator = torch.Generator().manual_seed(splits)
    for count in (1, 3, len(LENGTHS)):
        chosen = torch.randperm(len(LENGTHS), generator=generator)[:count].tolist()
        assert torch.equal(runner.run(p.rows(chosen), kv_splits=splits), together[chosen])


def test_the_same_call_gives_the_same_bits_again(bundle: Any, variants: list[dict[str, Any]]) -> None:
    for axes in variants:
        p, made = make(axes, LENGTHS), Runner(bundle, axes)
        first = made.run(p)
        for _ in range(20):
            assert torch.equal(made.run(p).view(torch.uint8), first.view(torch.uint8))


@pytest.mark.parametrize("layout", ["hnd", "layers", "interleaved"])
def test_layouts_are_strides(runner: Runner, plain: dict[str, Any], layout: str) -> None:
    p = make(plain, LENGTHS, kv_heads=3)
    before = runner.run(p)
    if layout == "hnd":
        p.k, p.v = (c.transpose(1, 2).contiguous().transpose(1, 2) for c in (p.k, p.v))
    elif layout == "layers":
        p.k, p.v = (torch.stack([c * 0, c, c * 0], 1)[:, 1] for c in (p.k, p.v))
    else:
        both = torch.stack([p.k, p.v], 1)
        p.k, p.v = both[:, 0], both[:, 1]
    assert not p.k.is_contiguous()
    assert torch.equal(runner.run(p), before)


def test_scales_can_be_on_the_device(bundle: Any, variants: list[dict[str, Any]]) -> None:
    for axes in variants:
        p, made = make(axes, LENGTHS), Runner(bundle, axes)
        p.call["q_scale"] = 0.75
        before = made.run(p)
        pointers = {"q_scale_ptr": torch.tensor([0.75], device="cuda"), "q_scale": 0.0}
        if axes["kv_dtype"] in ("e4m3", "i8"):
            pointers["kv_scale_ptr"] = torch.tensor([p.call["kv_scale"]], device="cuda")
            pointers["kv_scale"] = 0.0
        assert torch.equal(made.run(p, **pointers).view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("pdl", [0, 1])
def test_a_graph_replays_with_rewritten_buffers(runner: Runner, plain: dict[str, Any], pdl: int) -> None:
    p = make(plain, [700, 30, 0, 1024])
    out = torch.empty_like(p.q)
    args = runner.arguments(p, out, pdl=pdl)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(3):
            runner.op.run(**{**args, "stream": torch.cuda.current_stream()})
    for seed, lengths in enumerate(
        [[700, 30, 0, 1024], [0, 1024, 5, 16], [1, 0, 0, 257], [512, 513, 511, 0]]
    ):
        other = make(plain, lengths, seed=seed + 1, pages=64)
        p.q.copy_(other.q)
        p.seq_lens.copy_(other.seq_lens)
        count = min(p.k.shape[0], other.k.shape[0])
        p.k[:count].copy_(other.k[:count])
        p.v[:count].copy_(other.v[:count])
        p.page_table.copy_(other.page_table.clamp_max(count - 1))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, runner.run(p))
        assert worst_row(out[p.seq_lens > 0], oracle(p)[p.seq_lens > 0]) <= LIMIT
    assert runner.semaphores.count_nonzero() == 0


def test_churn_of_a_serving_loop_stays_correct(
    runner: Runner, plain: dict[str, Any], measure: Measure
) -> None:
    generator = torch.Generator().manual_seed(9)
    p = make(plain, [1024] * 6, kv_heads=4)
    worst = 0.0
    for step in range(200):
        p.seq_lens.copy_(torch.randint(0, 1025, (6,), generator=generator))
        chosen = torch.randperm(6, generator=generator)[: 1 + step % 6].tolist()
        batch = p.rows(chosen)
        out, live = runner.run(batch), batch.seq_lens > 0
        assert out[~live].count_nonzero() == 0
        if live.any():
            worst = max(worst, worst_row(out[live], oracle(batch)[live]))
    measure(worst=worst)
    assert worst <= LIMIT
    assert runner.semaphores.count_nonzero() == 0


def test_an_empty_batch_does_nothing(runner: Runner, plain: dict[str, Any]) -> None:
    p = make(plain, [5]).rows([])
    assert runner.run(p).shape[0] == 0


def test_nothing_around_the_output_is_written(runner: Runner, plain: dict[str, Any]) -> None:
    p = make(plain, LENGTHS)
    whole = torch.full((len(LENGTHS) + 2, *p.q.shape[1:]), 7.0, device="cuda", dtype=p.q.dtype)
    for splits in SPLITS:
        runner.op.run(**runner.arguments(p, whole[1:-1], kv_splits=splits))
        torch.cuda.synchronize()
        assert torch.equal(whole[0], torch.full_like(whole[0], 7.0))
        assert torch.equal(whole[-1], torch.full_like(whole[-1], 7.0))
