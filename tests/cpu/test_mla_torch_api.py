"""``xqa_mla``: what FlashInfer's arguments become in the C struct, which variant they ask for, and what is refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("kernseal.kernels.xqa_mla.operands", reason="this tree does not have the op xqa_mla")

from cpu.test_xqa_torch_api import HOST, SMS, STREAM, Elsewhere, Recorder, no_gpu, scratch  # noqa: E402, F401

from kernseal.kernels.xqa_mla.torch_api import REPLACES, xqa_mla  # noqa: E402
from kernseal.loader import serving  # noqa: E402
from kernseal.loader.errors import InvalidArgument, NotPrepared, Unsupported  # noqa: E402
from kernseal.loader.layout import Layout  # noqa: E402
from kernseal.loader.library import declarations  # noqa: E402

FIELDS = Layout(declarations(), "kseal_xqa_mla_args").names
B, HQ, K, V, PAGES, SIZE, COLUMNS = 3, 128, 576, 512, 7, 64, 4
bf16, e4m3 = torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture
def recorder() -> Recorder:
    made = Recorder("sm_120a")
    serving.use_bundle(made, HOST)  # type: ignore[arg-type]
    return made


def call(dtype: Any = bf16, **changes: Any) -> dict[str, Any]:
    """The arguments of a plain call."""
    pool = torch.zeros(PAGES, SIZE, 1, K).to(dtype)
    return {
        "q": torch.zeros(B, 1, HQ, K).to(dtype),
        "k_cache": pool,
        "v_cache": pool,
        "page_table": torch.zeros(B, COLUMNS, dtype=torch.int32),
        "seq_lens": torch.zeros(B, 1, dtype=torch.uint32),
        "output": torch.zeros(B, 1, HQ, V, dtype=bf16),
        "workspace_buffer": scratch(1000),
        "semaphores": torch.zeros(100, dtype=torch.uint32),
        "page_size": SIZE,
        **changes,
    }


def test_the_arguments_are_flashinfers_in_its_order() -> None:
    assert list(inspect.signature(xqa_mla).parameters) == [
        *("q", "k_cache", "v_cache", "page_table", "seq_lens", "output", "workspace_buffer", "semaphores"),
        *("page_size", "q_scale", "kv_scale", "sm_count", "enable_pdl"),
    ]


@pytest.mark.parametrize(("dtype", "name"), [(bf16, "bf16"), (e4m3, "e4m3")])
def test_a_plain_call(recorder: Recorder, dtype: Any, name: str) -> None:
    args = call(dtype)
    assert xqa_mla(*args.values()) is None
    assert recorder.prepared == [{"op": "xqa_mla", "device": HOST, "dtype": name, "page_size": SIZE}]
    assert recorder.launched == [
        {
            **dict.fromkeys(FIELDS, 0),
            **{name: args[name].data_ptr() for name in ("q", "page_table", "seq_lens")},
            "k": args["k_cache"].data_ptr(),
            "v": args["k_cache"].data_ptr(),
            "o": args["output"].data_ptr(),
            "workspace": args["workspace_buffer"].data_ptr(),
            "workspace_bytes": 1000,
            "num_q_heads": HQ,
            "pdl": 1,
            "q_scale": 1.0,
            "kv_scale": 1.0,
            "batch_size": B,
            "num_pages": PAGES,
            "max_pages_per_seq": COLUMNS,
            "kv_page_stride": SIZE * K,
            "kv_token_stride": K,
            "stream": STREAM,
        }
    ]
    xqa_mla(**call(dtype))
    assert len(recorder.prepared) == 1


def test_scales_strides_and_switches(recorder: Recorder) -> None:
    layers = torch.zeros(PAGES, 2, SIZE, 640, dtype=bf16)[..., :K]
    k, v = layers.unbind(dim=1)
    q_scale = torch.tensor(0.5)
    args = call(k_cache=k, v_cache=v, q_scale=q_scale, kv_scale=0.25, enable_pdl=False, sm_count=SMS)
    xqa_mla(**args)
    (found,) = recorder.launched
    assert (found["kv_page_stride"], found["kv_token_stride"]) == (2 * SIZE * 640, 640)
    assert found["v"] - found["k"] == SIZE * 640 * 2
    assert (found["q_scale_ptr"], found["kv_scale"], found["pdl"]) == (q_scale.data_ptr(), 0.25, 0)


def test_an_empty_batch_is_passed_on(recorder: Recorder) -> None:
    empty = {
        "page_table": torch.zeros(0, 0, dtype=torch.int32),
        "seq_lens": torch.zeros(0, dtype=torch.int32),
    }
    xqa_mla(**call(q=torch.zeros(0, 1, HQ, K, dtype=bf16), output=torch.zeros(0, HQ, V, dtype=bf16), **empty))
    assert recorder.launched[0]["batch_size"] == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": torch.zeros(B + 1, 1, HQ, K, dtype=bf16)}, r"q: shape \(4, 1, 128, 576\); expected \[3, 1, heads, 576\]"),
        ({"q": torch.zeros(B, 1, HQ, V, dtype=bf16)}, r"q: shape \(3, 1, 128, 512\)"),
        ({"q": torch.zeros(B, 2, HQ, K, dtype=bf16)}, r"q: shape \(3, 2, 128, 576\); expected 221184 elements"),
        ({"k_cache": torch.zeros(PAGES, 32, 1, K, dtype=bf16)}, r"k_cache: shape \(7, 32, 1, 576\); expected \[pages, 64"),
        ({"v_cache": torch.zeros(PAGES, SIZE, 1, K).to(e4m3)}, "v_cache: torch.float8_e4m3fn; supported: torch.bfloat16"),
        ({"v_cache": torch.zeros(PAGES, SIZE, 2, K, dtype=bf16)[:, :, :1]}, "v_cache: shape and strides must be those of"),
        ({"v_cache": torch.zeros(PAGES + 1, SIZE, 1, K, dtype=bf16)}, "v_cache: shape and strides .* has 7 pages"),
        ({"k_cache": torch.zeros(1, SIZE, 1, K, dtype=bf16).expand(PAGES, -1, -1, -1)}, "k_cache: strides .0, 576"),
        ({"k_cache": torch.zeros(PAGES, SIZE, 1, K, dtype=bf16).as_subclass(Elsewhere)}, "k_cache: is on cuda:3"),
        ({"output": torch.zeros(B, HQ, V)}, "output: torch.float32; supported: torch.bfloat16"),
        ({"output": torch.zeros(B, HQ, K, dtype=bf16)}, "output: shape"),
        ({"page_table": torch.zeros(B, COLUMNS, dtype=torch.int64)}, "page_table: torch.int64"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(recorder: Recorder, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        xqa_mla(**call(**changes))
    assert recorder.launched == []


def test_what_no_kernel_does_is_unsupported(recorder: Recorder) -> None:
    with pytest.raises(
        Unsupported, match=r"q: torch.float16; supported: torch.bfloat16, torch.float8_e4m3fn"
    ):
        xqa_mla(**call(torch.float16))
    with pytest.raises(Unsupported, match="sm_count is 9"):
        xqa_mla(**call(sm_count=9))
    with pytest.raises(Unsupported, match="use_sliding_window"):
        REPLACES["flashinfer.xqa"]["get_xqa_module_mla"](bf16, bf16, SIZE, K, HQ, True)


def test_the_module_that_flashinfers_own_callers_get(recorder: Recorder) -> None:
    args = call()
    module = REPLACES["flashinfer.xqa"]["get_xqa_module_mla"](bf16, bf16, SIZE, K, HQ, False)
    tensors = (args[name] for name in ("output", "q", "k_cache", "v_cache", "page_table"))
    scratch_of = args["semaphores"], args["workspace_buffer"]
    module.xqa_mla(SMS, 0.5, *tensors, COLUMNS * SIZE, args["seq_lens"], B, 0.25, *scratch_of, False)
    (found,) = recorder.launched
    assert (found["q_scale"], found["kv_scale"], found["pdl"]) == (0.5, 0.25, 0)
    assert (found["q"], found["o"]) == (args["q"].data_ptr(), args["output"].data_ptr())


def test_a_device_that_nothing_serves() -> None:
    with pytest.raises(NotPrepared, match="no bundle serves the host"):
        xqa_mla(**call())
