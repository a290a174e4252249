"""Source patches: unified diffs that apply exactly as written, or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unidiff.patch import PatchedFile, PatchSet

from kernseal.export import files
from kernseal.loader.errors import RuleFailed


@dataclass(frozen=True)
class SourcePatch:
    """One file under ``patches/source``: a header of ``Name: text`` lines that says why, then a unified diff."""

    name: str
    text: str

    @property
    def sha256(self) -> str:
        return files.sha256_bytes(self.text.encode())

    @property
    def header(self) -> dict[str, str]:
        pairs = (
            line.split(": ", 1) for line in self.text.split("\ndiff ", 1)[0].splitlines() if ": " in line
        )
        return dict(pairs)


REQUIRED_HEADERS = ("Subject", "Reason", "Upstream", "Remove-when")


def load(root: Path, names: Sequence[str]) -> list[SourcePatch]:
    """Read patches in the order they apply.

    Raises:
        RuleFailed: a file is not there or does not say why it exists.
    """
    loaded = []
    for name in names:
        try:
            patch = SourcePatch(name, (root / name).read_text())
        except FileNotFoundError as error:
            raise RuleFailed(f"patches/{name}: not there") from error
        lacking = [key for key in REQUIRED_HEADERS if key not in patch.header]
        if lacking:
            raise RuleFailed(f"patches/{name}: header lacks {', '.join(lacking)}")
        loaded.append(patch)
    return loaded


def write_tree(root: Path, tree: Mapping[str, bytes]) -> None:
    """Lay out a source set below ``root``."""
    for name, data in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def apply(tree: Mapping[str, bytes], patches: Sequence[SourcePatch]) -> dict[str, bytes]:
    """The tree with every patch applied; context and line numbers must fit exactly. A patch may add a file.

    Raises:
        RuleFailed: a hunk does not fit, its file is not in the tree, or one it adds is; the message names patch, file and
            line.
    """
    result = dict(tree)
    for patch in patches:
        for part in PatchSet(patch.text):
            path = part.path
            if part.is_added_file == (path in result):
                problem = "already there" if part.is_added_file else "not in the source set"
                raise RuleFailed(f"patches/{patch.name}: {path}: {problem}")
            result[path] = _apply_file(patch.name, path, result.get(path, b""), part)
    return result


def _apply_file(name: str, path: str, data: bytes, part: PatchedFile) -> bytes:
    lines = data.decode().splitlines(keepends=True)
    made: list[str] = []
    at = 0
    for hunk in part:
        start = hunk.source_start - 1 if hunk.source_length else hunk.source_start
        made += lines[at:start]
        at = start
        for line in hunk:
            if line.is_added:
                made.append(line.value)
                continue
            found = lines[at] if at < len(lines) else None
            if found != line.value:
                raise RuleFailed(f"patches/{name}: {path}:{at + 1}: expected {line.value!r}, found {found!r}")
            at += 1
            if line.is_context:
                made.append(line.value)
    return "".join(made + lines[at:]).encode()
