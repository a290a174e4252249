"""Plain Python: ``kernseal.open``, CUDA arrays, streams that are not named, and errors that Python knows."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import builds
import pytest

import kernseal
from kernseal.kernels.xqa_decode.operands import SPEC
from kernseal.loader import errors, tensors
from kernseal.loader.binder import Binder
from kernseal.loader.bundle import open_bundle
from kernseal.loader.errors import (
    InvalidArgument,
    InvalidArgumentType,
    KernsealError,
    Misaligned,
    Overflow,
    Unsupported,
    WorkspaceTooSmall,
)
from kernseal.loader.layout import Layout
from kernseal.loader.library import declarations

ROOT = Path(__file__).resolve().parents[2]
B, COLUMNS = 2, 3


class CudaArray:
    """What numba, and CuPy besides, say of an array."""

    def __init__(self, typestr: str, *shape: int, address: int = 0x7F0000000000, **more: Any) -> None:
        described = {"shape": shape, "typestr": typestr, "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = {**described, **more}


def bind(**changes: Any) -> dict[str, Any]:
    config = {**SPEC.config_defaults, "head_dim": 128, "group_size": 8, "device": 0}
    binder = Binder(Layout(declarations(), "kseal_xqa_decode_args"), SPEC, config)
    arrays = {"page_table": CudaArray("<i4", B, COLUMNS), "seq_lens": CudaArray("<u4", B)}
    return binder.values({**arrays, "workspace": CudaArray("|u1", 4096), "stream": 0, **changes})


def test_sizes_follow_from_cuda_arrays() -> None:
    values = bind(seq_lens=CudaArray("<i4", B, address=0x7F0000001000))
    assert values["seq_lens"] == 0x7F0000001000
    assert (values["batch_size"], values["max_pages_per_seq"], values["workspace_bytes"]) == (
        B,
        COLUMNS,
        4096,
    )


def test_a_cuda_array_in_version_2_or_with_dense_strides_is_read() -> None:
    assert bind(page_table=CudaArray("<i4", B, COLUMNS, version=2, strides=None))["batch_size"] == B
    assert bind(page_table=CudaArray("<i4", B, COLUMNS, strides=(4 * COLUMNS, 4)))["batch_size"] == B


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seq_lens": CudaArray("<i8", B)}, r"seq_lens: element type i64; this op was prepared for i32\|u32"),
        ({"seq_lens": CudaArray(">i4", B)}, "seq_lens: element type typestr '>i4'"),
        ({"q": CudaArray("<V2", B, 8, 128)}, "q: element type typestr '<V2'; this op was prepared for bf16"),
        ({"seq_lens": CudaArray("<i4", 5)}, r"seq_lens: shape \(5,\)"),
        (
            {"page_table": CudaArray("<i4", B, COLUMNS, strides=(40, 4))},
            "page_table: strides .* must be dense",
        ),
        (
            {"page_table": CudaArray("<i4", B, COLUMNS, strides=(6, 2))},
            r"page_table: strides \(6, 2\) must be multiples of its 4-byte elements",
        ),
        (
            {"seq_lens": CudaArray("<i4", B, stream=7)},
            "seq_lens: its work is on stream 7; run there, or sync",
        ),
        ({"seq_lens": CudaArray("<i4", B, stream=7), "stream": 8}, "seq_lens: its work is on stream 7"),
        ({"seq_lens": CudaArray("<i4", B, stream=2)}, "seq_lens: its work is on stream 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_cuda_array_that_does_not_fit_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        bind(**changes)


@pytest.mark.parametrize(("theirs", "ours"), [(None, 7), (1, 0), (1, 1), (2, 2), (0x1234, 0x1234)])
def test_a_cuda_array_on_the_same_stream_is_taken(theirs: int | None, ours: int) -> None:
    assert bind(seq_lens=CudaArray("<i4", B, stream=theirs), stream=ours)["stream"] == ours


def test_dlpack_is_asked_where_both_are_there() -> None:
    class Both(CudaArray):
        def __dlpack__(self, **options: Any) -> Any:
            raise RuntimeError("asked")

        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

    with pytest.raises(RuntimeError, match="asked"):
        bind(seq_lens=Both("<i4", B))


# ---- the stream that nobody named ----


class Tensor:
    def __init__(self, device: int | None) -> None:
        self.device, self.is_cuda = device, device is not None

    def get_device(self) -> int | None:
        return self.device


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of torch as is asked: a tensor's device, and the current stream there."""
    streams = {0: 0x100, 1: 0x200}
    made: Any = types.ModuleType("torch")
    made.Tensor = Tensor
    made.cuda = types.SimpleNamespace(
        current_stream=lambda device: types.SimpleNamespace(cuda_stream=streams[device])
    )
    monkeypatch.setitem(sys.modules, "torch", made)


@pytest.mark.usefixtures("torch")
def test_torch_tensors_bring_torchs_current_stream_of_their_device() -> None:
    assert tensors.current_stream([1, Tensor(None), Tensor(1), Tensor(0)]) == 0x200


@pytest.mark.usefixtures("torch")
def test_a_torch_that_gives_addresses_is_not_asked_for_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = types.SimpleNamespace(_cuda_getCurrentRawStream=lambda device: 0x300 + device)
    monkeypatch.setattr(sys.modules["torch"], "_C", asked, raising=False)
    assert tensors.current_stream([Tensor(1)]) == 0x301


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("values", [[], [0x7F00, 1.0], [Tensor(None)], [CudaArray("<i4", 1)]])
def test_nothing_else_has_a_current_stream(values: list[Any]) -> None:
    with pytest.raises(InvalidArgumentType, match="stream: missing; torch tensors have a current one"):
        tensors.current_stream(values)


def test_without_torch_nothing_has_a_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(InvalidArgumentType, match="stream: missing"):
        tensors.current_stream([object()])


# ---- errors ----


@pytest.mark.parametrize("kind", [InvalidArgument, Misaligned, WorkspaceTooSmall, Overflow])
def test_what_a_caller_gave_wrongly_is_a_value_error(kind: type[KernsealError]) -> None:
    assert issubclass(kind, ValueError) and not issubclass(kind, TypeError)


def test_every_other_error_is_kernseals_own_only() -> None:
    own = [kind for kind in errors.BY_VALUE.values() if not issubclass(kind, ValueError)]
    assert len(own) == len(errors.BY_VALUE) - 4
    assert all(kind.__mro__[1:3] == (KernsealError, Exception) for kind in own)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"q": object()},
            "q: expected a tensor, an object with __dlpack__ or __cuda_array_interface__, or an add",
        ),
        ({"colour": 1}, "colour: no such field"),
        ({"stream": "main"}, "stream: expected a CUstream"),
    ],
    ids=["operand", "unknown", "stream"],
)
def test_an_argument_of_another_type_is_a_type_error_too(changes: dict[str, Any], words: str) -> None:
    for kind in (TypeError, ValueError, InvalidArgument):
        with pytest.raises(kind, match=words) as caught:
            bind(**changes)
        assert caught.value.status == "invalid_argument"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("value", "kind"), [("two", InvalidArgumentType), (1 << 70, InvalidArgument), (None, InvalidArgumentType)]
)
def test_a_number_that_is_none_is_a_type_error_and_one_out_of_range_is_not(
    value: Any, kind: type[KernsealError]
) -> None:
    layout = Layout(declarations(), "kseal_xqa_decode_args")
    row = [0] * len(layout.names)
    row[layout.names.index("batch_size")] = value
    with pytest.raises(InvalidArgument, match="batch_size") as caught:
        layout.pack(row)
    assert type(caught.value) is kind


# ---- kernseal.open ----


def test_open_takes_what_open_bundle_takes() -> None:
    assert inspect.signature(kernseal.open) == inspect.signature(open_bundle)
    assert kernseal.__all__ == ["open"]


def python(code: str, environment: dict[str, str] | None = None, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


LOADED = "sorted(name for name in sys.modules if name.startswith('kernseal'))"


def test_importing_kernseal_imports_nothing_of_it() -> None:
    assert python(f"import sys, kernseal; print({LOADED})") == "['kernseal']\n"


RUN = """
import runpy, sys
sys.modules["torch"] = None  # an import of it fails
example = runpy.run_path(sys.argv[1])
assert example["main"](sys.argv[2:]) == 0
builders = {"click", "jinja2", "jsonschema", "rich", "yaml", "ziglang", "cutlass", "numpy"}
print(sorted({name.split(".")[0] for name in sys.modules} & builders))
print(sorted(name for name in sys.modules if name.startswith("kernseal.export")))
"""


@pytest.mark.slow
def test_a_run_needs_neither_torch_nor_the_exporter(
    example_bundle: Path, fake_process: dict[str, str]
) -> None:
    example = ROOT / "abi" / "examples" / "python" / "xqa_decode.py"
    told = python(RUN, fake_process, str(example), str(example_bundle), str(builds.CACHE / "tests.json"))
    assert told.splitlines() == ["ok: two sequences of XQA decode, output as expected", "[]", "[]"]


def test_the_example_with_torch_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    example = ROOT / "abi" / "examples" / "python" / "gdn_prefill.py"
    command = [sys.executable, str(example), str(tmp_path)]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=hidden, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"no GPU: torch {torch.__version__} sees none\n")


def test_an_op_is_called_as_it_is_run() -> None:
    from kernseal.loader.op import Op

    assert Op.__call__ is Op.run


def test_an_op_that_is_not_there_is_no_value_error() -> None:
    assert not issubclass(Unsupported, ValueError)
