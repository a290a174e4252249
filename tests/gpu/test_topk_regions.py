"""Top-k on hardware: what is selected, in which order, and what must never change a bit.

What no row has of the scores is NaN in every problem, which would be selected before anything else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu.topk_regions_problems import (  # noqa: E402
    OP,
    POISON,
    SMEM,
    Runner,
    axes_of,
    make,
    outputs,
    same_bits,
    wrong,
)
from gpu.variants import variants_of  # noqa: E402

Measure = Callable[..., None]
STATE, SCRATCH = 3104, 2048
EDGES = [0, 1, 511, 512, 513, 1023, 1024, 1025, 2047, 2049, 4096]


@pytest.fixture(scope="module")
def bundle(any_bundle: Any) -> Any:
    """Every bundle that has variants of this op, and so every test here on all of them."""
    return any_bundle


@pytest.fixture(scope="module")
def variants(bundle: Any) -> list[Any]:
    return variants_of(bundle, OP)


@pytest.fixture(scope="module")
def exact(variants: list[Any]) -> list[Any]:
    return [v for v in variants if axes_of(v)["deterministic"]]


def held(variant: Any) -> int:
    """About as many scores as a thread block holds."""
    return (SMEM[variant.class_name] - 2400) // (4 if axes_of(variant)["dtype"] == "f32" else 2)


def check_all(bundle: Any, variants: list[Any], problem: Callable[[Any], Any]) -> None:
    """``problem(variant)`` is right on every variant."""
    failures = {}
    for variant in variants:
        p = problem(variant)
        failures[variant.variant] = wrong(p, Runner(bundle, p.axes).run(p))
    assert {name: why for name, why in failures.items() if why} == {}


@pytest.mark.parametrize("top_k", [1, 64, 512, 2048])
def test_rows_of_every_length_in_one_thread_block(bundle: Any, variants: list[Any], top_k: int) -> None:
    lengths = [*EDGES, top_k - 1, top_k, top_k + 1]
    check_all(bundle, variants, lambda v: make(v, lengths, 4096, top_k))


@pytest.mark.parametrize("blocks", [2, 3, 7])
def test_rows_of_every_length_in_a_group(bundle: Any, variants: list[Any], blocks: int) -> None:
    def problem(v: Any) -> Any:
        chunk = held(v)
        around = [chunk - 1, chunk, chunk + 1, (blocks - 1) * chunk + 5, blocks * chunk - 3]
        return make(v, [*EDGES, *around], blocks * chunk - 3, 512)

    check_all(bundle, variants, problem)


@pytest.mark.parametrize("levels", [1, 2, 40])
@pytest.mark.parametrize("long", [False, True])
def test_equal_scores(bundle: Any, variants: list[Any], levels: int, long: bool) -> None:
    def problem(v: Any) -> Any:
        size = 3 * held(v) - 7 if long else 5000
        return make(v, [size, size - 1, 2000, 300], size, 700, levels=levels)

    check_all(bundle, variants, problem)


def test_the_order_is_that_of_bit_patterns(bundle: Any, variants: list[Any]) -> None:
    def problem(v: Any) -> Any:
        p = make(v, [3000] * 4, 3000, 64)
        inf, nan = float("inf"), float("nan")
        special = torch.tensor([0.0, -0.0, inf, -inf, nan, 1e-40, -1e-40, 65504.0], device="cuda")
        p.scores[0] = special.repeat(375).to(p.scores.dtype)
        p.scores[1] = torch.tensor([0.0, -0.0], device="cuda").repeat(1500).to(p.scores.dtype)
        p.scores[2, ::50] = nan
        p.scores[3] = torch.where(p.scores[3] > 2, p.scores[3], -inf)
        negative_nan = torch.full_like(p.scores[2], nan).copysign(torch.full_like(p.scores[2], -1.0))
        p.scores[2, 7::100] = negative_nan[7::100]
        return p

    check_all(bundle, variants, problem)


def test_lengths_are_kept_within_the_row(bundle: Any, variants: list[Any]) -> None:
    outside = [-1, -(2**31), 2**31 - 1, 5001, 5000, 0]
    check_all(bundle, variants, lambda v: make(v, outside, 5000, 600, row_stride=5200))
    check_all(bundle, variants, lambda v: make(v, [-5, 2**30, 77], 2 * held(v), 100))


@pytest.mark.parametrize("row_stride", [5000, 5001, 5002, 5004, 5008])
@pytest.mark.parametrize("begin", [0, 1, 3])
def test_rows_begin_anywhere(bundle: Any, variants: list[Any], row_stride: int, begin: int) -> None:
    """Scores whose address and stride are multiples of no vector."""

    def problem(v: Any) -> Any:
        p = make(v, [5000, 4999, 700, 1, 0], 5000, 512, row_stride=row_stride)
        memory = torch.full((p.scores.numel() + 8,), float("nan"), dtype=p.scores.dtype, device="cuda")
        moved = memory[begin : begin + p.scores.numel()].view_as(p.scores)
        moved.copy_(p.scores)
        p.scores = moved
        return p

    check_all(bundle, variants, problem)


@pytest.mark.parametrize("long", [False, True])
def test_windows_of_rows(bundle: Any, variants: list[Any], long: bool) -> None:
    def problem(v: Any) -> Any:
        size = 2 * held(v) if long else 3000
        starts = torch.tensor([0, 1, 7, 500, 123], dtype=torch.int32, device="cuda")
        extra = {"page_size": 1} if axes_of(v)["paged"] else {}
        return make(
            v, [size, size, 2999, 513, 512], size, 512, row_stride=size + 501, row_starts=starts, **extra
        )

    check_all(bundle, variants, problem)


@pytest.mark.parametrize("page_size", [1, 16, 64, 2**20])
@pytest.mark.parametrize("long", [False, True])
def test_page_tables_of_requests(bundle: Any, variants: list[Any], page_size: int, long: bool) -> None:
    def problem(v: Any) -> Any:
        size = 2 * held(v) if long else 3000
        p = make(v, [size, 1, 513, 2000], size, 512, page_size=page_size)
        p.call["page_table_starts"] = torch.tensor([0, 1, 2, 0], dtype=torch.int32, device="cuda")
        p.call["row_to_request"] = torch.tensor([1, 1, 0, 3], dtype=torch.int32, device="cuda")
        return p

    check_all(bundle, [v for v in variants if axes_of(v)["paged"]], problem)


def test_offsets(bundle: Any, variants: list[Any]) -> None:
    offsets = torch.tensor([0, 10**9, -5000], dtype=torch.int32, device="cuda")
    plain = [v for v in variants if not axes_of(v)["paged"]]
    check_all(bundle, plain, lambda v: make(v, [3000, 100, 5000], 5000, 512, offsets=offsets))


def test_without_lengths_a_row_is_all_of_it(bundle: Any, variants: list[Any]) -> None:
    def problem(v: Any) -> Any:
        p = make(v, [5000] * 3, 5000, 512)
        del p.call["lengths"]
        return p

    check_all(bundle, variants, problem)


@pytest.mark.parametrize("rows", [1, 131, 133, 1000])
def test_more_rows_than_groups(bundle: Any, variants: list[Any], rows: int) -> None:
    lengths = [1 + 977 * i % 3000 for i in range(rows)]
    check_all(bundle, variants, lambda v: make(v, lengths, 3000, 64))


def test_groups_take_row_after_row(bundle: Any, variants: list[Any]) -> None:
    """Short rows between long ones, which leave the counters of their group alone."""

    def problem(v: Any) -> Any:
        size = 2 * held(v)
        lengths = [(size - i, 3, 511, size // 2, 0, 600)[i * 7 % 6] for i in range(500)]
        return make(v, lengths, size, 512)

    check_all(bundle, variants, problem)


def test_a_million_scores(bundle: Any, variants: list[Any]) -> None:
    check_all(bundle, variants, lambda v: make(v, [2**20, 2**20 - 1, 5], 2**20, 2048))


def test_the_same_call_gives_the_same_bits_again(bundle: Any, exact: list[Any]) -> None:
    for variant in exact:
        for size in (5000, 3 * held(variant)):
            p = make(variant, [size] * 40, size, 512, levels=30)
            runner = Runner(bundle, p.axes)
            first = runner.run(p)
            for _ in range(30):
                again = runner.run(p)
                assert all(same_bits(again[name], first[name]) for name in first), variant.variant


def test_a_row_gets_the_same_bits_in_every_batch(bundle: Any, exact: list[Any]) -> None:
    for variant in exact:
        for size in (5000, 2 * held(variant)):
            p = make(variant, [size, 600, size - 1, 2000, size // 2, 3], size, 512, levels=50)
            runner = Runner(bundle, p.axes)
            together = runner.run(p)
            for chosen in ([0], [5], [4, 2], [3, 3, 3, 0], [5, 4, 3, 2, 1, 0]):
                alone = runner.run(p.rows(chosen))
                assert all(same_bits(alone[n], together[n][chosen]) for n in together), variant.variant


def test_what_is_beside_a_row_changes_no_bit(bundle: Any, exact: list[Any]) -> None:
    for variant in exact:
        p = make(variant, [700, 0, 4000, 513], 5000, 512, row_stride=5003)
        runner = Runner(bundle, p.axes)
        before = runner.run(p)
        for padding in (0.0, float("inf"), float("-inf"), 3.0):
            columns = torch.arange(5003, device="cuda")
            p.scores[columns >= p.call["lengths"][:, None]] = padding
            after = runner.run(p)
            assert all(same_bits(after[name], before[name]) for name in before), variant.variant


def test_all_variants_and_sizes_share_semaphores(bundle: Any, variants: list[Any]) -> None:
    """What a launch leaves is what the next one needs, whichever that is."""
    semaphores = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    for size in (2.0, 5.5, 1.2, 3.0, 0.3, 2.0):
        for variant in variants:
            length = int(size * held(variant))
            p = make(variant, [length, 600, length - 1], length, 512, seed=int(10 * size))
            out = Runner(bundle, p.axes, semaphores).run(p)
            assert wrong(p, out) == "", (variant.variant, size)


def test_counters_and_histograms_are_left_zero(bundle: Any, variants: list[Any]) -> None:
    for variant in variants:
        size = 2 * held(variant)
        p = make(variant, [size] * 70, size, 512)
        runner = Runner(bundle, p.axes)
        runner.run(p)
        groups = min(70, torch.cuda.get_device_properties(0).multi_processor_count // 2)
        states = runner.semaphores[: groups * STATE].view(torch.int32).view(groups, STATE // 4)
        assert states[:, :768].count_nonzero() == 0
        assert states[:, 770].count_nonzero() == 0


def test_ten_thousand_launches_of_groups_end(bundle: Any, variants: list[Any], measure: Measure) -> None:
    """Blocks that wait for one another do so thousands of times without being left behind."""
    for variant in variants:
        size = 4 * held(variant) - 100
        p = make(variant, [size, 600, size - 1], size, 512)
        runner = Runner(bundle, p.axes)
        out = outputs(p)
        args = runner.arguments(p, out)
        begin = time.monotonic()
        for _ in range(10_000):
            runner.op.run(**args)
        torch.cuda.synchronize()
        measure(**{variant.variant: (time.monotonic() - begin) / 10_000})
        assert wrong(p, out) == "", variant.variant


@pytest.mark.parametrize("long", [False, True])
def test_a_graph_replays_with_rewritten_buffers(bundle: Any, exact: list[Any], long: bool) -> None:
    for variant in exact:
        size = 2 * held(variant) if long else 5000
        p = make(variant, [size, 300, 700], size, 512)
        runner, out = Runner(bundle, p.axes), outputs(p)
        args = runner.arguments(p, out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            for _ in range(3):
                runner.op.run(**{**args, "stream": torch.cuda.current_stream()})
        for seed, lengths in enumerate(([size, 300, 700], [0, size - 1, 512], [513, 1, size // 2])):
            other = make(variant, lengths, size, 512, seed=seed + 1)
            p.scores.copy_(other.scores)
            p.call["lengths"].copy_(other.call["lengths"])
            for tensor in out.values():
                tensor.view(torch.uint8).fill_(0xA5)
            graph.replay()
            torch.cuda.synchronize()
            eager = runner.run(p)
            assert all(same_bits(out[name], eager[name]) for name in out), variant.variant
            assert wrong(p, out) == "", variant.variant


def test_nothing_around_the_outputs_is_written(bundle: Any, variants: list[Any]) -> None:
    for variant in variants:
        p = make(variant, [5000, 100, 0], 5000, 512)
        runner, out = Runner(bundle, p.axes), outputs(p)
        whole = {n: t.new_full((5, 512), POISON if t.dtype == torch.int32 else 7.0) for n, t in out.items()}
        edge = {name: tensor[[0, 4]].clone() for name, tensor in whole.items()}
        runner.op.run(**runner.arguments(p, {name: tensor[1:4] for name, tensor in whole.items()}))
        torch.cuda.synchronize()
        assert wrong(p, {name: tensor[1:4] for name, tensor in whole.items()}) == ""
        assert all(same_bits(whole[name][[0, 4]], edge[name]) for name in whole)


def test_an_empty_batch_does_nothing(bundle: Any, variants: list[Any]) -> None:
    for variant in variants:
        p = make(variant, [5], 5000, 512)
        p = p.rows([])
        assert Runner(bundle, p.axes).run(p)["indices"].shape == (0, 512)


def test_functions_of_flashinfer(bundle: Any, variants: list[Any]) -> None:
    from kernseal.kernels.topk_regions import torch_api

    torch_api.use_bundle(bundle)
    for variant in variants:
        axes = axes_of(variant)
        p = make(variant, [5000, 100, 0, 4000], 5000, 512, **({"page_size": 16} if axes["paged"] else {}))
        modes = {"deterministic": axes["deterministic"]}
        if axes["paged"]:
            raw = torch.empty(4, 512, dtype=torch.int32, device="cuda")
            out = torch_api.top_k_page_table_transform(
                *(p.scores, p.call["page_table"], p.call["lengths"], 512),
                page_size=16,
                out_raw_indices=raw,
                **modes,
            )
            assert wrong(p, {"indices": out, "raw_indices": raw}) == "", variant.variant
            continue
        p.call["offsets"] = torch.tensor([5, 0, 1, 10**6], dtype=torch.int32, device="cuda")
        out = torch_api.top_k_ragged_transform(p.scores, p.call["offsets"], p.call["lengths"], 512, **modes)
        assert wrong(p, {"indices": out}) == "", variant.variant
        scores = p.scores.nan_to_num(0.0)
        values, columns = torch_api.top_k(scores, 512, sorted=True, **modes)
        assert torch.equal(values, scores.topk(512).values)
        assert torch.equal(scores.gather(1, columns), values)
