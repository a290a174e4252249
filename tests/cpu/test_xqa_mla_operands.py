"""What the loader makes of XQA MLA decode's arguments, and that its description and profiles agree."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from kernseal.export import paths, spec
from kernseal.kernels.xqa_mla.operands import SPEC
from kernseal.loader.binder import Binder
from kernseal.loader.errors import InvalidArgument
from kernseal.loader.layout import Layout
from kernseal.loader.library import declarations

torch = pytest.importorskip("torch", reason="torch is not installed")

from cpu.test_loader_arguments import OnDevice  # noqa: E402

FOLDER = paths.kernels() / "xqa_mla"
KERNEL = yaml.safe_load((FOLDER / "kernel.yaml").read_text())
ARGS = Layout(declarations(), "kseal_xqa_mla_args")
CONFIG = {**SPEC.config_defaults, "device": 0}
B, PAGES, SIZE, ROW, LATENT = 3, 9, 64, 576, 512


def values(**changes: Any) -> dict[str, Any]:
    pool = torch.zeros(PAGES, SIZE, ROW, dtype=torch.bfloat16)
    made = {
        "q": torch.zeros(B, 128, ROW, dtype=torch.bfloat16),
        "k": pool,
        "v": pool,
        "o": torch.zeros(B, 128, LATENT, dtype=torch.bfloat16),
        "page_table": torch.zeros(B, 5, dtype=torch.int32),
        "seq_lens": torch.zeros(B, dtype=torch.int32),
        "workspace": torch.zeros(100, dtype=torch.uint8),
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


def test_dimensions_are_those_of_the_kernel() -> None:
    limits = KERNEL["limits"]
    assert SPEC.derive({}) == {"one": 1, "head_dim": limits["head_dim"], "v_dim": limits["v_dim"]}


def test_sizes_and_strides_follow_from_tensors() -> None:
    found = values()
    expected = {
        "batch_size": B,
        "num_q_heads": 128,
        "num_pages": PAGES,
        "max_pages_per_seq": 5,
        "kv_page_stride": SIZE * ROW,
        "kv_token_stride": ROW,
        "workspace_bytes": 100,
    }
    assert {name: found[name] for name in expected} == expected


def test_a_layer_of_a_pool_for_all_layers_is_its_strides() -> None:
    layer = torch.zeros(PAGES, 4, SIZE, 640, dtype=torch.bfloat16)[:, 1, :, :ROW]
    found = values(k=layer, v=layer)
    assert (found["kv_page_stride"], found["kv_token_stride"]) == (4 * SIZE * 640, 640)


def test_k_and_v_of_different_strides_are_refused() -> None:
    layers = torch.zeros(PAGES, 2, SIZE, ROW, dtype=torch.bfloat16)[:, 0]
    with pytest.raises(InvalidArgument, match=r"kv_page_stride: 36864, but v has 73728"):
        values(v=layers)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("q", (B, 128, 512), r"q: shape \(3, 128, 512\); expected .* = \(3, 128, 576\)"),
        ("k", (PAGES, 32, ROW), r"k: shape \(9, 32, 576\); expected .* = \(9, 64, 576\)"),
        ("o", (B, 128, ROW), r"o: shape \(3, 128, 576\); expected .* = \(3, 128, 512\)"),
    ],
)
def test_a_shape_that_the_kernel_does_not_have_is_refused(
    name: str, shape: tuple[int, ...], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        values(**{name: torch.zeros(shape, dtype=torch.bfloat16)})


def test_q_and_cache_have_one_element_type_and_o_is_bfloat16() -> None:
    small = {**CONFIG, "dtype": "e4m3"}
    types = {name: o.dtype for name, o in SPEC.operands(small).items()}
    assert {types[name] for name in ("q", "k", "v")} == {"dtype"}
    assert types["o"] == "bf16"


def test_config_defaults_are_those_of_the_builds() -> None:
    assert KERNEL["defaults"].items() <= SPEC.config_defaults.items()
    enums = {name: axis["type"] for name, axis in KERNEL["axes"].items() if axis["type"].startswith("kseal_")}
    assert SPEC.config_enums == enums


def test_every_sm_that_is_served_has_the_same_variants() -> None:
    op = spec.load_op(FOLDER)
    targets = [spec.Target("sm_120a"), spec.Target("sm_121a"), spec.Target("sm_120a", "sm_90a")]
    assert [[v.id for v in op.variants(t, "default")] for t in targets] == [["bf16_p64", "e4m3_p64"]] * 3
    assert all(len(op.variants(t, "full")) == 8 for t in targets)
    assert op.variants(spec.Target("sm_90a"), "default") == []
