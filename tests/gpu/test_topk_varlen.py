"""Top-k of a decode step on hardware: what is selected, and what must never change.

What no row has of the scores is NaN in every problem, which would be selected before anything else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu.topk_varlen_problems import OP, POISON, Problem, Runner, held, make, outputs, wrong  # noqa: E402
from gpu.variants import variants_of  # noqa: E402

Measure = Callable[..., None]
STATE_WORDS = 770
LENGTHS = [0, 1, 511, 512, 513, 1023, 1025, 4095, 4096, 5000]


@pytest.fixture(scope="module")
def bundle(any_bundle: Any) -> Any:
    """Every bundle that has variants of this op, and so every test here on all of them."""
    return any_bundle


@pytest.fixture(scope="module")
def variants(bundle: Any) -> list[Any]:
    return variants_of(bundle, OP)


def check_all(bundle: Any, variants: list[Any], problem: Callable[[Any], Problem]) -> None:
    failures = {v.variant: wrong(p, Runner(bundle, v).run(p)) for v in variants for p in [problem(v)]}
    assert {name: why for name, why in failures.items() if why} == {}


@pytest.mark.parametrize("top_k", [1, 64, 512, 2048])
@pytest.mark.parametrize("copies", [1, 30])
def test_rows_of_every_length(bundle: Any, variants: list[Any], top_k: int, copies: int) -> None:
    """A few rows, and more than there are multiprocessors."""
    tokens = [*LENGTHS, top_k - 1, top_k, top_k + 1] * copies
    check_all(bundle, variants, lambda v: make(v, tokens, 5000, top_k))


@pytest.mark.parametrize("rows", [1, 2, 5, 66, 67, 140])
@pytest.mark.parametrize("max_len", [8192, 8193, 30000, 131072, 200001])
def test_rows_are_spread_over_the_device(bundle: Any, variants: list[Any], rows: int, max_len: int) -> None:
    tokens = [(max_len, max_len - 1, 700, max_len // 2, 8195)[i % 5] for i in range(rows)]
    check_all(bundle, variants, lambda v: make(v, tokens, max_len, 512))


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
@pytest.mark.parametrize("ratio", [1, 4])
def test_rows_of_a_request(bundle: Any, variants: list[Any], next_n: int, ratio: int) -> None:
    tokens = [ratio * n + d for n in (0, 1, 64, 65, 3000) for d in range(ratio)]
    check_all(bundle, variants, lambda v: make(v, tokens, 3001, 64, next_n=next_n, compress_ratio=ratio))


@pytest.mark.parametrize("levels", [1, 2, 40])
@pytest.mark.parametrize("max_len", [5000, 131072])
def test_equal_scores(bundle: Any, variants: list[Any], levels: int, max_len: int) -> None:
    tokens = [max_len, max_len - 1, 2000, 300]
    check_all(bundle, variants, lambda v: make(v, tokens, max_len, 700, levels=levels))


def test_lengths_are_kept_within_the_row(bundle: Any, variants: list[Any]) -> None:
    outside = [-1, -(2**29), 2**31 - 1, 5001, 5000, 0]
    check_all(bundle, variants, lambda v: make(v, outside, 5000, 600, row_stride=5200))
    check_all(bundle, variants, lambda v: make(v, outside, 60000, 600))


@pytest.mark.parametrize("row_stride", [20000, 20001, 20002, 20004, 20008])
@pytest.mark.parametrize("begin", [0, 1, 5, 15])
def test_rows_begin_anywhere(bundle: Any, variants: list[Any], row_stride: int, begin: int) -> None:
    """Also where the last block of a row has a few scores, or none: what comes before its first vector ends with it."""
    tokens = [20000, 8192, 8193, 8195, 16384, 16387, 700, 65]
    check_all(bundle, variants, lambda v: make(v, tokens, 20000, 64, row_stride=row_stride, begin=begin))


def test_groups_take_row_after_row(bundle: Any, variants: list[Any]) -> None:
    def problem(v: Any) -> Problem:
        size = 2 * held(v)
        return make(v, [(size - i, 3, 511, size // 2, 0, 600)[i * 7 % 6] for i in range(500)], size, 512)

    check_all(bundle, variants, problem)


def test_all_variants_and_sizes_share_semaphores(bundle: Any, variants: list[Any]) -> None:
    semaphores = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    for max_len, rows in ((131072, 3), (9000, 200), (400000, 9), (65536, 1), (300000, 150)):
        for variant in variants:
            p = make(variant, [max_len, 600, max_len // 2] * -(-rows // 3), max_len, 512, seed=rows)
            assert wrong(p, Runner(bundle, variant, semaphores).run(p)) == "", (
                variant.variant,
                max_len,
                rows,
            )
            words = semaphores.view(torch.int32)[: 60 * STATE_WORDS].view(60, STATE_WORDS)
            assert words[:, :769].count_nonzero() == 0


def test_ten_thousand_launches_end(bundle: Any, variants: list[Any], measure: Measure) -> None:
    """Blocks that wait for one another do so thousands of times without being left behind."""
    for variant in variants:
        p = make(variant, [131072, 600, 131000], 131072, 512)
        runner, out = Runner(bundle, variant), outputs(p)
        args = runner.arguments(p, out)
        begin = time.monotonic()
        for _ in range(10_000):
            runner.op.run(**args)
        torch.cuda.synchronize()
        measure(**{variant.variant: (time.monotonic() - begin) / 10_000})
        assert wrong(p, out) == "", variant.variant


def test_a_launch_sees_what_the_kernel_before_it_wrote(bundle: Any, variants: list[Any]) -> None:
    """It may begin while that kernel is ending, and waits for it."""
    for variant in variants:
        problems = [make(variant, [60000, 700, 30000], 60000, 512, seed=seed) for seed in range(4)]
        runner, target = Runner(bundle, variant), make(variant, [0, 0, 0], 60000, 512)
        outs = []
        for step in range(40):
            p, out = problems[step % 4], outputs(target)
            args = runner.arguments(target, out)
            target.scores.copy_(p.scores)
            target.seq_lens.copy_(p.seq_lens)
            runner.op.run(**args)
            runner.op.run(**args)
            outs.append(out)
        torch.cuda.synchronize()
        assert [wrong(problems[i % 4], out) for i, out in enumerate(outs)] == [""] * 40, variant.variant


@pytest.mark.parametrize("max_len", [5000, 131072])
def test_a_graph_replays_with_rewritten_buffers(bundle: Any, variants: list[Any], max_len: int) -> None:
    for variant in variants:
        p = make(variant, [max_len, 300, 700], max_len, 512)
        runner, out = Runner(bundle, variant), outputs(p)
        args = runner.arguments(p, out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            for _ in range(3):
                runner.op.run(**{**args, "stream": torch.cuda.current_stream()})
        for seed, tokens in enumerate(([max_len, 300, 700], [0, max_len - 1, 512], [513, 1, max_len // 2])):
            other = make(variant, tokens, max_len, 512, seed=seed + 1)
            p.scores.copy_(other.scores)
            p.seq_lens.copy_(other.seq_lens)
            for tensor in out.values():
                tensor.view(torch.uint8).fill_(0xA5)
            graph.replay()
            torch.cuda.synchronize()
            assert wrong(p, out) == "", variant.variant


def test_nothing_around_the_outputs_is_written(bundle: Any, variants: list[Any]) -> None:
    for variant in variants:
        p = make(variant, [5000, 100, 0], 5000, 512)
        runner, out = Runner(bundle, variant), outputs(p)
        whole = {n: t.new_full((5, 512), POISON if t.dtype == torch.int32 else 7.0) for n, t in out.items()}
        edge = {name: tensor[[0, 4]].clone() for name, tensor in whole.items()}
        runner.op.run(**runner.arguments(p, {name: tensor[1:4] for name, tensor in whole.items()}))
        torch.cuda.synchronize()
        assert wrong(p, {name: tensor[1:4] for name, tensor in whole.items()}) == ""
        assert all(torch.equal(whole[name][[0, 4]], edge[name]) for name in whole)


def test_an_empty_batch_does_nothing(bundle: Any, variants: list[Any]) -> None:
    for variant in variants:
        assert Runner(bundle, variant).run(make(variant, [], 5000, 512))["indices"].shape == (0, 512)


def test_the_function_of_flashinfer(bundle: Any, variants: list[Any]) -> None:
    from kernseal.kernels.topk_varlen import torch_api

    torch_api.use_bundle(bundle)
    for variant in variants:
        p = make(variant, [5000, 100, 0, 4000], 5000, 512, next_n=2)
        indices, values = torch_api.top_k_varlen(p.scores, p.seq_lens, 512, next_n=2, return_values=p.values)
        out = {"indices": indices} | ({"values": values} if values is not None else {})
        assert wrong(p, out) == "", variant.variant
