"""Pools of states: which rows are read, which are written, which are left alone; and empty sequences."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu.problems import (  # noqa: E402
    DTYPES,
    POOL_SPARE,
    Case,
    blank,
    call_args,
    in_layout,
    launch,
    make_inputs,
    oracle,
    prepare,
    relative_error,
    results,
    rows_of,
    run,
)

LAYOUTS = pytest.mark.parametrize("layout", ["hvk", "hkv"])


def index(values: list[int], case: Case) -> torch.Tensor:
    return torch.tensor(values, dtype=DTYPES[case.index_dtype]).to("cuda")


@LAYOUTS
@pytest.mark.parametrize("state_dtype", ["f32", "bf16"])
def test_in_place_update_leaves_other_rows_alone(bundle: Any, layout: str, state_dtype: str) -> None:
    case = Case(pooled=True, state_layout=layout, state_dtype=state_dtype)
    args = call_args(case, make_inputs(case))
    pool = args["final_state"]
    pool.nan_to_num_(nan=3.0)
    spare = [row for row in range(pool.shape[0]) if row not in rows_of(case)]
    launch(prepare(bundle, case), args)
    torch.cuda.synchronize()
    assert bool((pool[spare] == 3.0).all())
    assert bool(pool.isfinite().all())


@LAYOUTS
def test_output_rows_differ_from_input_rows(bundle: Any, layout: str) -> None:
    case = Case(pooled=True, state_layout=layout)
    x = make_inputs(case)
    want = run(bundle, case, x)
    args = call_args(case, x)
    source = args["initial_state"]
    before = source.clone()
    target = blank(*source.shape, dtype=source.dtype)
    writes = list(reversed(rows_of(case)))
    args |= {"final_state": target, "output_state_indices": index(writes, case)}
    launch(prepare(bundle, case), args)
    got = results(case, args)
    assert torch.equal(got.output, want.output)
    assert torch.equal(got.state, want.state)
    assert torch.equal(source.nan_to_num(), before.nan_to_num())
    untouched = [row for row in range(target.shape[0]) if row not in writes]
    assert bool(target[untouched].isnan().all())


@LAYOUTS
def test_a_negative_read_row_starts_from_zeros(bundle: Any, layout: str) -> None:
    case = Case(pooled=True, state_layout=layout)
    x = make_inputs(case)
    fresh = [0, 2, 4]
    args = call_args(case, x)
    reads = rows_of(case)
    writes = list(reads)
    for i in fresh:
        reads[i] = -1
    args |= {"state_indices": index(reads, case), "output_state_indices": index(writes, case)}
    launch(prepare(bundle, case), args)
    got = results(case, args)
    x.state[fresh] = 0
    want = run(bundle, case, x)
    assert torch.equal(got.output, want.output)
    assert torch.equal(got.state, want.state)


@LAYOUTS
def test_a_negative_write_row_is_not_written(bundle: Any, layout: str) -> None:
    case = Case(pooled=True, state_layout=layout)
    x = make_inputs(case)
    want = run(bundle, case, x)
    args = call_args(case, x)
    before = args["final_state"].clone()
    rows = rows_of(case)
    dropped = [1, 3, 6]
    writes = [-1 if i in dropped else row for i, row in enumerate(rows)]
    args["output_state_indices"] = index(writes, case)
    launch(prepare(bundle, case), args)
    torch.cuda.synchronize()
    assert torch.equal(args["o"], want.output)
    kept = [rows[i] for i in dropped]
    assert torch.equal(args["final_state"][kept], before[kept])
    written = [i for i in range(len(rows)) if i not in dropped]
    pool = in_layout(args["final_state"], layout)
    assert torch.equal(pool[[rows[i] for i in written]], want.state[written])


@LAYOUTS
def test_two_sequences_may_read_one_row(bundle: Any, layout: str) -> None:
    case = Case(lengths=(65, 65, 10), pooled=True, state_layout=layout)
    x = make_inputs(case)
    x.state[1] = x.state[0]
    want = run(bundle, case, x)
    args = call_args(case, x)
    target = blank(*args["final_state"].shape, dtype=torch.float32)
    reads, writes = rows_of(case), rows_of(case)
    reads[1] = reads[0]
    args |= {
        "final_state": target,
        "state_indices": index(reads, case),
        "output_state_indices": index(writes, case),
    }
    launch(prepare(bundle, case), args)
    got = results(case, args)
    assert torch.equal(got.output, want.output)
    assert torch.equal(got.state, want.state)


@LAYOUTS
@pytest.mark.parametrize("state_dtype", ["f32", "bf16"])
def test_pool_rows_may_be_padded(bundle: Any, layout: str, state_dtype: str) -> None:
    case = Case(pooled=True, state_layout=layout, state_dtype=state_dtype)
    x = make_inputs(case)
    want = run(bundle, case, x)
    args = call_args(case, x)
    dense = args["initial_state"]
    row = dense[0].numel()
    wide = torch.full((dense.shape[0], row + 384), 5.0, dtype=dense.dtype, device="cuda")
    padded = wide[:, :row].view(dense.shape)
    padded.copy_(dense)
    assert not padded.is_contiguous()
    args |= {"initial_state": padded, "final_state": padded}
    launch(prepare(bundle, case), args)
    got = results(case, args)
    assert torch.equal(got.output, want.output)
    assert torch.equal(got.state, want.state)
    assert bool((wide[:, row:] == 5.0).all())


@LAYOUTS
@pytest.mark.parametrize("pooled", [False, True], ids=["packed", "pooled"])
def test_an_empty_sequence_keeps_its_state(bundle: Any, layout: str, pooled: bool) -> None:
    case = Case(lengths=(0, 65, 0, 0, 128, 0), pooled=pooled, state_layout=layout)
    x = make_inputs(case)
    got = run(bundle, case, x)
    empty = [i for i, length in enumerate(case.lengths) if length == 0]
    assert torch.equal(got.state[empty], x.state[empty])


@LAYOUTS
def test_an_empty_sequence_without_initial_state_ends_in_zeros(bundle: Any, layout: str) -> None:
    case = Case(lengths=(0, 65, 0), initial_state=False, state_layout=layout)
    got = run(bundle, case)
    assert bool((got.state[[0, 2]] == 0).all())


def test_an_empty_sequence_moves_its_state_to_the_row_it_writes(bundle: Any) -> None:
    case = Case(lengths=(0, 3, 0), pooled=True)
    x = make_inputs(case)
    args = call_args(case, x)
    args["final_state"] = blank(*args["final_state"].shape, dtype=torch.float32)
    reads = rows_of(case)
    reads[2] = -1
    args |= {"state_indices": index(reads, case), "output_state_indices": index(rows_of(case), case)}
    launch(prepare(bundle, case), args)
    got = results(case, args)
    assert torch.equal(got.state[0], x.state[0])
    assert bool((got.state[2] == 0).all())


@pytest.mark.parametrize("pooled", [False, True], ids=["packed", "pooled"])
def test_sequences_without_any_token(bundle: Any, pooled: bool) -> None:
    case = Case(lengths=(0, 0, 0), pooled=pooled)
    x = make_inputs(case)
    assert torch.equal(run(bundle, case, x).state, x.state)


def test_no_sequence_at_all_is_a_no_op(bundle: Any) -> None:
    case = Case(lengths=())
    got = run(bundle, case)
    assert got.output.shape[0] == 0
    assert got.state.shape[0] == 0


def test_the_final_state_may_be_the_initial_state(bundle: Any) -> None:
    case = Case(lengths=(65, 0, 200))
    x = make_inputs(case)
    want = run(bundle, case, x)
    args = call_args(case, x)
    args["final_state"] = args["initial_state"]
    launch(prepare(bundle, case), args)
    got = results(case, args)
    assert torch.equal(got.output, want.output)
    assert torch.equal(got.state, want.state)


def test_checkpoints_of_a_pooled_call(bundle: Any) -> None:
    case = Case(lengths=(130, 0, 64, 300), pooled=True, checkpoint_every=64)
    got = run(bundle, case)
    assert got.checkpoints is not None
    assert relative_error(got.checkpoints, oracle(case).checkpoints) <= 6e-3
    assert got.pool is not None and got.pool.shape[0] == len(case.lengths) + POOL_SPARE
