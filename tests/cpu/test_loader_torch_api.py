"""``chunk_gated_delta_rule`` up to the call: which memory and which rows it hands on, and what it refuses."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kernseal.kernels.gdn_prefill import torch_api  # noqa: E402
from kernseal.kernels.gdn_prefill.torch_api import _packed, _pooled, chunk_gated_delta_rule  # noqa: E402
from kernseal.loader import serving  # noqa: E402
from kernseal.loader.errors import InvalidArgument, Unsupported  # noqa: E402

CPU = torch.device("cpu")
SHAPE = (3, 2, 128, 128)


def hkv(*shape: int) -> torch.Tensor:
    """The [.., V, K] view of [.., K, V] memory."""
    return torch.zeros(shape).transpose(-1, -2)


def test_packed_without_states_allocates_float32_hvk() -> None:
    states = _packed(None, None, SHAPE, CPU)
    assert states.initial is None and not states.transposed
    assert states.final.shape == SHAPE and states.final.dtype == torch.float32
    assert states.read_rows is None and states.write_rows is None


def test_packed_allocates_in_the_order_and_type_of_the_initial_state() -> None:
    initial = hkv(*SHAPE).to(torch.bfloat16)
    states = _packed(initial, None, SHAPE, CPU)
    assert states.transposed and states.final.dtype == torch.bfloat16
    assert states.initial is not None and states.initial.is_contiguous() and states.final.is_contiguous()
    assert states.initial.data_ptr() == initial.data_ptr()
    assert states.logical_final.shape == SHAPE and states.logical_final.stride(-2) == 1


def test_packed_writes_to_the_memory_it_is_given() -> None:
    final = hkv(*SHAPE)
    states = _packed(None, final, SHAPE, CPU)
    assert states.transposed and states.final.is_contiguous()
    assert states.final.data_ptr() == states.logical_final.data_ptr() == final.data_ptr()


def test_two_memory_orders_in_one_call_are_refused() -> None:
    with pytest.raises(Unsupported, match="memory order"):
        _packed(hkv(*SHAPE), torch.zeros(SHAPE), SHAPE, CPU)


def test_a_state_with_neither_v_nor_k_contiguous_is_refused() -> None:
    with pytest.raises(Unsupported, match="V or K must be contiguous"):
        _packed(torch.zeros(3, 2, 128, 256)[..., ::2], None, SHAPE, CPU)
    with pytest.raises(InvalidArgument, match="initial_state: shape"):
        _packed(torch.zeros(3, 128, 128), None, SHAPE, CPU)


ROWS = torch.tensor([4, 1, 2], dtype=torch.int32)
POOL, OTHER = torch.zeros(5, 2, 128, 128), torch.ones(5, 2, 128, 128)


@pytest.mark.parametrize(
    ("initial", "final", "write", "expected"),
    [
        (POOL, POOL, None, (POOL, POOL, [4, 1, 2], None)),
        (POOL, OTHER, None, (POOL, OTHER, [4, 1, 2], None)),
        (POOL, OTHER, [0, 3, -1], (POOL, OTHER, [4, 1, 2], [0, 3, -1])),
        (POOL, None, None, (POOL, POOL, [4, 1, 2], [-1, -1, -1])),
        (None, OTHER, None, (OTHER, OTHER, [-1, -1, -1], [4, 1, 2])),
        (None, OTHER, [0, 3, -1], (OTHER, OTHER, [-1, -1, -1], [0, 3, -1])),
    ],
    ids=["in place", "other pool", "other rows", "read only", "write only", "write only, other rows"],
)
def test_pools_and_rows(initial: Any, final: Any, write: list[int] | None, expected: tuple[Any, ...]) -> None:
    rows = None if write is None else torch.tensor(write, dtype=torch.int32)
    states = _pooled(initial, final, ROWS, rows, torch.int64)
    source, target, reads, writes = expected
    assert states.initial is source and states.final is target
    assert states.read_rows is not None and states.read_rows.dtype == torch.int64
    assert states.read_rows.tolist() == reads
    assert (None if states.write_rows is None else states.write_rows.tolist()) == writes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_qk_l2norm_in_kernel": True}, "use_qk_l2norm_in_kernel: not supported; normalise"),
        ({"backend": "cudnn"}, "backend: not supported; supported: auto, flashinfer"),
        ({"gate_domain": "log"}, r"gate_domain: not supported; pass exp\(g\)"),
        ({"use_gate_in_kernel": True}, "use_gate_in_kernel: not supported"),
        ({"A_log": torch.zeros(1)}, "use_gate_in_kernel: not supported"),
        ({"dt_bias": torch.zeros(1)}, "use_gate_in_kernel: not supported"),
        ({"beta_is_logit": True}, "beta_is_logit: not supported"),
        ({"checkpoint_state_indices": ROWS}, "checkpoint_state_indices: not supported"),
        ({"prefix_lens": ROWS}, "prefix_lens: not supported"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_the_kernels_do_not_do_is_refused(change: dict[str, Any], words: str) -> None:
    q = torch.zeros(4, 2, 128, dtype=torch.bfloat16)
    with pytest.raises(Unsupported, match=words):
        chunk_gated_delta_rule(q, q, q, cu_seqlens=torch.tensor([0, 4]), **change)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """What a bundle is asked for: op, axes, and the arguments of the run."""
    calls: list[tuple[str, dict[str, Any], dict[str, Any]]] = []

    def prepare(op: str, device: int, at_least: str | None, **axes: Any) -> Any:
        def run(**args: Any) -> None:
            calls.append((op, axes, args))

        def settle(changing: tuple[str, ...], **args: Any) -> Any:
            return SimpleNamespace(
                launch=lambda values: run(**args | dict(zip(changing, values, strict=True)))
            )

        return SimpleNamespace(
            run=run, settle=settle, workspace_size=lambda **args: args.get("chunk_len", 0) + 8
        )

    bundle = SimpleNamespace(prepare=prepare)
    monkeypatch.setattr(serving, "_served", {-1: serving.Served(bundle, -1)})  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    return calls


@pytest.mark.parametrize(
    ("change", "op", "cut"),
    [
        ({}, "gdn_prefill", {}),
        ({"use_cp": False, "max_seqlen": 4}, "gdn_prefill", {}),
        ({"use_cp": True}, "gdn_prefill_cp", {"max_seqlen": 0, "chunk_len": 0}),
        ({"use_cp": True, "max_seqlen": 4}, "gdn_prefill_cp", {"max_seqlen": 4, "chunk_len": 0}),
        ({"_cp_chunk_len": 128}, "gdn_prefill_cp", {"max_seqlen": 0, "chunk_len": 128}),
    ],
    ids=["auto", "never", "cut", "cut, longest known", "cut, chunk given"],
)
def test_sequences_are_cut_where_it_is_asked_for(
    launched: list[Any], change: dict[str, Any], op: str, cut: dict[str, int]
) -> None:
    q, v, gate = torch.zeros(4, 2, 128, dtype=torch.bfloat16), torch.zeros(4, 3, 128), torch.rand(4, 3)
    chunk_gated_delta_rule(q, q, v, g=gate, cu_seqlens=torch.tensor([0, 4]), **change)
    ((found, axes, args),) = launched
    assert found == op
    assert {name: args[name] for name in ("max_seqlen", "chunk_len") if name in args} == cut
    assert args["workspace"].numel() == 8 + cut.get("chunk_len", 0)
    assert args["alpha"] is gate
    if cut:  # upstream's kernels for it always read both gates
        assert not {"alpha", "beta"} & axes.keys() and torch.equal(args["beta"], torch.ones(4, 3))
    else:
        assert (axes["alpha"], axes["beta"], args["beta"]) == (True, False, None)


def asked(**changes: Any) -> dict[str, Any]:
    made = {"q": torch.zeros(4, 2, 128, dtype=torch.bfloat16), "cu_seqlens": torch.tensor([0, 4])}
    made |= {"k": made["q"].clone(), "v": torch.zeros(4, 3, 128, dtype=torch.bfloat16)}
    return {**made, "output_final_state": True, **changes}


def pooled(**changes: Any) -> dict[str, Any]:
    pools = {"initial_state": torch.zeros(5, 3, 128, 128), "output_state": torch.zeros(5, 3, 128, 128)}
    return asked(**pools, state_indices=torch.tensor([2]), **changes)


@pytest.mark.parametrize(
    "make",
    [
        asked,
        lambda: asked(initial_state=hkv(1, 3, 128, 128)),
        lambda: asked(initial_state=hkv(1, 3, 128, 128).to(torch.bfloat16), output_final_state=False),
        lambda: asked(output=torch.zeros(4, 3, 128), output_state=hkv(1, 3, 128, 128), g=torch.ones(4, 3)),
        pooled,
        lambda: pooled(output_state_indices=torch.tensor([3]), scale=0.5),
    ],
    ids=["plain", "hkv", "bf16, one result", "memory of the caller's", "pooled", "other rows"],
)
def test_a_call_that_looks_like_one_before_is_the_same_call(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    first, again = make(), make()
    chunk_gated_delta_rule(**first)
    before = chunk_gated_delta_rule(**first)
    monkeypatch.setattr(torch_api, "_Wanted", None)
    made = chunk_gated_delta_rule(**again)
    (op, axes, args), _, (op_again, axes_again, found) = launched
    assert (op, axes) == (op_again, axes_again)
    names = {"q": "q", "k": "k", "v": "v", "g": "alpha", "initial_state": "initial_state", "output": "o"}
    names |= {"output_state": "final_state", "cu_seqlens": "cu_seqlens", "state_indices": "state_indices"}
    names |= {"output_state_indices": "output_state_indices"}
    for name, field in names.items():
        if name in again:
            assert found[field] == again[name].data_ptr() and args[field].data_ptr() == first[name].data_ptr()
    assert [found[name] for name in ("beta", "checkpoints", "checkpoint_cu_starts")] == [0, 0, 0]
    assert found["scale"] == args["scale"] == again.get("scale", 1 / math.sqrt(128)) and found["stream"] == 7
    results, old = (r if isinstance(r, tuple) else (r,) for r in (made, before))
    assert len(results) == len(old) == 1 + again["output_final_state"]
    for result, same, field in zip(results, old, ("o", "final_state"), strict=False):
        assert result.data_ptr() == found[field]
        looks = [(t.shape, t.stride(), t.dtype) for t in (result, same)]
        assert looks[0] == looks[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"backend": "cudnn"}, "backend: not supported"),
        ({"prefix_lens": ROWS}, "prefix_lens: not supported"),
        ({"use_cp": "always"}, "use_cp: 'always'"),
        ({"cu_seqlens": None}, "cu_seqlens: missing"),
        ({"cu_seqlens": torch.zeros(2)}, "cu_seqlens: torch.float32"),
        ({"initial_state": torch.zeros(1, 3, 128, 256)[..., ::2]}, "V or K must be contiguous"),
        ({"q": torch.zeros(4, 2, 128)}, "q: torch.float32"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_was_right_before_makes_nothing_else_right(
    launched: list[Any], change: dict[str, Any], words: str
) -> None:
    chunk_gated_delta_rule(**asked())
    for _ in range(2):
        with pytest.raises((InvalidArgument, Unsupported), match=words):
            chunk_gated_delta_rule(**asked(**change))
    assert len(launched) == 1


def test_rows_that_are_converted_are_converted_at_every_call(launched: list[Any]) -> None:
    for row in (2, 3):
        chunk_gated_delta_rule(**pooled() | {"state_indices": torch.tensor([row], dtype=torch.int32)})
    assert [args["state_indices"].tolist() for _, _, args in launched] == [[2], [3]]


def test_to_be_cut_or_not_is_not_mixed_up(launched: list[Any]) -> None:
    for use_cp in (1, True, 1, True, "auto", True):
        chunk_gated_delta_rule(**asked(use_cp=use_cp))
    assert [op for op, _, _ in launched] == ["gdn_prefill", "gdn_prefill_cp"] * 3


@pytest.mark.parametrize(
    ("ends", "heads", "change", "op"),
    [
        ([0, 2048], 16, {}, "gdn_prefill"),
        ([0, 2048], 16, {"cut_where_it_pays": True}, "gdn_prefill_cp"),
        ([0, 2047], 16, {"cut_where_it_pays": True}, "gdn_prefill"),
        ([0, 2048], 17, {"cut_where_it_pays": True}, "gdn_prefill"),
        ([0, 4096], 17, {"cut_where_it_pays": True}, "gdn_prefill_cp"),
        ([0, 2048], 16, {"cut_where_it_pays": True, "use_cp": False}, "gdn_prefill"),
        ([0, 2000, 4096], 8, {"cut_where_it_pays": True}, "gdn_prefill_cp"),  # one has 2,048 at least
        ([0, 1000, 3000], 8, {"cut_where_it_pays": True}, "gdn_prefill"),
        ([0, 900, 3000], 8, {"cut_where_it_pays": True, "max_seqlen": 2100}, "gdn_prefill_cp"),
        ([0], 8, {"cut_where_it_pays": True}, "gdn_prefill"),
    ],
)
def test_auto_cuts_where_it_pays_if_that_is_asked_for(
    launched: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    ends: list[int],
    heads: int,
    change: dict[str, Any],
    op: str,
) -> None:
    bundle: Any = serving.served_by(-1).bundle
    bundle.statement = SimpleNamespace(sm="sm_90a")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda d: SimpleNamespace(multi_processor_count=132)
    )
    q = torch.zeros(ends[-1], 2, 128, dtype=torch.bfloat16)
    v = torch.zeros(ends[-1], heads, 128, dtype=torch.bfloat16)
    for _ in range(2):
        chunk_gated_delta_rule(q, q, v, cu_seqlens=torch.tensor(ends), **change)
    assert [found for found, _, _ in launched] == [op] * 2
    bundle.statement.sm = "sm_120a"  # where nothing was measured
    chunk_gated_delta_rule(q, q, v, cu_seqlens=torch.tensor(ends), **change)
    assert launched[-1][0] == "gdn_prefill"


def test_a_word_that_use_cp_does_not_have_is_refused() -> None:
    q = torch.zeros(4, 2, 128, dtype=torch.bfloat16)
    with pytest.raises(InvalidArgument, match="use_cp: 'always'; must be 'auto', True or False"):
        chunk_gated_delta_rule(q, q, q, cu_seqlens=torch.tensor([0, 4]), use_cp="always")


def test_arguments_that_need_each_other() -> None:
    q = torch.zeros(4, 2, 128, dtype=torch.bfloat16)
    ends = torch.tensor([0, 4])
    with pytest.raises(InvalidArgument, match="cu_seqlens: missing"):
        chunk_gated_delta_rule(q, q, q)
    with pytest.raises(InvalidArgument, match="output_state_indices: needs state_indices"):
        chunk_gated_delta_rule(q, q, q, cu_seqlens=ends, output_state_indices=ROWS)
    with pytest.raises(InvalidArgument, match="output_state: must be the pool"):
        chunk_gated_delta_rule(q, q, q, cu_seqlens=ends, state_indices=ROWS, output_final_state=True)


def test_the_arguments_are_flashinfers_in_its_order() -> None:
    import inspect

    names = list(inspect.signature(chunk_gated_delta_rule).parameters)
    assert names == [
        *("q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "cu_seqlens"),
        *("use_qk_l2norm_in_kernel", "output", "output_state", "state_checkpoints", "checkpoint_cu_starts"),
        *("checkpoint_every_n_tokens", "use_cp", "state_indices", "_cp_chunk_len", "backend", "max_seqlen"),
        *("gate_domain", "use_gate_in_kernel", "A_log", "dt_bias", "beta_is_logit", "cu_seqlens_cpu"),
        *("output_state_indices", "checkpoint_state_indices", "prefix_lens", "cut_where_it_pays"),
    ]
