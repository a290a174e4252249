"""QSA's torch function: what FlashInfer's arguments become in C, which variants they ask for, and what is refused."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cpu.fake_driver import qsa  # noqa: E402
from cpu.test_xqa_torch_api import HOST, SMS, STREAM, Elsewhere, no_gpu  # noqa: E402, F401

from kernseal.kernels.qsa_attention.torch_api import (  # noqa: E402
    q_token_kv_block_sparse_attention_with_paged_kv_cache as sparse_attention,
)
from kernseal.loader import serving  # noqa: E402
from kernseal.loader.errors import InvalidArgument, NotPrepared, Unsupported, WorkspaceTooSmall  # noqa: E402
from kernseal.loader.layout import Layout  # noqa: E402
from kernseal.loader.library import Library, declarations  # noqa: E402
from kernseal.loader.op import choose  # noqa: E402

ATTENTION = Layout(declarations(), "kseal_qsa_attention_args").names
METADATA = Layout(declarations(), "kseal_qsa_metadata_args").names
B, RATIO, HKV, D, PAGES, SIZE, TOPK, COLUMNS = 3, 12, 1, 256, 9, 64, 5, 4
bf16, e4m3 = torch.bfloat16, torch.float8_e4m3fn


class Recorder:
    """A bundle that chooses as any other, keeps what it is asked for and launches nothing."""

    def __init__(self, library: Library) -> None:
        self.statement = SimpleNamespace(sm="sm_100a", retarget=None)
        self.library = library
        self.prepared: list[dict[str, Any]] = []
        self.launched: list[tuple[str, dict[str, Any]]] = []

    def choose(self, op: str, sizes: dict[str, Any], *, sm_count: int, **config: Any) -> dict[str, Any]:
        assert sm_count == SMS
        return choose(self.library, op, sizes, sm_count, config)

    def prepare(self, op: str, device: int, at_least: str | None, **axes: Any) -> Any:
        self.prepared.append({"op": op, "device": device, **axes})
        return SimpleNamespace(launch=lambda **fields: self.launched.append((op, fields)))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    folder: Path = tmp_path_factory.mktemp("library")
    return Library(str(qsa.build([qsa.axes_of()], folder)))


@pytest.fixture
def recorder(library: Library) -> Recorder:
    made = Recorder(library)
    serving.use_bundle(made, HOST)  # type: ignore[arg-type]
    return made


def scratch(size: int) -> Any:
    memory = torch.zeros(size + 256, dtype=torch.uint8)
    start = -memory.data_ptr() % 256
    return memory[start : start + size]


def call(dtype: Any = bf16, group: int = 1, **changes: Any) -> dict[str, Any]:
    """The arguments of a plain call with B routes of ``group`` tokens."""
    rows = B * group
    cache = torch.zeros(PAGES, HKV, SIZE, D).to(dtype)
    return {
        "q": torch.zeros(rows, RATIO * HKV, D).to(dtype),
        "paged_kv_cache": (cache, cache.clone()),
        "block_table": torch.zeros(2, COLUMNS, dtype=torch.int32),
        "indexer_block_ids": torch.zeros(rows, TOPK, dtype=torch.int32),
        "token_to_request": torch.zeros(rows, dtype=torch.int32),
        "query_positions": torch.zeros(rows, dtype=torch.int64),
        "workspace_buffer": scratch(100000),
        "max_seq_len_kv": 200,
        "group_size": group,
        "qo_indptr": torch.zeros(B + 1, dtype=torch.int32),
        **changes,
    }


def shared(*shape: int, dim: int, dtype: Any = bf16) -> Any:
    """Zeros whose entries along ``dim`` are the same memory."""
    return torch.zeros(shape, dtype=dtype).narrow(dim, 0, 1).expand(shape)


def test_the_arguments_are_flashinfers_in_its_order() -> None:
    assert list(inspect.signature(sparse_attention).parameters) == [
        *("q", "paged_kv_cache", "block_table", "indexer_block_ids", "token_to_request", "query_positions"),
        *(
            "workspace_buffer",
            "max_seq_len_kv",
            "group_size",
            "kv_block_size",
            "mask_type",
            "sm_scale",
            "v_scale",
        ),
        *("out", "out_dtype", "qo_indptr", "split_kv", "share_pattern_across_kv_heads"),
        *("count_current_block_in_topk", "seq_lens"),
    ]


def test_one_token_a_route(recorder: Recorder) -> None:
    args = call()
    out = sparse_attention(**args)
    assert out.shape == args["q"].shape and out.dtype == bf16
    assert recorder.prepared == [{"op": "qsa_attention", "device": HOST, **qsa.axes_of()}]
    k, v = args["paged_kv_cache"]
    expected = {
        **dict.fromkeys(ATTENTION, 0),
        "num_q_heads": RATIO,
        "num_kv_heads": 1,
        "group": 1,
        "block_topk": TOPK,
        "scale": 1 / 16,
        "out_scale": 1.0,
        "max_seq_len": 200,
        "num_routes": B,
        "total_q": B,
        "num_pages": PAGES,
        "num_requests": 2,
        "max_pages_per_request": COLUMNS,
        "kv_page_stride": SIZE * D,
        "kv_head_stride": SIZE * D,
        "kv_token_stride": D,
        "block_indices_stride": TOPK,
        "block_table_stride": COLUMNS,
        "k": k.data_ptr(),
        "v": v.data_ptr(),
        "o": out.data_ptr(),
        "block_indices": args["indexer_block_ids"].data_ptr(),
        **{n: args[n].data_ptr() for n in ("q", "qo_indptr", "block_table")},
        **{n: args[n].data_ptr() for n in ("token_to_request", "query_positions")},
        "workspace": args["workspace_buffer"].data_ptr(),
        "workspace_bytes": 100000,
        "stream": STREAM,
    }
    assert recorder.launched == [("qsa_attention", expected)]
    sparse_attention(**call())
    assert len(recorder.prepared) == 1


def test_a_group_has_its_tables_in_the_workspace(recorder: Recorder) -> None:
    args = call(e4m3, group=4, max_seq_len_kv=4000, count_current_block_in_topk=False)
    args["block_table"] = torch.zeros(2, 63, dtype=torch.int32)
    out = sparse_attention(**args)
    assert out.dtype == bf16
    (first, metadata), (second, attention) = recorder.launched
    assert (first, second) == ("qsa_metadata", "qsa_attention")
    assert set(metadata) == set(METADATA) and set(attention) == set(ATTENTION)
    start = args["workspace_buffer"].data_ptr()
    assert metadata["page_capacity"] == 32  # 4 * 6 blocks of 4 tokens, rounded up to a mask
    assert (metadata["flat_kv_heads"], metadata["count_current"]) == (1, 0)
    places = {"page_indices": start, "memberships": start + 512, "kv_lens": start + 768}
    for name, at in places.items():
        assert metadata[name] == attention[name] == at
    assert attention["workspace"] == start + 1024
    assert attention["workspace_bytes"] == 100000 - 1024
    assert [attention[n] for n in ("block_indices", "block_table", "num_requests")] == [0, 0, 0]
    by_op = {p["op"]: p for p in recorder.prepared}
    assert by_op["qsa_metadata"]["query_major"] is True
    assert (by_op["qsa_attention"]["grouped"], by_op["qsa_attention"]["flat_kv_heads"]) == (True, 1)
    assert by_op["qsa_attention"]["count_current"] is True


def test_prefill_is_told_not_to_split(recorder: Recorder) -> None:
    sparse_attention(**call(split_kv=False))
    assert (recorder.prepared[0]["splits"], recorder.prepared[0]["persistent"]) == (1, True)


def test_a_layer_of_a_cache_keeps_its_strides(recorder: Recorder) -> None:
    both = torch.zeros(PAGES, 2, HKV, SIZE, D, dtype=bf16)
    sparse_attention(**call(paged_kv_cache=(both[:, 0], both[:, 1]), sm_scale=0.5, v_scale=2.0))
    (_, run) = recorder.launched[0]
    assert (run["kv_page_stride"], run["v"] - run["k"]) == (2 * SIZE * D, SIZE * D * 2)
    assert (run["scale"], run["out_scale"]) == (0.5, 2.0)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"mask_type": "dense"}, Unsupported, "mask_type"),
        ({"share_pattern_across_kv_heads": False}, Unsupported, "share_pattern_across_kv_heads"),
        ({"seq_lens": torch.zeros(2)}, Unsupported, "seq_lens"),
        ({"qo_indptr": None}, Unsupported, "only packed queries"),
        ({"query_positions": None}, Unsupported, "only packed queries"),
        ({"query_positions": torch.zeros(B)}, Unsupported, "query_positions: torch.float32"),
        ({"query_positions": torch.zeros(B + 1, dtype=torch.int64)}, InvalidArgument, "query_positions: shape"),
        ({"token_to_request": torch.zeros(B, dtype=torch.int64)}, InvalidArgument, "token_to_request: torch.int64"),
        ({"block_table": torch.zeros(2, 4)}, InvalidArgument, "block_table: torch.float32"),
        ({"block_table": torch.zeros(4, 2, dtype=torch.int32).T}, InvalidArgument, "block_table: strides"),
        ({"indexer_block_ids": torch.zeros(B, 1, 5)}, InvalidArgument, "indexer_block_ids, block_table"),
        ({"out": torch.zeros(B, RATIO, D)}, Unsupported, "out: torch.float32"),
        ({"out": torch.zeros(B, RATIO, D + 1, dtype=bf16)}, InvalidArgument, "out: shape"),
        ({"workspace_buffer": scratch(256)[:64].as_subclass(Elsewhere)}, InvalidArgument, "is on cuda:3"),
        ({"paged_kv_cache": (torch.zeros(1, 1, 64, 128),) * 2}, InvalidArgument, "paged_kv_cache: shapes"),
        ({"paged_kv_cache": (torch.zeros(1, 1, 64, 256),) * 2}, InvalidArgument, "k_cache: torch.float32"),
        ({"paged_kv_cache": (shared(PAGES, HKV, SIZE, D, dim=0),) * 2}, InvalidArgument, "paged_kv_cache: strides .0,"),
        ({"paged_kv_cache": (shared(PAGES, 2, SIZE, D, dim=1),) * 2}, InvalidArgument, "paged_kv_cache: strides .*, 0,"),
        ({"paged_kv_cache": (shared(PAGES, HKV, SIZE, D, dim=2),) * 2}, InvalidArgument, "paged_kv_cache: strides .*, 0,"),
        ({"block_table": shared(2, COLUMNS, dim=0, dtype=torch.int32)}, InvalidArgument, "block_table: strides .0,"),
        ({"indexer_block_ids": shared(B, TOPK, dim=0, dtype=torch.int32)}, InvalidArgument, "block_ids: strides .0,"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    recorder: Recorder, changes: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        sparse_attention(**call(**changes))
    assert recorder.launched == []


def test_a_workspace_without_room_for_the_tables_is_refused(recorder: Recorder) -> None:
    with pytest.raises(WorkspaceTooSmall, match="workspace_buffer has 700 bytes; 768 are needed"):
        sparse_attention(**call(group=2, workspace_buffer=scratch(700)))
    assert recorder.launched == []


def test_a_device_that_nothing_serves() -> None:
    with pytest.raises(NotPrepared, match="no bundle serves the host"):
        sparse_attention(**call())
