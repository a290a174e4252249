"""Graphs, streams, threads and memory: what a serving runtime relies on at run time."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu.bundles import open_by_name  # noqa: E402
from gpu.problems import (  # noqa: E402
    Case,
    Inputs,
    call_args,
    launch,
    make_inputs,
    prepare,
    results,
    run,
    workspace,
)

from kernseal.loader.errors import Capturing  # noqa: E402


def overwrite(args: dict[str, Any], case: Case, x: Inputs) -> None:
    """Put other inputs into the buffers that ``args`` points at."""
    fresh = call_args(case, x)
    for name, value in fresh.items():
        if isinstance(value, torch.Tensor):
            args[name].copy_(value)


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(state_layout="hkv"),
        Case(pooled=True),
        Case(pooled=True, state_layout="hkv"),
        Case(checkpoint_every=64),
        Case(lengths=(2048,)),
    ],
    ids=["packed", "hkv", "pooled", "pooled-hkv", "checkpoints", "2048"],
)
def test_a_captured_graph_replays_like_eager(bundle: Any, case: Case) -> None:
    op = prepare(bundle, case)
    args = call_args(case, make_inputs(case))
    scratch = workspace(op, **args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.run(**args, workspace=scratch, stream=torch.cuda.current_stream())
    for seed in (1, 2, 3):
        other = dataclasses.replace(case, seed=seed)
        x = make_inputs(other)
        overwrite(args, other, x)
        scratch.fill_(seed)
        graph.replay()
        torch.cuda.synchronize()
        got = results(case, args)
        want = run(bundle, other, x)
        assert torch.equal(got.output, want.output)
        assert torch.equal(got.state, want.state)
        if case.checkpoint_every:
            assert got.checkpoints is not None and want.checkpoints is not None
            assert torch.equal(got.checkpoints, want.checkpoints)


def test_a_replay_reads_the_offsets_that_are_there_then(bundle: Any) -> None:
    case = Case(lengths=(64, 64, 72))
    op = prepare(bundle, case)
    args = call_args(case, make_inputs(case))
    scratch = workspace(op, **args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.run(**args, workspace=scratch, stream=torch.cuda.current_stream())
    other = dataclasses.replace(case, lengths=(100, 0, 100))
    x = make_inputs(other)
    overwrite(args, other, x)
    graph.replay()
    torch.cuda.synchronize()
    want = run(bundle, other, x)
    assert torch.equal(args["o"], want.output)
    assert torch.equal(args["final_state"], want.state)


def test_prepare_is_refused_while_a_stream_is_captured(bundle: Any, bundle_name: str) -> None:
    """A bundle of its own, in which nothing is prepared yet."""
    case = Case(dtype="f16", pooled=True)
    with open_by_name(bundle_name) as fresh:
        graph = torch.cuda.CUDAGraph()
        x = torch.zeros(4, device="cuda")
        with torch.cuda.graph(graph):
            x += 1
            with pytest.raises(Capturing):
                prepare(fresh, case)
        graph.replay()
        torch.cuda.synchronize()
        assert x.tolist() == [1.0] * 4  # the refusal did not spoil the capture
        assert run(fresh, case).output.isfinite().all()


def test_run_allocates_nothing_on_the_device(bundle: Any, bundle_name: str) -> None:
    """Not even the first run after prepare, on a bundle of its own."""
    case = Case(lengths=(300, 65), dtype="f16", state_layout="hkv")
    with open_by_name(bundle_name) as fresh:
        op = prepare(fresh, case)
        args = call_args(case, make_inputs(case))
        scratch = workspace(op, **args)
        stream = torch.cuda.current_stream()
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0], torch.cuda.memory_stats()["allocation.all.allocated"]
        op.run(**args, workspace=scratch, stream=stream)
        torch.cuda.synchronize()
        for _ in range(20):
            op.run(**args, workspace=scratch, stream=stream)
        torch.cuda.synchronize()
        after = torch.cuda.mem_get_info()[0], torch.cuda.memory_stats()["allocation.all.allocated"]
        assert after == before


def test_two_streams_with_their_own_workspaces(bundle: Any) -> None:
    cases = [Case(lengths=(700, 65), seed=1), Case(lengths=(64, 800), seed=2)]
    inputs = [make_inputs(case) for case in cases]
    wanted = [run(bundle, case, x) for case, x in zip(cases, inputs, strict=True)]
    op = prepare(bundle, cases[0])
    calls = [call_args(case, x) for case, x in zip(cases, inputs, strict=True)]
    scratch = [workspace(op, **args) for args in calls]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(20):
        for args, space, stream in zip(calls, scratch, streams, strict=True):
            op.run(**args, workspace=space, stream=stream)
    torch.cuda.synchronize()
    for args, want in zip(calls, wanted, strict=True):
        assert torch.equal(args["o"], want.output)
        assert torch.equal(args["final_state"], want.state)


def test_threads_share_one_op(bundle: Any) -> None:
    cases = [Case(lengths=(200 + 13 * i, 65), seed=i) for i in range(4)]
    op = prepare(bundle, cases[0])
    inputs = [make_inputs(case) for case in cases]
    wanted = [run(bundle, case, x) for case, x in zip(cases, inputs, strict=True)]
    calls = [call_args(case, x) for case, x in zip(cases, inputs, strict=True)]
    scratch = [workspace(op, **args) for args in calls]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for _ in range(50):
                op.run(**calls[i], workspace=scratch[i], stream=streams[i])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert failures == []
    for args, want in zip(calls, wanted, strict=True):
        assert torch.equal(args["o"], want.output)


def test_run_does_not_wait_for_the_device(bundle: Any) -> None:
    case = Case(lengths=(64,), heads=(4, 4, 8))
    op = prepare(bundle, case)
    args = call_args(case, make_inputs(case))
    scratch = workspace(op, **args)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # a tenth of a second of a busy device
    op.run(**args, workspace=scratch, stream=torch.cuda.current_stream())
    done = torch.cuda.Event()
    done.record()
    assert not done.query()
    torch.cuda.synchronize()
    assert bool(args["o"].isfinite().all())


def test_dlpack_and_addresses_are_torch_tensors_bit_for_bit(bundle: Any) -> None:
    class OnlyDlpack:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def __dlpack__(self, **options: Any) -> Any:
            return self.tensor.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.tensor.__dlpack_device__()

    case = Case(pooled=True)
    x = make_inputs(case)
    want = run(bundle, case, x)
    op = prepare(bundle, case)
    args = call_args(case, x)
    launch(op, {k: OnlyDlpack(v) if isinstance(v, torch.Tensor) else v for k, v in args.items()})
    assert torch.equal(args["o"], want.output)
    args = call_args(case, x)
    scratch = workspace(op, **args)
    addresses = {k: v.data_ptr() if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    hq, hk, hv = case.heads
    op.run(
        **addresses,
        num_q_heads=hq,
        num_k_heads=hk,
        num_v_heads=hv,
        head_dim=128,
        total_tokens=case.tokens,
        num_seqs=len(case.lengths),
        pool_rows=args["final_state"].shape[0],
        workspace=scratch.data_ptr(),
        workspace_bytes=scratch.numel(),
        stream=torch.cuda.current_stream().cuda_stream,
    )
    torch.cuda.synchronize()
    assert torch.equal(args["o"], want.output)
    assert torch.equal(results(case, args).state, want.state)


def test_prepare_without_an_ordinal_uses_the_current_device(bundle: Any) -> None:
    case = Case()
    x = make_inputs(case)
    want = run(bundle, case, x)
    op = bundle.prepare("gdn_prefill", **case.axes)
    args = call_args(case, x)
    launch(op, args)
    assert op.config["device"] == -1
    assert torch.equal(args["o"], want.output)
