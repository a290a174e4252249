"""kernel.yaml: what the schema does not allow is refused with its field, each time."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kernseal.export import paths, spec
from kernseal.loader.errors import Malformed


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KERNSEAL_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(paths.kernels() / "gdn_prefill", tmp_path / "gdn_prefill"))


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


@pytest.mark.parametrize("sm", ["sm_90a", "sm_120a"])
def test_the_name_of_a_variant_is_its_point_on_the_axes(sm: str) -> None:
    for op in spec.load_ops():
        target = spec.Target(sm)
        for variant in op.variants(target, "full"):
            found = op.named(target, variant.id)
            assert found is not None and found == variant and found.axes == variant.axes
