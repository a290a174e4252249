"""Reading files that somebody may be changing, or may have replaced by something that is not a file.

A directory is opened once; everything in it is opened relative to that descriptor, without following a link,
and what the caller gets is the very bytes that were hashed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .violations import IoError, Malformed, Missing, Violation, failed

MAX_FILE_BYTES = 2 << 30
MAX_ENTRIES = 20_000
MAX_DEPTH = 8
_CHUNK = 4 << 20

_PART = r"(?!\.{1,2}(?:/|$))[A-Za-z0-9._+-]{1,128}"
NAME = re.compile(rf"(?!.{{513}}){_PART}(?:/{_PART}){{0,7}}")
NAME_RULE = "a relative path of plain ASCII names without . or .."

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a block device",
    stat.S_IFCHR: "a character device",
    stat.S_IFDIR: "a directory",
}


@dataclass(frozen=True)
class FileRead:
    """One pass over one file: ``data`` (if asked for) is what ``sha256`` is the hash of."""

    sha256: str
    size: int
    data: bytes | None


@dataclass
class Tree:
    """What a directory holds, by path relative to it."""

    files: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    violations: list[Violation] = field(default_factory=list)


@contextmanager
def directory(path: str | os.PathLike[str], *, follow: bool = False) -> Iterator[int]:
    """A descriptor of the directory ``path``, whose last component must not be a link unless ``follow``.

    Raises:
        VerificationFailed: Missing, Malformed or IoError.
    """
    # A trailing slash would make the kernel follow a link in spite of O_NOFOLLOW.
    text = os.fspath(path)
    name = text.rstrip("/") or text
    try:
        descriptor = os.open(name, _DIRECTORY & ~os.O_NOFOLLOW if follow else _DIRECTORY)
    except (OSError, ValueError) as error:
        raise failed(_os_violation(error, printable(name), "a directory")) from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_once(root: int, name: str, *, limit: int = MAX_FILE_BYTES, keep: bool = False) -> FileRead:
    """Hash the regular file ``name`` below ``root``, in one pass.

    Raises:
        VerificationFailed: Missing, Malformed (not a regular file, too large, a link on the way) or IoError.
    """
    shown = printable(name)
    *parents, last = name.split("/")
    folder = os.dup(root)
    try:
        for parent in parents:
            folder = _step(folder, parent, shown)
        return _read(folder, last, shown, limit, keep)
    except OSError as error:
        raise failed(_os_violation(error, shown, "a regular file")) from None
    finally:
        os.close(folder)


def read_path(path: str | os.PathLike[str], *, limit: int) -> bytes:
    """The bytes of a file given by the user. Links on the way are theirs to choose, one at the end is not."""
    folder, name = os.path.split(os.fspath(path))
    with directory(folder or ".", follow=True) as root:
        return read_all(root, name, limit=limit)


def read_all(root: int, name: str, *, limit: int) -> bytes:
    """``read_once`` for a small file of which only the bytes are wanted."""
    return read_once(root, name, limit=limit, keep=True).data or b""


def list_tree(root: int) -> Tree:
    """Every entry below ``root``; links, devices, FIFOs, sockets and unreadable folders are violations."""
    tree = Tree()
    _list(root, "", tree)
    return tree


def printable(name: str) -> str:
    return ascii(name)[1:-1]


def _step(folder: int, name: str, shown: str) -> int:
    """Move from ``folder`` into ``name``. On an error the caller still holds, and closes, ``folder``."""
    state = os.stat(name, dir_fd=folder, follow_symlinks=False)
    _refuse_kind(state.st_mode, stat.S_IFDIR, shown, "directories on the way")
    deeper = os.open(name, _DIRECTORY, dir_fd=folder)
    os.close(folder)
    return deeper


def _read(folder: int, name: str, shown: str, limit: int, keep: bool) -> FileRead:
    # Look before opening: opening a device can have effects. fstat afterwards is what counts.
    looked = os.stat(name, dir_fd=folder, follow_symlinks=False)
    _refuse_kind(looked.st_mode, stat.S_IFREG, shown, "a regular file")
    descriptor = os.open(name, _FILE, dir_fd=folder)
    try:
        state = os.fstat(descriptor)
        _refuse_kind(state.st_mode, stat.S_IFREG, shown, "a regular file")
        if state.st_size > limit:
            raise failed(Malformed(shown, f"{state.st_size} bytes", f"at most {limit} bytes"))
        return _hash(descriptor, shown, limit, keep)
    finally:
        os.close(descriptor)


def _hash(descriptor: int, shown: str, limit: int, keep: bool) -> FileRead:
    digest = hashlib.sha256()
    kept: list[bytes] = []
    size = 0
    while chunk := os.read(descriptor, _CHUNK):
        size += len(chunk)
        if size > limit:  # it grew after fstat
            raise failed(Malformed(shown, f"more than {limit} bytes", f"at most {limit} bytes"))
        digest.update(chunk)
        if keep:
            kept.append(chunk)
    return FileRead(digest.hexdigest(), size, b"".join(kept) if keep else None)


def _list(folder: int, prefix: str, tree: Tree) -> None:
    if prefix.count("/") >= MAX_DEPTH:
        found = f"folders deeper than {MAX_DEPTH}"
        tree.violations.append(Malformed(printable(prefix), found, f"at most {MAX_DEPTH} levels"))
        return
    with os.scandir(folder) as entries:
        _list_entries(folder, (entry.name for entry in entries), prefix, tree)


def _list_entries(folder: int, names: Iterable[str], prefix: str, tree: Tree) -> None:
    for name in names:
        if len(tree.files) + len(tree.folders) >= MAX_ENTRIES:
            found = f"more than {MAX_ENTRIES} entries"
            tree.violations.append(Malformed(printable(prefix) or ".", found, "a bundle"))
            return
        path = prefix + name
        try:
            _classify(folder, name, path, tree)
        except FileNotFoundError:
            continue  # vanished since listdir: if the manifest names it, reading it reports Missing
        except OSError as error:
            tree.violations.append(_os_violation(error, printable(path), "a readable entry"))


def _classify(folder: int, name: str, path: str, tree: Tree) -> None:
    kind = stat.S_IFMT(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    if kind == stat.S_IFREG:
        tree.files.add(path)
    elif kind == stat.S_IFDIR:
        tree.folders.add(path)
        deeper = os.open(name, _DIRECTORY, dir_fd=folder)
        try:
            _list(deeper, path + "/", tree)
        finally:
            os.close(deeper)
    else:
        found = _KINDS.get(kind, "a special file")
        tree.violations.append(Malformed(printable(path), found, "a regular file"))


def _refuse_kind(mode: int, wanted: int, shown: str, expected: str) -> None:
    if stat.S_IFMT(mode) != wanted:
        found = _KINDS.get(stat.S_IFMT(mode), "a regular file")
        raise failed(Malformed(shown, found, expected))


def _os_violation(error: OSError | ValueError, shown: str, expected: str) -> Violation:
    if not isinstance(error, OSError):
        return Malformed(shown, "a name with a NUL byte", expected)
    if error.errno == errno.ENOENT:
        return Missing(shown, "nothing", expected)
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.ENAMETOOLONG):
        return Malformed(shown, os.strerror(error.errno), expected)
    return IoError(shown, os.strerror(error.errno or 0), expected)
