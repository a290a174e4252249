"""kernel.yaml: what the schema does not allow is refused with its field, each time; which class serves what."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest

from kernseal.export import paths, spec
from kernseal.export.spec import Op, Target
from kernseal.loader.errors import Malformed, Unsupported

XQA = spec.load_op(paths.kernels() / "xqa_decode")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KERNSEAL_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(paths.kernels() / "gdn_prefill", tmp_path / "gdn_prefill"))


@pytest.fixture
def xqa_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KERNSEAL_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(paths.kernels() / "xqa_decode", tmp_path / "xqa_decode"))


def axes_of(**changes: Any) -> dict[str, Any]:
    return {**XQA.data["defaults"], **changes}


def edit(folder: Path, old: str, new: str) -> None:
    text = (folder / "kernel.yaml").read_text()
    assert old in text
    (folder / "kernel.yaml").write_text(text.replace(old, new, 1))


def test_the_committed_file_is_accepted_and_read_the_same_again(folder: Path) -> None:
    assert spec.load_op(folder) == spec.load_op(folder)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("op: gdn_prefill", "op: Gdn", "op: 'Gdn' does not match"),
        ("limits:", "limit:", "limit"),
        ("front_end: cute", "front_end: nvcc", "classes.sm90.front_end: 'nvcc' is not one of"),
        ("sms: [sm_90a]", "sms: [ninety]", "classes.sm90.sms.0: 'ninety' does not match"),
        ("op: gdn_prefill", "op: other_op", "op: 'other_op' is not the folder's name"),
        ("op: gdn_prefill", "op: [", "kernel.yaml of gdn_prefill"),
    ],
)
def test_a_mistake_is_refused_with_its_field_every_time(folder: Path, old: str, new: str, words: str) -> None:
    spec.load_op(folder)
    edit(folder, old, new)
    for _ in range(2):
        with pytest.raises(Malformed, match=r"kernel\.yaml") as refused:
            spec.load_op(folder)
        assert words in str(refused.value)


def test_a_policy_sets_axes_that_there_are(tmp_path: Path) -> None:
    folder = tmp_path / "qsa_attention"
    shutil.copytree(paths.kernels() / folder.name, folder)
    edit(folder, "choose: [grouped, ", "choose: [group, ")
    with pytest.raises(
        Malformed, match=r"qsa_attention/kernel\.yaml: abi\.choose: 'group' is no axis; there are dtype, "
    ):
        spec.load_op(folder)


@pytest.mark.parametrize("sm", ["sm_90a", "sm_120a"])
def test_the_name_of_a_variant_is_its_point_on_the_axes(sm: str) -> None:
    for op in spec.load_ops():
        target = spec.Target(sm)
        for variant in op.variants(target, "full"):
            found = op.named(target, variant.id)
            assert found is not None and found == variant and found.axes == variant.axes


@pytest.mark.parametrize(
    ("new", "words"),
    [
        ("serves: [fp8_math]", "classes.mha.serves: ['fp8_math'] is not of type 'object'"),
        ("serves: {fp8_math: []}", "classes.mha.serves.fp8_math: [] should be non-empty"),
        ("serves: {fp8_math: false}", "classes.mha.serves.fp8_math: False is not of type 'array'"),
        (
            "serves: {fp8: [false]}",
            "classes.mha.serves: 'fp8' is no axis; there are dtype, kv_dtype, out_dtype,",
        ),
        ("serves: {fp8_math: [no_math]}", "classes.mha.serves.fp8_math: 'no_math' is not one of False, True"),
        ("serves: {head_dim: [64, 65]}", "classes.mha.serves.head_dim: 65 is not one of 16, 32, "),
    ],
)
def test_a_class_serves_axes_and_values_that_there_are(xqa_folder: Path, new: str, words: str) -> None:
    edit(xqa_folder, "serves: {fp8_math: [false]}", new)
    for _ in range(2):
        with pytest.raises(Malformed) as refused:
            spec.load_op(xqa_folder)
        assert str(refused.value).startswith(f"kernels/xqa_decode/kernel.yaml: {words}")


@pytest.mark.parametrize(
    ("new", "words"),
    [
        ("{dtype: bf16}", "excludes.0.when.dtype: 'bf16' is not of type 'array'"),
        ("{dtype: []}", "excludes.0.when.dtype: [] should be non-empty"),
        ("{}", "excludes.0.when: {} should be non-empty"),
        ("{type: [bf16]}", "excludes.0.when: 'type' is no axis; there are dtype, kv_dtype, out_dtype,"),
        ("{dtype: [f16, bf61]}", "excludes.0.when.dtype: 'bf61' is not one of bf16, f16"),
    ],
)
def test_a_rule_excludes_axes_and_values_that_there_are(xqa_folder: Path, new: str, words: str) -> None:
    edit(xqa_folder, "when: {dtype: [bf16], kv_dtype: [f16]}", f"when: {new}")
    with pytest.raises(Malformed) as refused:
        spec.load_op(xqa_folder)
    assert str(refused.value).startswith(f"kernels/xqa_decode/kernel.yaml: {words}")


@pytest.mark.parametrize(
    ("target", "changes", "expected"),
    [
        (Target("sm_90a"), {}, "mha"),
        (Target("sm_90a"), {"fp8_math": True}, "gmma"),
        (Target("sm_100a"), {}, "mha_sm10x"),
        (Target("sm_103a"), {"fp8_math": True}, "mha_sm10x"),
        (Target("sm_121a"), {}, "mha_sm12x"),
        (Target("sm_120a", "sm_90a"), {}, "mha_sm12x"),
        (Target("sm_100a", "sm_90a"), {}, None),
        (Target("sm_75a"), {}, None),
    ],
)
def test_the_first_class_that_serves_the_axes_is_taken(
    target: Target, changes: dict[str, Any], expected: str | None
) -> None:
    assert XQA.class_for(target, axes_of(**changes)) == expected


def test_both_classes_of_a_target_are_built() -> None:
    assert XQA.classes_for(Target("sm_90a")) == ["mha", "gmma"]
    built = XQA.variants(Target("sm_90a"), "default")
    assert {v.axes["fp8_math"] for v in built if v.class_name == "gmma"} == {True}
    assert {v.axes["fp8_math"] for v in built if v.class_name == "mha"} == {False}


def without_gmma() -> Op:
    data = copy.deepcopy(dict(XQA.data))
    del data["classes"]["gmma"]
    return Op(XQA.name, XQA.folder, data)


def test_axes_that_no_class_serves_are_refused_with_what_each_serves() -> None:
    with pytest.raises(
        Unsupported,
        match=r"op xqa_decode: no class of sm_90a has \{.*'fp8_math': True\}: mha serves \{'fp8_math': \[False\]\}$",
    ):
        without_gmma().variant(Target("sm_90a"), axes_of(kv_dtype="e4m3", fp8_math=True))


def test_a_profile_leaves_out_what_no_class_serves() -> None:
    built = {v.id for v in XQA.variants(Target("sm_90a"), "default")}
    there = {v.id for v in without_gmma().variants(Target("sm_90a"), "default")}
    assert built - there == {v for v in built if v.endswith("fp8math")} != set()


@pytest.mark.parametrize(
    ("target", "changes", "words"),
    [
        (
            Target("sm_75a"),
            {},
            "op xqa_decode: target sm_75a has no class; supported: sm_90a, .*sm_120a-on-sm_90a",
        ),
        (Target("sm_90a"), {"kv_dtype": "nvfp4"}, "class mha: an nvfp4 cache needs SM120 or SM121"),
        (Target("sm_100a"), {"kv_dtype": "nvfp4"}, "class mha_sm10x: an nvfp4 cache needs SM120 or SM121"),
        (Target("sm_120a"), {"kv_dtype": "e4m3", "fp8_math": True}, "class mha_sm12x: fp8_math needs SM90"),
        (Target("sm_90a"), {"fp8_math": True}, "class gmma: fp8_math needs an e4m3 cache"),
        (
            Target("sm_90a"),
            {"kv_dtype": "nvfp4", "fp8_math": True},
            "class gmma: fp8_math needs an e4m3 cache",
        ),
        (
            Target("sm_120a"),
            {"kv_dtype": "nvfp4", "head_dim": 80},
            "needs a head_dim that is a multiple of 64",
        ),
    ],
)
def test_a_variant_that_cannot_be_is_refused_with_the_reason(
    target: Target, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(Unsupported, match=words):
        XQA.variant(target, axes_of(**changes))


def test_excludes_and_defaults_name_axes_and_values_that_there_are() -> None:
    for op in spec.load_ops():
        values = {axis: described.get("values", [False, True]) for axis, described in op.data["axes"].items()}
        assert set(op.data["defaults"]) == set(values)
        for rule in op.data.get("excludes", []):
            assert rule.get("class") in (None, *op.data["classes"])
            assert all(value in values[axis] for axis, some in rule["when"].items() for value in some), rule


def test_a_rule_over_a_range_of_head_dims_has_all_of_them() -> None:
    """Excludes list values: none of a range may be missing."""
    values = XQA.data["axes"]["head_dim"]["values"]
    assert values == list(range(16, 513, 16))
    for changes, unsupported in (
        ({"spec_decode": True}, lambda d: d > 256),
        ({"kv_dtype": "e4m3", "fp8_math": True}, lambda d: d > 256),
        ({"kv_dtype": "nvfp4"}, lambda d: d % 64 != 0),
        ({}, lambda d: False),
    ):
        target = Target("sm_120a" if "nvfp4" in changes.values() else "sm_90a")
        for head_dim in values:
            axes = axes_of(head_dim=head_dim, **changes)
            class_name = XQA.class_for(target, axes)
            assert class_name is not None
            assert (XQA.excluded(class_name, axes) is not None) == unsupported(head_dim), axes
