"""Source patches apply exactly as written, or the build fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernseal.export import patch, paths, source, spec
from kernseal.export.patch import SourcePatch
from kernseal.loader.errors import RuleFailed

HEADER = "Subject: s\nReason: r\nUpstream: u\nRemove-when: w\n\n"
DIFF = "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1,3 +1,4 @@\n one\n-two\n+2\n+2.5\n three\n"
TREE = {"a.py": b"one\ntwo\nthree\nfour\n"}


def test_a_patch_changes_what_it_says_and_nothing_else() -> None:
    assert patch.apply(TREE, [SourcePatch("p", HEADER + DIFF)]) == {"a.py": b"one\n2\n2.5\nthree\nfour\n"}


def test_a_patch_whose_context_moved_fails_with_file_and_line() -> None:
    with pytest.raises(RuleFailed, match=r"patches/p: a\.py:2: expected 'two\\n', found 'TWO\\n'"):
        patch.apply({"a.py": b"one\nTWO\nthree\n"}, [SourcePatch("p", HEADER + DIFF)])


def test_a_patch_beyond_the_end_of_a_file_fails() -> None:
    with pytest.raises(RuleFailed, match=r"a\.py:2: .* found None"):
        patch.apply({"a.py": b"one\n"}, [SourcePatch("p", HEADER + DIFF)])


def test_a_patch_for_a_file_outside_the_source_set_fails() -> None:
    with pytest.raises(RuleFailed, match=r"patches/p: a\.py: not in the source set"):
        patch.apply({"b.py": b""}, [SourcePatch("p", HEADER + DIFF)])


ADDED = (
    "diff --git a/b/c b/b/c\nnew file mode 100644\n--- /dev/null\n+++ b/b/c\n@@ -0,0 +1,2 @@\n+one\n+two\n"
)


def test_a_patch_adds_a_file() -> None:
    assert patch.apply(TREE, [SourcePatch("p", HEADER + ADDED)]) == {**TREE, "b/c": b"one\ntwo\n"}


def test_a_patch_that_adds_a_file_which_is_there_fails() -> None:
    with pytest.raises(RuleFailed, match=r"patches/p: b/c: already there"):
        patch.apply({"b/c": b"one\ntwo\n"}, [SourcePatch("p", HEADER + ADDED)])


def test_a_patch_without_a_reason_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.patch").write_text("Subject: s\nUpstream: u\n\n" + DIFF)
    with pytest.raises(RuleFailed, match="header lacks Reason, Remove-when"):
        patch.load(tmp_path, ["p.patch"])


def test_a_patch_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuleFailed, match=r"patches/nowhere\.patch: not there"):
        patch.load(tmp_path, ["nowhere.patch"])


def test_every_committed_patch_belongs_to_an_op() -> None:
    named = {name for op in spec.load_ops() for name in op.data["patches"]}
    there = {path.relative_to(paths.patches()).as_posix() for path in paths.patches().rglob("*.patch")}
    assert there == named


def test_applying_the_committed_patches_twice_fails() -> None:
    opened, _ = source.open_source(None, source.upstream())
    for op in spec.load_ops():
        loaded = patch.load(paths.patches(), op.data["patches"])
        once = patch.apply(source.read_set(opened, source.source_set(op.folder)), loaded)
        with pytest.raises(RuleFailed):
            patch.apply(once, loaded)
