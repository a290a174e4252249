"""The cache of compiled variants: shared between users, and kept within bounds."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from kernseal.export import cache, cli, commands_cache
from kernseal.export import variant as variants
from kernseal.export.files import sha256_bytes
from kernseal.loader.errors import BuildFailed, InvalidArgument

DAY = 86400


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KERNSEAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def contents(text: bytes) -> dict[str, bytes]:
    kernel = {"entry": "k", "registers": 1, "spill_bytes": 0, "static_smem": 0, "dynamic_smem": 0}
    record = {
        "kernels": [kernel],
        "host_function": None,
        "code_sha256": "c",
        "sha256": {"kernel.cubin": sha256_bytes(text)},
        "rules": {},
    }
    return {"record.json": json.dumps(record).encode(), "kernel.cubin": text}


def put(key: str, size: int, days_ago: float) -> Path:
    folder = variants.store("op/v", key, contents(b"x" * size)).folder
    then = time.time() - days_ago * DAY
    os.utime(folder / cache.RECORD, (then, then))
    return folder


def run(*arguments: str) -> dict[str, object]:
    done = CliRunner().invoke(commands_cache.cache, [*arguments, "--json"], catch_exceptions=False)
    found: dict[str, object] = json.loads(done.output)
    return found


def test_what_was_made_elsewhere_is_read_back(root: Path) -> None:
    made = variants.store("op/v", "ab12", contents(b"image"))
    assert variants.cached("ab12") == made
    assert made.read("kernel.cubin") == b"image"
    assert variants.files_of(made) == contents(b"image")


def test_files_that_are_not_those_of_their_record_are_not_taken(root: Path) -> None:
    wrong = {**contents(b"image"), "kernel.cubin": b"other"}
    with pytest.raises(BuildFailed, match=r"op/v: the cache at .*ab12 does not hold"):
        variants.store("op/v", "ab12", wrong)
    assert variants.cached("ab12") is None


def test_folders_are_as_open_as_the_cache(root: Path) -> None:
    """A cache that a group shares has folders that the group can add to, whatever each member's umask."""
    root.mkdir()
    root.chmod(0o2775)
    before = os.umask(0o077)
    try:
        folder = put("ab12", 1, 0)
    finally:
        os.umask(before)
    assert [oct(path.stat().st_mode)[-4:] for path in (folder.parent.parent, folder.parent)] == [
        "2775",
        "2775",
    ]


def test_a_read_counts_as_a_use_once_an_hour(root: Path) -> None:
    folder = put("ab12", 1, days_ago=9)
    assert variants.cached("ab12") is not None
    noted = (folder / cache.RECORD).stat().st_mtime
    assert time.time() - noted < 60
    assert variants.cached("ab12") is not None
    assert (folder / cache.RECORD).stat().st_mtime == noted


def test_the_entries_used_longest_ago_go_until_the_rest_fits(root: Path) -> None:
    old, middle, new = put("aa1", 4000, 3), put("bb2", 4000, 2), put("bb3", 4000, 1)
    assert run() == {**run(), "variants": 3, "removed": 0, "last_used_days_ago": 3.0}
    found = run("--prune", "--max-size", "9K")
    assert (found["variants"], found["removed"]) == (2, 1)
    assert not old.exists() and middle.exists() and new.exists()
    assert run("--prune", "--max-size", "0")["variants"] == 0
    assert cache.entries() == []


def test_what_was_not_used_for_long_goes_whatever_its_size(root: Path) -> None:
    old, new = put("aa1", 10, 31), put("bb2", 10, 29)
    assert run("--prune", "--older-than", "30")["removed"] == 1
    assert not old.exists() and new.exists()


def put_others(days_ago: float) -> tuple[Path, Path]:
    """A wheel and Zig's cache, as a build leaves them."""
    then = time.time() - days_ago * DAY
    wheel, zig = cache.wheel_folder("ab" * 32), cache.zig_folder()
    (zig / "o" / "some").mkdir(parents=True)
    (zig / "o" / "some" / "libc.so").write_bytes(b"x" * 300)
    wheel.mkdir(parents=True)
    (wheel / "some.whl").write_bytes(b"x" * 5000)
    for folder in (wheel, zig):
        os.utime(folder, (then, then))
    return wheel, zig


def test_wheels_and_zigs_cache_are_counted_beside_the_variants(root: Path) -> None:
    put("aa1", 1000, 3)
    put_others(1)
    found = run()
    assert found["variants"] == 1
    kinds = found["kinds"]
    assert isinstance(kinds, dict)
    assert kinds["wheels"] == {"entries": 1, "bytes": 5000}
    assert kinds["zig"] == {"entries": 1, "bytes": 300}
    assert found["bytes"] == kinds["variants"]["bytes"] + 5300
    said = CliRunner().invoke(commands_cache.cache, catch_exceptions=False).output
    assert "wheels: 1, 5,000 bytes" in said and "zig: 1, 300 bytes" in said


def test_wheels_and_zigs_cache_are_bounded_by_last_use_like_the_variants(root: Path) -> None:
    variant = put("aa1", 1000, 3)
    wheel, zig = put_others(40)
    assert run("--prune", "--older-than", "30")["removed"] == 2
    assert variant.exists() and not wheel.exists() and not zig.exists()
    wheel, zig = put_others(4)
    assert run("--prune", "--max-size", "3K")["removed"] == 1
    assert variant.exists() and not wheel.exists() and zig.exists()
    assert run("--prune", "--max-size", "0")["bytes"] == 0


def test_what_a_build_may_be_reading_stays_until_it_was_unused_for_ten_minutes(root: Path) -> None:
    wheel, zig = put_others(1)
    assert (cache.wheel_folder("ab" * 32), cache.zig_folder()) == (wheel, zig)
    assert run("--prune", "--max-size", "0")["removed"] == 0
    assert wheel.exists() and zig.exists()


def test_a_removal_that_was_killed_is_finished_by_the_next(root: Path) -> None:
    folder = put("aa1", 10, 3)
    left = folder.with_name(f".{folder.name}.removed")
    left.mkdir()
    (left / "kernel.cubin").write_bytes(b"half removed")
    assert run("--prune", "--max-size", "0") == {
        **run(),
        "removed": 1,
        "removed_bytes": folder_bytes(),
        "refused": [],
    }
    assert not folder.exists() and not left.exists()


def folder_bytes() -> int:
    return sum(map(len, contents(b"x" * 10).values()))


def test_another_users_entry_is_named_and_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = put("aa1", 10, 3)

    def refuse(*_: object) -> None:
        raise PermissionError("not yours")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refuse)
        assert run("--prune", "--max-size", "0")["refused"] == [str(folder)]
    assert folder.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-size", "4G"], "go with --prune"),
        (["--older-than", "4"], "go with --prune"),
        (["--prune"], "say what may stay"),
        (["--prune", "--max-size", "big"], "--max-size 'big': a number of bytes"),
    ],
)
def test_options_that_do_not_go_together(root: Path, arguments: list[str], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        CliRunner().invoke(commands_cache.cache, arguments, catch_exceptions=False)


@pytest.mark.parametrize(
    ("text", "size"), [("7", 7), ("1.5K", 1536), ("4G", 4 << 30), ("2 MiB", 2 << 20), ("1t", 1 << 40)]
)
def test_sizes(text: str, size: int) -> None:
    assert commands_cache.parse_size(text) == size


def test_it_is_a_command() -> None:
    assert "cache" in cli.main.commands
