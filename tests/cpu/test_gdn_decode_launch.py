"""GDN decode's launch code on the recording driver: what is refused in which words, and what is not launched."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from cpu.fake_driver.gdn_decode import OP, VARIANTS, Call, alignments, random_call
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.host_objects import HostObject
from cpu.fake_driver.kernseal_library import Kernseal, compiled_library

from kernseal.kernels.gdn_decode.rule import kernel_for

pytestmark = pytest.mark.slow

PLAIN = {
    "num_q_heads": 2,
    "num_v_heads": 4,
    "batch_size": 5,
    "pool_rows": 9,
    "state_row_stride": 0,
    "scale": 0.5,
    **{f"{name}_token_stride": 0 for name in ("q", "k", "v", "o", "a", "b")},
}


@pytest.fixture(scope="module")
def made(built_variant: Callable[..., HostObject]) -> dict[str, HostObject]:
    """Both for Hopper: a library is for one SM."""
    return {
        name: _built(built_variant, VARIANTS[of]) for name, of in (("default", "narrow"), ("steps", "wide"))
    }


def _built(
    built_variant: Callable[..., HostObject], variant: tuple[str, str | None, dict[str, Any]]
) -> HostObject:
    sm, retarget, changes = variant
    return built_variant(sm, retarget, op_name=OP, **changes)


@pytest.fixture(scope="module")
def library(
    made: dict[str, HostObject], fake_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory
) -> Kernseal:
    fake_gpu.reset()
    return compiled_library(list(made.values()), tmp_path_factory.mktemp("gdn_decode"))


def call_of(made: HostObject, **changes: Any) -> Call:
    """A valid call of moderate size with ``changes``."""
    axes = made.variant.axes
    steps = {"intermediate_steps": axes["tokens"]} if axes["intermediate_states"] else {}
    return Call(axes, {**random_call(random.Random(1), axes).fields, **PLAIN, **steps, **changes})


def status_of(library: Kernseal, call: Call) -> int:
    handle = library.prepare(OP, call.axes)
    try:
        return int(library.c.kseal_gdn_decode_run(handle, call.args(library)))
    finally:
        assert library.c.kseal_gdn_decode_release(handle) == 0


INVALID, UNALIGNED, OVERFLOW = "INVALID_ARGUMENT", "MISALIGNED", "OVERFLOW"
POINTERS = alignments({"index_dtype": "i64", "output_indices": True, "intermediate_states": True})
REFUSED: list[tuple[str, str, dict[str, Any], list[str]]] = [
    ("default", INVALID, {"batch_size": -1}, ["batch_size is -1"]),
    ("default", INVALID, {"num_q_heads": 0}, ["num_q_heads is 0", "positive"]),
    ("default", INVALID, {"num_q_heads": -2}, ["num_q_heads is -2", "positive"]),
    ("default", INVALID, {"num_v_heads": 0}, ["num_v_heads is 0", "multiple of num_q_heads, which is 2"]),
    ("default", INVALID, {"num_v_heads": 5}, ["num_v_heads is 5", "multiple of num_q_heads, which is 2"]),
    ("default", OVERFLOW, {"num_v_heads": 2**17}, ["num_v_heads is 131072", "below 2^17"]),
    ("default", INVALID, {"head_dim": 64}, ["head_dim is 64", "must be 128"]),
    ("default", INVALID, {"scale": 0.0}, ["scale is 0", "finite"]),
    ("default", INVALID, {"scale": float("nan")}, ["scale is", "finite"]),
    ("default", INVALID, {"scale": float("inf")}, ["scale is inf", "finite"]),
    ("default", OVERFLOW, {"batch_size": 2**26}, ["batch_size is 67108864", "Hv is 4, D / tile_v is 8"]),
    ("default", OVERFLOW, {"batch_size": 2**62}, ["batch_size is 4611686018427387904", "2^31"]),
    ("default", INVALID, {"pool_rows": 0}, ["pool_rows is 0", "positive"]),
    ("default", OVERFLOW, {"pool_rows": 2**31}, ["pool_rows is 2147483648", "2^31"]),
    ("default", INVALID, {"intermediate_steps": 1}, ["intermediate_steps is 1", "config.intermediate_states is 0"]),
    ("steps", INVALID, {"intermediate_steps": 2}, ["intermediate_steps is 2", "config.tokens, which is 3"]),
    ("steps", INVALID, {"intermediate_steps": -1}, ["intermediate_steps is -1", "config.tokens"]),
    ("steps", OVERFLOW, {"intermediate_steps": 2**27}, ["intermediate_steps is 134217728", "B is 5, Hv is 4"]),
    ("default", INVALID, {"q_token_stride": 255}, ["q_token_stride is 255", "at least 256, or 0"]),
    ("default", INVALID, {"k_token_stride": -256}, ["k_token_stride is -256", "at least 256"]),
    ("default", INVALID, {"v_token_stride": 256}, ["v_token_stride is 256", "at least 512"]),
    ("default", INVALID, {"o_token_stride": 504}, ["o_token_stride is 504", "at least 512"]),
    ("default", INVALID, {"a_token_stride": 3}, ["a_token_stride is 3", "at least 4"]),
    ("default", INVALID, {"b_token_stride": 3}, ["b_token_stride is 3", "at least 4"]),
    ("default", INVALID, {"state_row_stride": 65528}, ["state_row_stride is 65528", "at least 65536"]),
    ("default", UNALIGNED, {"q_token_stride": 260}, ["q_token_stride is 260", "multiple of 8"]),
    ("default", UNALIGNED, {"state_row_stride": 65540}, ["state_row_stride is 65540", "multiple of 8"]),
    ("default", OVERFLOW, {"v_token_stride": 2**58}, ["v_token_stride is 288230376151711744", "5 rows", "2^60"]),
    ("default", OVERFLOW, {"a_token_stride": 2**62}, ["a_token_stride is 4611686018427387904", "2^60"]),
    ("steps", OVERFLOW, {"b_token_stride": 2**57}, ["b_token_stride is", "15 rows", "2^60"]),
    ("default", OVERFLOW, {"state_row_stride": 2**57}, ["state_row_stride is", "9 rows", "2^60"]),
    ("default", INVALID, {"output_state_indices": 64}, ["output_state_indices is 0x40", "config.output_indices is 0"]),
    ("default", INVALID, {"intermediate_states": 64}, ["intermediate_states is 0x40", "config.intermediate_states is 0"]),
    ("default", UNALIGNED, {"state_indices": 6}, ["state_indices is 0x6", "4 bytes"]),
    *(("steps", INVALID, {name: 0}, [f"{name} is null; it is needed"]) for name in POINTERS),
    *(
        ("steps", UNALIGNED, {name: 4096 + align // 2}, [f"{name} is 0x", f"aligned to {align} bytes"])
        for name, align in POINTERS.items()
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "status", "changes", "words"),
    REFUSED,
    ids=[f"{i}-{next(iter(r[2]))}" for i, r in enumerate(REFUSED)],
)
def test_a_refusal_is_a_sentence(
    library: Kernseal,
    gpu: FakeGpu,
    made: dict[str, HostObject],
    variant: str,
    status: str,
    changes: dict[str, Any],
    words: list[str],
) -> None:
    assert status_of(library, call_of(made[variant], **changes)) == getattr(library.c, f"KSEAL_{status}")
    assert library.error().startswith("gdn_decode: ")
    assert [word for word in words if word not in library.error()] == [], library.error()
    assert gpu.log("launch") == []


@pytest.mark.parametrize("variant", ["default", "steps"])
def test_the_plain_call_launches(
    library: Kernseal, gpu: FakeGpu, made: dict[str, HostObject], variant: str
) -> None:
    gpu.params(made[variant].param_sizes())
    assert status_of(library, call_of(made[variant])) == 0, library.error()
    assert len(gpu.log("launch")) == 1


def test_what_is_just_below_the_limits_launches(
    library: Kernseal, gpu: FakeGpu, made: dict[str, HostObject]
) -> None:
    gpu.params(made["default"].param_sizes())
    call = call_of(made["default"], batch_size=2**26 - 1, pool_rows=2**31 - 1)
    assert status_of(library, call) == 0, library.error()
    assert gpu.log("launch")[-1]["grid"] == [2**31 - 32, 1, 1]


def test_an_empty_batch_launches_nothing_and_succeeds(
    library: Kernseal, gpu: FakeGpu, made: dict[str, HostObject]
) -> None:
    nothing = dict.fromkeys(POINTERS, 0)
    call = call_of(made["steps"], batch_size=0, num_q_heads=0, pool_rows=0, **nothing)
    assert status_of(library, call) == 0
    assert gpu.log("launch") == []


def test_there_is_no_workspace(library: Kernseal, gpu: FakeGpu, made: dict[str, HostObject]) -> None:
    call, size = call_of(made["steps"]), library.ffi.new("uint64_t *", 77)
    handle = library.prepare(OP, call.axes)
    assert library.c.kseal_gdn_decode_workspace_size(handle, call.args(library), size) == 0
    library.c.kseal_gdn_decode_release(handle)
    assert size[0] == 0


def test_a_driver_that_fails_at_the_launch_is_named(
    library: Kernseal, gpu: FakeGpu, made: dict[str, HostObject]
) -> None:
    gpu.fail("cuLaunchKernelEx", 700)
    assert status_of(library, call_of(made["default"])) == library.c.KSEAL_DRIVER_ERROR
    assert "cuLaunchKernelEx: CUDA_ERROR_ILLEGAL_ADDRESS (700)" in library.error()


def test_a_run_on_another_device_is_refused(
    library: Kernseal, gpu: FakeGpu, made: dict[str, HostObject]
) -> None:
    gpu.device((9, 0), count=2)
    call = call_of(made["default"])
    handle = library.prepare(OP, call.axes)
    gpu.current(1)
    assert library.c.kseal_gdn_decode_run(handle, call.args(library)) == library.c.KSEAL_NOT_PREPARED
    gpu.current(0)
    assert library.c.kseal_gdn_decode_release(handle) == 0


def chosen(library: Kernseal, tokens: int, sms: int = 132, **sizes: int) -> tuple[int, tuple[bool, int]]:
    config = library.struct(f"kseal_{OP}_config", tokens=tokens, wide=9, tile_v=9)
    status = library.c.kseal_gdn_decode_choose(library.struct(f"kseal_{OP}_args", **sizes), sms, config)
    return int(status), (config.wide, config.tile_v)


def test_the_library_chooses_by_the_rule(library: Kernseal) -> None:
    """The rule is upstream's: see ``test_gdn_decode_rule.py``."""
    for tokens in (1, 2, 8):
        for sms in (20, 48, 114, 132, 148, 188, 300):
            for work in range(1100):
                found = chosen(library, tokens, sms, batch_size=work, num_v_heads=1)
                assert found == (0, kernel_for(tokens, work, sms)), (tokens, sms, work)
    assert chosen(library, 1, batch_size=16, num_v_heads=32) == (0, (True, 64))
    assert chosen(library, 2, batch_size=2**26 - 1, num_v_heads=32) == (0, (True, 128))


@pytest.mark.parametrize(
    ("tokens", "sizes", "words"),
    [
        (0, {"batch_size": 1, "num_v_heads": 1}, "config.tokens is 0"),
        (1, {"batch_size": -1, "num_v_heads": 1}, "batch_size is -1"),
        (1, {"batch_size": 1, "num_v_heads": 0}, "num_v_heads is 0"),
        (1, {"batch_size": 2**26, "num_v_heads": 32}, "batch_size is 67108864; B * Hv must be below 2^31 (Hv is 32)"),
    ],
)  # fmt: skip
def test_a_choice_that_cannot_be_made_leaves_the_config(
    library: Kernseal, tokens: int, sizes: dict[str, int], words: str
) -> None:
    status, left = chosen(library, tokens, **sizes)
    assert status != 0 and words in library.error()
    assert left == (9, 9)


def test_what_no_class_has_is_refused_with_its_reason(library: Kernseal, gpu: FakeGpu) -> None:
    out = library.ffi.new(f"kseal_{OP} **")
    axes = {"tokens": 1, "wide": True, "tile_v": 16, "index_dtype": "i32", "qk_l2norm": True}
    axes |= {"output_indices": False, "intermediate_states": False, "update_state": True}
    config = library.config(OP, axes)
    assert library.c.kseal_gdn_decode_prepare(library.bundle, config, out) == library.c.KSEAL_UNSUPPORTED
    assert "a wide CTA works on 32 rows of V at least" in library.error()
    config.tile_v, config.tokens = 32, 9
    assert library.c.kseal_gdn_decode_prepare(library.bundle, config, out) == library.c.KSEAL_INVALID_ARGUMENT
    assert "config.tokens is 9" in library.error()
