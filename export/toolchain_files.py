"""What is really installed: every file of a distribution, hashed, and a cache so that none is hashed twice.

The digest of a distribution is the SHA-256 of what ``sha256sum`` prints for its files, sorted by path. It is
the same for a wheel (``wheel_pins.py`` reads the zip) and for what an installer made of it: files that installers
write themselves are left out, and so is byte code, which Python makes at will.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kernseal.export.files import sha256_file, write_atomic
from kernseal.loader.errors import KernsealError, ToolchainInvalid

_WRITTEN_BY_INSTALLERS = {
    "direct_url.json",
    "INSTALLER",
    "RECORD",
    "REQUESTED",
    "uv_build.json",
    "uv_cache.json",
}
_CACHE_SCHEMA = 1


@dataclass(frozen=True)
class Installed:
    """The files of one distribution, as its RECORD lists them.

    Attributes:
        name: normalised distribution name.
        site: the site-packages folder that the paths are relative to.
        recorded: path -> hash as RECORD writes it (``sha256=`` and base64), of the files that count.
    """

    name: str
    site: Path
    recorded: dict[str, str]


def counts(path: str) -> bool:
    """Whether a file is part of a distribution's digest."""
    folder, _, name = path.rpartition("/")
    if path.startswith("../") or name.endswith(".pyc"):
        return False
    return not (folder.endswith(".dist-info") and name in _WRITTEN_BY_INSTALLERS)


def tree_digest(files: Iterable[tuple[str, str]]) -> str:
    """SHA-256 over ``<sha256>  <path>`` lines, sorted by path."""
    total = hashlib.sha256()
    for path, digest in sorted(files):
        total.update(f"{digest}  {path}\n".encode())
    return total.hexdigest()


def find(name: str, version: str) -> metadata.Distribution:
    """The distribution that this Python would import.

    Raises:
        ToolchainInvalid: it is not installed, or in another version.
    """
    try:
        dist = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise ToolchainInvalid(f"{name}: not installed, expected {version}") from None
    if dist.version != version:
        raise ToolchainInvalid(f"{name}: found version {dist.version}, expected {version}")
    return dist


def read_record(name: str, version: str) -> Installed:
    """The files of an installed distribution.

    Raises:
        ToolchainInvalid: as `find`, or its RECORD is missing or malformed.
    """
    dist = find(name, version)
    try:
        rows = list(csv.reader((dist.read_text("RECORD") or "").splitlines()))
        recorded = {path: digest for path, digest, _ in rows if counts(path)}
    except (ValueError, csv.Error) as error:
        raise ToolchainInvalid(f"{name}: its RECORD does not list paths, hashes and sizes: {error}") from None
    if not recorded:
        raise ToolchainInvalid(f"{name}: its RECORD is missing or lists no files")
    return Installed(name, Path(str(dist.locate_file(""))), recorded)


def _hex(recorded: str) -> str:
    value = recorded.partition("=")[2]
    return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()


def _as_recorded(hexadecimal: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(bytes.fromhex(hexadecimal)).rstrip(b"=").decode()


def hash_files(dist: Installed) -> str:
    """Hash every file and return the digest of the distribution.

    Raises:
        ToolchainInvalid: a file is not there, or its bytes are not those that RECORD names.
    """
    found = {}
    for path, expected in dist.recorded.items():
        try:
            found[path] = sha256_file(dist.site / path)
        except OSError as error:
            raise _unreadable(dist, path, error) from None
        if _as_recorded(found[path]) != expected:
            wanted = _hex(expected) if expected.startswith("sha256=") else expected
            raise ToolchainInvalid(f"{dist.name}: {path}: found sha256 {found[path]}, expected {wanted}")
    return tree_digest(found.items())


def _unreadable(dist: Installed, path: str, error: OSError) -> KernsealError:
    return ToolchainInvalid(f"{dist.name}: {path}: found {error.strerror!r}, expected {dist.recorded[path]}")


def unknown_files(site: Path, folder: str, known: set[str]) -> list[str]:
    """Files below ``site/folder`` that no pinned distribution brought, byte code aside, sorted."""
    prefix = len(os.fspath(site)) + 1
    found = (path[prefix:] for path in _walk(os.fspath(site / folder)) if not path.endswith(".pyc"))
    return sorted(path for path in found if path not in known)


def _walk(folder: str) -> list[str]:
    files: list[str] = []
    folders = [folder]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                (folders if entry.is_dir(follow_symlinks=False) else files).append(entry.path)
    return files


def fingerprint(dist: Installed) -> str:
    """What tells that files may have changed, without reading them: size, mtime, ctime and inode of each.

    A write changes ctime, which no call can set back, so an edit that restores size and mtime shows as well.
    """
    lines = [os.fspath(dist.site)]
    prefix = os.fspath(dist.site) + os.sep
    for path, digest in dist.recorded.items():
        try:
            stat = os.stat(prefix + path)
        except OSError as error:
            raise _unreadable(dist, path, error) from None
        lines.append(f"{path} {digest} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class DigestCache:
    """Fingerprint -> digest, in a file in the user's cache folder.

    Whoever can write there can also write the tools themselves. A cache that can't be read, or is not one, is
    empty; one that can't be written is given up: it only ever saves time.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._entries = self._load()
        self._changed = False

    def _load(self) -> dict[str, str]:
        try:
            content = json.loads(self._file.read_bytes())
            entries = content["digests"] if content["schema"] == _CACHE_SCHEMA else {}
            return {str(k): str(v) for k, v in entries.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def digest(self, dist: Installed) -> str:
        """The digest of a distribution, from the cache when its fingerprint is known.

        Raises:
            ToolchainInvalid: as `hash_files`, or a file changed while it was read.
        """
        before = fingerprint(dist)
        if before in self._entries:
            return self._entries[before]
        digest = hash_files(dist)
        if fingerprint(dist) != before:
            raise ToolchainInvalid(f"{dist.name}: files in {dist.site} changed while they were read")
        self._entries[before] = digest
        self._changed = True
        return digest

    def save(self) -> None:
        """Write what was added, whole or not at all."""
        if not self._changed:
            return
        text = json.dumps({"schema": _CACHE_SCHEMA, "digests": self._entries}, indent=1, sort_keys=True)
        try:
            write_atomic(self._file, text.encode() + b"\n", 0o600)
        except OSError:
            return
