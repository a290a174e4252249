"""What the loader makes of top-k's arguments, and that its description and profiles agree."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from kernseal.export import paths, spec
from kernseal.kernels.topk_regions.operands import SPEC
from kernseal.loader.binder import Binder
from kernseal.loader.errors import InvalidArgument
from kernseal.loader.layout import Layout
from kernseal.loader.library import declarations

torch = pytest.importorskip("torch", reason="torch is not installed")

from cpu.test_loader_arguments import OnDevice  # noqa: E402

FOLDER = paths.kernels() / "topk_regions"
KERNEL = yaml.safe_load((FOLDER / "kernel.yaml").read_text())
ARGS = Layout(declarations(), "kseal_topk_regions_args")
CONFIG = {**SPEC.config_defaults, "device": 0}
R, N, K, PAGES = 3, 100, 8, 7


def values(**changes: Any) -> dict[str, Any]:
    made = {
        "scores": torch.zeros(R, N),
        "indices": torch.zeros(R, K, dtype=torch.int32),
        "lengths": torch.zeros(R, dtype=torch.int32),
        "semaphores": torch.zeros(100, dtype=torch.uint8),
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
    strides = {o.row_stride for o in operands.values() if o.row_stride is not None}
    assert {s for o in operands.values() for s in o.shape} | strides <= set(fields)


def test_sizes_and_strides_follow_from_tensors() -> None:
    table = torch.zeros(R, 16, dtype=torch.int32)[:, :PAGES]
    found = values(scores=torch.zeros(R, 128)[:, :N], page_table=table)
    expected = {"num_rows": R, "max_len": N, "top_k": K, "row_stride": 128, "semaphores_bytes": 100}
    expected |= {"num_requests": R, "max_pages": PAGES, "page_table_stride": 16}
    assert {name: found[name] for name in expected} == expected


def test_what_is_not_given_is_zero() -> None:
    found = values()
    pointers = (
        "row_starts",
        "offsets",
        "page_table",
        "row_to_request",
        "page_table_starts",
        "values",
        "raw_indices",
    )
    sizes = ("page_size", "num_requests", "max_pages", "page_table_stride")
    assert {found[name] or 0 for name in (*pointers, *sizes)} == {0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"values": torch.zeros(R, K + 1)}, r"values: shape \(3, 9\)"),
        ({"values": torch.zeros(R, K, dtype=torch.bfloat16)}, "values: .*bf16"),
        ({"lengths": torch.zeros(R + 1, dtype=torch.int32)}, "lengths: shape"),
        ({"offsets": torch.zeros(R, dtype=torch.int64)}, "offsets: .*i64"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        values(**changes)


def test_config_defaults_are_those_of_the_builds() -> None:
    assert KERNEL["defaults"].items() <= SPEC.config_defaults.items()
    enums = {name: axis["type"] for name, axis in KERNEL["axes"].items() if axis["type"].startswith("kseal_")}
    assert SPEC.config_enums == enums


def test_names_of_variants_are_those_of_the_build() -> None:
    op = spec.load_op(FOLDER)
    for variant in op.variants(spec.Target("sm_100a"), "full"):
        assert SPEC.variant(dict(variant.axes)) == variant.id


def test_every_sm_has_the_same_variants() -> None:
    op = spec.load_op(FOLDER)
    sms = ("sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a")
    targets = [*(spec.Target(sm) for sm in sms), spec.Target("sm_120a", "sm_90a")]
    ids = [[v.id for v in op.variants(t, "default")] for t in targets]
    assert ids == [ids[0]] * len(targets)
    assert len(ids[0]) == 8
    assert all(len(op.variants(t, "full")) == 12 for t in targets)
    assert {v.id for v in op.variants(targets[0], "full")} == set(ids[0]) | {
        v.id for v in op.variants(targets[0], "validation")
    }


def test_classes_have_the_shared_memory_of_their_sms() -> None:
    limits = yaml.safe_load((paths.kernels() / "sms.yaml").read_text())
    for cls in KERNEL["classes"].values():
        assert {limits[sm]["max_smem_per_block"] for sm in cls["sms"]} == {cls["smem_per_block"]}
