"""``chunk_gated_delta_rule``: FlashInfer's arguments over the same kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu.bundles import open_by_name  # noqa: E402
from gpu.problems import Case, call_args, ends, flashinfer_args, in_layout, make_inputs, rows_of, run  # noqa: E402

from kernseal.kernels.gdn_prefill import torch_api  # noqa: E402
from kernseal.kernels.gdn_prefill.torch_api import chunk_gated_delta_rule, use_bundle  # noqa: E402
from kernseal.kernels.gdn_prefill_cp.torch_api import cp_delta_rule  # noqa: E402
from kernseal.loader import serving  # noqa: E402
from kernseal.loader.errors import Capturing, InvalidArgument, NotPrepared, Unsupported  # noqa: E402


@pytest.fixture(autouse=True)
def served(bundle: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(serving, "_served", {})
    use_bundle(bundle)
    yield


def test_packed(bundle: Any) -> None:
    case = Case()
    x = make_inputs(case)
    want = run(bundle, case, x)
    output, state = chunk_gated_delta_rule(**flashinfer_args(case, x))
    assert torch.equal(output, want.output)
    assert torch.equal(state, want.state)


def test_output_only_and_into_given_memory(bundle: Any) -> None:
    case = Case()
    x = make_inputs(case)
    want = run(bundle, case, x)
    target = torch.empty_like(want.output)
    output = chunk_gated_delta_rule(
        x.q, x.k, x.v, x.alpha, x.beta, initial_state=x.state, cu_seqlens=ends(case.lengths), output=target
    )
    assert output is target
    assert torch.equal(output, want.output)


@pytest.mark.parametrize("alpha", [True, False])
@pytest.mark.parametrize("beta", [True, False])
def test_gates_may_be_left_out(bundle: Any, alpha: bool, beta: bool) -> None:
    case = Case(alpha=alpha, beta=beta)
    x = make_inputs(case)
    want = run(bundle, case, x)
    output = chunk_gated_delta_rule(
        x.q,
        x.k,
        x.v,
        x.alpha if alpha else None,
        x.beta if beta else None,
        initial_state=x.state,
        cu_seqlens=ends(case.lengths),
    )
    assert torch.equal(output, want.output)


def test_no_initial_state(bundle: Any) -> None:
    case = Case(initial_state=False)
    x = make_inputs(case)
    want = run(bundle, case, x)
    output, state = chunk_gated_delta_rule(
        x.q, x.k, x.v, x.alpha, x.beta, output_final_state=True, cu_seqlens=ends(case.lengths)
    )
    assert torch.equal(output, want.output)
    assert torch.equal(state, want.state)


def test_a_transposed_view_selects_the_hkv_variant(bundle: Any) -> None:
    case = Case()
    x = make_inputs(case)
    want = run(bundle, case, x)
    memory = in_layout(x.state, "hkv")
    result = torch.empty_like(memory)
    _, state = chunk_gated_delta_rule(
        x.q,
        x.k,
        x.v,
        x.alpha,
        x.beta,
        initial_state=memory.transpose(-1, -2),
        output_state=result.transpose(-1, -2),
        output_final_state=True,
        cu_seqlens=ends(case.lengths),
    )
    assert torch.equal(state, want.state)
    assert torch.equal(result.transpose(-1, -2), want.state)


def test_a_pool_updated_in_place(bundle: Any) -> None:
    case = Case(pooled=True)
    x = make_inputs(case)
    want = run(bundle, case, x)
    pool = call_args(case, x)["initial_state"]
    output, returned = chunk_gated_delta_rule(
        x.q,
        x.k,
        x.v,
        x.alpha,
        x.beta,
        initial_state=pool,
        output_state=pool,
        output_final_state=True,
        cu_seqlens=ends(case.lengths),
        state_indices=torch.tensor(rows_of(case), dtype=torch.int32, device="cuda"),
    )
    assert torch.equal(output, want.output)
    assert torch.equal(pool[rows_of(case)], want.state)
    assert returned.data_ptr() == pool.data_ptr()


def test_a_pool_that_is_only_read(bundle: Any) -> None:
    case = Case(pooled=True)
    x = make_inputs(case)
    want = run(bundle, case, x)
    pool = call_args(case, x)["initial_state"]
    before = pool.clone()
    output = chunk_gated_delta_rule(
        x.q,
        x.k,
        x.v,
        x.alpha,
        x.beta,
        initial_state=pool,
        cu_seqlens=ends(case.lengths),
        state_indices=torch.tensor(rows_of(case), device="cuda"),
    )
    assert torch.equal(output, want.output)
    assert torch.equal(pool.nan_to_num(), before.nan_to_num())


def test_a_pool_that_is_only_written(bundle: Any) -> None:
    case = Case(pooled=True)
    x = make_inputs(case)
    x.state.zero_()
    want = run(bundle, case, x)
    pool = torch.full((len(case.lengths) + 3, 32, 128, 128), float("nan"), device="cuda")
    chunk_gated_delta_rule(
        x.q,
        x.k,
        x.v,
        x.alpha,
        x.beta,
        output_state=pool,
        output_final_state=True,
        cu_seqlens=ends(case.lengths),
        state_indices=torch.tensor(rows_of(case), device="cuda"),
    )
    assert torch.equal(pool[rows_of(case)], want.state)


def test_checkpoints(bundle: Any) -> None:
    case = Case(checkpoint_every=64)
    x = make_inputs(case)
    want = run(bundle, case, x)
    args = call_args(case, x)
    chunk_gated_delta_rule(
        x.q,
        x.k,
        x.v,
        x.alpha,
        x.beta,
        initial_state=x.state,
        cu_seqlens=ends(case.lengths),
        state_checkpoints=args["checkpoints"],
        checkpoint_cu_starts=args["checkpoint_cu_starts"],
        checkpoint_every_n_tokens=64,
    )
    assert torch.equal(args["checkpoints"], want.checkpoints)


@pytest.mark.parametrize("change", [{}, {"_cp_chunk_len": 128}, {"max_seqlen": 4096}])
def test_cutting_sequences_is_the_context_parallel_op(bundle: Any, change: dict[str, Any]) -> None:
    case = Case(lengths=(4096,))
    x, offsets = make_inputs(case), ends((4096,))
    output, state = chunk_gated_delta_rule(**flashinfer_args(case, x), use_cp=True, **change)
    want, want_state = torch.empty_like(output), torch.empty_like(state)
    cp_delta_rule(
        *(want, want_state, x.q, x.k, x.v, x.alpha, x.beta, offsets, 128**-0.5),
        initial_state=x.state,
        max_seqlen=change.get("max_seqlen"),
        cp_chunk_len=change.get("_cp_chunk_len"),
    )
    assert torch.equal(output, want)
    assert torch.equal(state, want_state)


UNSUPPORTED: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "backend": "cudnn",
    "gate_domain": "log",
    "use_gate_in_kernel": True,
    "A_log": 0,
    "beta_is_logit": True,
    "checkpoint_state_indices": 0,
    "prefix_lens": 0,
}


@pytest.mark.parametrize("name", list(UNSUPPORTED))
def test_what_the_kernels_do_not_do_is_refused(name: str) -> None:
    case = Case(lengths=(4,))
    x = make_inputs(case)
    with pytest.raises(Unsupported, match="not supported"):
        chunk_gated_delta_rule(x.q, x.k, x.v, cu_seqlens=ends((4,)), **{name: UNSUPPORTED[name]})


def test_missing_offsets_and_a_missing_pool_are_refused() -> None:
    x = make_inputs(Case(lengths=(4,)))
    with pytest.raises(InvalidArgument, match="cu_seqlens"):
        chunk_gated_delta_rule(x.q, x.k, x.v)
    rows = torch.zeros(1, dtype=torch.int64, device="cuda")
    with pytest.raises(InvalidArgument, match="output_state"):
        chunk_gated_delta_rule(
            x.q, x.k, x.v, cu_seqlens=ends((4,)), state_indices=rows, output_final_state=True
        )


def test_a_device_without_a_bundle_is_refused() -> None:
    serving._served.clear()
    x = make_inputs(Case(lengths=(4,)))
    with pytest.raises(NotPrepared, match="use_bundle"):
        chunk_gated_delta_rule(x.q, x.k, x.v, cu_seqlens=ends((4,)))


def test_capture_works_after_prepare_and_is_refused_before(bundle_name: str) -> None:
    case = Case(lengths=(65,), initial_state=False)
    x = make_inputs(case)
    offsets = ends(case.lengths)
    with open_by_name(bundle_name) as fresh:
        use_bundle(fresh)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), pytest.raises(Capturing, match="prepare"):
            chunk_gated_delta_rule(x.q, x.k, x.v, x.alpha, x.beta, cu_seqlens=offsets)
        torch_api.prepare(**case.axes)
        want = chunk_gated_delta_rule(x.q, x.k, x.v, x.alpha, x.beta, cu_seqlens=offsets)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chunk_gated_delta_rule(x.q, x.k, x.v, x.alpha, x.beta, cu_seqlens=offsets)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, want)
