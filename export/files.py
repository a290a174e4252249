"""Whole or not at all: the only ways in which kernseal writes files and folders."""

from __future__ import annotations

import contextlib
import filecmp
import functools
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

TRIES = 50
"""How often a folder's replacement is tried while others replace it, too."""

FOREIGN_SECONDS = 24 * 3600
"""Age at which another machine's unfinished folder counts as abandoned."""


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace ``path`` by ``data``: readers see the old bytes or the new ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside ``target`` that becomes ``target`` when the block ends well, and goes when it does not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target)
    prefix = f".{target.name}.{_place()}-{os.getpid()}."
    stage = Path(tempfile.mkdtemp(prefix=prefix, suffix=".partial", dir=target.parent))
    stage.chmod(0o755)
    try:
        yield stage
        replace_folder(stage, target)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


@functools.cache
def _place() -> str:
    """Where a process's number is its own: this boot of this machine, this namespace. A folder may be shared with others."""
    try:
        here = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        here = os.uname().nodename
    return sha256_bytes(here.encode())[:12]


def _remove_abandoned(target: Path) -> None:
    """Remove what a killed build left beside ``target``; put back the old folder if the kill came between two renames."""
    pattern = rf"\.{re.escape(target.name)}\.(old-)?([0-9a-f]{{12}})-(\d+)(\..*\.partial)?"
    for path in target.parent.glob(f".{target.name}.*"):
        match = re.fullmatch(pattern, path.name)
        if match is None or not path.is_dir() or _in_use(path, match.group(2), int(match.group(3))):
            continue
        if match.group(1) and not target.exists():
            with contextlib.suppress(OSError):
                os.rename(path, target)
        shutil.rmtree(path, ignore_errors=True)


def _in_use(path: Path, place: str, pid: int) -> bool:
    """Whether its process may still run; of another machine's it is only known that a day is long for one variant."""
    if place == _place():
        return _alive(pid)
    try:
        return time.time() - path.stat().st_mtime < FOREIGN_SECONDS
    except OSError:
        return True


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def replace_folder(stage: Path, target: Path) -> None:
    """Put ``stage`` in the place of ``target``; where that holds the same files already, leave it to its readers.

    A kill in between leaves the old folder beside it, never a mixture. Others may do the same at the same time: who
    finds the folder moved under its hands tries again.
    """
    old = target.with_name(f".{target.name}.old-{_place()}-{os.getpid()}")
    for attempt in range(TRIES):
        try:
            return _replace_once(stage, target, old)
        except OSError:
            if old.exists() and not target.exists():
                with contextlib.suppress(OSError):
                    os.rename(old, target)
            if attempt == TRIES - 1 or not stage.exists():
                raise
            time.sleep(0.01)


def _replace_once(stage: Path, target: Path, old: Path) -> None:
    if not target.exists():
        os.rename(stage, target)
    elif not _same_files(stage, target):
        shutil.rmtree(old, ignore_errors=True)
        os.rename(target, old)
        os.rename(stage, target)
        shutil.rmtree(old, ignore_errors=True)


def _same_files(one: Path, two: Path) -> bool:
    def names(root: Path) -> set[str]:
        return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}

    try:
        found = names(one)
        same = filecmp.cmpfiles(one, two, sorted(found), shallow=False)[0]
        return names(two) == found == set(same)
    except OSError:
        return False
