"""``gated_delta_rule_decode_pretranspose``: what FlashInfer's arguments become in the C struct, and what is refused."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cpu.test_xqa_torch_api import HOST, SMS, STREAM, Elsewhere, Recorder, no_gpu  # noqa: E402, F401

from kernseal.kernels.gdn_decode.torch_api import (  # noqa: E402
    REPLACES,
    gated_delta_rule_decode_pretranspose,
)
from kernseal.loader import serving  # noqa: E402
from kernseal.loader.errors import InvalidArgument, NotPrepared, Unsupported  # noqa: E402
from kernseal.loader.layout import Layout  # noqa: E402
from kernseal.loader.library import declarations  # noqa: E402

FIELDS = Layout(declarations(), "kseal_gdn_decode_args").names
B, HQ, HV, D, ROWS = 3, 2, 4, 128, 9
bf16 = torch.bfloat16


@pytest.fixture
def recorder() -> Recorder:
    made = Recorder()
    serving.use_bundle(made, HOST)  # type: ignore[arg-type]
    return made


def call(tokens: int = 1, batch: int = B, **changes: Any) -> dict[str, Any]:
    """The arguments of a plain call over a pool."""
    return {
        "q": torch.zeros(batch, tokens, HQ, D, dtype=bf16),
        "k": torch.zeros(batch, tokens, HQ, D, dtype=bf16),
        "v": torch.zeros(batch, tokens, HV, D, dtype=bf16),
        "state": None,
        "A_log": torch.zeros(HV),
        "a": torch.zeros(batch, tokens, HV, dtype=bf16),
        "dt_bias": torch.zeros(HV),
        "b": torch.zeros(batch, tokens, HV, dtype=bf16),
        "initial_state": torch.zeros(ROWS, HV, D, D, dtype=bf16),
        "initial_state_indices": torch.zeros(batch, dtype=torch.int32),
        **changes,
    }


def launched(recorder: Recorder, **args: Any) -> dict[str, Any]:
    gated_delta_rule_decode_pretranspose(**args)
    return recorder.launched[-1]


def test_the_arguments_are_flashinfers_in_its_order() -> None:
    parameters = inspect.signature(gated_delta_rule_decode_pretranspose).parameters
    assert list(parameters) == [
        *("q", "k", "v", "state", "A_log", "a", "dt_bias", "b", "scale", "output", "use_qk_l2norm"),
        *("initial_state", "initial_state_indices", "output_state_indices", "intermediate_states_buffer"),
        *("disable_state_update", "backend"),
    ]
    defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    assert {name: value for name, value in defaults.items() if value is not None} == {
        "use_qk_l2norm": True,
        "disable_state_update": False,
        "backend": "auto",
    }
    assert list(REPLACES) == ["flashinfer.gdn_decode"]


def test_a_plain_call(recorder: Recorder) -> None:
    args = call()
    output, pool = gated_delta_rule_decode_pretranspose(**args)
    assert pool is args["initial_state"]
    assert (output.shape, output.dtype) == ((B, 1, HV, D), bf16)
    assert recorder.prepared == [
        {
            "op": "gdn_decode",
            "device": HOST,
            "tokens": 1,
            "wide": False,
            "tile_v": 16,
            "index_dtype": "i32",
            "qk_l2norm": True,
            "output_indices": False,
            "intermediate_states": False,
            "update_state": True,
        }
    ]
    assert recorder.launched == [
        {
            **dict.fromkeys(FIELDS, 0),
            **{name: args[name].data_ptr() for name in ("q", "k", "v", "a", "b", "dt_bias")},
            "a_log": args["A_log"].data_ptr(),
            "state": pool.data_ptr(),
            "state_indices": args["initial_state_indices"].data_ptr(),
            "o": output.data_ptr(),
            "num_q_heads": HQ,
            "num_v_heads": HV,
            "head_dim": D,
            "scale": 1 / math.sqrt(D),
            "batch_size": B,
            "pool_rows": ROWS,
            "q_token_stride": HQ * D,
            "k_token_stride": HQ * D,
            "v_token_stride": HV * D,
            "o_token_stride": HV * D,
            "a_token_stride": HV,
            "b_token_stride": HV,
            "state_row_stride": HV * D * D,
            "stream": STREAM,
        }
    ]
    gated_delta_rule_decode_pretranspose(**call())
    assert len(recorder.prepared) == 1


def test_a_verify_call_keeps_the_pool_and_stores_every_step(recorder: Recorder) -> None:
    buffer = torch.zeros(B, 6, HV, D, D, dtype=bf16)
    for given in (buffer, buffer[:, :4]):
        found = launched(
            recorder, **call(4), intermediate_states_buffer=given, disable_state_update=True, scale=0.5
        )
        assert (found["intermediate_states"], found["intermediate_steps"]) == (buffer.data_ptr(), 6)
        assert found["scale"] == 0.5
    (prepared,) = recorder.prepared
    wanted = {"tokens": 4, "intermediate_states": True, "update_state": False, "tile_v": 16}
    assert {name: prepared[name] for name in wanted} == wanted


def test_other_rows_to_write_take_the_type_of_those_to_read(recorder: Recorder) -> None:
    rows = torch.zeros(B, dtype=torch.int64)
    args = call(initial_state_indices=rows)
    assert launched(recorder, **args, output_state_indices=rows)["output_state_indices"] == 0
    assert not recorder.prepared[-1]["output_indices"]
    written = torch.ones(B, dtype=torch.int64)
    assert (
        launched(recorder, **args, output_state_indices=written)["output_state_indices"] == written.data_ptr()
    )
    wanted = {"output_indices": True, "index_dtype": "i64"}
    assert {name: recorder.prepared[-1][name] for name in wanted} == wanted
    narrow = torch.ones(B, dtype=torch.int32)
    assert (
        launched(recorder, **args, output_state_indices=narrow)["output_state_indices"] != narrow.data_ptr()
    )


@pytest.mark.parametrize(
    ("tokens", "batch", "kernel"),
    [
        (1, 32, (False, 16)),
        (1, 33, (False, 32)),
        (1, 66, (False, 64)),
        (1, 128, (True, 64)),
        (1, 256, (True, 128)),
        (2, 31, (False, 16)),
        (2, 32, (True, 32)),
    ],
)
def test_the_batch_chooses_the_kernel(
    recorder: Recorder, tokens: int, batch: int, kernel: tuple[bool, int]
) -> None:
    assert SMS == 132
    launched(recorder, **call(tokens, batch))
    (prepared,) = recorder.prepared
    assert (prepared["wide"], prepared["tile_v"]) == kernel


def test_slices_of_projections_and_a_padded_pool(recorder: Recorder) -> None:
    for tokens in (1, 2):
        qkv = torch.zeros(B, tokens, 1100, dtype=bf16)
        ba = torch.zeros(B, tokens, 2 * HV, dtype=bf16)
        pool = torch.zeros(ROWS, HV * D * D + 64, dtype=bf16)[:, : HV * D * D].unflatten(1, (HV, D, D))
        args = call(
            tokens,
            q=qkv[..., :256].unflatten(2, (HQ, D)),
            k=qkv[..., 256:512].unflatten(2, (HQ, D)),
            v=qkv[..., 512:1024].unflatten(2, (HV, D)),
            b=ba[..., :HV],
            a=ba[..., HV:],
            initial_state=pool,
        )
        found = launched(recorder, **args)
        strides = [found[f"{name}_token_stride"] for name in ("q", "k", "v", "a", "b", "o")]
        assert strides == [1100, 1100, 1100, 8, 8, HV * D]
        assert found["state_row_stride"] == HV * D * D + 64
        assert found["a"] - found["b"] == 2 * HV


def test_a_state_a_sequence_is_a_pool_in_order(recorder: Recorder) -> None:
    state = torch.zeros(B, HV, D, D, dtype=bf16)
    args = call(state=state, initial_state=None, initial_state_indices=None)
    _, returned = gated_delta_rule_decode_pretranspose(**args)
    assert returned is state
    assert (recorder.launched[-1]["state"], recorder.launched[-1]["pool_rows"]) == (state.data_ptr(), B)


def test_a_bias_in_bfloat16_is_converted_and_an_output_is_used(recorder: Recorder) -> None:
    bias, output = torch.zeros(HV, dtype=bf16), torch.zeros(B, 1, HV, D, dtype=bf16)
    found = launched(recorder, **call(dt_bias=bias), output=output, use_qk_l2norm=False, backend="flashinfer")
    assert found["dt_bias"] not in (0, bias.data_ptr())
    assert found["o"] == output.data_ptr()
    assert not recorder.prepared[-1]["qk_l2norm"]


def test_an_empty_batch_is_passed_on(recorder: Recorder) -> None:
    assert launched(recorder, **call(batch=0))["batch_size"] == 0


POOL = torch.zeros(ROWS, HV, D, D, dtype=bf16)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": torch.zeros(B, 1, HQ, 64, dtype=bf16)}, r"q: shape \(3, 1, 2, 64\); expected \[B, T, heads, 128\]"),
        ({"v": torch.zeros(B, HV, D, dtype=bf16)}, r"v: shape \(3, 4, 128\)"),
        ({"k": torch.zeros(B, 1, HV, D, dtype=bf16)}, r"k: shape \(3, 1, 4, 128\); expected \(3, 1, 2, 128\)"),
        ({"q": torch.zeros(B, 1, HQ, D, dtype=torch.float16)}, "q: torch.float16; supported: torch.bfloat16"),
        ({"a": torch.zeros(B, 1, HV)}, "a: torch.float32; supported: torch.bfloat16"),
        ({"b": torch.zeros(B, HV, dtype=bf16)}, r"b: shape \(3, 4\)"),
        ({"A_log": torch.zeros(HV, dtype=bf16)}, "A_log: torch.bfloat16; supported: torch.float32"),
        ({"dt_bias": torch.zeros(HQ)}, r"dt_bias: shape \(2,\); expected 4 elements"),
        ({"initial_state_indices": torch.zeros(B + 1, dtype=torch.int32)}, r"initial_state_indices: shape \(4,\)"),
        ({"initial_state_indices": None}, "initial_state and initial_state_indices must be given together"),
        ({"initial_state": None, "initial_state_indices": None}, "state: missing"),
        (
            {"initial_state": None, "initial_state_indices": None, "state": POOL},
            r"state: shape \(9, 4, 128, 128\); expected \[3, Hv, 128, 128\]",
        ),
        (
            {
                "initial_state": None,
                "initial_state_indices": None,
                "state": POOL[:B],
                "output_state_indices": torch.zeros(B, dtype=torch.int32),
            },
            "output_state_indices: needs initial_state",
        ),
        ({"output": torch.zeros(B, 1, HV, D)}, "output: torch.float32; supported: torch.bfloat16"),
        (
            {"intermediate_states_buffer": torch.zeros(B, HV, D, D, dtype=bf16)},
            r"intermediate_states_buffer: shape \(3, 4, 128, 128\); expected \(3, >= 1, 4, 128, 128\)",
        ),
        ({"q": torch.zeros(B, 1, HQ, D, dtype=bf16).as_subclass(Elsewhere)}, "no bundle serves cuda:3"),
        ({"v": torch.zeros(B, 1, HV, D, dtype=bf16).as_subclass(Elsewhere)}, "v: is on cuda:3"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(recorder: Recorder, changes: dict[str, Any], words: str) -> None:
    with pytest.raises((InvalidArgument, NotPrepared), match=words):
        gated_delta_rule_decode_pretranspose(**call(**changes))
    assert recorder.launched == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backend": "cake_gdn"}, "backend: 'cake_gdn' is not supported; supported: auto, flashinfer"),
        ({"initial_state": POOL.float()}, "initial_state: torch.float32; supported: torch.bfloat16"),
        ({"initial_state": POOL.unflatten(2, (2, 64))}, r"initial_state: shape \(9, 4, 2, 64, 128\)"),
        ({"initial_state": POOL.transpose(2, 3)}, "initial_state: strides"),
        ({"initial_state": POOL[:1].expand(ROWS, -1, -1, -1)}, "initial_state: strides .* none shared"),
        ({"initial_state_indices": torch.zeros(B, dtype=torch.int16)}, "initial_state_indices: torch.int16"),
        ({"q": torch.zeros(B, 1, D, HQ, dtype=bf16).transpose(2, 3)}, "q: strides .* must be dense"),
        ({"k": torch.zeros(1, 1, HQ, D, dtype=bf16).expand(B, -1, -1, -1)}, "k: strides .* must not share memory"),
    ],
)  # fmt: skip
def test_what_no_kernel_does_is_unsupported(recorder: Recorder, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        gated_delta_rule_decode_pretranspose(**call(**changes))
    assert recorder.launched == []


def test_sequences_apart_by_other_than_their_tokens_are_unsupported(recorder: Recorder) -> None:
    wide = torch.zeros(B, 5, HQ, D, dtype=bf16)
    with pytest.raises(Unsupported, match=r"q: strides .*; sequences must follow each other"):
        gated_delta_rule_decode_pretranspose(**call(2, q=wide[:, :2]))
    launched(recorder, **call(2, batch=1, q=wide[:1, :2]))
    launched(recorder, **call(1, q=wide[:, :1]))
    assert recorder.launched[-1]["q_token_stride"] == 5 * HQ * D


def test_a_buffer_of_uneven_steps_is_unsupported(recorder: Recorder) -> None:
    buffer = torch.zeros(B, 2, HV, D, 2 * D, dtype=bf16)[..., :D]
    with pytest.raises(Unsupported, match="intermediate_states_buffer: strides"):
        gated_delta_rule_decode_pretranspose(**call(2), intermediate_states_buffer=buffer)


def test_a_device_that_nothing_serves() -> None:
    with pytest.raises(NotPrepared, match="no bundle serves the host"):
        gated_delta_rule_decode_pretranspose(**call())
