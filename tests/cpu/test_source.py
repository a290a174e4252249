"""verify-source: the right tree is accepted; each way of being another one is its own result."""

from __future__ import annotations

import json
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from kernseal.export import source, verify_source
from kernseal.export.cli import main
from kernseal.export.findings import (
    EmptySource,
    FileAdded,
    FileChanged,
    FileMissing,
    Finding,
    NotASource,
    NotThere,
    SubmoduleMissing,
    WrongVersion,
)
from kernseal.loader.errors import SourceInvalid

PIN = source.upstream()
WANTED = {**source.all_wanted(), **PIN.licences}
VICTIM = "flashinfer/gdn_kernels/delta_rule_dsl/delta_rule_sm120.py"


def verify(path: Path) -> list[Finding]:
    return verify_source.verify(path, PIN, WANTED, source.listing())


@pytest.fixture(scope="module")
def wheel() -> Path:
    return source.fetch_wheel(PIN)


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        folders = ("flashinfer/gdn_kernels/", "flashinfer_python-")
        members = [n for n in archive.namelist() if n in WANTED or n.startswith(folders)]
        archive.extractall(root, [*members, "flashinfer/__init__.py", "flashinfer/_build_meta.py"])
    return root


@pytest.fixture
def tree(unpacked: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(unpacked, tmp_path / "tree"))


@pytest.fixture
def checkout(unpacked: Path, tmp_path: Path) -> Path:
    """The same files where a git checkout has them."""
    root = Path(shutil.copytree(unpacked, tmp_path / "checkout"))
    for there, here in PIN.checkout_paths.items():
        if there.startswith("flashinfer/data/") and (root / there).is_dir():
            shutil.move(root / there, root / here)
    (root / "flashinfer" / "data").rmdir()
    licence = next(iter(PIN.licences))
    shutil.move(root / licence, root / "LICENSE")
    (root / "version.txt").write_text(f"{PIN.version}\n")
    (root / "flashinfer" / "_build_meta.py").unlink()
    (root / ".gitmodules").write_text(
        '[submodule "3rdparty/cccl"]\n\tpath = 3rdparty/cccl\n\turl = ../cccl\n'
    )
    (root / "3rdparty" / "cccl").mkdir(parents=True)
    (root / "3rdparty" / "cccl" / "README").write_text("there\n")
    return root


def test_the_pinned_wheel_is_accepted(wheel: Path) -> None:
    assert verify(wheel) == []


def test_an_unpacked_wheel_is_accepted(tree: Path) -> None:
    assert verify(tree) == []


def test_a_checkout_with_the_same_hashes_is_accepted(checkout: Path) -> None:
    assert verify(checkout) == []


def test_one_changed_byte_is_a_change_of_that_file(tree: Path) -> None:
    data = bytearray((tree / VICTIM).read_bytes())
    data[100] ^= 1
    (tree / VICTIM).write_bytes(data)
    (found,) = verify(tree)
    assert isinstance(found, FileChanged)
    assert (found.path, found.expected) == (VICTIM, WANTED[VICTIM])


def test_a_missing_file_is_named(tree: Path) -> None:
    (tree / VICTIM).unlink()
    assert verify(tree) == [FileMissing(VICTIM)]


def test_an_added_file_is_named(tree: Path) -> None:
    added = "flashinfer/gdn_kernels/delta_rule_dsl/torch.py"
    (tree / added).write_text("raise SystemExit\n")
    assert verify(tree) == [FileAdded(added)]


def test_another_version_is_said_to_be_one(tree: Path) -> None:
    (tree / "flashinfer" / "_build_meta.py").write_text('__version__ = "0.7.5"\n')
    assert verify(tree) == [WrongVersion("flashinfer/_build_meta.py", PIN.version, "0.7.5")]


def test_a_wheel_of_another_version_is_said_to_be_one(tmp_path: Path) -> None:
    other = tmp_path / "flashinfer_python-0.7.5-py3-none-any.whl"
    other.write_bytes(b"PK")
    assert verify(other) == [WrongVersion(other.name, PIN.version, "0.7.5")]


def test_a_wheel_with_the_right_name_and_other_bytes_is_a_change(tmp_path: Path) -> None:
    other = tmp_path / PIN.wheel
    other.write_bytes(b"PK")
    (found,) = verify(other)
    assert isinstance(found, FileChanged)
    assert found.expected == PIN.sha256


def test_an_empty_folder_is_empty(tmp_path: Path) -> None:
    assert verify(tmp_path) == [EmptySource(str(tmp_path))]


def test_nothing_there_is_nothing_there(tmp_path: Path) -> None:
    assert verify(tmp_path / "no") == [NotThere(str(tmp_path / "no"))]


def test_a_folder_inside_another_repository_is_not_a_source_and_its_commit_is_never_reported(
    tmp_path: Path,
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(
        ["git", *identity, "-C", str(tmp_path), "commit", "-q", "--allow-empty", "-m", "other"], check=True
    )
    commit = subprocess.run(
        ["git", "-C", str(tmp_path), "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    inside = tmp_path / "vendor"
    inside.mkdir()
    (inside / "notes.txt").write_text("not FlashInfer\n")
    assert verify(inside) == [NotASource(str(inside))]
    shown = CliRunner().invoke(main, ["verify-source", str(inside)]).output
    assert commit[:7] not in shown


def test_a_checkout_whose_submodule_was_never_initialised_says_so(checkout: Path) -> None:
    (checkout / "3rdparty" / "cccl" / "README").unlink()
    assert verify(checkout) == [SubmoduleMissing(str(checkout / "3rdparty" / "cccl"))]


def test_flashinfer_as_an_uninitialised_submodule_of_the_users_repository_says_so(tmp_path: Path) -> None:
    (tmp_path / ".gitmodules").write_text('[submodule "fi"]\n\tpath = third_party/flashinfer\n\turl = x\n')
    (tmp_path / "third_party" / "flashinfer").mkdir(parents=True)
    found = verify(tmp_path / "third_party" / "flashinfer")
    assert found == [SubmoduleMissing(str(tmp_path / "third_party" / "flashinfer"))]


def test_the_command_exits_with_9_and_names_each_finding(tree: Path) -> None:
    (tree / VICTIM).unlink()
    result = CliRunner().invoke(main, ["verify-source", str(tree), "--json"])
    report = json.loads(result.output)
    assert result.exit_code == SourceInvalid.exit_code == 9
    assert report["findings"] == [{"kind": "missing", "path": VICTIM}]
    assert report["accepted"] is False


def test_reading_a_source_set_from_a_changed_tree_is_refused(tree: Path) -> None:
    (tree / VICTIM).write_text("pass\n")
    with pytest.raises(SourceInvalid, match=VICTIM):
        source.read_set(source.folder_source(tree, PIN), WANTED)
