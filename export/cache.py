"""The cache: compiled variants, the pinned wheel, Zig's own; what is in it, and how it stays within bounds.

An entry of a variant is named by the digest of everything that decides its bytes and checked whenever it is read, so
any number of users and machines may share one: ``$KERNSEAL_CACHE`` on any file system that renames atomically. New
folders have the mode of the cache's own, which so says who may add.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernseal.export import paths

VARIANTS = "variants"
WHEELS = "wheels"
ZIG = "zig"
KINDS = (VARIANTS, WHEELS, ZIG)
RECORD = "record.json"
TOUCH_SECONDS = 3600
"""A use within this time of the last one is not noted: a build reads many entries, perhaps over a network."""
BUSY_SECONDS = 600
"""A wheel and Zig's cache are read for as long as a build takes to read its source or to link; until then they stay."""


@dataclass(frozen=True)
class Entry:
    """One compiled variant, one wheel, or Zig's whole cache, of which a part is no use.

    Attributes:
        kind: of ``KINDS``.
        size: bytes.
        used: when it was last made or read, in seconds since the epoch.
    """

    kind: str
    folder: Path
    size: int
    used: float


def folder_of(key: str) -> Path:
    """Where the entry of ``key`` is or is to be."""
    return paths.cache() / VARIANTS / key[:2] / key


def make_parent(folder: Path) -> None:
    """Make the folders between the cache and an entry, with the mode of the cache."""
    root = paths.cache()
    root.mkdir(parents=True, exist_ok=True)
    mode = stat.S_IMODE(root.stat().st_mode)
    for part in reversed([path for path in folder.parents if path.is_relative_to(root) and path != root]):
        try:
            part.mkdir()
        except FileExistsError:
            continue
        part.chmod(mode)


def note_use(folder: Path) -> None:
    """Note that an entry was read. Not where it is another user's, whose own use counts."""
    record = folder / RECORD
    with contextlib.suppress(OSError):
        if time.time() - record.stat().st_mtime > TOUCH_SECONDS:
            os.utime(record)


def wheel_folder(sha256: str) -> Path:
    """Where the wheel of this hash is or is to be; its use is noted."""
    return _noted(paths.cache() / WHEELS / sha256)


def zig_folder() -> Path:
    """Where Zig keeps glibc's stubs for the next link; its use is noted."""
    folder = paths.cache() / ZIG
    folder.mkdir(parents=True, exist_ok=True)
    return _noted(folder)


def _noted(folder: Path) -> Path:
    with contextlib.suppress(OSError):
        os.utime(folder)
    return folder


def entries() -> list[Entry]:
    """Every entry, the one that was used longest ago first."""
    return sorted(_entries(), key=lambda entry: (entry.used, entry.folder))


def _entries() -> Iterator[Entry]:
    root = paths.cache()
    for record in (root / VARIANTS).glob(f"*/*/{RECORD}"):
        with contextlib.suppress(FileNotFoundError):
            yield Entry(VARIANTS, record.parent, _size(record.parent), record.stat().st_mtime)
    wheels = [(WHEELS, folder) for folder in (root / WHEELS).glob("[!.]*")]
    for kind, folder in [*wheels, (ZIG, root / ZIG)]:
        with contextlib.suppress(FileNotFoundError):
            yield Entry(kind, folder, _size(folder), folder.stat().st_mtime)


def _size(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            size += path.lstat().st_size if not path.is_dir() else 0
    return size


def to_prune(found: Sequence[Entry], max_bytes: int | None, older_than: float | None) -> list[Entry]:
    """Of ``found``, in the order of ``entries``, those that are to go; none that a build may be reading.

    Args:
        max_bytes: what the others may take together.
        older_than: seconds since the last use from which on an entry goes in any case.
    """
    left = sum(entry.size for entry in found)
    gone = []
    for entry in found:
        if entry.kind != VARIANTS and time.time() - entry.used < BUSY_SECONDS:
            continue
        too_old = older_than is not None and time.time() - entry.used > older_than
        if too_old or (max_bytes is not None and left > max_bytes):
            gone.append(entry)
            left -= entry.size
    return gone


def remove(gone: Sequence[Entry]) -> list[Entry]:
    """Remove entries; those that could not be, since they are another user's, are returned.

    Each is renamed first: who reads it meanwhile finds it whole or not at all.
    """
    kept = []
    for entry in gone:
        aside = entry.folder.with_name(f".{entry.folder.name}.removed")
        shutil.rmtree(aside, ignore_errors=True)  # of a removal that was killed
        try:
            os.rename(entry.folder, aside)
        except FileNotFoundError:
            continue
        except OSError:
            kept.append(entry)
            continue
        shutil.rmtree(aside, ignore_errors=True)
    return kept
