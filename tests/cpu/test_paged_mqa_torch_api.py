"""Paged MQA logits with FlashInfer's arguments: the C structs they become, the variants they ask for, what is refused."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("kernseal.kernels.paged_mqa_logits.operands", reason="this tree does not have the op")

from cpu.test_xqa_torch_api import HOST, SMS, STREAM, Elsewhere, Recorder, no_gpu  # noqa: E402, F401

from kernseal.export import source  # noqa: E402
from kernseal.kernels.paged_mqa_logits.torch_api import (  # noqa: E402
    REPLACES,
    fp4_paged_mqa_logits,
    fp8_paged_mqa_logits,
    precompile_paged_mqa_logits,
)
from kernseal.kernels.paged_mqa_schedule.torch_api import (  # noqa: E402
    REPLACES as REPLACES_SCHEDULE,
)
from kernseal.kernels.paged_mqa_schedule.torch_api import (  # noqa: E402
    compute_paged_mqa_logits_schedule,
)
from kernseal.loader import serving  # noqa: E402
from kernseal.loader.errors import InvalidArgument, NotPrepared, Unsupported  # noqa: E402
from kernseal.loader.layout import Layout  # noqa: E402
from kernseal.loader.library import declarations  # noqa: E402

FIELDS = {
    op: set(Layout(declarations(), f"kseal_{op}_args").names)
    for op in ("paged_mqa_logits", "paged_mqa_schedule")
}
B, N, H, D, PAGES, SIZE, COLUMNS, LONGEST = 3, 2, 64, 128, 7, 32, 4, 100
FP8 = {
    "kv_dtype": "e4m3",
    **dict.fromkeys(("out_dtype", "epi_dtype", "acc_dtype"), "f32"),
    "num_heads": H,
    "head_dim": D,
    "next_n": N,
    "page_size": SIZE,
    "interleaved": False,
}
i32, u8, f32, f16, bf16, e4m3 = (
    torch.int32,
    torch.uint8,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
)


@pytest.fixture
def recorder() -> Recorder:
    made = Recorder("sm_100a")
    serving.use_bundle(made, HOST)  # type: ignore[arg-type]
    return made


def fp8(**changes: Any) -> dict[str, Any]:
    """The arguments of a plain FP8 call."""
    return {
        "q": torch.zeros(B, N, H, D).to(e4m3),
        "kv_fused": torch.zeros(PAGES, SIZE, 1, D + 4, dtype=u8),
        "weights": torch.zeros(B * N, H),
        "block_tables": torch.zeros(B, COLUMNS, dtype=i32),
        "seq_lens": torch.zeros(B, dtype=i32),
        "max_seq_len": LONGEST,
        **changes,
    }


def fp4(next_n: int = N, **changes: Any) -> dict[str, Any]:
    args = fp8(
        q=torch.zeros(B, next_n, H, D // 2, dtype=u8),
        kv_fused=torch.zeros(PAGES, SIZE, 1, D // 2 + 4, dtype=u8),
        weights=torch.zeros(B * next_n, H),
    )
    q_sf = torch.zeros(B, next_n, H, dtype=i32)
    return {"q": args.pop("q"), "q_sf": q_sf, **args, **changes}


def signature_upstream(name: str) -> list[str]:
    opened, _ = source.open_source(None, source.upstream())
    text = opened.read("flashinfer/attn_scores/attn_scores.py")
    assert text is not None
    found = next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == name)
    return [a.arg for a in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)]


@pytest.mark.parametrize(
    "function",
    [
        fp8_paged_mqa_logits,
        fp4_paged_mqa_logits,
        precompile_paged_mqa_logits,
        compute_paged_mqa_logits_schedule,
    ],
)
def test_the_arguments_are_flashinfers_in_its_order(function: Callable[..., Any]) -> None:
    assert list(inspect.signature(function).parameters) == signature_upstream(function.__name__)
    for replaced in (REPLACES, REPLACES_SCHEDULE):
        for module, functions in replaced.items():
            assert module in ("flashinfer", "flashinfer.attn_scores.attn_scores")
            assert all(name == f.__name__ for name, f in functions.items())


def test_a_plain_call_makes_its_schedule_and_its_logits(recorder: Recorder) -> None:
    args = fp8()
    logits = fp8_paged_mqa_logits(**args)
    assert (tuple(logits.shape), logits.dtype, logits.stride(0)) == ((B * N, LONGEST), f32, 256)
    assert recorder.prepared == [
        {"op": "paged_mqa_logits", "device": HOST, **FP8},
        {"op": "paged_mqa_schedule", "device": HOST, "atoms": 1},
    ]
    scheduled, launched = recorder.launched
    address = scheduled["schedule"]
    assert scheduled == {
        "num_ctas": SMS,
        "batch_size": B,
        "seq_len_stride": 1,
        "seq_lens": args["seq_lens"].data_ptr(),
        "schedule": address,
        "stream": STREAM,
    }
    assert launched == {
        "num_ctas": SMS,
        "batch_size": B,
        "num_pages": PAGES,
        "max_pages_per_seq": COLUMNS,
        "max_seq_len": LONGEST,
        "kv_page_stride": SIZE * (D + 4),
        "page_table_stride": COLUMNS,
        "seq_len_stride": 1,
        "logits_stride": 256,
        "q": args["q"].data_ptr(),
        "q_scales": 0,
        "kv": args["kv_fused"].data_ptr(),
        "weights": args["weights"].data_ptr(),
        "page_table": args["block_tables"].data_ptr(),
        "seq_lens": args["seq_lens"].data_ptr(),
        "schedule": address,
        "logits": logits.data_ptr(),
        "stream": STREAM,
    }
    assert set(launched) == FIELDS["paged_mqa_logits"]
    assert set(scheduled) == FIELDS["paged_mqa_schedule"]
    fp8_paged_mqa_logits(**fp8())
    assert len(recorder.prepared) == 2


@pytest.mark.parametrize(("next_n", "atoms"), [(1, 1), (2, 1), (3, 1), (4, 2)])
def test_fp4_schedules_two_rows_a_sequence_where_it_reads_the_cache_twice(
    recorder: Recorder, next_n: int, atoms: int
) -> None:
    args = fp4(next_n)
    logits = fp4_paged_mqa_logits(**args)
    wanted = {**FP8, "kv_dtype": "fp4", "out_dtype": "bf16", "next_n": next_n}
    assert recorder.prepared[0] == {"op": "paged_mqa_logits", "device": HOST, **wanted}
    assert recorder.prepared[1]["atoms"] == atoms
    assert (logits.dtype, recorder.launched[1]["q_scales"]) == (bf16, args["q_sf"].data_ptr())
    assert recorder.launched[1]["kv_page_stride"] == SIZE * (D // 2 + 4)


def test_a_schedule_and_storage_of_the_caller_are_used(recorder: Recorder) -> None:
    schedule, out = torch.zeros(21, 2, dtype=i32), torch.zeros(B * N + 5, 1024)[:, :300]
    logits = fp8_paged_mqa_logits(**fp8(schedule_meta=schedule, out=out))
    (launched,) = recorder.launched
    assert (launched["num_ctas"], launched["schedule"]) == (20, schedule.data_ptr())
    assert (launched["logits"], launched["logits_stride"]) == (out.data_ptr(), 1024)
    assert (logits.data_ptr(), tuple(logits.shape)) == (out.data_ptr(), (B * N, LONGEST))


def test_views_are_read_where_they_are(recorder: Recorder) -> None:
    layers = torch.zeros(PAGES, 3, SIZE * (D + 4), dtype=u8)[:, 1].view(PAGES, SIZE, 1, D + 4)
    tables = torch.zeros(B * N, COLUMNS, dtype=i32)[::N]
    lens = torch.zeros(B * N, dtype=i32)[::N]
    fp8_paged_mqa_logits(**fp8(kv_fused=layers, block_tables=tables, seq_lens=lens))
    scheduled, launched = recorder.launched
    assert (launched["kv"], launched["kv_page_stride"]) == (layers.data_ptr(), 3 * SIZE * (D + 4))
    assert launched["page_table_stride"] == N * COLUMNS
    assert launched["seq_len_stride"] == scheduled["seq_len_stride"] == N


def test_half_precision_is_the_variants_and_the_weights(recorder: Recorder) -> None:
    args = fp8(weights=torch.full((B * N, H), 0.5))
    fp8_paged_mqa_logits(**args, output_dtype=f16, epi_dtype=f16, acc_dtype=f16)
    wanted = {**FP8, "out_dtype": "f16", "epi_dtype": "f16", "acc_dtype": "f16"}
    assert recorder.prepared[0] == {"op": "paged_mqa_logits", "device": HOST, **wanted}
    assert recorder.launched[1]["weights"] != args["weights"].data_ptr()
    fp4_paged_mqa_logits(
        **fp4(kv_fused=torch.zeros(PAGES, 128, 1, 68, dtype=u8)), is_kv_sf_interleaved=True, epi_dtype=bf16
    )
    last = recorder.prepared[-1]
    assert (last["interleaved"], last["epi_dtype"], last["page_size"]) == (True, "bf16", 128)


def test_an_empty_batch_is_passed_on(recorder: Recorder) -> None:
    empty = {
        "q": torch.zeros(0, N, H, D).to(e4m3),
        "weights": torch.zeros(0, H),
        "block_tables": torch.zeros(0, COLUMNS, dtype=i32),
        "seq_lens": torch.zeros(0, dtype=i32),
    }
    assert tuple(fp8_paged_mqa_logits(**fp8(**empty)).shape) == (0, LONGEST)
    assert [line["batch_size"] for line in recorder.launched] == [0, 0]


def test_a_schedule_by_itself(recorder: Recorder) -> None:
    lens = torch.zeros(9, dtype=i32)
    made = compute_paged_mqa_logits_schedule(lens)
    assert (tuple(made.shape), made.dtype) == ((SMS + 1, 2), i32)
    out = torch.zeros(5, 2, dtype=i32)
    assert compute_paged_mqa_logits_schedule(lens, next_n=4, variant="fp4", out=out) is out
    assert [line["num_ctas"] for line in recorder.launched] == [SMS, 4]
    assert [line["atoms"] for line in recorder.prepared] == [1, 2]


def test_what_flashinfer_compiles_ahead_is_prepared(recorder: Recorder) -> None:
    precompile_paged_mqa_logits(device=torch.device("cpu"))
    of_logits = [p for p in recorder.prepared if p["op"] == "paged_mqa_logits"]
    assert len(of_logits) == 3 * 4 * (1 + 2)
    assert {p["out_dtype"] for p in of_logits if p["kv_dtype"] == "fp4"} == {"bf16", "f32"}
    assert {p["out_dtype"] for p in of_logits if p["kv_dtype"] == "e4m3"} == {"f32"}
    assert {p["atoms"] for p in recorder.prepared if p["op"] == "paged_mqa_schedule"} == {1, 2}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(B, N, H, D)}, "q: torch.float32; supported: torch.float8_e4m3fn"),
    ({"q": torch.zeros(B, H, D).to(e4m3)}, r"q: shape \(3, 64, 128\); expected \[B, next_n, heads"),
    ({"q": torch.zeros(B, N, D, H).to(e4m3).transpose(2, 3)}, "q: strides"),
    ({"kv_fused": torch.zeros(PAGES, SIZE, 1, D, dtype=u8)}, r"kv_fused: shape .*; expected \[pages, page_size, 1, 132\]"),
    ({"kv_fused": torch.zeros(PAGES, SIZE, D + 4, dtype=u8)}, "kv_fused: shape"),
    ({"kv_fused": torch.zeros(PAGES, SIZE, 1, D + 4).to(e4m3)}, "kv_fused: torch.float8_e4m3fn; supported: torch.uint8"),
    ({"kv_fused": torch.zeros(PAGES, SIZE, 1, D + 8, dtype=u8)[..., : D + 4]}, "bytes of a page must be dense"),
    ({"kv_fused": torch.zeros(1, SIZE, 1, D + 4, dtype=u8).expand(PAGES, -1, -1, -1)}, "kv_fused: strides .0,"),
    ({"weights": torch.zeros(B, H)}, "weights: shape .*; expected 384 elements"),
    ({"weights": torch.zeros(B * N, H, dtype=f16)}, "weights: torch.float16; supported: torch.float32"),
    ({"block_tables": torch.zeros(B, COLUMNS, dtype=torch.int64)}, "block_tables: torch.int64"),
    ({"block_tables": torch.zeros(B + 1, COLUMNS, dtype=i32)}, r"block_tables: shape \(4, 4\); expected \[3, columns\]"),
    ({"block_tables": torch.zeros(COLUMNS, B, dtype=i32).T}, "block_tables: strides"),
    ({"block_tables": torch.zeros(1, COLUMNS, dtype=i32).expand(B, -1)}, "block_tables: strides .0, 1.; .* not share"),
    ({"seq_lens": torch.zeros(B, 1, dtype=i32)}, r"seq_lens: shape \(3, 1\); expected \[B\]"),
    ({"seq_lens": torch.zeros(B + 1, dtype=i32)}, r"seq_lens: shape \(4,\); expected \[3\]"),
    ({"seq_lens": torch.zeros(1, dtype=i32).expand(B)}, "seq_lens: strides .0,.; entries must not share"),
    ({"seq_lens": torch.zeros(B)}, "seq_lens: torch.float32; supported: torch.int32"),
    ({"schedule_meta": torch.zeros(SMS, dtype=i32)}, r"schedule_meta: shape \(132,\); expected \[CTAs \+ 1, 2\]"),
    ({"schedule_meta": torch.zeros(1, 2, dtype=i32)}, r"schedule_meta: shape \(1, 2\)"),
    ({"schedule_meta": torch.zeros(9, 2)}, "schedule_meta: torch.float32"),
    ({"out": torch.zeros(B * N, LONGEST)}, r"out: shape \(6, 100\); expected at least \[6, 256\]"),
    ({"out": torch.zeros(B * N - 1, 256)}, r"out: shape \(5, 256\)"),
    ({"out": torch.zeros(B * N, 256, dtype=f16)}, "out: torch.float16; supported: torch.float32"),
    ({"out": torch.zeros(256, B * N).T}, "out: strides"),
    ({"out": torch.zeros(1, 256).expand(B * N, -1)}, "out: strides .0, 1."),
    ({"kv_fused": torch.zeros(PAGES, SIZE, 1, D + 4, dtype=u8).as_subclass(Elsewhere)}, "kv_fused: is on cuda:3"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), BAD)
def test_what_does_not_fit_is_refused(recorder: Recorder, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        fp8_paged_mqa_logits(**fp8(**changes))
    assert [line for line in recorder.launched if "logits" in line] == []


def test_sm120_has_no_schedule(recorder: Recorder) -> None:
    recorder.statement.sm = "sm_120a"
    fp8_paged_mqa_logits(**fp8())
    (launched,) = recorder.launched
    assert (launched["num_ctas"], launched["schedule"]) == (0, 0)
    with pytest.raises(InvalidArgument, match="schedule_meta: must be None; sm_120a has no schedule"):
        fp8_paged_mqa_logits(**fp8(schedule_meta=torch.zeros(SMS + 1, 2, dtype=i32)))


def test_what_no_kernel_does_is_unsupported(recorder: Recorder) -> None:
    with pytest.raises(Unsupported, match=r"epi_dtype: torch\.int32"):
        fp8_paged_mqa_logits(**fp8(), epi_dtype=i32)
    with pytest.raises(Unsupported, match="sf_vec_size is 16; supported: 32"):
        fp4_paged_mqa_logits(**fp4(), sf_vec_size=16)
    with pytest.raises(Unsupported, match="next_n is 5; supported for fp4: 1 to 4"):
        compute_paged_mqa_logits_schedule(torch.zeros(3, dtype=i32), next_n=5, variant="fp4")
    with pytest.raises(Unsupported, match="variant is 'bf16'; supported: fp8, fp4"):
        compute_paged_mqa_logits_schedule(torch.zeros(3, dtype=i32), variant="bf16")
    with pytest.raises(Unsupported, match="use_gpu_kernel is False"):
        compute_paged_mqa_logits_schedule(torch.zeros(3, dtype=i32), use_gpu_kernel=False)
    with pytest.raises(InvalidArgument, match=r"seq_lens: is on cpu; expected cuda"):
        compute_paged_mqa_logits_schedule(torch.zeros(3, dtype=i32), torch.device("cuda"))
    assert recorder.launched == []


def test_a_device_that_no_bundle_serves_is_refused() -> None:
    with pytest.raises(NotPrepared):
        fp8_paged_mqa_logits(**fp8())
    with pytest.raises(NotPrepared):
        compute_paged_mqa_logits_schedule(torch.zeros(3, dtype=i32))
