"""``xqa``: what FlashInfer's arguments become in the C struct, which variant they ask for, and what is refused."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.xqa import axes_of, library_of, param_sizes

torch = pytest.importorskip("torch", reason="torch is not installed")

from kernseal.kernels.xqa_decode import torch_api  # noqa: E402
from kernseal.kernels.xqa_decode.torch_api import xqa  # noqa: E402
from kernseal.loader import addresses, serving  # noqa: E402
from kernseal.loader.bundle import Bundle  # noqa: E402
from kernseal.loader.errors import (  # noqa: E402
    InvalidArgument,
    NotPrepared,
    Unsupported,
    WorkspaceTooSmall,
)
from kernseal.loader.layout import Layout  # noqa: E402
from kernseal.loader.library import Library, declarations  # noqa: E402

HOST = (
    -1
)  # what torch calls the device of a host tensor; here it is served, as the fake driver's current device
STREAM, SMS = 0x51, 132
FIELDS = Layout(declarations(), "kseal_xqa_decode_args").names
B, PAGES, HKV, SIZE, D, GROUP, COLUMNS = 3, 9, 2, 16, 64, 4, 5
HQ = GROUP * HKV
bf16, f16, e4m3, f32 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_served", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: HOST)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    monkeypatch.setattr(addresses, "sm_count", lambda device: SMS)


class Recorder:
    """A bundle that keeps what it is asked for and launches nothing."""

    def __init__(self, sm: str = "sm_90a") -> None:
        self.statement = SimpleNamespace(sm=sm, retarget=None)
        self.prepared: list[dict[str, Any]] = []
        self.launched: list[dict[str, Any]] = []

    def prepare(self, op: str, device: int, at_least: str | None, **axes: Any) -> Any:
        assert at_least is None
        self.prepared.append({"op": op, "device": device, **axes})
        return SimpleNamespace(launch=lambda **fields: self.launched.append(fields), settle=self.settle)

    def settle(self, changing: tuple[str, ...], **numbers: Any) -> Any:
        def launch(values: list[Any]) -> None:
            self.launched.append({**numbers, **dict(zip(changing, values, strict=True))})

        return SimpleNamespace(launch=launch)


@pytest.fixture
def recorder() -> Recorder:
    made = Recorder()
    serving.use_bundle(made, HOST)  # type: ignore[arg-type]
    return made


def scratch(size: int) -> torch.Tensor:
    """As aligned as an allocation on a device is."""
    memory = torch.zeros(size + 128, dtype=torch.int8)
    start = -memory.data_ptr() % 128
    return memory[start : start + size]


class Elsewhere(torch.Tensor):
    """A tensor of device 3."""

    device = torch.device("cuda:3")

    def get_device(self) -> int:
        return 3


def call(**changes: Any) -> dict[str, Any]:
    """The arguments of a plain call."""
    q = changes.pop("q", torch.zeros(B, 1, HQ, D, dtype=bf16))
    pool = torch.zeros(PAGES, SIZE, HKV, D, dtype=q.dtype)
    return {
        "q": q,
        "k_cache": pool,
        "v_cache": pool.clone(),
        "page_table": torch.zeros(B, COLUMNS, dtype=torch.int32),
        "seq_lens": torch.zeros(B, 1, dtype=torch.uint32),
        "output": torch.zeros_like(q),
        "workspace_buffer": scratch(1000),
        "semaphores": torch.zeros(100, dtype=torch.uint32),
        "num_kv_heads": HKV,
        "page_size": SIZE,
        **changes,
    }


def launched(recorder: Recorder, **changes: Any) -> dict[str, Any]:
    assert xqa(**call(**changes)) is None
    return recorder.launched[-1]


def test_the_arguments_are_flashinfers_in_its_order_then_ours_by_name() -> None:
    parameters = inspect.signature(xqa).parameters
    assert list(parameters) == [
        *("q", "k_cache", "v_cache", "page_table", "seq_lens", "output", "workspace_buffer", "semaphores"),
        *(
            "num_kv_heads",
            "page_size",
            "sinks",
            "q_scale",
            "kv_scale",
            "sliding_win_size",
            "kv_layout",
            "sm_count",
        ),
        *("enable_pdl", "rcp_out_scale", "q_seq_len", "mask", "q_cu_seq_lens", "k_sf_cache", "v_sf_cache"),
        *("fp8_math", "kv_splits"),
    ]
    by_name = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    assert by_name == ["q_cu_seq_lens", "k_sf_cache", "v_sf_cache", "fp8_math", "kv_splits"]


def test_a_plain_call(recorder: Recorder) -> None:
    args = call()
    xqa(*args.values())
    assert recorder.prepared == [
        {"op": "xqa_decode", "device": HOST, **axes_of(head_dim=D, group_size=GROUP)}
    ]
    addresses = {name: args[name].data_ptr() for name in ("q", "page_table", "seq_lens", "semaphores")}
    zeros = dict.fromkeys(FIELDS, 0)
    assert recorder.launched == [
        {
            **zeros,
            **addresses,
            "k": args["k_cache"].data_ptr(),
            "v": args["v_cache"].data_ptr(),
            "o": args["output"].data_ptr(),
            "workspace": args["workspace_buffer"].data_ptr(),
            "num_q_heads": HQ,
            "num_kv_heads": HKV,
            "q_len": 1,
            "pdl": 1,
            "q_scale": 1.0,
            "kv_scale": 1.0,
            "rcp_out_scale": 1.0,
            "batch_size": B,
            "q_rows": B,
            "num_pages": PAGES,
            "max_pages_per_seq": COLUMNS,
            "kv_page_stride": SIZE * HKV * D,
            "kv_token_stride": HKV * D,
            "kv_head_stride": D,
            "semaphores_bytes": 400,
            "workspace_bytes": 1000,
            "stream": STREAM,
        }
    ]


def test_every_field_of_the_struct_is_given_by_its_name(recorder: Recorder) -> None:
    assert set(launched(recorder)) == set(FIELDS)


def test_numbers_are_passed_on(recorder: Recorder) -> None:
    found = launched(
        recorder,
        q_scale=0.5,
        kv_scale=0.25,
        rcp_out_scale=4.0,
        sliding_win_size=77,
        enable_pdl=False,
        kv_splits=-1,
        sm_count=SMS,
    )
    expected = {
        "q_scale": 0.5,
        "kv_scale": 0.25,
        "rcp_out_scale": 4.0,
        "window": 77,
        "pdl": 0,
        "kv_splits": -1,
    }
    assert {name: found[name] for name in expected} == expected
    assert recorder.prepared[-1]["sliding_window"] is True


def test_scales_on_the_device_and_sinks_are_passed_by_address(recorder: Recorder) -> None:
    q_scale, kv_scale, sinks = torch.tensor(0.5), torch.tensor([0.25]), torch.zeros(HKV, GROUP)
    small = {name: torch.zeros(PAGES, SIZE, HKV, D).to(e4m3) for name in ("k_cache", "v_cache")}
    found = launched(recorder, q_scale=q_scale, kv_scale=kv_scale, sinks=sinks, **small)
    addresses = [t.data_ptr() for t in (q_scale, kv_scale, sinks)]
    assert [found[name] for name in ("q_scale_ptr", "kv_scale_ptr", "sinks")] == addresses


def test_the_scale_tensor_of_a_16_bit_cache_is_not_read(recorder: Recorder) -> None:
    assert launched(recorder, kv_scale=torch.tensor(0.25))["kv_scale_ptr"] == 0


def test_a_window_of_no_size_is_none(recorder: Recorder) -> None:
    assert launched(recorder, sliding_win_size=-1)["window"] == 0
    assert recorder.prepared[-1]["sliding_window"] is False


@pytest.mark.parametrize("beam", [(), (1,)])
@pytest.mark.parametrize("mask_dtype", [torch.uint16, torch.uint32])
def test_drafts(recorder: Recorder, beam: tuple[int, ...], mask_dtype: Any) -> None:
    q_len = 40
    words = 2 if mask_dtype == torch.uint32 else 4
    mask = torch.zeros(B, q_len, words, dtype=mask_dtype)
    q = torch.zeros(B, *beam, q_len, HQ, D, dtype=bf16)
    found = launched(recorder, q=q, q_seq_len=q_len, mask=mask)
    assert (found["q_len"], found["q_rows"], found["mask"]) == (q_len, B * q_len, mask.data_ptr())
    assert recorder.prepared[-1]["spec_decode"] is True and found["q_cu_lens"] == 0


def test_drafts_of_their_own_number(recorder: Recorder) -> None:
    ends = torch.tensor([0, 5, 5, 8], dtype=torch.int32)
    q, mask = torch.zeros(8, HQ, D, dtype=bf16), torch.zeros(8, 2, dtype=torch.uint16)
    found = launched(recorder, q=q, q_seq_len=5, mask=mask, q_cu_seq_lens=ends)
    assert (found["batch_size"], found["q_rows"], found["q_len"]) == (B, 8, 5)
    assert found["q_cu_lens"] == ends.data_ptr()


def test_no_drafts_at_all_launch_nothing(recorder: Recorder) -> None:
    q = torch.zeros(0, HQ, D, dtype=bf16)
    ends = torch.zeros(B + 1, dtype=torch.int32)
    mask = torch.zeros(0, 2, dtype=torch.uint16)
    assert xqa(**call(q=q, q_seq_len=5, mask=mask, q_cu_seq_lens=ends)) is None
    assert recorder.launched == []


def test_an_empty_batch_is_passed_on(recorder: Recorder) -> None:
    empty = {
        "page_table": torch.zeros(0, 0, dtype=torch.int32),
        "seq_lens": torch.zeros(0, 1, dtype=torch.uint32),
    }
    assert launched(recorder, q=torch.zeros(0, 1, HQ, D, dtype=bf16), **empty)["batch_size"] == 0


def strides(found: dict[str, Any], kind: str = "kv") -> list[int]:
    return [found[f"{kind}_{name}_stride"] for name in ("page", "token", "head")]


def test_a_cache_of_heads_first(recorder: Recorder) -> None:
    pools = {name: torch.zeros(PAGES, HKV, SIZE, D, dtype=bf16) for name in ("k_cache", "v_cache")}
    assert strides(launched(recorder, kv_layout="HND", **pools)) == [SIZE * HKV * D, D, SIZE * D]


def test_k_and_v_interleaved(recorder: Recorder) -> None:
    both = torch.zeros(PAGES, 2, SIZE, HKV, D, dtype=bf16)
    k, v = both.unbind(dim=1)
    found = launched(recorder, k_cache=k, v_cache=v)
    assert strides(found) == [2 * SIZE * HKV * D, HKV * D, D]
    assert found["v"] - found["k"] == SIZE * HKV * D * 2


def test_the_stride_of_what_there_is_one_of_does_not_matter(recorder: Recorder) -> None:
    k = torch.zeros(SIZE, D, dtype=bf16).as_strided((1, SIZE, 1, D), (0, D, 0, 1))
    v = torch.zeros(1, SIZE, 1, D, dtype=bf16)
    found = launched(
        recorder, q=torch.zeros(B, 1, GROUP, D, dtype=bf16), k_cache=k, v_cache=v, num_kv_heads=1
    )
    assert strides(found) == [D, D, D]


def test_one_token_a_page_may_have_any_stride(recorder: Recorder) -> None:
    dense = torch.zeros(PAGES, 1, HKV, D, dtype=bf16)
    for pool in (
        dense,
        dense.as_strided(dense.shape, (HKV * D, 7, D, 1)),
    ):  # dense too, and taken for the same
        found = launched(recorder, k_cache=pool, v_cache=dense, page_size=1)
        assert strides(found) == [HKV * D, D, D]


def test_an_nvfp4_cache_counts_bytes_and_has_scales(recorder: Recorder) -> None:
    pools = {
        name: torch.zeros(PAGES, SIZE, HKV, D // 2, dtype=torch.uint8) for name in ("k_cache", "v_cache")
    }
    both = torch.zeros(PAGES, 2, HKV, SIZE, D // 16, dtype=torch.uint8).transpose(2, 3)
    scales = dict(zip(("k_sf_cache", "v_sf_cache"), both.unbind(dim=1), strict=True))
    found = launched(recorder, **pools, **scales)
    assert recorder.prepared[-1]["kv_dtype"] == "nvfp4"
    assert strides(found) == [SIZE * HKV * D // 2, HKV * D // 2, D // 2]
    assert strides(found, "scale") == [2 * SIZE * HKV * D // 16, D // 16, SIZE * D // 16]
    assert found["k_scales"] == both.data_ptr()
    with pytest.raises(InvalidArgument, match="v_sf_cache: missing"):
        xqa(**call(**pools, k_sf_cache=scales["k_sf_cache"]))
    with pytest.raises(InvalidArgument, match="v_sf_cache: its strides must be those of k_sf_cache"):
        xqa(
            **call(
                **pools,
                **{**scales, "v_sf_cache": scales["v_sf_cache"].clone(memory_format=torch.contiguous_format)},
            )
        )


@pytest.mark.parametrize(
    ("sm", "kv", "head_dim", "q_len", "asked", "expected"),
    [
        ("sm_90a", e4m3, 64, 1, None, True),
        ("sm_90a", e4m3, 256, 1, None, True),
        ("sm_90a", e4m3, 64, 1, False, False),
        ("sm_90a", e4m3, 272, 1, None, False),
        ("sm_90a", e4m3, 64, 2, None, False),
        ("sm_90a", bf16, 64, 1, None, False),
        ("sm_90a", torch.int8, 64, 1, None, False),
        ("sm_120a", e4m3, 64, 1, None, False),
        ("sm_120a", e4m3, 64, 1, True, True),
    ],
)
def test_fp8_math_is_where_upstream_has_it_and_a_caller_may_say_no(
    sm: str, kv: Any, head_dim: int, q_len: int, asked: bool | None, expected: bool
) -> None:
    made = Recorder(sm)
    serving.use_bundle(made, HOST)  # type: ignore[arg-type]
    pool = torch.zeros(PAGES, SIZE, HKV, head_dim).to(kv)
    q = torch.zeros(B, 1, *((q_len,) if q_len > 1 else ()), HQ, head_dim, dtype=bf16)
    mask = torch.zeros(B, q_len, 2, dtype=torch.uint16)
    xqa(**call(q=q, k_cache=pool, v_cache=pool, q_seq_len=q_len, mask=mask, fp8_math=asked))
    assert made.prepared[-1]["fp8_math"] is expected
    assert made.prepared[-1]["spec_decode"] is (q_len > 1)


def test_a_variant_is_prepared_once_and_again_for_another_bundle(recorder: Recorder) -> None:
    launched(recorder)
    launched(recorder, sinks=torch.zeros(HQ), q_scale=2.0)
    assert len(recorder.prepared) == 1
    launched(recorder, q=torch.zeros(B, 1, HQ, D, dtype=f16))
    assert len(recorder.prepared) == 2
    other = Recorder()
    serving.use_bundle(other, HOST)  # type: ignore[arg-type]
    xqa(**call())
    assert len(other.prepared) == len(other.launched) == 1


q_of = {"dtype": bf16}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": torch.zeros(B + 1, 1, HQ, D, **q_of)}, r"q: shape \(4, 1, 8, 64\); expected 3 sequences of 1 tok"),
        ({"q": torch.zeros(1, B, HQ, D, **q_of)}, r"q: shape \(1, 3, 8, 64\)"),
        ({"q": torch.zeros(HQ, D, **q_of)}, r"q: shape \(8, 64\)"),
        ({"q": torch.zeros(B, 1, HQ, 2 * D, **q_of)[..., ::2], "output": torch.zeros(B, HQ, D, **q_of)}, "q: strides"),
        ({"q_seq_len": 2}, "expected 3 sequences of 2 tokens"),
        ({"kv_layout": "BSHD"}, "kv_layout is 'BSHD'; it must be NHD or HND"),
        ({"k_cache": torch.zeros(PAGES, 32, HKV, D, **q_of)}, r"k_cache: shape \(9, 32, 2, 64\); expected \(9, 16,"),
        ({"v_cache": torch.zeros(PAGES, SIZE, HKV, D)}, r"v_cache: torch.float32; supported: torch.bfloat16"),
        ({"v_cache": torch.zeros(PAGES, 2, SIZE, HKV, D, **q_of)[:, 0]}, r"v_cache: strides \(4096, 128, 64, 1\); k_c"),
        ({"k_cache": torch.zeros(1, SIZE, HKV, D, **q_of).expand(PAGES, -1, -1, -1)}, "k_cache: strides .0, 128"),
        ({"k_cache": torch.zeros(PAGES, SIZE, HKV, 2 * D, **q_of)[..., ::2]}, "k_cache: strides .*; the last must be 1"),
        ({"page_table": torch.zeros(B, COLUMNS, dtype=torch.int64)}, "page_table: torch.int64; supported: torch.int32"),
        ({"page_table": torch.zeros(B, 9, dtype=torch.int32)[:, :COLUMNS]}, "page_table: strides .9, 1.; must be dense"),
        ({"page_table": torch.zeros(2, COLUMNS, dtype=torch.int32)}, r"page_table: shape \(2, 5\); expected 15 elem"),
        ({"seq_lens": torch.zeros(B, dtype=torch.int64)}, "seq_lens: torch.int64; supported: torch.int32, torch.uint32"),
        ({"output": torch.zeros(B, 1, HQ - 1, D, **q_of)}, "output: shape"),
        ({"sinks": torch.zeros(HQ, **q_of)}, "sinks: torch.bfloat16"),
        ({"sinks": torch.zeros(HKV)}, "sinks: shape"),
        ({"q_scale": torch.zeros(2)}, "q_scale: shape"),
        ({"kv_scale": torch.zeros(1, dtype=torch.float64)}, "kv_scale: torch.float64"),
        ({"q": torch.zeros(B, 1, 2, HQ, D, **q_of), "q_seq_len": 2}, "mask: missing; q_seq_len is 2"),
        (
            {"q": torch.zeros(B, 2, HQ, D, **q_of), "q_seq_len": 2, "mask": torch.zeros(B, 2, dtype=torch.uint16)},
            r"mask: shape \(3, 2\); expected 12 elements",
        ),
        (
            {"q": torch.zeros(B, 2, HQ, D, **q_of), "q_seq_len": 2, "mask": torch.zeros(B, 2, 32, dtype=torch.bool)},
            "mask: torch.bool; supported: torch.uint16",
        ),
        ({"semaphores": torch.zeros(100, 2)[:, 0]}, "semaphores: strides"),
        ({"workspace_buffer": torch.zeros(9).as_subclass(Elsewhere)}, "workspace_buffer: is on cuda:3; expected the host"),
        ({"v_cache": torch.zeros(PAGES, SIZE, HKV, D, **q_of).as_subclass(Elsewhere)}, "v_cache: is on cuda:3"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(recorder: Recorder, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        xqa(**call(**changes))
    assert recorder.launched == []
    xqa(**call())  # what was right before makes nothing else right
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=words):
            xqa(**call(**changes))
    assert len(recorder.launched) == 1


def test_a_call_that_looks_like_one_before_is_not_looked_at_again(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again = call(sinks=torch.zeros(HQ)), call(sinks=torch.zeros(HQ))
    xqa(**first, q_scale=2.0)
    monkeypatch.setattr(torch_api, "_settle", None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM + 1, raising=False)
    xqa(**again, q_scale=-0.0, kv_scale=0.5, rcp_out_scale=4.0)
    before, found = recorder.launched
    memory = {
        **{name: again[name].data_ptr() for name in ("q", "page_table", "seq_lens", "sinks", "semaphores")},
        "k": again["k_cache"].data_ptr(),
        "v": again["v_cache"].data_ptr(),
        "o": again["output"].data_ptr(),
        "workspace": again["workspace_buffer"].data_ptr(),
    }
    factors = {"q_scale": -0.0, "kv_scale": 0.5, "rcp_out_scale": 4.0, "stream": STREAM + 1}
    assert found == {**before, **memory, **factors} and math.copysign(1, found["q_scale"]) == -1
    assert all(before[name] != address for name, address in memory.items())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"enable_pdl": False}, {"pdl": 0}),
        ({"kv_splits": -1}, {"kv_splits": -1}),
        ({"sliding_win_size": 9}, {"window": 9}),
        ({"workspace_buffer": scratch(2000)}, {"workspace_bytes": 2000}),
        ({"semaphores": torch.zeros(50, dtype=torch.uint32)}, {"semaphores_bytes": 200}),
        ({"page_table": torch.zeros(B, 7, dtype=torch.int32)}, {"max_pages_per_seq": 7}),
        ({"q_scale": torch.tensor(0.5)}, {"q_scale": 1.0}),
        (
            dict.fromkeys(("k_cache", "v_cache"), torch.zeros(PAGES, 2, SIZE, HKV, D, **q_of)[:, 0]),
            {"kv_page_stride": 2 * SIZE * HKV * D},
        ),
        (
            {**dict.fromkeys(("k_cache", "v_cache"), torch.zeros(PAGES, SIZE, SIZE, D, **q_of)), "num_kv_heads": SIZE}
            | {"q": torch.zeros(B, 1, SIZE, D, **q_of), "kv_layout": "HND"},
            {"kv_token_stride": D, "kv_head_stride": SIZE * D},
        ),
    ],
    ids=lambda value: ", ".join(value),
)  # fmt: skip
def test_a_call_that_looks_otherwise_is_worked_out(
    recorder: Recorder, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    for asked in ({}, changes, {}, changes):
        launched(recorder, **asked)
    plain, other, plain_again, other_again = (
        {name: fields[name] for name in expected} for fields in recorder.launched
    )
    assert other == other_again == expected and plain == plain_again
    assert plain != other or "q_scale" in changes
    by_address = [fields["q_scale_ptr"] != 0 for fields in recorder.launched]
    assert by_address == [False, "q_scale" in changes] * 2


def test_a_number_with_a_value_of_its_own_is_looked_at_every_time(recorder: Recorder) -> None:
    heads = torch.tensor(HKV)
    launched(recorder, num_kv_heads=heads)
    heads += 1
    with pytest.raises(InvalidArgument, match="k_cache: shape"):
        xqa(**call(num_kv_heads=heads))


def test_few_calls_are_remembered(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_MOST_CALLS", 3)
    for size in range(1000, 1010):
        assert launched(recorder, workspace_buffer=scratch(size))["workspace_bytes"] == size
        assert len(serving.served_by(HOST).calls) <= 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": torch.zeros(B, 1, HQ, D)}, "q: torch.float32; supported: torch.bfloat16, torch.float16"),
        ({"output": torch.zeros(B, 1, HQ, D)}, "output: torch.float32"),
        ({"k_cache": torch.zeros(PAGES, SIZE, HKV, D)}, "k_cache: torch.float32"),
        ({"sm_count": 64}, "sm_count is 64; it must be None or the device's own, 132"),
    ],
)
def test_what_no_kernel_does_is_unsupported(recorder: Recorder, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        xqa(**call(**changes))


def test_a_device_that_nothing_serves_says_how_to_change_that() -> None:
    with pytest.raises(NotPrepared, match=r"no bundle serves the host; call kernseal\.loader"):
        xqa(**call())
    with pytest.raises(NotPrepared, match="no bundle serves cuda:7"):
        serving.served_by(7)


@pytest.fixture(scope="module")
def folder(fake_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with one variant, its image made up."""
    fake_gpu.reset()
    path = tmp_path_factory.mktemp("xqa")
    library_of([axes_of(head_dim=D, group_size=GROUP)], "sm_90a", path).close()
    return path


@pytest.fixture
def bundle(folder: Path, gpu: FakeGpu) -> Iterator[Bundle]:
    gpu.params(param_sizes(axes_of()))
    statement: Any = SimpleNamespace(sm="sm_90a", retarget=None)
    library = Library(str(folder / "libkernseal.so"))
    with Bundle(library, str(folder), statement, allow_validation=False, device=HOST) as opened:
        serving.use_bundle(opened, HOST)
        yield opened


def test_the_library_takes_the_call(bundle: Bundle, gpu: FakeGpu) -> None:
    args = call()
    xqa(**args)
    (found,) = gpu.log("launch")
    xqa(**args)
    assert gpu.log("launch") == [found, found]
    assert found["grid"] == [1, HKV, B] and int(str(found["stream"]), 0) == STREAM
    xqa(
        **call(
            q=torch.zeros(0, 1, HQ, D, dtype=bf16),
            page_table=args["page_table"][:0],
            seq_lens=args["seq_lens"][:0],
        )
    )
    assert len(gpu.log("launch")) == 2


def test_scratch_that_is_too_small_is_refused_with_the_size_that_is_needed(bundle: Bundle) -> None:
    long = {"page_table": torch.zeros(B, 1000, dtype=torch.int32), "q": torch.zeros(B, 1, HQ, D, dtype=bf16)}
    with pytest.raises(WorkspaceTooSmall, match=r"semaphores_bytes is 4; 24 are needed"):
        xqa(**call(**long, semaphores=torch.zeros(1, dtype=torch.uint32)))
    with pytest.raises(WorkspaceTooSmall, match=r"workspace_bytes is 1000; \d+ are needed"):
        xqa(**call(**long))


def test_a_missing_variant_is_reported_with_the_command_that_builds_it(bundle: Bundle) -> None:
    with pytest.raises(Unsupported) as error:
        xqa(**call(sliding_win_size=9))
    command = "kernseal build --sm 90 --variant xqa_decode/bf16_kvbf16_obf16_d64_g4_p16_window"
    assert str(error.value).endswith(
        f"has: bf16_kvbf16_obf16_d64_g4_p16; to build it, or to read why nothing does it: {command}"
    )


def test_a_call_after_the_bundle_was_closed_says_so(bundle: Bundle) -> None:
    xqa(**call())
    xqa(**call())
    bundle.close()
    with pytest.raises(InvalidArgument, match="belongs to a bundle that was closed"):
        xqa(**call())


def test_launch_wants_every_field_and_no_other(bundle: Bundle) -> None:
    op = bundle.prepare("xqa_decode", device=HOST, head_dim=D, group_size=GROUP)
    fields = dict.fromkeys(FIELDS, 0)
    with pytest.raises(InvalidArgument, match="rows: no such field; there are num_q_heads, "):
        op.launch(**fields, rows=1)
    del fields["pdl"], fields["q"]
    with pytest.raises(InvalidArgument, match=r"missing: pdl, q$"):
        op.launch(**fields)
    with pytest.raises(InvalidArgument, match="q_len: -5000000000 does not fit the field"):
        op.launch(**dict.fromkeys(FIELDS, 0) | {"q_len": -5_000_000_000})
