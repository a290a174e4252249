"""GDN decode on hardware: numbers against a float64 oracle, rows far into a pool, and what must never change a bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu.bundles import open_by_name  # noqa: E402
from gpu.gdn_decode_problems import (  # noqa: E402
    BF16,
    INDEX,
    OP,
    D,
    Problem,
    Runner,
    axes_in,
    blank,
    check,
    error_of,
    make,
    padded,
)
from gpu.variants import variants_of  # noqa: E402

from kernseal.kernels.gdn_decode import torch_api  # noqa: E402
from kernseal.kernels.gdn_decode.operands import SPEC  # noqa: E402
from kernseal.kernels.gdn_decode.rule import kernel_for  # noqa: E402
from kernseal.loader import serving  # noqa: E402
from kernseal.loader.errors import Capturing, InvalidArgument  # noqa: E402

Axes = dict[str, Any]
Measure = Callable[..., None]

ROWS = [5, 0, -1, 15, 16, -(2**31), 7, 2**31 - 1, 1]
"""Of a pool of 16: its ends, and every kind of padding."""
WRITTEN = [2, 3, 4, -1, 6, 8, 16, 9, 1]


@pytest.fixture(scope="module")
def bundle(any_bundle: Any) -> Any:
    """Every bundle that has variants of this op, and so every test here on all of them."""
    return any_bundle


@pytest.fixture(scope="module")
def variants(bundle: Any) -> list[Axes]:
    variants_of(bundle, OP)
    return axes_in(bundle)


def one_of_each(variants: list[Axes]) -> list[Axes]:
    """One variant of each kernel, with as much to do as there is."""
    busy = sorted(variants, key=lambda a: (a["output_indices"], a["intermediate_states"], a["tokens"]))
    return list({(a["wide"], a["tokens"] == 1, a["update_state"]): a for a in busy}.values())


def problem(axes: Axes, **sizes: Any) -> Problem:
    """Every kind of row, with NaN for the tokens of padding."""
    p = make(axes, ROWS, WRITTEN if axes["output_indices"] else None, **sizes)
    for name in ("q", "k", "v", "a", "b"):
        getattr(p, name)[~p.alive] = math.nan
    return p


@pytest.mark.parametrize("heads", [(2, 4), (16, 32), (3, 3), (1, 8)], ids=str)
def test_decode_agrees_with_the_oracle(
    bundle: Any, variants: list[Axes], measure: Measure, heads: tuple[int, int]
) -> None:
    for axes in variants:
        p = problem(axes, heads=heads)
        got = Runner(bundle, axes).run(p, spare_steps=2)
        check(p, got)
        error = error_of(got.output[p.alive], p.reference().output[p.alive])
        measure(**{SPEC.variant(axes): {"worst": error}})


def test_a_large_batch(bundle: Any, variants: list[Axes]) -> None:
    """More CTAs than fit on the device at once."""
    for axes in one_of_each(variants):
        order = torch.randperm(1200, generator=torch.Generator().manual_seed(1)).tolist()
        written = order[600:] if axes["output_indices"] else None
        p = make(axes, order[:600], written, heads=(4, 8), pool_rows=1200)
        check(p, Runner(bundle, axes).run(p))


def test_an_empty_batch_is_a_call_that_does_nothing(bundle: Any, variants: list[Axes]) -> None:
    for axes in one_of_each(variants):
        p = make(axes, [], [] if axes["output_indices"] else None)
        got = Runner(bundle, axes).run(p)
        assert got.output.numel() == 0
        assert torch.equal(got.pool, p.pool)


def test_slices_of_projections_and_a_padded_pool_give_the_same_bits(
    bundle: Any, variants: list[Axes]
) -> None:
    spare = {"q": 8, "k": 24, "v": 16, "o": 8, "a": 3, "b": 1, "state": 40}
    for axes in one_of_each(variants):
        p, runner = problem(axes), Runner(bundle, axes)
        want = runner.run(p)
        args = runner.arguments(replace(p, pool=p.pool.clone()))
        args |= {name: padded(args[name], columns) for name, columns in spare.items()}
        runner.launch(args)
        torch.cuda.synchronize()
        assert torch.equal(args["o"].unflatten(0, want.output.shape[:2]), want.output)
        assert torch.equal(args["state"], want.pool)
        for name in spare:
            view = args[name]
            whole = view.as_strided((view.shape[0], view.stride(0)), (view.stride(0), 1))
            assert bool(whole[:, view[0].numel() :].isnan().all()), f"between rows of {name}"


def test_rows_far_into_a_pool(bundle: Any, variants: list[Axes]) -> None:
    """Row 4096 of 32 heads begins 2^31 elements into the pool. The rest of it is not even filled."""
    rows, written, heads = [4096, 4095, 2047, 4100], [4099, 1, 4097, 4098], (16, 32)
    for axes in one_of_each(variants):
        split = axes["output_indices"]
        used = sorted({*rows, *written})
        small = make(
            axes,
            [used.index(r) for r in rows],
            [used.index(r) for r in written] if split else None,
            heads=heads,
            pool_rows=len(used),
        )
        want = Runner(bundle, axes).run(small)
        pool = torch.empty(4101, heads[1], D, D, dtype=BF16, device="cuda")
        pool[used] = small.pool
        index = INDEX[axes["index_dtype"]]
        far = replace(
            small,
            pool=pool,
            rows=torch.tensor(rows, dtype=index, device="cuda"),
            written=torch.tensor(written, dtype=index, device="cuda") if split else None,
        )
        runner = Runner(bundle, axes)
        args = runner.arguments(far)
        runner.launch(args)
        torch.cuda.synchronize()
        check(small, want)
        assert torch.equal(args["o"].unflatten(0, want.output.shape[:2]), want.output)
        assert torch.equal(pool[used], want.pool)


def test_intermediate_states_far_into_their_buffer(bundle: Any, variants: list[Axes]) -> None:
    """The last sequence's begin past 2^31 elements."""
    found = [a for a in one_of_each(variants) if a["intermediate_states"]]
    if not found:
        pytest.skip("this bundle has no variant with intermediate states")
    for axes in found:
        rows = list(range(66))
        p = make(axes, rows, rows if axes["output_indices"] else None, heads=(16, 32), pool_rows=66)
        runner = Runner(bundle, axes)
        want = runner.run(p)
        steps = torch.empty(66, 64, 32, D, D, dtype=BF16, device="cuda")
        args = runner.arguments(replace(p, pool=p.pool.clone()), intermediate_states=steps)
        runner.launch(args)
        torch.cuda.synchronize()
        assert torch.equal(steps[:, : axes["tokens"]], want.steps)


def test_a_request_has_the_same_bits_in_any_batch(bundle: Any, variants: list[Axes]) -> None:
    for axes in variants:
        p, runner = problem(axes), Runner(bundle, axes)
        whole = runner.run(p)
        assert torch.equal(runner.run(p).output, whole.output), "not even with itself"
        for chosen in ([3], [8, 0, 2], list(reversed(range(len(ROWS))))):
            part = runner.run(p.sequences(chosen))
            assert torch.equal(part.output, whole.output[chosen])
            if whole.steps is not None and part.steps is not None:
                assert torch.equal(part.steps.nan_to_num(), whole.steps[chosen].nan_to_num())


def test_a_captured_graph_replays_like_eager(bundle: Any, variants: list[Axes]) -> None:
    """Also with other rows and numbers than when it was captured."""
    for axes in one_of_each(variants):
        runner = Runner(bundle, axes)
        first = problem(axes)
        args = runner.arguments(replace(first, pool=first.pool.clone()))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            runner.launch(args)
        for order in (range(len(ROWS)), [8, 0, 1, 2, 3, 4, 5, 6, 7]):
            p = problem(axes, seed=order[0]).sequences(list(order))
            want = runner.run(p)
            for name, value in runner.arguments(p).items():
                if isinstance(value, torch.Tensor):
                    args[name].copy_(value)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(
                args["o"].unflatten(0, want.output.shape[:2]).nan_to_num(), want.output.nan_to_num()
            )
            assert torch.equal(args["state"], want.pool)
            if want.steps is not None:
                assert torch.equal(args["intermediate_states"].nan_to_num(), want.steps.nan_to_num())


def test_two_sequences_may_read_one_row(bundle: Any, variants: list[Axes]) -> None:
    found = [a for a in one_of_each(variants) if a["output_indices"] or not a["update_state"]]
    for axes in found:
        p = make(axes, [3, 3, 3], [0, 1, 2] if axes["output_indices"] else None)
        check(p, Runner(bundle, axes).run(p))


def test_run_allocates_nothing_on_the_device(bundle: Any, variants: list[Axes]) -> None:
    for axes in one_of_each(variants):
        runner = Runner(bundle, axes)
        args = runner.arguments(problem(axes))
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0], torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(20):
            runner.launch(args)
        torch.cuda.synchronize()
        assert (torch.cuda.mem_get_info()[0], torch.cuda.memory_stats()["allocation.all.allocated"]) == before


def test_a_refusal_reaches_python(bundle: Any, variants: list[Axes]) -> None:
    runner = Runner(bundle, variants[0])
    args = runner.arguments(problem(variants[0]), scale=0.0)
    with pytest.raises(InvalidArgument, match="scale is 0"):
        runner.launch(args)


# ---- FlashInfer's function ----


@pytest.fixture
def served(bundle: Any, variants: list[Axes], monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """What the rule picks here for small batches, by what else a call asks for."""
    monkeypatch.setattr(serving, "_served", {})
    torch_api.use_bundle(bundle)
    found = [a for a in variants if (a["wide"], a["tile_v"]) == kernel_for(a["tokens"], 36, 132)]
    if not found:
        pytest.skip("this bundle has no variant of gdn_decode that the rule picks for a small batch")
    return found


def arguments(p: Problem, **changes: Any) -> dict[str, Any]:
    """The call of FlashInfer's function that asks for what ``p`` does."""
    steps = blank(p.batch, p.axes["tokens"] + 1, p.hv, D, D) if p.axes["intermediate_states"] else None
    return {
        **{name: getattr(p, name) for name in ("q", "k", "v", "a", "b", "dt_bias")},
        "A_log": p.a_log,
        "state": None,
        "scale": p.scale,
        "use_qk_l2norm": p.axes["qk_l2norm"],
        "initial_state": p.pool.clone(),
        "initial_state_indices": p.rows,
        "output_state_indices": p.written,
        "intermediate_states_buffer": steps,
        "disable_state_update": not p.axes["update_state"],
        **changes,
    }


def test_flashinfers_function_gives_the_same_bits(bundle: Any, served: list[Axes]) -> None:
    for axes in served:
        p = problem(axes)
        want = Runner(bundle, axes).run(p)
        args = arguments(p)
        output, pool = torch_api.gated_delta_rule_decode_pretranspose(**args)
        torch.cuda.synchronize()
        assert torch.equal(output, want.output)
        assert torch.equal(pool, want.pool)
        if want.steps is not None:
            got = args["intermediate_states_buffer"][:, : axes["tokens"]]
            assert torch.equal(got.nan_to_num(), want.steps.nan_to_num())


def test_flashinfers_function_is_captured_after_prepare_and_refused_before(
    bundle: Any, served: list[Axes], request: pytest.FixtureRequest
) -> None:
    axes = served[0]
    p = problem(axes)
    want = Runner(bundle, axes).run(p)
    with open_by_name(request.node.callspec.params["any_bundle"]) as fresh:
        torch_api.use_bundle(fresh)
        args = arguments(p, output=blank(*p.v.shape))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), pytest.raises(Capturing, match="prepare"):
            torch_api.gated_delta_rule_decode_pretranspose(**args)
        torch_api.prepare(**axes)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch_api.gated_delta_rule_decode_pretranspose(**args)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(args["output"], want.output)
