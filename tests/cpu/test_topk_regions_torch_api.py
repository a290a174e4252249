"""Top-k with FlashInfer's arguments: what they become in the C struct, which variant they ask for, and what is refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cpu.fake_driver.gpu import FakeGpu  # noqa: E402
from cpu.fake_driver.topk_regions import PARAM_SIZES, axes_of, library_of  # noqa: E402
from cpu.test_xqa_torch_api import HOST, STREAM, Elsewhere, Recorder, no_gpu  # noqa: E402, F401

from kernseal.kernels.topk_regions import torch_api  # noqa: E402
from kernseal.kernels.topk_regions.torch_api import (  # noqa: E402
    REPLACES,
    top_k,
    top_k_page_table_transform,
    top_k_ragged_transform,
)
from kernseal.loader import addresses, serving  # noqa: E402
from kernseal.loader.errors import InvalidArgument, NotPrepared, Unsupported  # noqa: E402
from kernseal.loader.layout import Layout  # noqa: E402
from kernseal.loader.library import declarations  # noqa: E402

FIELDS = Layout(declarations(), "kseal_topk_regions_args").names
R, N, K, REQUESTS, PAGES = 3, 100, 8, 2, 7
f32, bf16, f16, i32 = torch.float32, torch.bfloat16, torch.float16, torch.int32


@pytest.fixture(autouse=True)
def not_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(addresses, "_semaphores", {})


@pytest.fixture
def recorder() -> Recorder:
    made = Recorder()
    serving.use_bundle(made, HOST)  # type: ignore[arg-type]
    return made


def per_row() -> Any:
    return torch.zeros(R, dtype=i32)


def paged(**changes: Any) -> dict[str, Any]:
    return {
        "input": torch.zeros(R, N),
        "src_page_table": torch.zeros(R, PAGES, dtype=i32),
        "lengths": per_row(),
        "k": K,
        **changes,
    }


def ragged(**changes: Any) -> dict[str, Any]:
    return {"input": torch.zeros(R, N), "offsets": per_row(), "lengths": per_row(), "k": K, **changes}


def the_rest(found: dict[str, Any], **expected: Any) -> None:
    """``found`` is ``expected``, and 0 in every other field."""
    semaphores = addresses._semaphores["topk_regions", HOST, STREAM]
    assert semaphores.count_nonzero() == 0
    always = {
        "semaphores": semaphores.data_ptr(),
        "semaphores_bytes": semaphores.nbytes,
        "stream": STREAM,
        "top_k": K,
        "num_rows": R,
        "max_len": N,
        "row_stride": N,
    }
    assert found == {**dict.fromkeys(FIELDS, 0), **always, **expected}


def test_the_arguments_are_flashinfers_in_its_order() -> None:
    functions = {name: list(inspect.signature(f).parameters) for name, f in REPLACES["flashinfer"].items()}
    modes = ["deterministic", "tie_break", "dsa_graph_safe"]
    assert functions == {
        "top_k": ["input", "k", "sorted", *modes],
        "top_k_ragged_transform": ["input", "offsets", "lengths", "k", *modes, "row_starts"],
        "top_k_page_table_transform": [
            *("input", "src_page_table", "lengths", "k", "row_to_batch", *modes),
            *("row_starts", "page_table_row_starts", "page_size", "out", "out_raw_indices"),
        ],
    }
    assert REPLACES["flashinfer.topk"] == REPLACES["flashinfer"]


@pytest.mark.parametrize(("dtype", "name"), [(f32, "f32"), (bf16, "bf16"), (f16, "f16")])
@pytest.mark.parametrize("deterministic", [False, True])
def test_values_and_columns(recorder: Recorder, dtype: Any, name: str, deterministic: bool) -> None:
    scores = torch.zeros(R, N, dtype=dtype)
    values, columns = top_k(scores, K, deterministic=deterministic)
    variant = {"dtype": name, "paged": False, "deterministic": deterministic}
    assert recorder.prepared == [{"op": "topk_regions", "device": HOST, **variant}]
    assert (values.dtype, values.shape, columns.dtype, columns.shape) == (dtype, (R, K), torch.int64, (R, K))
    (found,) = recorder.launched
    indices = found.pop("indices")
    assert indices != 0
    the_rest({**found, "indices": 0}, scores=scores.data_ptr(), values=values.data_ptr())
    top_k(scores, K, deterministic=deterministic)
    assert len(recorder.prepared) == 1


def test_sorted_values_bring_their_columns(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(wanted: Any, scores: Any, k: int, tie_break: int, indices: Any, values: int) -> None:
        indices.copy_(torch.tensor([[4, 1, 2]], dtype=i32))
        made[0].copy_(torch.tensor([[1.0, 3.0, 2.0]]))

    made: list[Any] = []
    empty = torch.empty
    monkeypatch.setattr(torch_api, "_launch", fake)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(empty(*a, **k)) or made[-1])  # type: ignore[func-returns-value]
    values, columns = top_k(torch.zeros(1, 5), 3, sorted=True)
    assert (values.tolist(), columns.tolist()) == ([[3.0, 2.0, 1.0]], [[1, 2, 4]])


def test_ragged_rows(recorder: Recorder) -> None:
    args = ragged(row_starts=per_row(), deterministic=True, k=K)
    out = top_k_ragged_transform(**args)
    names = {"scores": "input", "offsets": "offsets", "lengths": "lengths", "row_starts": "row_starts"}
    expected = {field: args[name].data_ptr() for field, name in names.items()}
    the_rest(recorder.launched[0], indices=out.data_ptr(), **expected)
    assert (out.dtype, out.shape) == (i32, (R, K))


def test_page_tables(recorder: Recorder) -> None:
    names = {
        "scores": "input",
        "page_table": "src_page_table",
        "row_to_request": "row_to_batch",
        "row_starts": "row_starts",
        "page_table_starts": "page_table_row_starts",
        "lengths": "lengths",
        "indices": "out",
        "raw_indices": "out_raw_indices",
    }
    args = paged(
        input=torch.zeros(R, 128, dtype=bf16)[:, :N],
        src_page_table=torch.zeros(REQUESTS, 16, dtype=i32)[:, :PAGES],
        **{name: per_row() for name in ("row_to_batch", "row_starts", "page_table_row_starts")},
        **{name: torch.zeros(R, K, dtype=i32) for name in ("out", "out_raw_indices")},
        page_size=64,
    )
    assert top_k_page_table_transform(**args) is args["out"]
    assert recorder.prepared[0]["paged"] is True
    the_rest(
        recorder.launched[0],
        **{field: args[name].data_ptr() for field, name in names.items()},
        row_stride=128,
        page_size=64,
        num_requests=REQUESTS,
        max_pages=PAGES,
        page_table_stride=16,
    )


def test_streams_have_semaphores_of_their_own_and_so_have_graphs(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    top_k(torch.zeros(R, N), K)
    top_k(torch.zeros(R, N), K)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 99, raising=False)
    top_k(torch.zeros(R, N), K)
    assert set(addresses._semaphores) == {("topk_regions", HOST, STREAM), ("topk_regions", HOST, 99)}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    top_k(torch.zeros(R, N), K)
    first, second, other, captured = (found["semaphores"] for found in recorder.launched)
    assert first == second
    assert len({first, other, captured}) == 3


def test_an_empty_batch_is_passed_on(recorder: Recorder) -> None:
    values, columns = top_k(torch.zeros(0, N), K)
    assert (values.shape, columns.shape) == ((0, K), (0, K))
    assert recorder.launched[0]["num_rows"] == 0


Case = tuple[Any, dict[str, Any], str]
WRONG: list[Case] = [
    (top_k, {"input": torch.zeros(R, N), "k": N + 1}, "k is 101; the rows of input have 100"),
    (top_k, {"input": torch.zeros(N), "k": K}, r"input: shape \(100,\); expected two dimensions"),
    (top_k, {"input": torch.zeros(N, R).T, "k": 1}, r"input: strides \(1, 3\); rows must be dense"),
    (top_k, {"input": torch.zeros(1, N).expand(R, -1), "k": 1}, r"input: strides \(0, 1\); .* not overlap"),
    (
        top_k_ragged_transform,
        ragged(offsets=torch.zeros(R)),
        "offsets: torch.float32; supported: torch.int32",
    ),
    (
        top_k_ragged_transform,
        ragged(lengths=torch.zeros(R + 1, dtype=i32)),
        r"lengths: shape \(4,\); expected 3",
    ),
    (top_k_ragged_transform, ragged(row_starts=per_row().long()), "row_starts: torch.int64"),
    (top_k_ragged_transform, ragged(lengths=per_row().as_subclass(Elsewhere)), "lengths: is on cuda:3"),
    (
        top_k_page_table_transform,
        paged(src_page_table=torch.zeros(R, PAGES)),
        "src_page_table: torch.float32",
    ),
    (top_k_page_table_transform, paged(out=torch.zeros(R, K + 1, dtype=i32)), r"out: shape \(3, 9\)"),
    (top_k_page_table_transform, paged(out_raw_indices=torch.zeros(R, K)), "out_raw_indices: torch.float32"),
]


@pytest.mark.parametrize(("function", "args", "words"), WRONG, ids=[words[:12] for _, _, words in WRONG])
def test_what_does_not_fit_is_refused(
    recorder: Recorder, function: Any, args: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        function(**args)
    assert recorder.launched == []


def test_what_no_kernel_does_is_unsupported(recorder: Recorder) -> None:
    with pytest.raises(Unsupported, match=r"input: torch.float64; supported: torch.float32"):
        top_k(torch.zeros(R, N, dtype=torch.float64), K)
    with pytest.raises(Unsupported, match="tie_break is 1; supported is 0"):
        top_k_ragged_transform(**ragged(tie_break=1))
    serving._served.clear()
    with pytest.raises(NotPrepared, match="no bundle serves the host"):
        top_k(torch.zeros(R, N), K)


def test_the_library_takes_what_the_functions_give(
    gpu: FakeGpu, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the C library to a launch: the fields of every function are those that it accepts."""
    library = library_of([axes_of(), axes_of(paged=True)], tmp_path)
    ffi, statuses = library.ffi, []

    class Direct:
        statement = Recorder().statement

        def prepare(self, op: str, device: int, at_least: Any, **axes: Any) -> Any:
            handle = library.prepare(op, axes)

            def launch(**fields: Any) -> None:
                kinds = {f[0]: f[1].type for f in ffi.typeof("kseal_topk_regions_args").fields}
                values = {
                    n: ffi.cast(kinds[n], v) if kinds[n].kind == "pointer" else v for n, v in fields.items()
                }
                statuses.append(
                    library.c.kseal_topk_regions_run(handle, library.struct(f"kseal_{op}_args", **values))
                )
                assert statuses[-1] == 0, library.error()

            return type("Op", (), {"launch": staticmethod(launch)})

    serving.use_bundle(Direct(), HOST)  # type: ignore[arg-type]
    gpu.params(PARAM_SIZES)
    top_k(torch.zeros(R, 2 * 10**5), K, deterministic=True)
    top_k_ragged_transform(**ragged(deterministic=True, k=2048))
    top_k_page_table_transform(**paged(deterministic=True, page_size=16))
    assert statuses == [0, 0, 0]
    assert [line["kernel"] for line in gpu.log("launch")] == [
        "topk_cta_group",
        "topk_one_cta",
        "topk_one_cta",
    ]
