"""A verified bundle as a wheel: data only, nothing in it is ever imported or run.

The same bundle gives the same files and the same RECORD of their hashes; with the same zlib, the same wheel.
"""

from __future__ import annotations

import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipInfo

from packaging.utils import canonicalize_name
from packaging.version import Version
from wheel.wheelfile import WheelFile

from kernseal.export import files, whole
from kernseal.export.compressed import Sizes
from kernseal.loader.errors import Unsupported
from kernseal.loader.installed import FOLDER, GROUP
from kernseal.loader.policy import Policy
from kernseal.loader.statement import Statement

PLATFORMS = {"linux-x86_64": "manylinux_2_17_x86_64", "linux-aarch64": "manylinux_2_17_aarch64"}
"""As old a glibc as the library is linked for (host.ZIG_TARGETS)."""
EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Wheel:
    """A wheel that was written; ``sizes.compressed`` is its own."""

    path: Path
    sha256: str
    sizes: Sizes


def write(bundle: Path, out: Path, policy: Policy) -> Wheel:
    """Pack a bundle that ``policy`` accepts.

    Args:
        out: folder for the wheel; one of the same name in it is replaced.

    Raises:
        VerificationFailed: the policy does not accept the bundle.
        Unsupported: no wheel tag says what its host is.
    """
    found = whole.read(bundle, policy)
    statement = found.verified.statement
    name = file_name(statement)
    with tempfile.TemporaryDirectory(prefix="kernseal-wheel-") as folder:
        path = Path(folder) / name
        _pack(path, statement, found.files)
        data = path.read_bytes()
    files.write_atomic(out / name, data)
    sizes = Sizes(len(found.files), sum(map(len, found.files.values())), len(data))
    return Wheel(out / name, files.sha256_bytes(data), sizes)


def project(statement: Statement) -> str:
    """``kernseal-bundle-sm120a``: the distribution's name."""
    return canonicalize_name(f"kernseal-bundle-{statement.target.replace('sm_', 'sm')}")


def package(statement: Statement) -> str:
    """``kernseal_bundle_sm120a``: the folder in site-packages."""
    return project(statement).replace("-", "_")


def tag(statement: Statement) -> str:
    """Any Python 3, no ABI of its own, the platform of the library.

    Raises:
        Unsupported: a host without such a platform.
    """
    if statement.host not in PLATFORMS:
        raise Unsupported(f"host {statement.host!r}: supported are {', '.join(sorted(PLATFORMS))}")
    return f"py3-none-{PLATFORMS[statement.host]}"


def file_name(statement: Statement) -> str:
    return f"{package(statement)}-{Version(statement.version)}-{tag(statement)}.whl"


def _pack(path: Path, statement: Statement, contents: dict[str, bytes]) -> None:
    with _Reproducible(path, "w", ZIP_DEFLATED) as archive:
        for name in sorted(contents):
            archive.add(f"{package(statement)}/{FOLDER}/{name}", contents[name], whole.mode(name))
        licences = sorted(name for name in contents if name.startswith("licenses/"))
        for name in licences:
            archive.add(f"{archive.dist_info_path}/{name}", contents[name])
        info = {
            "METADATA": _metadata(statement, [name.removeprefix("licenses/") for name in licences]),
            "WHEEL": _wheel(statement),
            "entry_points.txt": f"[{GROUP}]\n{statement.target}-{statement.host} = {package(statement)}\n",
        }
        for name, text in info.items():
            archive.add(f"{archive.dist_info_path}/{name}", text.encode())


def _metadata(statement: Statement, licences: list[str]) -> str:
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {project(statement)}",
        f"Version: {Version(statement.version)}",
        f"Summary: Sealed GPU kernels of kernseal for {statement.target} on {statement.host}.",
        "License-Expression: Apache-2.0",
        *(f"License-File: {name}" for name in licences),
        "Requires-Python: >=3.10",
        "",
        f"kernseal.loader.installed.find_bundle({statement.target!r}) is its folder; open_bundle verifies it.",
        "",
    ]
    return "\n".join(lines)


def _wheel(statement: Statement) -> str:
    return "Wheel-Version: 1.0\nGenerator: kernseal\nRoot-Is-Purelib: false\n" + f"Tag: {tag(statement)}\n"


class _Reproducible(WheelFile):  # type: ignore[misc,unused-ignore]
    """One time for every entry. How each is compressed is zlib's, and nothing that RECORD hashes."""

    def add(self, name: str, data: bytes, mode: int = 0o644) -> None:
        info = ZipInfo(name, EPOCH)
        info.external_attr = (mode | stat.S_IFREG) << 16
        info.create_system = 3
        info.compress_type = self.compression
        self.writestr(info, data)

    def writestr(self, name: Any, data: Any, compress_type: int | None = None) -> None:
        if isinstance(name, str):  # RECORD, which the base class writes
            self.add(name, data.encode())
        else:
            super().writestr(name, data, compress_type)
