"""``xqa_mla``: FlashInfer's arguments over the same kernels, bit for bit what the op's own call gives."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu.bundles import open_by_name  # noqa: E402
from gpu.variants import variants_of  # noqa: E402
from gpu.xqa_mla_problems import HEADS, LATENT, LENGTHS, Problem, Runner, make  # noqa: E402

from kernseal.kernels.xqa_mla import torch_api  # noqa: E402
from kernseal.kernels.xqa_mla.torch_api import use_bundle, xqa_mla  # noqa: E402
from kernseal.loader import serving  # noqa: E402
from kernseal.loader.errors import Capturing, Unsupported, WorkspaceTooSmall  # noqa: E402


@pytest.fixture(autouse=True)
def served(bundle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    variants_of(bundle, "xqa_mla")
    monkeypatch.setattr(serving, "_served", {})
    use_bundle(bundle)


@pytest.fixture(params=["bf16", "e4m3"])
def problem(request: pytest.FixtureRequest) -> Problem:
    return make({"dtype": request.param, "page_size": 64}, LENGTHS)


def arguments(p: Problem, **changes: Any) -> dict[str, Any]:
    """The call of ``xqa_mla`` that asks for what ``p`` does."""
    return {
        "q": p.q.unsqueeze(1),
        "k_cache": p.k.unsqueeze(2),
        "v_cache": p.v.unsqueeze(2),
        "page_table": p.page_table,
        "seq_lens": p.seq_lens.unsqueeze(1).view(torch.uint32),
        "output": torch.full((len(p.q), 1, HEADS, LATENT), float("nan"), dtype=torch.bfloat16, device="cuda"),
        "workspace_buffer": torch.full((8 << 20,), -1, dtype=torch.int8, device="cuda"),
        "semaphores": torch.zeros(1, dtype=torch.uint32, device="cuda"),
        "page_size": p.axes["page_size"],
        "q_scale": p.call["q_scale"],
        "kv_scale": p.call["kv_scale"],
        **changes,
    }


def called(p: Problem, **changes: Any) -> torch.Tensor:
    args = arguments(p, **changes)
    xqa_mla(**args)
    torch.cuda.synchronize()
    return args["output"].squeeze(1)


def test_the_same_bits_as_the_ops_own_call(bundle: Any, problem: Problem) -> None:
    expected = Runner(bundle, problem.axes).run(problem)
    assert torch.equal(called(problem), expected)
    scales = {n: torch.tensor(problem.call[n], device="cuda") for n in ("q_scale", "kv_scale")}
    assert torch.equal(called(problem, **scales, enable_pdl=False), expected)


def test_an_empty_batch_writes_nothing(problem: Problem) -> None:
    assert called(problem.rows([])).numel() == 0


def test_what_is_refused(problem: Problem) -> None:
    with pytest.raises(
        WorkspaceTooSmall, match=rf"workspace_bytes is 1024; {18432 * len(LENGTHS)} are needed"
    ):
        called(problem, workspace_buffer=torch.zeros(1024, dtype=torch.uint8, device="cuda"))
    with pytest.raises(Unsupported, match="sm_count is 1; it must be None or the device's own"):
        called(problem, sm_count=1)


def test_capture_works_after_prepare_and_is_refused_before(bundle_name: str, problem: Problem) -> None:
    args = arguments(problem)
    with open_by_name(bundle_name) as fresh:
        use_bundle(fresh)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), pytest.raises(Capturing, match="prepare"):
            xqa_mla(**args)
        torch_api.prepare(**problem.axes)
        expected = called(problem)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            xqa_mla(**args)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(args["output"].squeeze(1), expected)
