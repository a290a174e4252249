"""The pinned upstream source: find it, check it file by file, and lay out exactly the files that an op's build reads.

A source is the pinned wheel, an unpacked wheel, or a checkout (``--source``). Whatever ``flashinfer`` is installed in
site-packages plays no part: builds import from the tree made here, which holds the op's source set and nothing else.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kernseal.abi import yaml_text
from kernseal.export import cache, files, paths
from kernseal.export.findings import FileChanged, FileMissing
from kernseal.loader.errors import SourceInvalid


@dataclass(frozen=True)
class Upstream:
    """``kernels/upstream.yaml``."""

    name: str
    version: str
    wheel: str
    sha256: str
    purl: str
    repository: str
    commit: str
    licence: str
    checkout_paths: Mapping[str, str]
    watched: tuple[str, ...]
    licences: Mapping[str, str]


def upstream() -> Upstream:
    data = yaml_text.load((paths.kernels() / "upstream.yaml").read_text())
    data["watched"] = tuple(data["watched"])
    return Upstream(**data)


def source_set(op_folder: Path) -> dict[str, str]:
    """Path to SHA-256 of every upstream file that the op's build reads."""
    data: dict[str, str] = json.loads((op_folder / "source_set.json").read_text())
    return data


def listing() -> dict[str, str]:
    """Path to SHA-256 of everything in the watched folders."""
    data: dict[str, str] = json.loads((paths.kernels() / "upstream_listing.json").read_text())
    return data


@dataclass(frozen=True)
class Source:
    """Readable upstream files, by their path in the wheel.

    Attributes:
        label: how messages call it.
        read: bytes of one file, or None.
        names: every path under a folder.
    """

    label: str
    read: Callable[[str], bytes | None]
    names: Callable[[str], list[str]]


def wheel_source(path: Path) -> Source:
    archive = zipfile.ZipFile(path)
    known = set(archive.namelist())

    def names(folder: str) -> list[str]:
        return sorted(name for name in known if name.startswith(folder + "/") and not name.endswith("/"))

    return Source(path.name, lambda name: archive.read(name) if name in known else None, names)


def folder_source(root: Path, pin: Upstream) -> Source:
    """An unpacked wheel or a checkout."""
    checkout = not (root / "flashinfer" / "data").is_dir()

    def real(name: str) -> Path:
        if checkout:
            for there, here in pin.checkout_paths.items():
                if name.startswith(there + "/"):
                    return root / here / name[len(there) + 1 :]
        return root / name

    def read(name: str) -> bytes | None:
        try:
            return real(name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def names(folder: str) -> list[str]:
        top = real(folder + "/x").parent
        found = (path for path in top.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return sorted(str(PurePosixPath(folder) / path.relative_to(top).as_posix()) for path in found)

    return Source(str(root), read, names)


def fetch_wheel(pin: Upstream, note: Callable[[str], None] = lambda _: None) -> Path:
    """The pinned wheel in the cache, downloaded by pip (which checks the SHA-256) when it is not there.

    Raises:
        SourceInvalid: pip could not get a file with the pinned hash.
    """
    target = cache.wheel_folder(pin.sha256) / pin.wheel
    if target.is_file():
        return target
    note(f"fetching {pin.wheel}")
    with files.staged_folder(target.parent) as stage:
        lock = stage / "requirements.txt"
        lock.write_text(f"{pin.name}=={pin.version} --hash=sha256:{pin.sha256}\n")
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        command += ["--require-hashes", "--only-binary", ":all:", "--dest", str(stage), "-r", str(lock)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lock.unlink()
        if done.returncode or not (stage / pin.wheel).is_file():
            raise SourceInvalid(f"{pin.wheel}: pip could not fetch it: {done.stderr.strip()[-600:]}")
    return target


def open_source(
    given: Path | None, pin: Upstream, note: Callable[[str], None] = lambda _: None
) -> tuple[Source, Path]:
    """The source a build reads from: ``given``, or the pinned wheel."""
    path = given or fetch_wheel(pin, note)
    return (wheel_source(path) if path.is_file() else folder_source(path, pin)), path


def read_set(source: Source, wanted: Mapping[str, str]) -> dict[str, bytes]:
    """Bytes of every file of a source set, each checked.

    Raises:
        SourceInvalid: a file is missing or differs.
    """
    got: dict[str, bytes] = {}
    for name, expected in wanted.items():
        data = source.read(name)
        if data is None:
            raise SourceInvalid(f"source {source.label}: {FileMissing(name)}")
        found = files.sha256_bytes(data)
        if found != expected:
            raise SourceInvalid(f"source {source.label}: {FileChanged(name, expected, found)}")
        got[name] = data
    return got


@functools.cache
def all_wanted() -> dict[str, str]:
    """The union of the ops' source sets and the licences."""
    wanted: dict[str, str] = {}
    for path in sorted(paths.kernels().glob("*/source_set.json")):
        wanted.update(source_set(path.parent))
    return wanted
