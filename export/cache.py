"""The cache of compiled variants: what is in it, and how it stays within bounds.

An entry is named by the digest of everything that decides its bytes and checked whenever it is read, so any number of users
and machines may share one: ``$KERNSEAL_CACHE`` on any file system that renames atomically. New folders have the mode of the
cache's own, which so says who may add.
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
RECORD = "record.json"
TOUCH_SECONDS = 3600
"""A use within this time of the last one is not noted: a build reads many entries, perhaps over a network."""


@dataclass(frozen=True)
class Entry:
    """One compiled variant.

    Attributes:
        size: bytes.
        used: when it was last made or read, in seconds since the epoch.
    """

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


def entries() -> list[Entry]:
    """Every entry, the one that was used longest ago first."""
    return sorted(_entries(), key=lambda entry: (entry.used, entry.folder))


def _entries() -> Iterator[Entry]:
    for record in (paths.cache() / VARIANTS).glob(f"*/*/{RECORD}"):
        with contextlib.suppress(FileNotFoundError):
            size = sum(path.stat().st_size for path in record.parent.iterdir())
            yield Entry(record.parent, size, record.stat().st_mtime)


def to_prune(found: Sequence[Entry], max_bytes: int | None, older_than: float | None) -> list[Entry]:
    """Of ``found``, in the order of ``entries``, those that are to go.

    Args:
        max_bytes: what the others may take together.
        older_than: seconds since the last use from which on an entry goes in any case.
    """
    left = sum(entry.size for entry in found)
    gone = []
    for entry in found:
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
