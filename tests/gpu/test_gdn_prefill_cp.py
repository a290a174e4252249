"""Context-parallel GDN prefill on hardware: numbers against the float64 recurrence, and what must never change a bit.

The problems are those of ``gdn_prefill``. Scratch is full of garbage, and memory that nobody may read is NaN.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu.bundles import BUNDLES, folder, open_by_name  # noqa: E402
from gpu.problems import (  # noqa: E402
    DTYPES,
    KINDS,
    RAGGED,
    Case,
    Inputs,
    Outputs,
    blank,
    call_args,
    in_layout,
    make_inputs,
    oracle,
    relative_error,
    results,
    rows_of,
)
from gpu.problems import run as run_fused  # noqa: E402

from kernseal.loader.bundle import Bundle  # noqa: E402
from kernseal.loader.errors import Unsupported  # noqa: E402
from kernseal.loader.op import Op  # noqa: E402

OP = "gdn_prefill_cp"
LIMITS = {"bf16": 8e-3, "f16": 3e-3}
"""Largest ||error|| / ||reference|| allowed, by element type."""
BF16_STATE_LIMIT = 1e-2
CLOSE = {"bf16": 1e-2, "f16": 3e-3}
"""The same, between two ways to cut a sequence."""

HEADS = [(4, 4, 8), (8, 2, 2), (16, 16, 16), (8, 8, 16), (16, 16, 32), (32, 32, 32), (4, 4, 20)]
"""Each of the three fixup kernels (up to 8, up to 16, more), at its edge and inside."""
LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 2048, 4097]
LAYOUTS = pytest.mark.parametrize("layout", ["hvk", "hkv"])


class Bundles:
    """A product bundle, and beside it the one with the variants of the profile `validation`, where that was built."""

    def __init__(self, opened: list[Bundle]) -> None:
        self.opened = opened

    def prepare(self, op: str, **axes: Any) -> Op:
        for bundle in self.opened:
            with contextlib.suppress(Unsupported):
                return bundle.prepare(op, **axes)
        if len(self.opened) == 1 and op == OP:
            pytest.skip(f"no validation bundle, and {self.opened[0].path} lacks {axes}")
        return self.opened[0].prepare(op, **axes)  # says why

    def variants(self) -> list[Any]:
        return [v for bundle in self.opened for v in bundle.variants()]


@pytest.fixture(scope="module", params=list(BUNDLES))
def bundle(request: pytest.FixtureRequest, gpu: Any) -> Iterator[Bundles]:
    with contextlib.ExitStack() as stack:
        names = [name for name in (request.param, f"{request.param}_more") if folder(name).is_dir()]
        made = Bundles([stack.enter_context(open_by_name(name)) for name in names])
        if not any(v.op == OP for v in made.variants()):
            pytest.skip(f"no bundle {folder(request.param)} with variants of {OP}")
        yield made
        gpu.cuda.synchronize()


def axes_of(case: Case) -> dict[str, Any]:
    return {name: value for name, value in case.axes.items() if name not in ("alpha", "beta")}


def prepare(bundle: Any, case: Case) -> Op:
    return bundle.prepare(OP, device=0, **axes_of(case))


def scratch(op: Op, args: dict[str, Any], byte: int = 0xAB) -> torch.Tensor:
    return torch.full((op.workspace_size(**args),), byte, dtype=torch.uint8, device="cuda")


def launch(op: Op, args: dict[str, Any]) -> None:
    op.run(**args, workspace=scratch(op, args), stream=torch.cuda.current_stream())


def run(bundle: Any, case: Case, x: Inputs | None = None, **cut: int) -> Outputs:
    """Prepare, run and wait; ``cut`` is chunk_len and max_seqlen."""
    args = call_args(case, x or make_inputs(case)) | cut
    launch(prepare(bundle, case), args)
    torch.cuda.synchronize()
    return results(case, args)


def same_bits(got: Outputs, want: Outputs) -> None:
    assert torch.equal(got.output, want.output)
    assert torch.equal(got.state, want.state)
    if want.checkpoints is not None:
        assert got.checkpoints is not None and torch.equal(got.checkpoints, want.checkpoints)


def check(case: Case, got: Outputs, measure: Any, **more: Any) -> None:
    want = oracle(case)
    state_limit = BF16_STATE_LIMIT if case.state_dtype == "bf16" else LIMITS[case.dtype]
    output = relative_error(got.output, want.output)
    state = relative_error(got.state, want.final_state)
    measure(output=output, state=state, **more)
    assert output <= LIMITS[case.dtype]
    assert state <= state_limit
    if case.checkpoint_every:
        assert got.checkpoints is not None and got.checkpoints.shape == want.checkpoints.shape
        assert relative_error(got.checkpoints, want.checkpoints) <= state_limit


def index(values: list[int], case: Case) -> torch.Tensor:
    return torch.tensor(values, dtype=DTYPES[case.index_dtype]).to("cuda")


# ---- numbers ----


@pytest.mark.parametrize("chunk_len", [0, 64, 128, 1 << 20])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_one_sequence_in_chunks(bundle: Any, tokens: int, chunk_len: int, measure: Any) -> None:
    case = Case(lengths=(tokens,))
    check(case, run(bundle, case, chunk_len=chunk_len), measure)


@pytest.mark.parametrize("initial_state", [True, False], ids=["init", "zero"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("lengths", [RAGGED, (2048,), (700, 0, 1500)], ids=str)
def test_head_counts_in_chunks(
    bundle: Any, heads: tuple[int, int, int], lengths: tuple[int, ...], initial_state: bool, measure: Any
) -> None:
    case = Case(lengths=lengths, heads=heads, initial_state=initial_state)
    check(case, run(bundle, case, chunk_len=128), measure)


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_every_variant_in_chunks(bundle: Any, case: Case, measure: Any) -> None:
    for chunk_len in (0, 64):
        check(case, run(bundle, case, chunk_len=chunk_len), measure, chunk_len=chunk_len)


def test_the_cases_above_are_all_the_variants_of_the_bundles(bundle: Any) -> None:
    if len(bundle.opened) < 2:
        pytest.skip("no validation bundle: its variants are missing")

    def words(axes: dict[str, Any]) -> tuple[tuple[str, str], ...]:
        return tuple(sorted((k, str(int(v)) if isinstance(v, bool) else str(v)) for k, v in axes.items()))

    assert {words(axes_of(case)) for case in KINDS} == {
        words(dict(v.axes)) for v in bundle.variants() if v.op == OP
    }


@pytest.mark.parametrize("every", [64, 128, 192])
def test_checkpoints_fall_inside_and_at_the_ends_of_chunks(bundle: Any, every: int, measure: Any) -> None:
    case = Case(lengths=(500, 64, 63, 0, 192), heads=(4, 4, 8), checkpoint_every=every)
    check(case, run(bundle, case, chunk_len=128), measure)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("heads", [(4, 4, 8), (16, 16, 32)], ids=str)
def test_it_computes_what_gdn_prefill_does(
    bundle: Any, heads: tuple[int, int, int], dtype: str, measure: Any
) -> None:
    case = Case(lengths=(3000, 200), heads=heads, dtype=dtype)
    got, fused = run(bundle, case), run_fused(bundle, case)
    output, state = relative_error(got.output, fused.output), relative_error(got.state, fused.state)
    measure(output=output, state=state)
    assert max(output, state) <= CLOSE[dtype]


# ---- what changes no bit ----


@pytest.mark.parametrize("heads", [(4, 4, 8), (8, 8, 16), (16, 16, 32)], ids=str)
def test_two_runs_give_the_same_bits(bundle: Any, heads: tuple[int, int, int]) -> None:
    case = Case(lengths=(1000, 65, 0, 300), heads=heads, checkpoint_every=64)
    first = run(bundle, case, chunk_len=128)
    for _ in range(5):
        same_bits(run(bundle, case, chunk_len=128), first)


@pytest.mark.parametrize("heads", [(4, 4, 8), (8, 8, 16), (16, 16, 32)], ids=str)
def test_what_is_in_the_workspace_does_not_count(bundle: Any, heads: tuple[int, int, int]) -> None:
    case = Case(lengths=RAGGED, heads=heads)
    op, found = prepare(bundle, case), []
    for byte in (0, 0xAB, 0xFF):  # 0xFF.. is NaN in every type
        args = call_args(case, make_inputs(case)) | {"chunk_len": 64}
        op.run(**args, workspace=scratch(op, args, byte), stream=torch.cuda.current_stream())
        torch.cuda.synchronize()
        found.append(results(case, args))
    for other in found[1:]:
        same_bits(other, found[0])


@pytest.mark.parametrize("heads", [(4, 4, 8), (16, 16, 32)], ids=str)
def test_a_sequence_has_the_same_bits_in_any_batch(bundle: Any, heads: tuple[int, int, int]) -> None:
    lengths = (300, 0, 65, 1000)
    case = Case(lengths=lengths, heads=heads)
    x = make_inputs(case)
    got, start = run(bundle, case, x, chunk_len=128), 0
    for i, length in enumerate(lengths):
        part = slice(start, start + length)
        start += length
        tokens = {name: getattr(x, name)[part].contiguous() for name in ("q", "k", "v", "alpha", "beta")}
        alone = dataclasses.replace(case, lengths=(length,))
        want = run(bundle, alone, Inputs(**tokens, state=x.state[i : i + 1].contiguous()), chunk_len=128)
        assert torch.equal(got.output[part], want.output)
        assert torch.equal(got.state[i : i + 1], want.state)


def test_how_long_the_longest_sequence_may_be_changes_nothing(bundle: Any) -> None:
    case = Case(lengths=(300, 0, 65, 1000))
    want = run(bundle, case, chunk_len=128)
    for longest in (1000, 1001, 1364):
        same_bits(run(bundle, case, chunk_len=128, max_seqlen=longest), want)


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(state_layout="hkv"),
        Case(pooled=True),
        Case(pooled=True, state_layout="hkv"),
        Case(checkpoint_every=64),
        Case(lengths=(4096,), heads=(4, 4, 8)),
    ],
    ids=["packed", "hkv", "pooled", "pooled-hkv", "checkpoints", "4096"],
)
def test_a_captured_graph_replays_like_eager(bundle: Any, case: Case) -> None:
    op = prepare(bundle, case)
    args = call_args(case, make_inputs(case))
    space = scratch(op, args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.run(**args, workspace=space, stream=torch.cuda.current_stream())
    for seed in (1, 2, 3):
        other = dataclasses.replace(case, seed=seed)
        x = make_inputs(other)
        for name, value in call_args(other, x).items():
            if isinstance(value, torch.Tensor):
                args[name].copy_(value)
        space.fill_(seed)
        graph.replay()
        torch.cuda.synchronize()
        same_bits(results(case, args), run(bundle, other, x))


# ---- states: which rows are read and written ----


@LAYOUTS
@pytest.mark.parametrize("state_dtype", ["f32", "bf16"])
def test_in_place_is_as_out_of_place_and_leaves_other_rows_alone(
    bundle: Any, layout: str, state_dtype: str
) -> None:
    """Last chunks of one token are done long before the first of other sequences begin."""
    case = Case(lengths=(1025, 129, 65) * 20, pooled=True, state_layout=layout, state_dtype=state_dtype)
    x = make_inputs(case)
    args = call_args(case, x) | {"chunk_len": 64}
    pool = args["final_state"]
    pool.nan_to_num_(nan=3.0)
    apart = args | {"final_state": blank(*pool.shape, dtype=pool.dtype), "o": torch.empty_like(args["o"])}
    op = prepare(bundle, case)
    launch(op, apart)
    launch(op, args)
    torch.cuda.synchronize()
    same_bits(results(case, args), results(case, apart))
    spare = [row for row in range(pool.shape[0]) if row not in rows_of(case)]
    assert bool((pool[spare] == 3.0).all()) and bool(apart["final_state"][spare].isnan().all())


@LAYOUTS
def test_output_rows_differ_from_input_rows(bundle: Any, layout: str) -> None:
    case = Case(pooled=True, state_layout=layout)
    x = make_inputs(case)
    want = run(bundle, case, x)
    args = call_args(case, x)
    source = args["initial_state"]
    before, target = source.clone(), blank(*source.shape, dtype=source.dtype)
    writes = list(reversed(rows_of(case)))
    args |= {"final_state": target, "output_state_indices": index(writes, case)}
    launch(prepare(bundle, case), args)
    torch.cuda.synchronize()
    same_bits(results(case, args), want)
    assert torch.equal(source.nan_to_num(), before.nan_to_num())
    assert bool(target[[row for row in range(target.shape[0]) if row not in writes]].isnan().all())


@LAYOUTS
@pytest.mark.parametrize("heads", [(4, 4, 8), (16, 16, 32)], ids=str)
def test_a_negative_read_row_starts_from_zeros(bundle: Any, layout: str, heads: tuple[int, int, int]) -> None:
    case = Case(pooled=True, state_layout=layout, heads=heads)
    x = make_inputs(case)
    args, reads, fresh = call_args(case, x), rows_of(case), [0, 1, 2, 5]  # one of them is empty
    writes = list(reads)
    for i in fresh:
        reads[i] = -1
    args |= {"state_indices": index(reads, case), "output_state_indices": index(writes, case)}
    launch(prepare(bundle, case), args)
    torch.cuda.synchronize()
    x.state[fresh] = 0
    same_bits(results(case, args), run(bundle, case, x))


@LAYOUTS
def test_a_negative_write_row_is_not_written(bundle: Any, layout: str) -> None:
    case = Case(pooled=True, state_layout=layout)
    x = make_inputs(case)
    want = run(bundle, case, x)
    args, rows, dropped = call_args(case, x), rows_of(case), [1, 3, 6]  # one of them is empty
    before = args["final_state"].clone()
    args["output_state_indices"] = index([-1 if i in dropped else r for i, r in enumerate(rows)], case)
    launch(prepare(bundle, case), args)
    torch.cuda.synchronize()
    assert torch.equal(args["o"], want.output)
    kept, written = [rows[i] for i in dropped], [i for i in range(len(rows)) if i not in dropped]
    assert torch.equal(args["final_state"][kept], before[kept])
    assert torch.equal(
        in_layout(args["final_state"], layout)[[rows[i] for i in written]], want.state[written]
    )


@LAYOUTS
@pytest.mark.parametrize("state_dtype", ["f32", "bf16"])
def test_pool_rows_and_tokens_may_be_padded(bundle: Any, layout: str, state_dtype: str) -> None:
    case = Case(pooled=True, state_layout=layout, state_dtype=state_dtype)
    x = make_inputs(case)
    want = run(bundle, case, x)
    args = call_args(case, x)
    dense = args["initial_state"]
    row = dense[0].numel()
    wide = torch.full((dense.shape[0], row + 384), 5.0, dtype=dense.dtype, device="cuda")
    padded = wide[:, :row].view(dense.shape)
    padded.copy_(dense)
    args |= {"initial_state": padded, "final_state": padded}
    for name in ("q", "k", "v", "o"):
        tokens = args[name]
        space = blank(tokens.shape[0], tokens.shape[1] + 1, tokens.shape[2], dtype=tokens.dtype)
        space[:, :-1] = tokens
        args[name] = space[:, :-1]
    launch(prepare(bundle, case), args)
    torch.cuda.synchronize()
    same_bits(results(case, args), want)
    assert bool((wide[:, row:] == 5.0).all())


# ---- sequences without tokens ----


@LAYOUTS
@pytest.mark.parametrize("pooled", [False, True], ids=["packed", "pooled"])
@pytest.mark.parametrize("heads", [(4, 4, 8), (16, 16, 32)], ids=str)
def test_an_empty_sequence_keeps_its_state(
    bundle: Any, layout: str, pooled: bool, heads: tuple[int, int, int]
) -> None:
    case = Case(lengths=(0, 65, 0, 0, 128, 0), pooled=pooled, state_layout=layout, heads=heads)
    x = make_inputs(case)
    got = run(bundle, case, x)
    empty = [i for i, length in enumerate(case.lengths) if length == 0]
    assert torch.equal(got.state[empty], x.state[empty])


@LAYOUTS
def test_an_empty_sequence_without_initial_state_ends_in_zeros(bundle: Any, layout: str) -> None:
    case = Case(lengths=(0, 65, 0), initial_state=False, state_layout=layout)
    assert bool((run(bundle, case).state[[0, 2]] == 0).all())


@pytest.mark.parametrize("pooled", [False, True], ids=["packed", "pooled"])
@pytest.mark.parametrize("heads", [(4, 4, 8), (16, 16, 32)], ids=str)
def test_sequences_without_any_token(bundle: Any, pooled: bool, heads: tuple[int, int, int]) -> None:
    case = Case(lengths=(0, 0, 0), pooled=pooled, heads=heads)
    x = make_inputs(case)
    assert torch.equal(run(bundle, case, x).state, x.state)


def test_no_sequence_at_all_is_a_no_op(bundle: Any) -> None:
    got = run(bundle, Case(lengths=()))
    assert got.output.shape[0] == 0 and got.state.shape[0] == 0


# ---- for torch ----


def logical(state: torch.Tensor, layout: str) -> torch.Tensor:
    """The [.., V, K] view of a state in memory order."""
    return state.transpose(-1, -2) if layout == "hkv" else state


@LAYOUTS
def test_the_torch_function_is_the_op(bundle: Any, layout: str) -> None:
    from kernseal.kernels.gdn_prefill_cp.torch_api import cp_delta_rule, use_bundle

    case = Case(lengths=(1000, 65), heads=(8, 8, 16), state_layout=layout)
    x = make_inputs(case)
    want = run(bundle, case, x, max_seqlen=1000)
    use_bundle(bundle.opened[0])
    args = call_args(case, x)
    cp_delta_rule(
        args["o"],
        logical(args["final_state"], layout),
        x.q,
        x.k,
        x.v,
        x.alpha,
        x.beta,
        args["cu_seqlens"],
        args["scale"],
        initial_state=logical(args["initial_state"], layout),
        max_seqlen=1000,
    )
    torch.cuda.synchronize()
    got = results(case, args)
    same_bits(got, want)
