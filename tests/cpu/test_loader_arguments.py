"""What the loader makes of Python arguments, without any library: sizes and strides from tensors, and every refusal."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from kernseal.export import paths
from kernseal.kernels.gdn_prefill.operands import SPEC
from kernseal.loader.binder import Binder, Order
from kernseal.loader.errors import InvalidArgument, IoError
from kernseal.loader.layout import Layout
from kernseal.loader.library import declarations
from kernseal.loader.memfd import sealed_memfd
from kernseal.loader.op import Settled
from kernseal.loader.tensors import HOST, _capsule_pointer, _DLTensor, reader_of, row_stride, stream_handle

torch = pytest.importorskip("torch", reason="torch is not installed")

KERNEL = yaml.safe_load((paths.kernels() / "gdn_prefill" / "kernel.yaml").read_text())
ARGS = Layout(declarations(), "kseal_gdn_prefill_args")
T, N, HQ, HV, D = 10, 2, 2, 4, 128


class OnDevice:
    """A host tensor that says through DLPack that it is CUDA memory; nothing here reads it."""

    def __init__(self, tensor: Any, device: int = 0) -> None:
        self.tensor = tensor
        self.device = device
        self.streams: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.device)

    def __dlpack__(self, stream: Any = None) -> Any:
        self.streams.append(stream)
        capsule = self.tensor.__dlpack__()
        described = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
        described.device_type, described.device_id = 2, self.device
        return capsule


def binder(**changes: Any) -> Binder:
    config = {**SPEC.config_defaults, "device": 0, **changes}
    return Binder(ARGS, SPEC, config)


def tensors(rows: int = N, **changes: Any) -> dict[str, Any]:
    made = {
        "q": torch.zeros(T, HQ, D, dtype=torch.bfloat16),
        "k": torch.zeros(T, HQ, D, dtype=torch.bfloat16),
        "v": torch.zeros(T, HV, D, dtype=torch.bfloat16),
        "o": torch.zeros(T, HV, D, dtype=torch.bfloat16),
        "alpha": torch.zeros(T, HV),
        "beta": torch.zeros(T, HV),
        "initial_state": torch.zeros(rows, HV, D, D),
        "final_state": torch.zeros(rows, HV, D, D),
        "cu_seqlens": torch.zeros(N + 1, dtype=torch.int64),
        "workspace": torch.zeros(4096, dtype=torch.uint8),
        **changes,
    }
    wrapped = {name: OnDevice(t) if isinstance(t, torch.Tensor) else t for name, t in made.items()}
    return {**wrapped, "scale": 1.0, "stream": 0}


def test_operands_are_the_pointers_of_the_op_and_the_rest_its_fields() -> None:
    pointers = {f["name"] for f in KERNEL["abi"]["args"] if f["type"].startswith("ptr")}
    fields = {f["name"] for f in KERNEL["abi"]["args"]}
    for pooled in (False, True):
        operands = SPEC.operands({**SPEC.config_defaults, "pooled": pooled})
        assert set(operands) == pointers
        for operand in operands.values():
            names = {s.partition("+")[0] for s in operand.shape} | ({operand.row_stride} - {None})
            assert names <= fields | {"o_heads"}
    assert set(SPEC.args_defaults) <= fields
    assert ARGS.names == tuple(f["name"] for f in KERNEL["abi"]["args"])


def test_config_defaults_are_those_of_the_builds() -> None:
    run_time = ("device", "stream")
    assert {k: v for k, v in SPEC.config_defaults.items() if k not in run_time} == KERNEL["defaults"]
    enums = {name: axis["type"] for name, axis in KERNEL["axes"].items() if axis["type"] != "bool"}
    assert SPEC.config_enums == enums


def test_sizes_follow_from_tensors() -> None:
    values = binder().values(tensors())
    expected = {"total_tokens": T, "num_seqs": N, "num_q_heads": HQ, "num_k_heads": HQ, "num_v_heads": HV}
    expected |= {
        "head_dim": D,
        "workspace_bytes": 4096,
        "pool_rows": 0,
        "q_token_stride": 0,
        "checkpoints": 0,
    }
    assert {name: values[name] for name in expected} == expected


def test_pool_rows_and_strides_follow_from_a_padded_pool() -> None:
    row = HV * D * D
    padded = torch.zeros(5, row + 256)[:, :row].view(5, HV, D, D)
    rows = torch.zeros(N, dtype=torch.int64)
    values = binder(pooled=True).values(
        tensors(initial_state=padded, final_state=torch.zeros(5, HV, D, D), state_indices=rows)
    )
    assert values["pool_rows"] == 5
    assert values["initial_state_stride"] == row + 256
    assert values["final_state_stride"] == 0


def test_slices_of_a_fused_projection_give_their_token_stride() -> None:
    fused = torch.zeros(T, HQ + HQ + HV, D, dtype=torch.bfloat16)
    q, k, v = fused.split([HQ, HQ, HV], dim=1)
    values = binder().values(tensors(q=q, k=k, v=v))
    assert [values[f"{n}_token_stride"] for n in "qkv"] == [8 * D] * 3
    assert values["k"] - values["q"] == HQ * D * 2
    assert values["o_token_stride"] == 0


def test_one_token_has_no_stride_to_speak_of() -> None:
    fused = torch.zeros(1, 8, D, dtype=torch.bfloat16)
    one = {n: torch.zeros(1, HV) for n in ("alpha", "beta")} | {
        "o": torch.zeros(1, HV, D, dtype=torch.bfloat16)
    }
    q, k, v = fused.split([HQ, HQ, HV], dim=1)
    assert binder().values(tensors(q=q, k=k, v=v, **one))["q_token_stride"] == 0


def test_addresses_are_taken_as_they_are() -> None:
    values = binder().values({"q": 4096, "alpha": None, "scale": 2.0, "stream": 7})
    assert (values["q"], values["alpha"], values["stream"]) == (4096, 0, 7)
    assert values["num_q_heads"] is None
    with pytest.raises(
        InvalidArgument, match="missing: num_q_heads, num_k_heads, num_v_heads, head_dim, total"
    ):
        ARGS.pack([values[name] for name in ARGS.names])


def test_sizes_that_are_passed_are_checked_against_tensors() -> None:
    with pytest.raises(InvalidArgument, match=r"q: shape \(10, 2, 128\); expected .* = \(11, 2, 128\)"):
        binder().values(tensors() | {"total_tokens": 11})


def test_workspace_may_be_larger_but_not_smaller_than_said() -> None:
    assert binder().values(tensors() | {"workspace_bytes": 100})["workspace_bytes"] == 100
    with pytest.raises(InvalidArgument, match="workspace: holds 4096 bytes, workspace_bytes says 4097"):
        binder().values(tensors() | {"workspace_bytes": 4097})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": torch.zeros(T, HQ, D)}, "q: element type f32; this op was prepared for bf16"),
        (
            {"alpha": torch.zeros(T, HV, dtype=torch.float64)},
            "alpha: element type DLPack type code 2, 64 bits",
        ),
        ({"alpha": torch.zeros(T, HQ)}, r"alpha: shape \(10, 2\)"),
        ({"alpha": torch.zeros(T, HV, 1)}, r"alpha: shape \(10, 4, 1\)"),
        ({"k": torch.zeros(T, D, HQ, dtype=torch.bfloat16).transpose(1, 2)}, "k: strides"),
        ({"v": torch.zeros(1, HV, D, dtype=torch.bfloat16).expand(T, HV, D)}, "v: rows overlap"),
        ({"final_state": torch.zeros(N, 2 * HV, D, D)[:, :HV]}, "final_state: strides .* must be dense"),
        ({"cu_seqlens": torch.zeros(N + 1, dtype=torch.int32)}, "cu_seqlens: element type i32"),
        ({"cu_seqlens": torch.zeros(N + 2, dtype=torch.int64)}, "initial_state: shape"),
        ({"workspace": torch.zeros(64, 64, dtype=torch.uint8).t()}, "workspace: strides"),
        ({"workspace": "scratch"}, "workspace: expected a tensor"),
        ({"colour": 3}, "colour: no such field"),
    ],
    ids=[
        *("q type", "alpha type", "alpha shape", "alpha rank", "k transposed", "v expanded", "state sliced"),
        *("offsets type", "offsets length", "workspace strides", "not a tensor", "no such field"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changes: dict[str, Any], words: str) -> None:
    for known in (binder(), binder_that_knows()):  # also after a call that was right, and once more
        for _ in range(2):
            with pytest.raises(InvalidArgument, match=words):
                known.values(tensors(**changes))


def binder_that_knows() -> Binder:
    """One that has taken the usual tensors before."""
    known = binder()
    known.values(tensors())
    assert len(known._shown) == 1
    return known


def test_a_shape_that_was_seen_is_not_worked_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    known, again = binder_that_knows(), tensors()
    monkeypatch.setattr(Binder, "_check", None)
    values = known.values(again)
    assert (values["total_tokens"], values["num_seqs"], values["workspace_bytes"]) == (T, N, 4096)
    assert values["q"] == again["q"].tensor.data_ptr()


class OnCuda(torch.Tensor):
    """A host tensor that says that it is torch's on a CUDA device; nothing here reads it."""

    is_cuda = True
    device = torch.device("cuda:0")

    def get_device(self) -> int:
        return self.device.index


class Elsewhere(OnCuda):
    device = torch.device("cuda:1")


def torch_tensors(**changes: Any) -> dict[str, Any]:
    found = {
        name: given.tensor if isinstance(given, OnDevice) else given for name, given in tensors().items()
    }
    return {
        name: given.as_subclass(OnCuda) if type(given) is torch.Tensor else given
        for name, given in {**found, **changes}.items()
    }


def test_torch_tensors_that_were_seen_are_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    known, again = binder(), torch_tensors(scale=-0.0)
    first = [known.values(torch_tensors()) for _ in range(2)][-1]
    monkeypatch.setattr(Binder, "_look", None)
    values = known.values(again)
    moved = {name: again[name].data_ptr() for name in ARGS.pointers if name in again and name != "stream"}
    assert values == {**first, **moved, "scale": -0.0} and str(values["scale"]) == "-0.0"
    assert (values["total_tokens"], values["workspace_bytes"]) == (T, 4096)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": torch.zeros(T, HQ, D, dtype=torch.float16)}, "q: element type f16; this op was prepared for bf16"),
        ({"alpha": torch.zeros(T, HV, dtype=torch.float64)}, "alpha: element type torch.float64"),
        ({"alpha": torch.zeros(HV, T).t()}, "alpha: strides"),
        ({"beta": torch.zeros(T, HV, 1)}, r"beta: shape \(10, 4, 1\)"),
        ({"beta": torch.zeros(T, HV).as_subclass(Elsewhere)}, "beta: is on cuda:1; expected cuda:0"),
        ({"beta": torch.zeros(T, HV).as_subclass(torch.nn.Parameter)}, "beta: is on the host; expected cuda:0"),
        ({"beta": torch.zeros(T, HV, device="meta").as_subclass(torch.nn.Parameter)}, "beta: is on the host"),
        ({"colour": 3}, "colour: no such field"),
        ({"total_tokens": T + 1}, "q: shape"),
    ],
)  # fmt: skip
def test_a_torch_tensor_that_shows_something_else_is_refused(changes: dict[str, Any], words: str) -> None:
    known = binder()
    for _ in range(3):
        known.values(torch_tensors())
        with pytest.raises(InvalidArgument, match=words):
            known.values(torch_tensors(**changes))


def test_a_torch_tensor_with_other_strides_gives_them() -> None:
    known, fused = binder(), torch.zeros(T, 2 * HQ, D, dtype=torch.bfloat16).as_subclass(OnCuda)
    for _ in range(3):
        assert known.values(torch_tensors())["q_token_stride"] == 0
        assert known.values(torch_tensors(q=fused[:, :HQ]))["q_token_stride"] == 2 * HQ * D


def test_threads_do_not_see_each_others_memory() -> None:
    known = binder()

    def calls(number: int) -> bool:
        args = torch_tensors(stream=number, scale=float(number), workspace_bytes=1000 + number % 2)
        mine = {name: args[name].data_ptr() for name in ARGS.pointers if name in args and name != "stream"}
        mine |= {name: args[name] for name in ("stream", "scale", "workspace_bytes")}
        return all(mine.items() <= known.values(args).items() for _ in range(200))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(calls, range(16)))


def test_a_settled_call_may_be_shared_by_threads() -> None:
    expected, wrong = threading.local(), []

    def run(_: Any, record: Any) -> int:
        found = (int(declarations().cast("uintptr_t", record.q)), record.scale, record.total_tokens)
        if found != (expected.q, expected.scale, T):
            wrong.append(found)
        return 0

    op: Any = SimpleNamespace(_open=lambda: None, _run=run, _layout=ARGS)
    order = Order(ARGS.names, ("scale", "q"))
    call = Settled(op, order, order.numbers(dict.fromkeys(ARGS.names, 0) | {"total_tokens": T}))

    def calls(number: int) -> None:
        expected.q, expected.scale = 0x1000 * number, float(number)
        for _ in range(200):
            call.launch([expected.scale, expected.q])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(calls, range(16)))
    assert not wrong
    with pytest.raises(InvalidArgument, match="q: -4 does not fit the field"):
        call.launch([1.0, -4])


def test_what_a_call_leaves_out_or_says_otherwise_is_another_shape() -> None:
    known, row = binder_that_knows(), HV * D * D
    with pytest.raises(InvalidArgument, match=r"q: shape \(10, 2, 128\); expected .* = \(11, 2, 128\)"):
        known.values(tensors() | {"total_tokens": 11})
    assert known.values(tensors() | {"workspace_bytes": 100})["workspace_bytes"] == 100
    assert known.values(tensors())["workspace_bytes"] == 4096
    # By address, a tensor shows nothing: what it showed before is not taken.
    assert known.values(tensors() | {"workspace": 4096})["workspace_bytes"] is None
    one = torch.zeros(2, row + 256)[:, :row].view(2, HV, D, D)
    with pytest.raises(InvalidArgument, match="initial_state: strides"):
        known.values(tensors(initial_state=one))


def test_a_size_that_is_no_plain_number_is_looked_at_every_time() -> None:
    class Size:
        """An object with a value of its own, as a tensor with one element is."""

        def __init__(self, value: int) -> None:
            self.value = value

        def __index__(self) -> int:
            return self.value

        def __eq__(self, other: object) -> bool:
            return self.value == other

        __hash__ = object.__hash__

    known, size = binder(), Size(T)
    known.values(tensors() | {"total_tokens": size})
    size.value = T + 1
    with pytest.raises(InvalidArgument, match="q: shape"):
        known.values(tensors() | {"total_tokens": size})


def test_few_shapes_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernseal.loader.binder._MOST_SHAPES", 3)
    known = binder()
    for size in range(4000, 4010):
        assert known.values(tensors() | {"workspace_bytes": size})["workspace_bytes"] == size
        assert len(known._shown) <= 3


def test_the_host_and_other_devices_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="k: is on the host; expected cuda:0"):
        binder().values(tensors() | {"k": torch.zeros(T, HQ, D, dtype=torch.bfloat16)})
    with pytest.raises(InvalidArgument, match="v: is on cuda:1; expected cuda:0"):
        binder().values(tensors() | {"v": OnDevice(torch.zeros(T, HV, D, dtype=torch.bfloat16), 1)})


def test_without_an_ordinal_all_tensors_must_be_on_one_device() -> None:
    anywhere = binder(device=-1)
    everything = {n: OnDevice(v.tensor, 3) if isinstance(v, OnDevice) else v for n, v in tensors().items()}
    assert anywhere.values(everything)["total_tokens"] == T
    everything["beta"] = OnDevice(torch.zeros(T, HV), 2)
    with pytest.raises(InvalidArgument, match="beta: is on cuda:2; expected cuda:3"):
        anywhere.values(everything)
    with pytest.raises(InvalidArgument, match="beta: is on the host; expected"):
        anywhere.values(everything | {"beta": torch.zeros(T, HV)})


def test_dlpack_producers_are_told_the_stream() -> None:
    q = OnDevice(torch.zeros(T, HQ, D, dtype=torch.bfloat16))
    binder().values(tensors() | {"q": q, "stream": 0x77})
    binder().values(tensors() | {"q": q, "stream": 0})
    assert q.streams == [0x77, 1]  # 1 is DLPack's name for the legacy default stream


def test_a_dlpack_slice_keeps_its_offset_and_strides() -> None:
    whole = torch.zeros(4, 6)
    view = reader_of("x", OnDevice(whole))("x", OnDevice(whole[1:, 2:]), 0)
    assert view[0] == whole.data_ptr() + (6 + 2) * 4
    assert view[1:] == (0, "f32", (3, 4), (6, 1))


def test_torch_tensors_are_read_without_dlpack() -> None:
    tensor = torch.zeros(3, 5, dtype=torch.float16)
    view = reader_of("x", tensor)("x", tensor.t(), 0)
    assert (view[0], view[1], view[2], tuple(view[3])) == (tensor.data_ptr(), HOST, "f16", (5, 3))
    assert view[4] is not None and tuple(view[4]) == (1, 5)


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((4, 2, 3), (6, 3, 1), 0),
        ((4, 2, 3), (10, 3, 1), 10),
        ((1, 2, 3), (99, 3, 1), 0),
        ((0, 2), (7, 9), 0),
        ((4,), (3,), 3),
    ],
)
def test_row_stride(shape: tuple[int, ...], strides: tuple[int, ...], expected: int) -> None:
    assert row_stride("x", shape, strides) == expected


def test_streams_of_three_kinds() -> None:
    class Torch:
        cuda_stream = 5

    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 9)

    class Later:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (1, 9)

    assert [stream_handle(s) for s in (3, Torch(), Protocol())] == [3, 5, 9]
    for bad in (None, "0", Later(), 1.5):
        with pytest.raises(InvalidArgument, match="stream"):
            stream_handle(bad)


def test_packed_structs_are_what_the_c_compiler_lays_out() -> None:
    ffi = declarations()
    for name in ("kseal_gdn_prefill_args", "kseal_gdn_prefill_config"):
        layout = Layout(ffi, name)
        record = layout.pack(list(range(1, len(layout.names) + 1)))
        assert record.struct_size == ffi.sizeof(name)
        for value, field in enumerate(layout.names, 1):
            got = getattr(record, field)
            assert (int(ffi.cast("uintptr_t", got)) if field in layout.pointers else got) == value


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_q_heads", 1 << 31, "num_q_heads: 2147483648 does not fit"),
        ("workspace_bytes", -1, "workspace_bytes: -1 does not fit"),
        ("q", -4, "q: -4 does not fit"),
        ("scale", 1e300, "scale: 1e"),
        ("total_tokens", 1.5, "total_tokens: 1.5 does not fit"),
        ("total_tokens", None, "missing: total_tokens"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(field: str, value: Any, words: str) -> None:
    values = dict.fromkeys(ARGS.names, 0) | {field: value}
    with pytest.raises(InvalidArgument, match=words):
        ARGS.pack(list(values.values()))


def test_a_sealed_memfd_can_be_read_but_never_written() -> None:
    descriptor = sealed_memfd("test", b"kernseal" * 1000)
    try:
        assert os.pread(descriptor, 1 << 20, 0) == b"kernseal" * 1000
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
        with pytest.raises(PermissionError), open(f"/proc/self/fd/{descriptor}", "r+b", buffering=0) as again:
            again.write(b"x")
    finally:
        os.close(descriptor)


def test_a_memfd_that_cannot_be_made_is_an_io_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(IoError, match="Too many open files"):
        sealed_memfd("test", b"")
