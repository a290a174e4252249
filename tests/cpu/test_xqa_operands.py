"""What the loader makes of XQA decode's arguments, and that its description, profiles and models agree."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from kernseal.export import paths, spec
from kernseal.kernels.xqa_decode.operands import SPEC
from kernseal.loader.binder import Binder
from kernseal.loader.errors import InvalidArgument
from kernseal.loader.layout import Layout
from kernseal.loader.library import declarations

torch = pytest.importorskip("torch", reason="torch is not installed")

from cpu.test_loader_arguments import OnDevice  # noqa: E402

FOLDER = paths.kernels() / "xqa_decode"
KERNEL = yaml.safe_load((FOLDER / "kernel.yaml").read_text())
ARGS = Layout(declarations(), "kseal_xqa_decode_args")
CONFIG = {**SPEC.config_defaults, "device": 0, "head_dim": 64, "group_size": 4}
B, PAGES, HKV, SIZE, D = 3, 9, 2, 16, 64


def values(**changes: Any) -> dict[str, Any]:
    pool = torch.zeros(PAGES, SIZE, HKV, D, dtype=torch.bfloat16)
    made = {
        "q": torch.zeros(B, 4 * HKV, D, dtype=torch.bfloat16),
        "k": pool,
        "v": pool.clone(),
        "o": torch.zeros(B, 4 * HKV, D, dtype=torch.bfloat16),
        "page_table": torch.zeros(B, 5, dtype=torch.int32),
        "seq_lens": torch.zeros(B, dtype=torch.int32),
        "semaphores": torch.zeros(100, dtype=torch.int32),
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
    known = set(fields) | set(CONFIG) | set(SPEC.derive({}))
    assert {s for o in operands.values() for s in (*o.shape, *o.strides)} <= known


def test_sizes_and_strides_follow_from_tensors() -> None:
    found = values()
    expected = {
        "batch_size": B,
        "num_q_heads": 8,
        "num_kv_heads": HKV,
        "num_pages": PAGES,
        "max_pages_per_seq": 5,
        "kv_page_stride": SIZE * HKV * D,
        "kv_token_stride": HKV * D,
        "kv_head_stride": D,
        "semaphores_bytes": 400,
    }
    assert {name: found[name] for name in expected} == expected


def test_an_hnd_cache_is_its_transposed_view() -> None:
    pools = {
        name: torch.zeros(PAGES, HKV, SIZE, D, dtype=torch.bfloat16).transpose(1, 2) for name in ("k", "v")
    }
    found = values(**pools)
    strides = [found[name] for name in ("kv_page_stride", "kv_token_stride", "kv_head_stride")]
    assert strides == [SIZE * HKV * D, D, SIZE * D]


def test_k_and_v_of_different_strides_are_refused() -> None:
    layers = torch.zeros(PAGES, 2, SIZE, HKV, D, dtype=torch.bfloat16)[:, 0]
    with pytest.raises(InvalidArgument, match=r"kv_page_stride: 2048, but v has 4096"):
        values(v=layers)


def test_a_head_that_is_not_dense_is_refused() -> None:
    wide = torch.zeros(PAGES, SIZE, HKV, 2 * D, dtype=torch.bfloat16)[..., ::2]
    with pytest.raises(InvalidArgument, match=r"k: strides .*; the last dimension must be dense"):
        values(k=wide)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        (
            "q",
            (B, 8, 128),
            r"q: shape \(3, 8, 128\); expected \[batch_size, num_q_heads, head_dim\] = \(3, 8, 64\)",
        ),
        ("k", (PAGES, 32, HKV, D), r"k: shape \(9, 32, 2, 64\); expected .* = \(9, 16, 2, 64\)"),
        ("o", (B, 4, D), r"o: shape \(3, 4, 64\)"),
    ],
)
def test_a_shape_that_the_config_does_not_have_is_refused(
    name: str, shape: tuple[int, ...], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        values(**{name: torch.zeros(shape, dtype=torch.bfloat16)})


def test_config_defaults_are_those_of_the_builds() -> None:
    named = {n: v for n, v in SPEC.config_defaults.items() if n in KERNEL["axes"]}
    assert named.items() <= KERNEL["defaults"].items()
    enums = {name: axis["type"] for name, axis in KERNEL["axes"].items() if axis["type"].startswith("kseal_")}
    assert SPEC.config_enums == enums


def test_the_default_profile_has_what_the_models_need_and_no_more() -> None:
    op = spec.load_op(FOLDER)
    target = spec.Target("sm_120a")
    models = yaml.safe_load((FOLDER / "models.yaml").read_text())
    needed = {
        (m["head_dim"], m["group_size"], window)
        for m in models
        for window in ((False, True) if "window" in m else (False,))
    }
    assert all(m["checked"] in ("aiconfigurator", "litgpt", "slime", "hub", "mlx-lm") for m in models)
    built = [v.axes for v in op.variants(target, "default")]
    sixteen_bit = {
        (a["head_dim"], a["group_size"], a["sliding_window"]) for a in built if a["kv_dtype"] == a["dtype"]
    }
    assert sixteen_bit == needed
    assert len(built) <= 25


def test_every_sm_has_the_same_variants() -> None:
    op = spec.load_op(FOLDER)
    ids = {
        sm: [v.id for v in op.variants(spec.Target(sm), "default")]
        for sm in ("sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a")
    }
    assert len({tuple(found) for found in ids.values()}) == 1
    retargeted = op.variants(spec.Target("sm_120a", "sm_90a"), "default")
    assert [v.id for v in retargeted] == ids["sm_90a"]
