"""FlashInfer's wrappers of a paged cache: what their arguments become in the C struct, and what is refused by name."""

from __future__ import annotations

import ctypes
import inspect
import math
import struct
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cpu.fake_driver.fa2 import MERGE_PARAMS
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.paged_prefill import TILE_PARAMS, axes_of, library_of

torch = pytest.importorskip("torch", reason="torch is not installed")

from cpu.test_xqa_torch_api import HOST, STREAM, Elsewhere, no_gpu, scratch  # noqa: E402, F401

from kernseal.kernels.paged_prefill.torch_api import (  # noqa: E402
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    prepare,
)
from kernseal.loader import serving  # noqa: E402
from kernseal.loader.bundle import Bundle  # noqa: E402
from kernseal.loader.errors import (  # noqa: E402
    InvalidArgument,
    NotPrepared,
    Unsupported,
    WorkspaceTooSmall,
)
from kernseal.loader.library import Library  # noqa: E402

HQ, HKV, D, SIZE, PAGES = 8, 2, 128, 16, 9
QO, INDPTR, INDICES, LAST = [0, 100, 100, 130], [0, 4, 4, 7], [8, 1, 2, 7, 0, 3, 5], [5, 0, 16]
LENGTHS = [53, 0, 48]
bf16, f16 = torch.bfloat16, torch.float16
PLAN_BYTES = 640


class Recorder:
    """A bundle whose ops plan by writing one byte, and keep what they are asked to launch."""

    statement = SimpleNamespace(sm="sm_90a", retarget=None)

    def __init__(self) -> None:
        self.prepared: list[dict[str, Any]] = []
        self.planned: list[dict[str, Any]] = []
        self.launched: list[dict[str, Any]] = []
        self.settled = 0

    def prepare(self, op: str, device: int, at_least: str | None, **axes: Any) -> Any:
        assert (op, device, at_least) == ("paged_prefill", HOST, None)
        self.prepared.append(axes)
        return SimpleNamespace(plan=self.plan, settle=self.settle, config=axes)

    def plan(self, **fields: Any) -> int:
        read = {"qo_indptr": 1, "page_indptr": 1, "kv_lens": 0}
        count = fields["batch_size"]
        values = {name: ints_at(fields[name], count + extra) for name, extra in read.items()}
        self.planned.append({**fields, **values})
        return PLAN_BYTES

    def settle(self, changing: tuple[str, ...], **numbers: Any) -> Any:
        self.settled += 1

        def launch(values: list[Any]) -> None:
            self.launched.append({**numbers, **dict(zip(changing, values, strict=True))})

        return SimpleNamespace(launch=launch)


@pytest.fixture(autouse=True)
def recorder(no_gpu: None) -> Recorder:  # noqa: F811
    made = Recorder()
    serving.use_bundle(made, HOST)  # type: ignore[arg-type]
    return made


@pytest.fixture(scope="module")
def folder(fake_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory) -> Path:
    fake_gpu.reset()
    path = tmp_path_factory.mktemp("paged")
    library_of([axes_of(), axes_of(causal=False)], path).close()
    return path


@pytest.fixture
def bundle(folder: Path, gpu: FakeGpu, no_gpu: None) -> Iterator[Bundle]:  # noqa: F811
    """The library on the recording driver, instead of the recorder."""
    gpu.params(TILE_PARAMS)
    gpu.params(MERGE_PARAMS, "merge")
    statement: Any = SimpleNamespace(sm="sm_90a", retarget=None)
    library = Library(str(folder / "libkernseal.so"))
    with Bundle(library, str(folder), statement, allow_validation=False, device=HOST) as opened:
        serving.use_bundle(opened, HOST)
        yield opened


def ints_at(address: int, count: int) -> list[int]:
    return list((ctypes.c_int32 * count).from_address(address)) if count else []


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def planned(made: Any = None, **changes: Any) -> Any:
    made = made or BatchPrefillWithPagedKVCacheWrapper(scratch(1 << 20), changes.pop("kv_layout", "NHD"))
    table = [ints(changes.pop(name, v)) for name, v in (("qo", QO), ("indptr", INDPTR))]
    table += [changes.pop("indices", ints(INDICES)), ints(changes.pop("last", LAST))]
    given = {"causal": True, "q_data_type": bf16, **changes}
    heads = given.pop("heads", (HQ, HKV))
    made.plan(*table, *heads, given.pop("head_dim_qk", D), given.pop("page_size", SIZE), **given)
    return made


def decode(made: Any = None, **changes: Any) -> Any:
    made = made or BatchDecodeWithPagedKVCacheWrapper(scratch(1 << 20))
    given = {"q_data_type": bf16, **changes}
    table = (ints(given.pop("indptr", INDPTR)), given.pop("indices", None), ints(given.pop("last", LAST)))
    table = tuple(ints(INDICES) if values is None else values for values in table)
    made.plan(*table, HQ, HKV, D, SIZE, **given)
    return made


def query(rows: int = QO[-1], dtype: Any = bf16) -> torch.Tensor:
    return torch.zeros(rows, HQ, D, dtype=dtype)


def pools(dtype: Any = bf16) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (torch.zeros(PAGES, SIZE, HKV, D, dtype=dtype) for _ in range(2))
    return k, v


def test_the_arguments_are_flashinfers_in_its_order() -> None:
    prefill, steps = BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper

    def names(function: Any) -> list[str]:
        return [name for name in inspect.signature(function).parameters if name != "self"]

    assert names(prefill) == [
        *("float_workspace_buffer", "kv_layout", "use_cuda_graph", "qo_indptr_buf", "paged_kv_indptr_buf"),
        *("paged_kv_indices_buf", "paged_kv_last_page_len_buf", "custom_mask_buf", "mask_indptr_buf"),
        *("backend", "jit_args", "jit_kwargs", "variant_owns_mask", "max_total_num_rows"),
    ]
    assert names(prefill.plan) == [
        *("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "num_qo_heads"),
        *("num_kv_heads", "head_dim_qk", "page_size", "head_dim_vo", "custom_mask", "packed_custom_mask"),
        *("causal", "pos_encoding_mode", "use_fp16_qk_reduction", "sm_scale", "window_left"),
        *("logits_soft_cap", "rope_scale", "rope_theta", "q_data_type", "kv_data_type", "o_data_type"),
        *("non_blocking", "prefix_len_ptr", "token_pos_in_items_ptr", "token_pos_in_items_len"),
        *("max_item_len_ptr", "seq_lens", "seq_lens_q", "block_tables", "max_token_per_sequence"),
        *("max_sequence_kv", "fixed_split_size", "disable_split_kv", "uniform_q_len", "use_token_head_sf"),
        "tile_q",
    ]
    assert names(prefill.run) == [
        *("q", "paged_kv_cache", "args", "q_scale", "k_scale", "v_scale", "out", "lse", "return_lse"),
        *("lse_base", "lse_layout", "enable_pdl", "window_left", "sinks", "kv_cache_sf"),
        *("skip_softmax_threshold_scale_factor", "use_fp16_softmax", "uses_spcompress"),
    ]
    assert names(steps) == [
        *("float_workspace_buffer", "kv_layout", "use_cuda_graph", "use_tensor_cores"),
        *("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"),
        *("backend", "jit_args", "jit_kwargs"),
    ]
    assert names(steps.plan) == [
        *("indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim", "page_size"),
        *("pos_encoding_mode", "window_left", "logits_soft_cap", "q_data_type"),
        *("kv_data_type", "o_data_type", "data_type", "sm_scale", "rope_scale", "rope_theta"),
        *("non_blocking", "block_tables", "seq_lens", "fixed_split_size", "disable_split_kv"),
        *("q_len_per_req", "window_right", "is_causal", "use_token_head_sf"),
    ]
    assert names(prefill.forward) == [
        *("q", "paged_kv_cache", "causal", "pos_encoding_mode", "use_fp16_qk_reduction", "k_scale"),
        *("v_scale", "window_left", "logits_soft_cap", "sm_scale", "rope_scale", "rope_theta", "return_lse"),
    ]
    assert names(steps.forward) == [
        *("q", "paged_kv_cache", "pos_encoding_mode", "q_scale", "k_scale", "v_scale", "window_left"),
        *("logits_soft_cap", "sm_scale", "rope_scale", "rope_theta", "return_lse"),
    ]
    assert names(steps.run) == [
        *("q", "paged_kv_cache", "args", "q_scale", "k_scale", "v_scale", "out", "lse", "return_lse"),
        *("enable_pdl", "window_left", "sinks", "q_len_per_req", "skip_softmax_threshold_scale_factor"),
        "kv_cache_sf",
    ]


def test_a_step_may_be_planned_without_names(recorder: Recorder) -> None:
    """As FlashInfer once had it: ``window_right`` alone never had a place."""
    made = BatchDecodeWithPagedKVCacheWrapper(scratch(1 << 20))
    made.plan(ints(INDPTR), ints(INDICES), ints(LAST), HQ, HKV, D, SIZE, "NONE", -1, 0.0, bf16)
    assert recorder.prepared[-1]["dtype"] == "bf16"
    last = inspect.signature(made.plan).parameters
    positional = [name for name, p in last.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional[-1] == "q_len_per_req" and "window_right" not in positional
    with pytest.raises(Unsupported, match="pos_encoding_mode is 'ALIBI'"):
        made.plan(ints(INDPTR), ints(INDICES), ints(LAST), HQ, HKV, D, SIZE, "ALIBI")


def test_forward_is_run_where_it_asks_for_what_was_planned(recorder: Recorder) -> None:
    """Upstream's would take these for plan's; None is then 1 / sqrt(head_dim), whatever plan was told."""
    made, steps = planned(), decode()
    assert made.forward(query(), pools(), True, "NONE", k_scale=2.0).shape == (130, HQ, D)
    assert len(made.forward_return_lse(query(), pools(), causal=True)) == 2
    assert steps.forward(query(3), pools(), "NONE", 3.0, sm_scale=1 / math.sqrt(D)).shape == (3, HQ, D)
    assert len(steps.forward_return_lse(query(3), pools())) == 2
    factors = [call["sm_scale"] * math.sqrt(D) for call in recorder.launched]
    assert factors == pytest.approx([2, 1, 3, 1])
    for other, words in (
        (lambda: made.forward(query(), pools()), "causal is False; forward does what was planned, True"),
        (lambda: steps.forward(query(3), pools(), sm_scale=0.5), "sm_scale is 0.5; forward"),
        (lambda: decode(sm_scale=0.5).forward(query(3), pools()), "sm_scale is 0.08.*was planned, 0.5"),
        (lambda: steps.forward(query(3), pools(), "ALIBI"), "pos_encoding_mode is 'ALIBI'"),
        (lambda: steps.forward(query(3), pools(), window_left=4), "window_left is 4"),
        (lambda: steps.forward(query(3), pools(), logits_soft_cap=1.0), "logits_soft_cap"),
        (lambda: made.forward(query(), pools(), True, use_fp16_qk_reduction=True), "use_fp16_qk_reduction"),
    ):
        with pytest.raises(Unsupported, match=words):
            other()
    assert steps.resolved_backend == "fa2"
    with pytest.raises(NotPrepared):
        BatchDecodeWithPagedKVCacheWrapper(scratch(1000)).forward(query(3), pools())


def test_a_plain_call(recorder: Recorder) -> None:
    indices = ints(INDICES)
    made, (k, v), q = planned(indices=indices), pools(), query()
    out = made.run(q, (k, v))
    assert (out.shape, out.dtype) == ((130, HQ, D), bf16)
    assert recorder.prepared == [{"dtype": "bf16", "head_dim": D, "causal": True}]
    sized, written = recorder.planned
    assert "plan" not in sized and written["plan_bytes"] == PLAN_BYTES
    assert (written["qo_indptr"], written["page_indptr"], written["kv_lens"]) == (QO, INDPTR, LENGTHS)
    (found,) = recorder.launched
    plan = made._planned
    expected = {"num_q_heads": HQ, "num_kv_heads": HKV, "page_size": SIZE, "tile_q": 0, "fixed_grid": 0}
    expected |= {"pdl": 1, "sm_scale": 1 / math.sqrt(D), "batch_size": 3, "total_q": 130, "total_pages": 7}
    expected |= {"num_pages": PAGES, "kv_chunk": -1, "q_row_stride": HQ * D, "q_head_stride": D}
    expected |= {"kv_page_stride": SIZE * HKV * D, "kv_row_stride": HKV * D, "kv_head_stride": D}
    expected |= {"q": q.data_ptr(), "k": k.data_ptr(), "v": v.data_ptr(), "page_indices": indices.data_ptr()}
    expected |= {"o": out.data_ptr(), "lse": 0, "plan": plan.host.data_ptr(), "plan_bytes": PLAN_BYTES}
    expected |= {"plan_device": plan.device.data_ptr(), "workspace": made._workspace.data_ptr()}
    expected |= {"workspace_bytes": 1 << 20, "stream": STREAM}
    assert found == expected


def test_numbers_are_worked_out_once_a_plan(recorder: Recorder) -> None:
    """A layer has tensors of its own, which look as those of the layer before."""
    made, layers = planned(), [pools() for _ in range(3)]
    for layer in layers:
        made.run(query(), layer)
    assert (recorder.settled, len(recorder.launched)) == (1, 3)
    assert [call["k"] for call in recorder.launched] == [k.data_ptr() for k, _ in layers]
    made.run(query(), pools(), enable_pdl=False)
    planned(made).run(query(), pools())
    assert (recorder.settled, [call["pdl"] for call in recorder.launched]) == (3, [1, 1, 1, 0, 1])


def test_lse_is_made_or_taken(recorder: Recorder) -> None:
    made = planned()
    out, lse = made.run_return_lse(query(), pools())
    assert (lse.shape, lse.dtype) == ((130, HQ), torch.float32)
    mine = {"out": torch.zeros_like(out), "lse": torch.zeros_like(lse)}
    assert made.run(query(), pools(), **mine, return_lse=True) == (mine["out"], mine["lse"])
    made.run(query(), pools(), lse=mine["lse"])
    assert [call["lse"] for call in recorder.launched] == [lse.data_ptr(), mine["lse"].data_ptr(), 0]
    assert recorder.launched[1]["o"] == mine["out"].data_ptr()


@pytest.mark.parametrize(
    ("changes", "chunk", "tile"),
    [
        ({}, -1, 0),
        ({"disable_split_kv": True}, 0, 0),
        ({"disable_split_kv": True, "tile_q": 16}, 0, 16),
        ({"fixed_split_size": 8}, 8 * SIZE, 64),
        ({"fixed_split_size": 8, "tile_q": 16}, 8 * SIZE, 16),
        ({"fixed_split_size": 8, "disable_split_kv": True}, 0, 0),
        ({"fixed_split_size": -1}, -1, 0),
    ],
)
def test_how_sequences_are_split(recorder: Recorder, changes: dict[str, Any], chunk: int, tile: int) -> None:
    """Upstream counts parts in pages."""
    planned(**changes).run(query(), pools())
    assert (recorder.launched[0]["kv_chunk"], recorder.launched[0]["tile_q"]) == (chunk, tile)


def test_how_steps_are_split(recorder: Recorder) -> None:
    for changes in ({}, {"fixed_split_size": 8}, {"disable_split_kv": True}):
        decode(**changes).run(query(3), pools())
    found = [(call["kv_chunk"], call["tile_q"]) for call in recorder.launched]
    assert found == [(-1, 16), (8 * SIZE, 16), (0, 16)]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(
    ("batch", "rows", "tile", "chunk"),
    [
        (64, 1, 16, -1),
        (132, 4, 16, -1),
        (133, 4, 16, 0),
        (133, 5, 64, 0),
        (66, 17, 128, -1),
        (67, 33, 128, 0),
    ],
)
def test_a_batch_that_fills_the_device_is_not_split_in_a_graph(
    recorder: Recorder, graph: bool, batch: int, rows: int, tile: int, chunk: int
) -> None:
    """The tile follows from the rows of a sequence. With 132 SMs and 2 KV heads a split aims at 132 thread blocks."""
    kept = [torch.zeros(n, dtype=torch.int32) for n in (batch + 1, 9, batch)] if graph else []
    made = BatchDecodeWithPagedKVCacheWrapper(scratch(64), "NHD", graph, True, *kept)
    ends, last = ints([0] * (batch + 1)), ints([0] * batch)
    made.plan(ends, ints([]), last, HQ, HKV, D, SIZE, q_data_type=bf16, q_len_per_req=rows)
    found = recorder.planned[-1]
    assert (found["tile_q"], found["kv_chunk"]) == (tile, chunk if graph else -1)


def test_a_full_batch_of_drafts_needs_no_scratch_in_a_graph(bundle: Bundle) -> None:
    """Upstream's plan of it has none either."""
    kept = [torch.zeros(n, dtype=torch.int32) for n in (257, 256 * 64, 256)]
    made = BatchDecodeWithPagedKVCacheWrapper(scratch(0), "NHD", True, True, *kept)
    ends = torch.arange(0, 256 * 64 + 1, 64, dtype=torch.int32)
    made.plan(ends, kept[1].clone(), ints([16] * 256), 32, 8, D, SIZE, q_data_type=bf16, q_len_per_req=4)


def test_a_step_of_decode(recorder: Recorder) -> None:
    made = decode()
    out, lse = made.run(query(3), pools(), return_lse=True)
    assert (out.shape, lse.shape) == ((3, HQ, D), (3, HQ)) and made.use_tensor_cores
    assert recorder.prepared == [{"dtype": "bf16", "head_dim": D, "causal": False}]
    assert (recorder.planned[-1]["qo_indptr"], recorder.planned[-1]["kv_lens"]) == ([0, 1, 2, 3], LENGTHS)


def test_drafts_are_causal(recorder: Recorder) -> None:
    made = decode(q_len_per_req=4, is_causal=True)
    made.run(query(12), pools(), q_len_per_req=4)
    assert recorder.prepared[0]["causal"] is True
    assert recorder.planned[-1]["qo_indptr"] == [0, 4, 8, 12]
    with pytest.raises(InvalidArgument, match="q_len_per_req is 3; the plan is for 4"):
        made.run(query(12), pools(), q_len_per_req=3)
    with pytest.raises(InvalidArgument, match="q_len_per_req is 0"):
        decode(q_len_per_req=0)
    with pytest.raises(Unsupported, match="is_causal is True"):
        decode(is_causal=True)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_layouts_are_strides(recorder: Recorder, layout: str) -> None:
    made = planned(kv_layout=layout)
    inner = (SIZE, HKV) if layout == "NHD" else (HKV, SIZE)
    both = torch.zeros(PAGES, 2, *inner, D, dtype=bf16)
    wide = torch.zeros(130, HQ + 3, D, dtype=bf16)[:, 2 : HQ + 2]
    made.run(wide, both)
    layers = torch.zeros(PAGES, 3, *inner, 2 * D, dtype=bf16)
    made.run(wide, (layers[:, 1, ..., :D], layers[:, 1, ..., D:]))
    first, second = recorder.launched
    strides = [(c["kv_page_stride"], c["kv_row_stride"], c["kv_head_stride"]) for c in (first, second)]
    page, (row, head) = SIZE * HKV * D, (HKV * D, D) if layout == "NHD" else (D, SIZE * D)
    assert strides == [(2 * page, row, head), (6 * page, 2 * row, 2 * head)]
    assert first["v"] - first["k"] == page * 2 and second["v"] - second["k"] == D * 2
    assert (first["q"], first["q_row_stride"], first["q_head_stride"]) == (wide.data_ptr(), (HQ + 3) * D, D)


def test_what_there_is_one_of_may_lie_anywhere(recorder: Recorder) -> None:
    made = planned()
    k, v = (torch.zeros(2, SIZE, HKV, D, dtype=bf16)[:1] for _ in range(2))
    made.run(query(), (k, v.as_strided(v.shape, (7, *v.stride()[1:]))))
    assert recorder.launched[0]["kv_page_stride"] == 0


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("name", "shared"), [("q", 0), ("q", 1), ("k", 0), ("k", 1), ("v", 2)])
def test_entries_that_share_memory_are_refused(
    recorder: Recorder, layout: str, name: str, shared: int
) -> None:
    made = planned(kv_layout=layout)
    inner = (SIZE, HKV) if layout == "NHD" else (HKV, SIZE)
    given = {"q": query(), **{x: torch.zeros(PAGES, *inner, D, dtype=bf16) for x in "kv"}}
    made.run(given["q"], (given["k"], given["v"]))
    whole = given[name]
    given[name] = whole.narrow(shared, 0, 1).expand_as(whole)
    words = rf"{name}: strides \(.*\b0\b.*, 1\); the last must be 1 and none of the others 0"
    with pytest.raises(InvalidArgument, match=words):
        made.run(given["q"], (given["k"], given["v"]))
    assert len(recorder.launched) == 1


def test_scales_of_the_logits_are_folded(recorder: Recorder) -> None:
    made = planned(sm_scale=0.5)
    made.run(query(), pools(), q_scale=2.0, k_scale=3.0, v_scale=1.0)
    made.run(query(), pools())
    assert [call["sm_scale"] for call in recorder.launched] == [3.0, 0.5] and recorder.settled == 1


def test_the_mean_and_the_type_choose_the_variant(recorder: Recorder) -> None:
    planned(q_data_type="float16", kv_data_type=f16, causal=False, head_dim_qk=64)
    assert recorder.prepared == [{"dtype": "f16", "head_dim": 64, "causal": False}]
    decode(q_data_type=None, data_type="half")
    assert recorder.prepared[1]["dtype"] == "f16"
    with pytest.raises(InvalidArgument, match=r"q: torch\.bfloat16; supported: torch\.float16"):
        decode(q_data_type=f16).run(query(3), pools(f16))


def test_a_sequence_without_pages_has_no_keys(recorder: Recorder) -> None:
    planned(last=[5, 11, 16])
    assert recorder.planned[-1]["kv_lens"] == LENGTHS, "its last page is not read"


def test_a_plan_does_not_touch_the_one_before_it() -> None:
    made = planned()
    before = made._planned
    planned(made)
    after = made._planned
    assert after.host.data_ptr() != before.host.data_ptr()
    assert after.device.data_ptr() != before.device.data_ptr()


def buffers(entries: int = 20) -> dict[str, torch.Tensor]:
    zeros = [torch.zeros(count, dtype=torch.int32) for count in (4, 4, entries, 3)]
    names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    return dict(zip(names, zeros, strict=True))


def test_a_graph_has_one_launch_and_one_place_for_its_plans(recorder: Recorder) -> None:
    kept = buffers()
    made = planned(BatchPrefillWithPagedKVCacheWrapper(scratch(1 << 20), "NHD", True, **kept))
    assert made.is_cuda_graph_enabled
    assert [kept[name].tolist() for name in kept] == [QO, INDPTR, [*INDICES, *[0] * 13], LAST]
    q, cache, out = query(), pools(), query()
    made.run(q, cache, out=out)
    other = {"qo": [0, 5, 100, 120], "indptr": [0, 0, 1, 3], "indices": ints([4, 2, 1]), "last": [0, 3, 9]}
    planned(made, **other)
    assert kept["paged_kv_indices_buf"].tolist()[:4] == [4, 2, 1, 7]
    made.run(q[:120], cache, out=out[:120])
    first, second = recorder.launched
    assert first.pop("plan") != second.pop("plan") and first == second
    assert (first["fixed_grid"], first["total_q"], first["total_pages"]) == (1, 130, 20)
    assert first["page_indices"] == kept["paged_kv_indices_buf"].data_ptr()
    refused = {
        "qo_indptr: 131 rows; at most 130 were fixed": {"qo": [0, 1, 2, 131]},
        "paged_kv_indptr: 3 entries; 4 were fixed": {"qo": [0, 1, 2], "indptr": [0, 1, 2], "last": [1, 1]},
        "paged_kv_indices: 21 entries; 20 were fixed": {"indices": ints([0] * 21)},
    }
    before = [kept[name].tolist() for name in kept]
    for words, changes in refused.items():
        with pytest.raises(InvalidArgument, match=words):
            planned(made, **changes)
    assert before == [kept[name].tolist() for name in kept], "nothing was written"


def test_a_graph_may_say_how_many_rows_it_is_for(recorder: Recorder) -> None:
    made = BatchPrefillWithPagedKVCacheWrapper(
        scratch(1 << 20), use_cuda_graph=True, **buffers(), max_total_num_rows=200
    )
    planned(made).run(query(), pools())
    assert recorder.launched[0]["total_q"] == 200


@pytest.mark.parametrize(
    ("rows", "given", "tile"),
    [
        (4, {"uniform_q_len": 4}, 16),
        (5, {"uniform_q_len": 5}, 64),
        (5, {"uniform_q_len": 5, "tile_q": 16}, 16),
        (4, {"uniform_q_len": 0}, 0),
        (4, {}, 0),
    ],
)
def test_a_graph_of_sequences_of_one_length(
    recorder: Recorder, rows: int, given: dict[str, int], tile: int
) -> None:
    made = BatchPrefillWithPagedKVCacheWrapper(scratch(1 << 20), "NHD", True, **buffers())
    planned(made, qo=[n * rows for n in range(4)], **given)
    assert recorder.planned[-1]["tile_q"] == tile


def test_a_promise_that_is_not_kept_is_refused_where_it_is_read(recorder: Recorder) -> None:
    """Upstream plans for any lengths then, with another tile than the graph has."""
    made = BatchPrefillWithPagedKVCacheWrapper(scratch(1 << 20), "NHD", True, **buffers())
    with pytest.raises(InvalidArgument, match="uniform_q_len is 3; the sequences have 0 to 100 rows"):
        planned(made, uniform_q_len=3)
    planned(uniform_q_len=3)
    assert recorder.planned[-1]["tile_q"] == 0


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("head_dim", {"head_dim_qk": 64}),
        ("causal", {"causal": False}),
        ("dtype", {"q_data_type": f16}),
        ("page_size", {"page_size": 32}),
        ("tile_q", {"tile_q": 16}),
        ("sm_scale", {"sm_scale": 0.5}),
        ("kv_chunk", {"disable_split_kv": True}),
        ("num_q_heads", {"heads": (16, 2)}),
        ("num_kv_heads", {"heads": (8, 4)}),
    ],
)
def test_a_graph_keeps_its_launch(recorder: Recorder, name: str, changes: dict[str, Any]) -> None:
    """What is captured would go on as it was, on the plan of another."""
    made = planned(BatchPrefillWithPagedKVCacheWrapper(scratch(1 << 20), "NHD", True, **buffers()))
    before, prepared = made._planned, len(recorder.prepared)
    with pytest.raises(
        InvalidArgument, match=f"{name} is .*; with use_cuda_graph it stays as the first plan"
    ):
        planned(made, **changes)
    assert made._planned is before and len(recorder.prepared) == prepared
    made.run(query(), pools())


def test_a_graph_keeps_its_scratch_and_its_bundle() -> None:
    made = planned(BatchPrefillWithPagedKVCacheWrapper(scratch(1 << 20), "NHD", True, **buffers()))
    first = made._workspace
    made.reset_workspace_buffer(scratch(1 << 20))
    with pytest.raises(InvalidArgument, match="workspace is "):
        planned(made)
    made.reset_workspace_buffer(first)
    planned(made)
    serving.use_bundle(Recorder(), HOST)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"bundle: another serves .* than at the first plan"):
        planned(made)


def test_scratch_is_kept_while_a_plan_names_it(recorder: Recorder) -> None:
    made = planned()
    held = weakref.ref(made._workspace)
    made.reset_workspace_buffer(scratch(1 << 20))
    made.run(query(), pools())
    old = held()
    assert old is not None and recorder.launched[0]["workspace"] == old.data_ptr()
    del old
    planned(made)
    assert held() is None


class Copied(torch.Tensor):
    """A tensor that keeps how it was written."""

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        WRITTEN.append((source, non_blocking))
        return super().copy_(source.as_subclass(torch.Tensor), non_blocking)


WRITTEN: list[tuple[torch.Tensor, bool]] = []


@pytest.mark.parametrize(("elsewhere", "non_blocking"), [(False, True), (False, False), (True, True)])
def test_only_pages_on_the_device_are_copied_without_waiting(elsewhere: bool, non_blocking: bool) -> None:
    """An engine may write its pinned memory again as soon as plan returns. Here the host is the device."""
    WRITTEN.clear()
    kept = buffers()
    kept["paged_kv_indices_buf"] = kept["paged_kv_indices_buf"].as_subclass(Copied)
    made = BatchPrefillWithPagedKVCacheWrapper(scratch(1 << 20), "NHD", True, **kept)
    indices = ints(INDICES).as_subclass(Elsewhere) if elsewhere else ints(INDICES)
    planned(made, indices=indices, non_blocking=non_blocking)
    assert [waits for _, waits in WRITTEN] == [non_blocking and not elsewhere]


class Pinned(torch.Tensor):
    def is_pinned(self, device: Any = None) -> bool:
        return True


def test_ends_in_pinned_memory_are_not_what_is_copied() -> None:
    WRITTEN.clear()
    kept = {name: buffer.as_subclass(Copied) for name, buffer in buffers().items()}
    made = BatchPrefillWithPagedKVCacheWrapper(scratch(1 << 20), "NHD", True, **kept)
    given = [ints(values).as_subclass(Pinned) for values in (QO, INDPTR, LAST)]
    made.plan(given[0], given[1], ints(INDICES), given[2], HQ, HKV, D, SIZE, causal=True, q_data_type=bf16)
    sources = {source.data_ptr() for source, _ in WRITTEN}
    assert len(sources) == 4 and sources.isdisjoint(tensor.data_ptr() for tensor in given)


def test_a_plan_that_fails_changes_nothing(bundle: Bundle) -> None:
    """Neither the rows that a graph is for nor what was planned before."""
    kept = buffers()
    made = BatchPrefillWithPagedKVCacheWrapper(scratch(1000), "NHD", True, **kept)
    with pytest.raises(WorkspaceTooSmall):
        planned(made, qo=[0, 1, 2, 3])
    assert all(not buffer.any() for buffer in kept.values())
    made.reset_workspace_buffer(scratch(1 << 25))
    before = planned(made)._planned
    with pytest.raises(InvalidArgument, match="kv_lens"):
        planned(made, last=[17, 0, 16])
    assert made._planned is before
    made.run(query(), pools())


def test_a_graph_of_decode(recorder: Recorder) -> None:
    kept = list(buffers().values())[1:]
    made = decode(BatchDecodeWithPagedKVCacheWrapper(scratch(1 << 20), "NHD", True, False, *kept))
    made.run(query(3), pools())
    assert (recorder.launched[0]["fixed_grid"], recorder.launched[0]["total_pages"]) == (1, 20)
    with pytest.raises(InvalidArgument, match="indptr: 3 entries; 4 were fixed"):
        decode(made, indptr=[0, 1, 2], last=[1, 1])
    with pytest.raises(InvalidArgument, match="q_len_per_req is 2; 1 was fixed"):
        decode(made, q_len_per_req=2)


@pytest.mark.parametrize(
    "changes",
    [
        *({name: torch.zeros(1)} for name in ("custom_mask", "packed_custom_mask", "prefix_len_ptr")),
        *({name: torch.zeros(1)} for name in ("token_pos_in_items_ptr", "max_item_len_ptr")),
        {"use_token_head_sf": True},
        {"use_fp16_qk_reduction": True},
        {"logits_soft_cap": 30.0},
        {"pos_encoding_mode": "ROPE_LLAMA"},
        {"window_left": 0},
        {"head_dim_vo": 64},
        {"kv_data_type": torch.float8_e4m3fn},
        {"o_data_type": f16},
        {"q_data_type": torch.float32},
    ],
)
def test_what_plan_does_not_do_is_named(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(Unsupported, match=name):
        planned(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_token_head_sf": True},
        {"window_right": 3},
        {"window_left": 0},
        {"logits_soft_cap": 1.0},
        {"pos_encoding_mode": "ALIBI"},
        {"kv_data_type": torch.float8_e4m3fn},
    ],
)
def test_what_a_step_does_not_do_is_named(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(Unsupported, match=name):
        decode(**changes)


def test_values_that_mean_nothing_are_taken(recorder: Recorder) -> None:
    """Plans are as those without them."""
    none = {"logits_soft_cap": 0.0, "rope_theta": 1e4, "window_left": -1, "seq_lens": ints([1])}
    indices, memory = ints(INDICES), scratch(1 << 20)
    for plan, wrapper, more in (
        (planned, BatchPrefillWithPagedKVCacheWrapper, {"head_dim_vo": D, "uniform_q_len": 3}),
        (decode, BatchDecodeWithPagedKVCacheWrapper, {"is_causal": False}),
    ):
        for changes in ({}, {**none, **more, "block_tables": ints([1])}):
            plan(wrapper(memory), indices=indices, **changes)
        assert lasting(recorder.planned[-1]) == lasting(recorder.planned[-3])
        assert recorder.prepared[0] == recorder.prepared.pop()
        recorder.prepared.clear()


def lasting(fields: dict[str, Any]) -> dict[str, Any]:
    """What of a plan's fields the plan after it has too."""
    return {name: value for name, value in fields.items() if not name.startswith("plan")}


@pytest.mark.parametrize(
    "changes",
    [
        *({name: torch.zeros(1)} for name in ("custom_mask_buf", "mask_indptr_buf")),
        {"jit_args": []},
        {"jit_kwargs": {}},
        {"variant_owns_mask": True},
        {"backend": "cudnn"},
    ],
)
def test_what_the_wrapper_is_not_is_named(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(Unsupported, match=name):
        BatchPrefillWithPagedKVCacheWrapper(scratch(1000), **changes)
    if name in ("jit_args", "jit_kwargs", "backend"):
        with pytest.raises(Unsupported, match=name):
            BatchDecodeWithPagedKVCacheWrapper(scratch(1000), **changes)


def test_arguments_that_make_no_sense() -> None:
    memory, kept = scratch(1000), buffers()
    prefill, steps = BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper
    with pytest.raises(InvalidArgument, match="kv_layout is 'NDH'"):
        prefill(memory, kv_layout="NDH")
    with pytest.raises(InvalidArgument, match="qo_indptr_buf: needed with use_cuda_graph"):
        prefill(memory, use_cuda_graph=True, **{**kept, "qo_indptr_buf": None})
    with pytest.raises(InvalidArgument, match=r"paged_kv_indptr_buffer, paged_kv_indices_buffer, .*: needed"):
        steps(memory, use_cuda_graph=True)
    for name, given, words in (
        ("paged_kv_indptr_buf", ints([0] * 5), r"shape \(5,\); expected \[B \+ 1\] = \[4\]"),
        ("qo_indptr_buf", ints([0] * 9), r"shape \(9,\); expected \[B \+ 1\] = \[4\]"),
        ("paged_kv_last_page_len_buf", ints([[0] * 3]), r"shape \(1, 3\); expected one dimension"),
        ("paged_kv_indices_buf", ints([0]).long(), r"torch\.int64"),
    ):
        with pytest.raises(InvalidArgument, match=f"{name}: {words}"):
            prefill(memory, use_cuda_graph=True, **{**kept, name: given})
    with pytest.raises(InvalidArgument, match="max_total_num_rows: needs use_cuda_graph"):
        prefill(memory, max_total_num_rows=5)
    with pytest.raises(InvalidArgument, match=r"paged_kv_indptr: shape \(3,\); expected \[4\]"):
        planned(indptr=[0, 1, 2])
    with pytest.raises(InvalidArgument, match=r"paged_kv_last_page_len: shape \(2,\); expected \[3\]"):
        planned(last=[1, 1])
    with pytest.raises(InvalidArgument, match=r"paged_kv_indices: torch\.int64"):
        planned(indices=ints(INDICES).long())
    with pytest.raises(InvalidArgument, match=r"paged_kv_indices: shape \(1, 7\); expected one dimension"):
        planned(indices=ints([INDICES]))
    for made, rows in ((prefill(memory), 130), (steps(memory), 3)):
        with pytest.raises(NotPrepared, match="plan must be called before run"):
            made.run(query(rows), pools())


UNDONE: list[tuple[dict[str, Any], str]]
UNDONE = [
    ({"v_scale": 2.0}, r"v_scale is 2\.0"),
    *(({name: torch.ones(1)}, f"{name}: is a tensor") for name in ("q_scale", "k_scale", "v_scale")),
    ({"window_left": 5}, "window_left is 5"),
    ({"sinks": torch.zeros(HQ)}, "sinks"),
    ({"kv_cache_sf": torch.zeros(1)}, "kv_cache_sf"),
    ({"skip_softmax_threshold_scale_factor": 1.0}, "skip_softmax_threshold_scale_factor"),
    ({"lse_base": "ln"}, "lse_base is 'ln'"),
    ({"lse_layout": "HN"}, "lse_layout 'HN'"),
    ({"use_fp16_softmax": True}, "use_fp16_softmax"),
    ({"uses_spcompress": True}, "uses_spcompress"),
]
"""Arguments of run, and what is said of them."""
PREFILL_ALONE = {"lse_base", "lse_layout", "use_fp16_softmax", "uses_spcompress"}


@pytest.mark.parametrize(
    ("steps", "changes", "words"),
    [
        (steps, changes, words)
        for steps in (False, True)
        for changes, words in UNDONE
        if not (steps and PREFILL_ALONE & set(changes))
    ],
)
def test_what_run_does_not_do_is_named(
    recorder: Recorder, steps: bool, changes: dict[str, Any], words: str
) -> None:
    made, rows = (decode(), 3) if steps else (planned(), 130)
    with pytest.raises(Unsupported, match=words):
        made.run(query(rows), pools(), **changes)
    assert recorder.launched == []


def test_arguments_of_another_variant_are_refused() -> None:
    for made, rows in ((planned(), 130), (decode(), 3)):
        with pytest.raises(Unsupported, match="args"):
            made.run(query(rows), pools(), torch.zeros(1))


def test_values_laid_out_unlike_keys_are_refused(recorder: Recorder) -> None:
    k, v = pools()
    for other in (v.transpose(1, 2).contiguous().transpose(1, 2), v[:-1]):
        with pytest.raises(Unsupported, match="paged_kv_cache: v is "):
            planned().run(query(), (k, other))
    assert recorder.launched == []


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("q", torch.zeros(131, HQ, D, dtype=bf16), "the plan is for "),
        ("q", torch.zeros(130, HQ, 64, dtype=bf16), "the plan is for "),
        ("q", torch.zeros(130, HQ * D, dtype=bf16), "expected three dimensions"),
        ("k", torch.zeros(PAGES, 2 * SIZE, HKV, D, dtype=bf16), "the plan is for "),
        ("v", torch.zeros(PAGES, SIZE, 1, D, dtype=bf16), "the plan is for "),
        ("v", torch.zeros(PAGES, SIZE, HKV, D), r"torch\.float32"),
        ("k", torch.zeros(PAGES * SIZE, HKV, D, dtype=bf16), "the plan is for "),
        ("k", torch.zeros(PAGES, SIZE, D, HKV, dtype=bf16).transpose(2, 3), "the last must be 1"),
        ("out", torch.zeros(130, HQ, 64, dtype=bf16), "expected"),
        ("out", torch.zeros(130, HQ, 2 * D, dtype=bf16)[..., :D], "must be dense"),
        ("q", torch.zeros(130, HQ, D, dtype=bf16).as_subclass(Elsewhere), "is on cuda:3"),
        ("k", torch.zeros(PAGES, SIZE, HKV, D, dtype=bf16).as_subclass(Elsewhere), "is on cuda:3"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(recorder: Recorder, name: str, tensor: Any, words: str) -> None:
    k, v = pools()
    given = {"q": query(), "k": k, "v": v, "out": None, name: tensor}
    with pytest.raises(InvalidArgument, match=f"{name}: .*{words}"):
        planned().run(given["q"], (given["k"], given["v"]), out=given["out"])
    assert recorder.launched == []


def test_a_single_tensor_has_keys_and_values() -> None:
    for shape in ((PAGES, SIZE, HKV, D), (PAGES, 3, SIZE, HKV, D)):
        with pytest.raises(InvalidArgument, match=r"paged_kv_cache: shape .*; expected \[num_pages, 2"):
            planned().run(query(), torch.zeros(shape, dtype=bf16))


def test_a_variant_may_be_prepared_ahead(recorder: Recorder) -> None:
    prepare(HOST, head_dim=128, causal=True)
    assert recorder.prepared == [{"head_dim": 128, "causal": True}]


@pytest.mark.parametrize(
    ("chunk", "launches"), [({"disable_split_kv": True}, 1), ({"fixed_split_size": 1}, 2)]
)
def test_the_library_takes_what_the_wrappers_pass(
    bundle: Bundle, gpu: FakeGpu, chunk: dict[str, Any], launches: int
) -> None:
    (k, v), q, indices = pools(), query(), ints(INDICES)
    made = planned(BatchPrefillWithPagedKVCacheWrapper(scratch(1 << 24)), indices=indices, **chunk)
    made.run(q, (k, v), return_lse=True)
    decode(BatchDecodeWithPagedKVCacheWrapper(scratch(1 << 24)), **chunk).run(
        query(3), torch.stack([k, v], 1)
    )
    found = gpu.log("launch")
    assert len(found) == 2 * launches
    words = struct.unpack_from("<33Q", bytes.fromhex(found[0]["params"][0]))
    assert {q.data_ptr(), k.data_ptr(), v.data_ptr(), indices.data_ptr()} <= set(words)


def test_the_library_makes_the_same_launch_for_every_plan_of_a_graph(bundle: Bundle, gpu: FakeGpu) -> None:
    made = BatchPrefillWithPagedKVCacheWrapper(scratch(1 << 25), "HND", True, **buffers())
    cache, q, out = torch.zeros(PAGES, 2, HKV, SIZE, D, dtype=bf16), query(), query()
    planned(made).run(q, cache, out=out)
    planned(made, qo=[0, 5, 100, 120], indptr=[0, 0, 1, 3], last=[0, 3, 9], indices=ints([4, 2, 1]))
    made.run(q[:120], cache, out=out[:120])
    launches = gpu.log("launch")
    half = len(launches) // 2
    assert half and launches[:half] == launches[half:]


def test_an_empty_batch_launches_nothing(bundle: Bundle, gpu: FakeGpu) -> None:
    none = {"indptr": [0], "indices": ints([]), "last": []}
    assert planned(qo=[0], **none).run(query(0), pools()).shape == (0, HQ, D)
    made = BatchDecodeWithPagedKVCacheWrapper(scratch(1 << 20))
    made.plan(ints([0]), ints([]), ints([]), HQ, HKV, D, SIZE, q_data_type=bf16)
    assert made.run(query(0), pools()).shape == (0, HQ, D)
    assert gpu.log("launch") == []


def test_sequences_without_pages_need_no_pool(bundle: Bundle, gpu: FakeGpu) -> None:
    made = planned(qo=[0, 3], indptr=[0, 0], indices=ints([]), last=[0])
    assert made.run(query(3), tuple(pool[:0] for pool in pools())).shape == (3, HQ, D)
    assert gpu.log("launch")


def test_what_the_library_refuses(bundle: Bundle, gpu: FakeGpu) -> None:
    with pytest.raises(WorkspaceTooSmall, match=r"workspace_bytes is 1000; this plan needs \d+"):
        planned(BatchPrefillWithPagedKVCacheWrapper(scratch(1000)), fixed_split_size=1)
    with pytest.raises(InvalidArgument, match=r"kv_lens\[0\] is 65; with 4 pages of 16, 0 to 64"):
        planned(last=[17, 0, 16])
    with pytest.raises(InvalidArgument, match=r"page_indptr\[2\] is 3"):
        planned(indptr=[0, 4, 3, 7])
    with pytest.raises(Unsupported) as error:
        planned(head_dim_qk=64)
    assert str(error.value).endswith("kernseal build --sm 90 --variant paged_prefill/bf16_d64_causal")
    assert gpu.log("launch") == []
