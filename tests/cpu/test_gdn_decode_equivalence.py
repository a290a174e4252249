"""A launch of GDN decode is, byte for byte, the launch of CuTe's own host object through CuTe's own runtime."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from cpu.fake_driver.gdn_decode import OP, VARIANTS, Call, D, random_call
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.host_objects import HostObject
from cpu.fake_driver.kernseal_library import compiled_library
from cpu.fake_driver.reference import Reference, Scalar, Tensor, masked

pytestmark = pytest.mark.slow

CASES = 60


def tensor(call: Call, name: str, heads: int) -> Tensor:
    """[B, T, heads, ..]: what is dynamic of it."""
    stride = call[f"{name}_token_stride"] or call.dense[name]
    return Tensor(call[name], (call["batch_size"], heads), (call.axes["tokens"] * stride, stride))


def arguments(call: Call) -> dict[str, Tensor | Scalar]:
    """By CuTe's names; those that the variant lacks are not asked for."""
    batch, hq, hv, steps = (
        call[n] for n in ("batch_size", "num_q_heads", "num_v_heads", "intermediate_steps")
    )
    row = call["state_row_stride"] or hv * D * D
    b = tensor(call, "b", hv)
    return {
        "h0_source": Tensor(call["state"], (call["pool_rows"], hv), (row,)),
        "intermediate_states": Tensor(call.fields.get("intermediate_states", 0), (batch * steps * hv,)),
        "A_log": Tensor(call["a_log"], (hv,)),
        "a": tensor(call, "a", hv),
        "dt_bias": Tensor(call["dt_bias"], (hv,)),
        **{name: tensor(call, name, heads) for name, heads in (("q", hq), ("k", hq), ("v", hv), ("o", hv))},
        "b": b,
        "b_gate": b,
        "h0_indices": Tensor(call["state_indices"], (batch,)),
        "h0_out_indices": Tensor(call.fields.get("output_state_indices", 0), (batch,)),
        "scale": Scalar("float", call["scale"]),
        "HV": Scalar("int32_t", hv),
        "cache_steps": Scalar("int32_t", steps),
        "H": Scalar("int32_t", hq),
        "stream": Scalar("void *", call["stream"]),
    }


def is_padding(mask: bytes) -> bool:
    """Whether what is unset can be: words between the fields of a tensor, nothing of a number."""
    return mask.count(0) <= (8 if len(mask) > 8 else 0)


@pytest.mark.parametrize("class_name", VARIANTS)
def test_our_launch_is_cutes_launch(
    built_variant: Callable[..., HostObject],
    gpu: FakeGpu,
    tmp_path: Path,
    class_name: str,
) -> None:
    sm, retarget, changes = VARIANTS[class_name]
    made = built_variant(sm, retarget, op_name=OP, **changes)
    assert made.variant.class_name == class_name
    axes = made.variant.axes
    reference = Reference(made, tmp_path / "reference")
    cc = int(made.target.arch.removeprefix("sm_").removesuffix("a"))
    gpu.device(divmod(cc, 10))
    library = compiled_library([made], tmp_path / "ours")

    reference.load()
    theirs = gpu.log("set_attribute")
    handle = library.prepare(OP, axes)
    assert gpu.log("set_attribute") == theirs * 2, "kernel attributes differ"

    gpu.params(made.param_sizes())
    rng = random.Random(class_name)
    for case in range(CASES):
        call = random_call(rng, axes)
        assert library.c.kseal_gdn_decode_run(handle, call.args(library)) == 0, library.error()
        ours = gpu.log("launch")[-1]
        expected, masks = reference.launch(gpu, arguments(call))
        assert all(is_padding(m) for m in masks)
        assert masked(ours, masks) == masked(expected, masks), f"case {case}: {call}"
        assert (ours["kernel"], ours["smem"]) == made.answer.kernels[0]
        ctas = call["batch_size"] * call["num_v_heads"] * (D // axes["tile_v"])
        assert (ours["grid"], ours["block"]) == ([ctas, 1, 1], [128, 1, 1])

    assert library.c.kseal_gdn_decode_release(handle) == 0
    library.close()
