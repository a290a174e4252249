"""``top_k_varlen``: what FlashInfer's arguments become in the C struct, which variant they ask for, and what is refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cpu.test_xqa_torch_api import HOST, STREAM, Elsewhere, Recorder, no_gpu  # noqa: E402, F401

from kernseal.kernels.topk_varlen.torch_api import REPLACES, top_k_varlen  # noqa: E402
from kernseal.loader import addresses, serving  # noqa: E402
from kernseal.loader.errors import InvalidArgument, Unsupported  # noqa: E402
from kernseal.loader.layout import Layout  # noqa: E402
from kernseal.loader.library import declarations  # noqa: E402

FIELDS = Layout(declarations(), "kseal_topk_varlen_args").names
B, NEXT, N, K = 3, 2, 100, 8
i32 = torch.int32


@pytest.fixture(autouse=True)
def not_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(addresses, "_semaphores", {})


@pytest.fixture
def recorder() -> Recorder:
    made = Recorder()
    serving.use_bundle(made, HOST)  # type: ignore[arg-type]
    return made


def call(**changes: Any) -> dict[str, Any]:
    return {
        "logits": torch.zeros(B * NEXT, N),
        "seq_lens": torch.zeros(B, dtype=i32),
        "top_k": K,
        "next_n": NEXT,
        **changes,
    }


def test_the_arguments_are_flashinfers_in_its_order() -> None:
    assert list(inspect.signature(top_k_varlen).parameters) == [
        *("logits", "seq_lens", "top_k", "row_starts", "max_window_len", "absolute_indices", "page_table"),
        *("page_size", "compress_ratio", "next_n", "pre_idx", "return_values", "out_indices", "out_values"),
        *("backend", "load_balance", "workspace"),
    ]
    assert REPLACES["flashinfer"]["top_k_varlen"] is top_k_varlen


def test_a_plain_call(recorder: Recorder) -> None:
    args = call()
    indices, values = top_k_varlen(**args)
    assert (indices.shape, indices.dtype, values) == ((B * NEXT, K), i32, None)
    assert recorder.prepared == [{"op": "topk_varlen", "device": HOST, "dtype": "f32", "values": False}]
    zeros = addresses._semaphores["topk_varlen", HOST, STREAM]
    assert zeros.count_nonzero() == 0
    assert recorder.launched == [
        {
            **dict.fromkeys(FIELDS, 0),
            "top_k": K,
            "next_n": NEXT,
            "compress_ratio": 1,
            "num_requests": B,
            "max_len": N,
            "row_stride": N,
            "scores": args["logits"].data_ptr(),
            "seq_lens": args["seq_lens"].data_ptr(),
            "indices": indices.data_ptr(),
            "semaphores": zeros.data_ptr(),
            "semaphores_bytes": zeros.nbytes,
            "stream": STREAM,
        }
    ]
    top_k_varlen(**call())
    assert len(recorder.prepared) == 1


def test_values_strides_and_given_outputs(recorder: Recorder) -> None:
    logits = torch.zeros(B * NEXT, 128, dtype=torch.bfloat16)[:, :N]
    out, scores = torch.zeros(B * NEXT * K, dtype=i32), torch.zeros(B * NEXT, K, dtype=torch.bfloat16)
    outputs = {"out_indices": out, "out_values": scores, "return_values": True}
    found = top_k_varlen(**call(logits=logits, compress_ratio=4, backend="radix", **outputs))
    assert found[0] is out
    assert found[1] is scores
    assert recorder.prepared[0]["values"] is True
    (run,) = recorder.launched
    assert (run["row_stride"], run["compress_ratio"]) == (128, 4)
    assert (run["indices"], run["values"]) == (out.data_ptr(), scores.data_ptr())


def test_hints_of_other_backends_change_nothing(recorder: Recorder) -> None:
    hint = torch.zeros(B, K, dtype=i32)
    top_k_varlen(**call(pre_idx=hint, load_balance=False, workspace={"x": 1}, out_values=torch.zeros(1)))
    assert recorder.launched[0]["values"] == 0


def test_an_empty_batch_is_passed_on(recorder: Recorder) -> None:
    indices, _ = top_k_varlen(torch.zeros(0, N), torch.zeros(0, dtype=i32), K)
    assert indices.shape == (0, K)
    assert recorder.launched[0]["num_requests"] == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"next_n": 1}, r"logits: shape \(6, 100\); expected \[3, N\]"),
        ({"logits": torch.zeros(6)}, r"logits: shape \(6,\)"),
        ({"logits": torch.zeros(N, 6).T}, r"logits: strides \(1, 6\); rows must be dense"),
        ({"logits": torch.zeros(1, N).expand(6, -1)}, r"logits: strides \(0, 1\)"),
        ({"seq_lens": torch.zeros(B)}, "seq_lens: torch.float32"),
        ({"seq_lens": torch.zeros(B, dtype=i32).as_subclass(Elsewhere)}, "seq_lens: is on cuda:3"),
        ({"out_indices": torch.zeros(6, K + 1, dtype=i32)}, r"out_indices: shape \(6, 9\)"),
        ({"out_values": torch.zeros(6, K, dtype=i32), "return_values": True}, "out_values: torch.int32"),
    ],
)
def test_what_does_not_fit_is_refused(recorder: Recorder, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        top_k_varlen(**call(**changes))
    assert recorder.launched == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"logits": torch.zeros(6, N, dtype=torch.float64)},
            "logits: torch.float64; supported: torch.float32",
        ),
        ({"row_starts": torch.zeros(6, dtype=i32)}, "row_starts: not supported"),
        ({"absolute_indices": True}, "row_starts: not supported"),
        ({"page_table": torch.zeros(3, 9, dtype=i32)}, "page_table: not supported here"),
        ({"backend": "gvr"}, "backend is 'gvr'; supported are auto, radix"),
    ],
)
def test_what_no_kernel_does_is_unsupported(recorder: Recorder, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        top_k_varlen(**call(**changes))
