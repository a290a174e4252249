"""``xqa``: FlashInfer's arguments over the same kernels, bit for bit what the op's own call gives."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu.bundles import open_by_name  # noqa: E402
from gpu.xqa_problems import DTYPES, LENGTHS, Problem, Runner, make, same  # noqa: E402

from kernseal.kernels.xqa_decode import torch_api  # noqa: E402
from kernseal.kernels.xqa_decode.operands import SPEC  # noqa: E402
from kernseal.kernels.xqa_decode.torch_api import use_bundle, xqa  # noqa: E402
from kernseal.loader import serving  # noqa: E402
from kernseal.loader.errors import (  # noqa: E402
    Capturing,
    InvalidArgument,
    NotPrepared,
    Unsupported,
    WorkspaceTooSmall,
)
from kernseal.loader.flashinfer import installed  # noqa: E402

PLAIN = {"head_dim": 128, "group_size": 8}
WINDOW = {"head_dim": 128, "group_size": 2, "sliding_window": True}
FP8 = {**PLAIN, "kv_dtype": "e4m3"}
DRAFTS = {"head_dim": 128, "group_size": 4, "spec_decode": True}
SPLIT = [4000, 17, 1, 0, 900]


@pytest.fixture(autouse=True)
def served(bundle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_served", {})
    use_bundle(bundle)


def full(axes: dict[str, Any]) -> dict[str, Any]:
    given = {name: SPEC.config_defaults[name] for name in SPEC.tags if name in SPEC.config_defaults}
    return {**given, **axes}


def arguments(p: Problem, **changes: Any) -> dict[str, Any]:
    """The call of ``xqa`` that asks for what ``p`` does."""
    known = {"window": "sliding_win_size", "kv_scale": "kv_scale"}
    passed = {known[name]: value for name, value in p.call.items() if name in known}
    return {
        "q": p.q.unsqueeze(1),
        "k_cache": p.k,
        "v_cache": p.v,
        "page_table": p.page_table,
        "seq_lens": p.seq_lens.unsqueeze(1).view(torch.uint32),
        "output": torch.full(p.q.shape, float("nan"), device="cuda").to(DTYPES[p.axes["out_dtype"]]),
        "workspace_buffer": torch.full((64 << 20,), -1, dtype=torch.int8, device="cuda"),
        "semaphores": torch.zeros(1 << 16, dtype=torch.uint32, device="cuda"),
        "num_kv_heads": p.kv_heads,
        "page_size": p.axes["page_size"],
        **passed,
        **changes,
    }


def called(p: Problem, **changes: Any) -> torch.Tensor:
    args = arguments(p, **changes)
    xqa(**args)
    torch.cuda.synchronize()
    assert args["semaphores"].view(torch.int32).count_nonzero() == 0
    return args["output"].reshape(p.q.shape)


@pytest.mark.parametrize("lengths", [LENGTHS, SPLIT], ids=["edges", "split"])
@pytest.mark.parametrize("axes", [PLAIN, WINDOW], ids=["plain", "window"])
def test_the_same_bits_as_the_ops_own_call(bundle: Any, axes: dict[str, Any], lengths: list[int]) -> None:
    p = make(full(axes), lengths)
    assert same(called(p), Runner(bundle, p.axes).run(p, pdl=1))


def test_sinks_scales_and_splits(bundle: Any) -> None:
    p = make(full(PLAIN), SPLIT)
    sinks = torch.linspace(-4, 6, p.q.shape[1], device="cuda")
    expected = Runner(bundle, p.axes).run(p, sinks=sinks, q_scale=0.5, kv_splits=3)
    shaped = sinks.view(p.kv_heads, -1)
    for q_scale in (0.5, torch.tensor(0.5, device="cuda")):
        found = called(
            p, sinks=shaped, q_scale=q_scale, kv_scale=torch.tensor(1.0, device="cuda"), kv_splits=3
        )
        assert same(found, expected)


def test_heads_first_and_interleaved_caches(bundle: Any) -> None:
    p = make(full(PLAIN), LENGTHS)
    expected = Runner(bundle, p.axes).run(p)
    heads_first = [pool.transpose(1, 2).contiguous() for pool in (p.k, p.v)]
    assert same(called(p, k_cache=heads_first[0], v_cache=heads_first[1], kv_layout="HND"), expected)
    k, v = torch.stack([p.k, p.v], dim=1).unbind(dim=1)
    assert same(called(p, k_cache=k, v_cache=v), expected)


@pytest.mark.parametrize("asked", [None, False, True])
def test_an_e4m3_cache_is_multiplied_as_flashinfer_does_unless_told(
    bundle: Any, bundle_name: str, asked: bool | None
) -> None:
    has = bundle_name == "sm90"
    p = make(full(FP8), SPLIT)
    if asked and not has:
        with pytest.raises(Unsupported, match="fp8_math needs SM90"):
            called(p, fp8_math=True)
        return
    axes = {**p.axes, "fp8_math": has if asked is None else asked}
    assert same(called(p, fp8_math=asked), Runner(bundle, axes).run(p))


def test_drafts(bundle: Any) -> None:
    p = make(full(DRAFTS), [2000, 5, 77], q_lens=[5, 5, 5])
    expected = Runner(bundle, p.axes).run(p)
    mask = p.call["mask"].view(torch.uint16).view(3, 5, 2)
    q = p.q.view(3, 1, 5, *p.q.shape[1:])
    assert same(called(p, q=q, q_seq_len=5, mask=mask), expected)


def test_drafts_of_their_own_number(bundle: Any) -> None:
    p = make(full(DRAFTS), [2000, 9, 77], q_lens=[3, 0, 5])
    expected = Runner(bundle, p.axes).run(p)
    mask = p.call["mask"].view(torch.uint16)
    found = called(p, q=p.q, q_seq_len=5, mask=mask, q_cu_seq_lens=p.call["q_cu_lens"])
    assert same(found, expected)


def test_an_empty_batch_writes_nothing() -> None:
    p = make(full(PLAIN), SPLIT).rows([])
    assert called(p).numel() == 0


def test_it_runs_on_torchs_current_stream(bundle: Any) -> None:
    p = make(full(PLAIN), SPLIT)
    expected = Runner(bundle, p.axes).run(p)
    args = arguments(p, q=torch.zeros_like(p.q).unsqueeze(1))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        args["q"].copy_(p.q.unsqueeze(1))
        xqa(**args)
    torch.cuda.synchronize()
    assert same(args["output"], expected)


def test_scratch_that_is_too_small_is_refused_with_the_size_that_is_needed() -> None:
    p = make(full(PLAIN), SPLIT)
    with pytest.raises(WorkspaceTooSmall, match=r"workspace_bytes is 1024; \d+ are needed"):
        called(p, workspace_buffer=torch.zeros(1024, dtype=torch.uint8, device="cuda"))
    with pytest.raises(WorkspaceTooSmall, match=r"semaphores_bytes is 4; \d+ are needed"):
        called(p, semaphores=torch.zeros(1, dtype=torch.int32, device="cuda"))


def test_a_variant_that_is_not_there_comes_with_its_command() -> None:
    p = make({**full(PLAIN), "page_size": 128}, SPLIT)
    command = (
        r"kernseal build --sm (90|120 --retarget 90) --variant xqa_decode/bf16_kvbf16_obf16_d128_g8_p128$"
    )
    with pytest.raises(Unsupported, match=command):
        called(p)


def test_a_tensor_on_the_host_and_a_device_without_a_bundle_are_refused() -> None:
    p = make(full(PLAIN), SPLIT)
    with pytest.raises(InvalidArgument, match="page_table: is on cpu; expected cuda:0"):
        called(p, page_table=p.page_table.cpu())
    serving._served.clear()
    with pytest.raises(NotPrepared, match="no bundle serves cuda:0"):
        called(p)


def test_capture_works_after_prepare_and_is_refused_before(bundle_name: str) -> None:
    p = make(full(PLAIN), SPLIT)
    args = arguments(p)
    with open_by_name(bundle_name) as fresh:
        use_bundle(fresh)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), pytest.raises(Capturing, match="prepare"):
            xqa(**args)
        torch_api.prepare(**p.axes)
        expected = called(p)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            xqa(**args)
        graph.replay()
        torch.cuda.synchronize()
        assert same(args["output"], expected)


def test_flashinfers_own_callers_get_the_same_bits(bundle: Any) -> None:
    flashinfer = pytest.importorskip("flashinfer", reason="flashinfer is not installed")
    p = make(full(PLAIN), SPLIT)
    expected = Runner(bundle, p.axes).run(p)
    cache = torch.stack([p.k, p.v], dim=1)
    workspace = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    theirs = flashinfer.xqa
    with installed(bundle):
        assert flashinfer.xqa is flashinfer.decode.xqa is xqa
        capacity = p.page_table.shape[1] * p.axes["page_size"]
        scale = p.q.shape[-1] ** -0.5
        found = flashinfer.decode.trtllm_batch_decode_with_kv_cache(
            p.q,
            cache,
            workspace,
            p.page_table,
            p.seq_lens,
            capacity,
            scale,
            1.0,
            kv_layout="NHD",
            backend="xqa",
        )
        torch.cuda.synchronize()
    assert same(found, expected)
    assert flashinfer.xqa is flashinfer.decode.xqa is theirs
