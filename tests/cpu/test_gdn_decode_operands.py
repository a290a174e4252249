"""What the loader makes of GDN decode's arguments, and that its description and profiles agree."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from kernseal.export import paths, spec
from kernseal.kernels.gdn_decode.operands import SPEC
from kernseal.loader.binder import Binder
from kernseal.loader.errors import InvalidArgument
from kernseal.loader.layout import Layout
from kernseal.loader.library import declarations

torch = pytest.importorskip("torch", reason="torch is not installed")

from cpu.test_loader_arguments import OnDevice  # noqa: E402

FOLDER = paths.kernels() / "gdn_decode"
KERNEL = yaml.safe_load((FOLDER / "kernel.yaml").read_text())
ARGS = Layout(declarations(), "kseal_gdn_decode_args")
T = 3
CONFIG = {
    **SPEC.config_defaults,
    "device": 0,
    "tokens": T,
    "intermediate_states": True,
    "output_indices": True,
}
B, HQ, HV, D, ROWS, STEPS = 5, 2, 4, 128, 9, 7
bf16 = torch.bfloat16


def values(**changes: Any) -> dict[str, Any]:
    made = {
        "q": torch.zeros(B * T, HQ, D, dtype=bf16),
        "k": torch.zeros(B * T, HQ, D, dtype=bf16),
        "v": torch.zeros(B * T, HV, D, dtype=bf16),
        "o": torch.zeros(B * T, HV, D, dtype=bf16),
        "a": torch.zeros(B * T, HV, dtype=bf16),
        "b": torch.zeros(B * T, HV, dtype=bf16),
        "a_log": torch.zeros(HV),
        "dt_bias": torch.zeros(HV),
        "state": torch.zeros(ROWS, HV, D, D, dtype=bf16),
        "state_indices": torch.zeros(B, dtype=torch.int32),
        "output_state_indices": torch.zeros(B, dtype=torch.int32),
        "intermediate_states": torch.zeros(B, STEPS, HV, D, D, dtype=bf16),
        **changes,
    }
    wrapped = {name: OnDevice(t) if isinstance(t, torch.Tensor) else t for name, t in made.items()}
    return Binder(ARGS, SPEC, CONFIG).values({**wrapped, "stream": 0})


def test_operands_are_the_pointers_of_the_op_and_the_rest_its_fields() -> None:
    fields = {f["name"]: f["type"] for f in KERNEL["abi"]["args"]}
    operands = SPEC.operands(CONFIG)
    assert set(operands) == {name for name, kind in fields.items() if kind.startswith("ptr")}
    assert set(SPEC.args_defaults) <= set(fields)
    assert ARGS.names == tuple(fields)
    known = set(fields) | set(CONFIG) | set(SPEC.derive({"batch_size": 1, "tokens": 1}))
    assert {s for o in operands.values() for s in (*o.shape, *o.strides)} <= known
    assert {o.row_stride for o in operands.values()} - {None} <= set(fields)


def test_defaults_and_tags_are_those_of_the_description() -> None:
    axes = KERNEL["axes"]
    assert {name: SPEC.config_defaults[name] for name in axes} == KERNEL["defaults"]
    op = spec.load_op(FOLDER)
    for variant in op.variants(spec.Target("sm_90a"), "full"):
        assert SPEC.variant(variant.axes) == variant.id


def test_sizes_follow_from_tensors_and_dense_ones_need_no_stride() -> None:
    found = values()
    expected = {"batch_size": B, "num_q_heads": HQ, "num_v_heads": HV, "head_dim": D, "pool_rows": ROWS}
    expected |= {"intermediate_steps": STEPS, "state_row_stride": 0}
    expected |= {f"{name}_token_stride": 0 for name in ("q", "k", "v", "o", "a", "b")}
    assert {name: found[name] for name in expected} == expected


def test_slices_of_a_projection_are_their_strides() -> None:
    qkv = torch.zeros(B * T, 1100, dtype=bf16)
    ba = torch.zeros(B * T, 2 * HV, dtype=bf16)
    pool = torch.zeros(ROWS, HV * D * D + 64, dtype=bf16)[:, : HV * D * D].unflatten(1, (HV, D, D))
    found = values(
        q=qkv[:, : HQ * D].unflatten(1, (HQ, D)),
        v=qkv[:, 256 : 256 + HV * D].unflatten(1, (HV, D)),
        b=ba[:, :HV],
        a=ba[:, HV:],
        state=pool,
    )
    names = ("q_token_stride", "k_token_stride", "v_token_stride", "b_token_stride", "a_token_stride")
    assert [found[name] for name in names] == [1100, 0, 1100, 8, 8]
    assert found["state_row_stride"] == HV * D * D + 64


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": torch.zeros(B, HQ, D, dtype=bf16)}, r"q: shape \(5, 2, 128\); expected \[rows, num_q_heads, head_dim\]"),
        ({"v": torch.zeros(B * T, HV, D)}, "v: element type f32; this op was prepared for bf16"),
        ({"state_indices": torch.zeros(B, dtype=torch.int64)}, "state_indices: element type i64"),
        ({"dt_bias": torch.zeros(HV, dtype=bf16)}, "dt_bias: element type bf16"),
        ({"output_state_indices": torch.zeros(B + 1, dtype=torch.int32)}, "output_state_indices: shape"),
        ({"intermediate_states": torch.zeros(B, 8, HV, D, D, dtype=bf16)[:, :7]}, "intermediate_states: strides"),
        ({"state": torch.zeros(ROWS, HV, D, D, dtype=bf16).transpose(-1, -2)}, "state: "),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        values(**changes)


def test_the_profiles_have_what_their_words_say() -> None:
    op = spec.load_op(FOLDER)
    for sm in ("sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a"):
        target = spec.Target(sm)
        counts = {profile: len(op.variants(target, profile)) for profile in ("default", "validation", "full")}
        assert counts == {"default": 18, "validation": 10, "full": 720}
        full = {v.id for v in op.variants(target, "full")}
        assert {v.id for p in ("default", "validation") for v in op.variants(target, p)} <= full
