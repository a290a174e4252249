"""``BatchPrefillWithRaggedKVCacheWrapper``: what FlashInfer's arguments become, on the library and the recording driver."""

from __future__ import annotations

import inspect
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.ragged_prefill import HEAD, HEAD_FIELDS, MERGE_PARAMS, TILE_PARAMS, axes_of, library_of

torch = pytest.importorskip("torch", reason="torch is not installed")

from cpu.test_xqa_torch_api import HOST, STREAM, Elsewhere, no_gpu, scratch  # noqa: E402, F401

from kernseal.kernels.ragged_prefill.torch_api import (  # noqa: E402
    BatchPrefillWithRaggedKVCacheWrapper,
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

HQ, HKV, D = 8, 2, 128
QO, KV = [0, 100, 100, 130], [0, 400, 450, 480]
bf16, f16 = torch.bfloat16, torch.float16


@pytest.fixture(scope="module")
def folder(fake_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory) -> Path:
    fake_gpu.reset()
    path = tmp_path_factory.mktemp("ragged")
    made = [axes_of(), axes_of(causal=False), axes_of(dtype="f16"), axes_of(head_dim=192)]
    library_of(made, path).close()
    return path


@pytest.fixture(autouse=True)
def bundle(folder: Path, gpu: FakeGpu, no_gpu: None) -> Iterator[Bundle]:  # noqa: F811
    gpu.params(TILE_PARAMS)
    gpu.params(MERGE_PARAMS, "merge")
    statement: Any = SimpleNamespace(sm="sm_90a", retarget=None)
    library = Library(str(folder / "libkernseal.so"))
    with Bundle(library, str(folder), statement, allow_validation=False, device=HOST) as opened:
        serving.use_bundle(opened, HOST)
        yield opened


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def wrapper(size: int = 1 << 24, **changes: Any) -> BatchPrefillWithRaggedKVCacheWrapper:
    return BatchPrefillWithRaggedKVCacheWrapper(scratch(size), **changes)


def planned(made: BatchPrefillWithRaggedKVCacheWrapper | None = None, **changes: Any) -> Any:
    made = made or wrapper()
    qo, kv = changes.pop("qo", QO), changes.pop("kv", KV)
    given = {"causal": True, "q_data_type": bf16, "disable_split_kv": True, **changes}
    made.plan(ints(qo), ints(kv), HQ, HKV, given.pop("head_dim_qk", D), **given)
    return made


def tensors(rows: int = QO[-1], keys: int = KV[-1], dtype: Any = bf16) -> dict[str, torch.Tensor]:
    shapes = {"q": (rows, HQ, D), "k": (keys, HKV, D), "v": (keys, HKV, D)}
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}


def params(gpu: FakeGpu, which: int = -1) -> tuple[Any, ...]:
    """q, k, v, q_indptr, kv_indptr, o, lse, scale, then the six strides of the last launch of tiles."""
    launch = [line for line in gpu.log("launch") if line["kernel"] != "merge"][which]
    found = struct.unpack_from("<7Q3IiIf2I6I", bytes.fromhex(launch["params"][0]))
    return (*found[:7], found[12], *found[15:])


def head(made: BatchPrefillWithRaggedKVCacheWrapper) -> dict[str, int]:
    assert made._planned is not None
    return dict(zip(HEAD_FIELDS, HEAD.unpack_from(bytes(made._planned.host.numpy())), strict=True))


def test_the_arguments_are_flashinfers_in_its_order() -> None:
    made = BatchPrefillWithRaggedKVCacheWrapper
    assert list(inspect.signature(made).parameters) == [
        *("float_workspace_buffer", "kv_layout", "use_cuda_graph", "qo_indptr_buf", "kv_indptr_buf"),
        *("custom_mask_buf", "mask_indptr_buf", "backend", "jit_args", "jit_kwargs", "variant_owns_mask"),
    ]
    assert list(inspect.signature(made.plan).parameters) == [
        *("self", "qo_indptr", "kv_indptr", "num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo"),
        *("custom_mask", "packed_custom_mask", "causal", "pos_encoding_mode", "use_fp16_qk_reduction"),
        *(
            "window_left",
            "logits_soft_cap",
            "sm_scale",
            "rope_scale",
            "rope_theta",
            "q_data_type",
            "kv_data_type",
        ),
        *(
            "o_data_type",
            "non_blocking",
            "prefix_len_ptr",
            "token_pos_in_items_ptr",
            "token_pos_in_items_len",
        ),
        *("max_item_len_ptr", "fixed_split_size", "disable_split_kv", "seq_lens", "seq_lens_q"),
        *(
            "max_token_per_sequence",
            "max_sequence_kv",
            "v_indptr",
            "o_indptr",
            "qo_indptr_cpu",
            "kv_indptr_cpu",
        ),
        *("uniform_q_len", "use_token_head_sf", "tile_q"),
    ]
    assert list(inspect.signature(made.run).parameters) == [
        *(
            "self",
            "q",
            "k",
            "v",
            "args",
            "q_scale",
            "k_scale",
            "v_scale",
            "o_scale",
            "out",
            "lse",
            "return_lse",
        ),
        *("lse_base", "lse_layout", "enable_pdl", "kv_cache_sf"),
    ]


def test_a_plain_call(gpu: FakeGpu) -> None:
    made, given = planned(), tensors()
    out = made.run(**given)
    assert (out.shape, out.dtype) == ((130, HQ, D), bf16)
    found = params(gpu)
    assert found[:3] == tuple(given[name].data_ptr() for name in "qkv")
    assert found[5:7] == (out.data_ptr(), 0)
    assert found[7] == struct.unpack("<f", struct.pack("<f", 128**-0.5))[0]
    assert found[8:] == (HQ * D, D, HKV * D, D, HKV * D, D)
    (launch,) = gpu.log("launch")
    assert int(str(launch["stream"]), 0) == STREAM and launch["attributes"] == [[6, "01000000"]]
    device = made._planned.device
    assert found[3] == device.data_ptr() + head(made)["q_indptr"]
    assert (
        bytes(device.numpy())[: head(made)["bytes"]]
        == bytes(made._planned.host.numpy())[: head(made)["bytes"]]
    )


def test_forward_is_run_where_it_asks_for_what_was_planned(gpu: FakeGpu) -> None:
    made, given = planned(), tensors()
    assert made.forward(**given, causal=True).shape == (130, HQ, D)
    assert len(made.forward_return_lse(given["q"], given["k"], given["v"], True)) == 2
    assert len(gpu.log("launch")) == 2
    with pytest.raises(Unsupported, match="causal is False; forward does what was planned, True"):
        made.forward(**given)
    with pytest.raises(Unsupported, match="sm_scale is 2"):
        made.forward(**given, causal=True, sm_scale=2.0)


def test_lse_is_made_or_taken(gpu: FakeGpu) -> None:
    made = planned()
    out, lse = made.run_return_lse(**tensors())
    assert (lse.shape, lse.dtype) == ((130, HQ), torch.float32)
    assert params(gpu)[5:7] == (out.data_ptr(), lse.data_ptr())
    mine = {"out": torch.zeros_like(out), "lse": torch.zeros_like(lse)}
    assert made.run(**tensors(), **mine, return_lse=True, enable_pdl=False) == (mine["out"], mine["lse"])
    assert params(gpu)[5:7] == (mine["out"].data_ptr(), mine["lse"].data_ptr())
    made.run(**tensors(), lse=mine["lse"])
    assert params(gpu)[6] == 0, "not asked for"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"disable_split_kv": False}, {"kv_chunk": -1}),
        ({"disable_split_kv": True}, {"kv_chunk": 0, "tile": 2}),
        ({"disable_split_kv": True, "tile_q": 16}, {"kv_chunk": 0, "tile": 0}),
        ({"disable_split_kv": False, "fixed_split_size": 128}, {"kv_chunk": 128, "tile": 1, "split": 1}),
        ({"disable_split_kv": False, "fixed_split_size": 128, "tile_q": 16}, {"kv_chunk": 128, "tile": 0}),
        ({"disable_split_kv": False, "fixed_split_size": -1}, {"kv_chunk": -1}),
    ],
)
def test_how_sequences_are_split(gpu: FakeGpu, changes: dict[str, Any], expected: dict[str, int]) -> None:
    made = planned(**changes)
    found = head(made)
    assert {name: found[name] for name in expected} == expected
    made.run(**tensors())
    assert len(gpu.log("launch")) == 1 + found["split"]


def test_heads_first_and_strided_tensors(gpu: FakeGpu) -> None:
    made = planned(wrapper(kv_layout="HND"))
    both = torch.zeros(HKV, 500, 2 * D, dtype=bf16)
    q = torch.zeros(130, HQ + 3, D, dtype=bf16)[:, 2 : HQ + 2]
    made.run(q, both[..., :D], both[..., D:])
    assert params(gpu)[8:] == ((HQ + 3) * D, D, 2 * D, 1000 * D, 2 * D, 1000 * D)
    assert params(gpu)[0] == q.data_ptr()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("shared", [0, 1])
def test_entries_that_share_memory_are_refused(gpu: FakeGpu, layout: str, name: str, shared: int) -> None:
    made, given = planned(wrapper(kv_layout=layout)), tensors()
    if layout == "HND":
        given |= {x: given[x].transpose(0, 1).contiguous() for x in "kv"}
    given[name] = given[name].narrow(shared, 0, 1).expand_as(given[name])
    words = rf"{name}: strides \(.*\b0\b.*, 1\); the last must be 1 and none of the others 0"
    with pytest.raises(InvalidArgument, match=words):
        made.run(**given)
    assert gpu.log("launch") == []


def test_asymmetric_heads_and_element_types_choose_the_variant(gpu: FakeGpu) -> None:
    made = planned(head_dim_qk=192, head_dim_vo=128)
    out = made.run(
        torch.zeros(130, HQ, 192, dtype=bf16), torch.zeros(480, HKV, 192, dtype=bf16), tensors()["v"]
    )
    assert out.shape == (130, HQ, 128)
    made = planned(q_data_type="float16", kv_data_type=f16)
    assert made.run(**tensors(dtype=f16)).dtype == f16
    with pytest.raises(InvalidArgument, match=r"q: torch\.bfloat16; supported: torch\.float16"):
        made.run(**tensors())


def test_a_plan_does_not_touch_the_one_before_it() -> None:
    """The step that runs keeps its plan, on the host and on the device."""
    made = planned()
    before = made._planned
    held = bytes(before.host.numpy()), bytes(before.device.numpy())
    planned(made, qo=[0, 1, 2, 3], kv=[0, 7, 8, 9])
    assert (bytes(before.host.numpy()), bytes(before.device.numpy())) == held
    assert made._planned.device.data_ptr() != before.device.data_ptr()


def test_a_graph_has_one_launch_and_one_place_for_its_plans(gpu: FakeGpu) -> None:
    buffers = {
        "qo_indptr_buf": torch.zeros(4, dtype=torch.int32),
        "kv_indptr_buf": torch.zeros(4, dtype=torch.int32),
    }
    made = planned(wrapper(use_cuda_graph=True, **buffers))
    assert made.is_cuda_graph_enabled
    assert buffers["qo_indptr_buf"].tolist() == QO and buffers["kv_indptr_buf"].tolist() == KV
    given, out = tensors(), torch.zeros(130, HQ, D, dtype=bf16)
    made.run(**given, out=out)
    place = made._planned.device.data_ptr()
    planned(made, qo=[0, 5, 100, 120], kv=[0, 0, 1, 470])
    assert made._planned.device.data_ptr() == place
    made.run(given["q"][:120], given["k"], given["v"], out=out[:120])
    first, second = gpu.log("launch")
    assert first == second
    with pytest.raises(InvalidArgument, match="qo_indptr: 131 rows; at most 130 were fixed"):
        planned(made, qo=[0, 1, 2, 131])
    with pytest.raises(InvalidArgument, match="qo_indptr: 3 entries; 4 were fixed"):
        planned(made, qo=[0, 1, 2], kv=[0, 1, 2])


def graphed(size: int = 1 << 24) -> BatchPrefillWithRaggedKVCacheWrapper:
    kept = {name: ints([0] * 4) for name in ("qo_indptr_buf", "kv_indptr_buf")}
    return wrapper(size, use_cuda_graph=True, **kept)


def test_a_graph_of_sequences_of_one_length() -> None:
    """Tiles are then for their rows, times the heads of a KV head."""
    for rows, tile in ((4, 0), (5, 1), (17, 2)):
        made = planned(graphed(), qo=[n * rows for n in range(4)], uniform_q_len=rows)
        assert head(made)["tile"] == tile
        assert head(planned(graphed(), qo=[n * rows for n in range(4)]))["tile"] > 0
    with pytest.raises(InvalidArgument, match="uniform_q_len is 3; the sequences have 0 to 100 rows"):
        planned(graphed(), uniform_q_len=3)
    assert head(planned(uniform_q_len=3))["tile"] == head(planned())["tile"], "nobody reads it"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("causal", {"causal": False}),
        ("dtype", {"q_data_type": f16}),
        ("sm_scale", {"sm_scale": 0.5}),
        ("kv_chunk", {"disable_split_kv": False}),
        ("tile_q", {"tile_q": 16}),
    ],
)
def test_a_graph_keeps_its_launch(name: str, changes: dict[str, Any]) -> None:
    """What is captured would go on as it was, on the plan of another."""
    made = planned(graphed())
    before = made._planned
    with pytest.raises(
        InvalidArgument, match=f"{name} is .*; with use_cuda_graph it stays as the first plan"
    ):
        planned(made, **changes)
    assert made._planned is before


def test_a_plan_that_fails_changes_nothing() -> None:
    made = graphed(1000)
    with pytest.raises(WorkspaceTooSmall):
        planned(made, qo=[0, 1, 2, 3], disable_split_kv=False)
    made.reset_workspace_buffer(scratch(1 << 25))
    planned(made, disable_split_kv=False).run(**tensors())


def test_an_empty_batch_launches_nothing(gpu: FakeGpu) -> None:
    made = planned(qo=[0], kv=[0])
    assert made.run(**tensors(0, 0)).shape == (0, HQ, D)
    made = planned(qo=[0, 0], kv=[0, 5])
    assert made.run(**tensors(0, 5)).shape == (0, HQ, D)
    assert gpu.log("launch") == []


def test_mirrors_on_the_host_are_read_instead() -> None:
    made = planned(qo=[0, 9, 9, 9], qo_indptr_cpu=ints(QO), kv_indptr_cpu=ints(KV))
    assert head(made)["rows"] == QO[-1]


@pytest.mark.parametrize(
    "changes",
    [
        *({name: torch.zeros(1)} for name in ("custom_mask", "packed_custom_mask", "prefix_len_ptr")),
        *(
            {name: torch.zeros(1)}
            for name in ("token_pos_in_items_ptr", "max_item_len_ptr", "v_indptr", "o_indptr")
        ),
        {"use_token_head_sf": True},
        {"use_fp16_qk_reduction": True},
        {"logits_soft_cap": 30.0},
        {"pos_encoding_mode": "ROPE_LLAMA"},
        {"window_left": 0},
        {"kv_data_type": torch.float8_e4m3fn},
        {"o_data_type": f16},
        {"q_data_type": torch.float32},
    ],
)
def test_what_plan_does_not_do_is_named(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(Unsupported, match=name):
        planned(**changes)


def test_values_that_mean_nothing_are_taken() -> None:
    planned(
        logits_soft_cap=0.0, sm_scale=0.5, rope_theta=1e4, window_left=-1, uniform_q_len=3, seq_lens=ints([1])
    )


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
        wrapper(**changes)


def test_arguments_that_make_no_sense() -> None:
    with pytest.raises(InvalidArgument, match="kv_layout is 'NDH'"):
        wrapper(kv_layout="NDH")
    with pytest.raises(InvalidArgument, match="needed with use_cuda_graph"):
        wrapper(use_cuda_graph=True)
    for name, given, words in (
        ("kv_indptr_buf", ints([0] * 5), r"shape \(5,\); expected \[B \+ 1\] = \[4\]"),
        ("qo_indptr_buf", ints([0] * 4).view(2, 2), r"shape \(2, 2\); expected one dimension"),
        ("qo_indptr_buf", ints([0] * 4).long(), r"torch\.int64"),
    ):
        kept = {"qo_indptr_buf": ints([0] * 4), "kv_indptr_buf": ints([0] * 4), name: given}
        with pytest.raises(InvalidArgument, match=f"{name}: {words}"):
            wrapper(use_cuda_graph=True, **kept)
    with pytest.raises(InvalidArgument, match="kv_indptr: 3 entries; qo_indptr has 4"):
        planned(kv=[0, 1, 2])
    with pytest.raises(InvalidArgument, match=r"qo_indptr: torch\.int64"):
        wrapper().plan(ints(QO).long(), ints(KV), HQ, HKV, D)
    with pytest.raises(InvalidArgument, match=r"qo_indptr\[2\] is 50"):
        planned(qo=[0, 100, 50, 130])
    with pytest.raises(NotPrepared, match="plan must be called before run"):
        wrapper().run(**tensors())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(({name: 2.0}, f"{name} is 2.0") for name in ("q_scale", "k_scale", "v_scale", "o_scale")),
        ({"lse_base": "e"}, "lse_base is 'e'"),
        ({"lse_layout": "HN"}, "lse_layout 'HN'"),
        ({"kv_cache_sf": torch.zeros(1)}, "kv_cache_sf"),
    ],
)
def test_what_run_does_not_do_is_named(gpu: FakeGpu, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        planned().run(**tensors(), **changes)
    assert gpu.log("launch") == []


def test_arguments_of_another_variant_are_refused() -> None:
    given = tensors()
    with pytest.raises(Unsupported, match="args"):
        planned().run(given["q"], given["k"], given["v"], torch.zeros(1))


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("q", torch.zeros(131, HQ, D, dtype=bf16), "the plan is for "),
        ("q", torch.zeros(130, HQ, 64, dtype=bf16), "the plan is for "),
        ("q", torch.zeros(130, HQ * D, dtype=bf16), "expected three dimensions"),
        ("k", torch.zeros(479, HKV, D, dtype=bf16), "the plan is for "),
        ("v", torch.zeros(480, 1, D, dtype=bf16), "the plan is for "),
        ("v", torch.zeros(480, HKV, D), r"torch\.float32"),
        ("k", torch.zeros(480, D, HKV, dtype=bf16).transpose(1, 2), "the last must be 1"),
        ("out", torch.zeros(130, HQ, 64, dtype=bf16), "expected"),
        ("out", torch.zeros(130, HQ, 2 * D, dtype=bf16)[..., :D], "must be dense"),
        ("q", torch.zeros(130, HQ, D, dtype=bf16).as_subclass(Elsewhere), "is on cuda:3"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(gpu: FakeGpu, name: str, tensor: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}: .*{words}"):
        planned().run(**{**tensors(), name: tensor})
    assert gpu.log("launch") == []


def test_scratch_that_is_too_small_is_refused_with_the_size_that_is_needed() -> None:
    with pytest.raises(WorkspaceTooSmall, match=r"workspace_bytes is 1000; this plan needs \d+"):
        planned(wrapper(1000), disable_split_kv=False, fixed_split_size=128)


def test_a_missing_variant_is_reported_with_the_command_that_builds_it() -> None:
    with pytest.raises(Unsupported) as error:
        planned(head_dim_qk=64)
    assert str(error.value).endswith("kernseal build --sm 90 --variant ragged_prefill/bf16_d64_v64_causal")


def test_a_variant_may_be_prepared_ahead(gpu: FakeGpu) -> None:
    prepare(HOST, head_dim=128, v_dim=128, causal=True)
    loads = len(gpu.log("load"))
    planned().run(**tensors())
    assert len(gpu.log("load")) == loads == 1
