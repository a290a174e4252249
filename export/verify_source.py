"""Is this source the pinned one? Every way in which it is not, file by file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from kernseal.export import files
from kernseal.export.findings import (
    EmptySource,
    FileAdded,
    FileChanged,
    FileMissing,
    Finding,
    NotASource,
    NotThere,
    SubmoduleMissing,
    WrongVersion,
)
from kernseal.export.source import Source, Upstream, folder_source, wheel_source

VERSION_FILES = ("flashinfer/_build_meta.py", "version.txt")


def verify(path: Path, pin: Upstream, wanted: Mapping[str, str], watched: Mapping[str, str]) -> list[Finding]:
    """Everything about the source at ``path`` that is not as pinned; empty when it is the pinned one.

    Args:
        path: a wheel, an unpacked wheel, or a checkout.
        pin: ``upstream()``.
        wanted: path to SHA-256 that must be there (the union of the ops' source sets).
        watched: path to SHA-256 of the whole content of the watched folders.
    """
    if not path.exists():
        return [NotThere(str(path))]
    if path.is_file():
        return _verify_wheel(path, pin) or _verify_files(wheel_source(path), pin, wanted, watched)
    return _verify_folder(path, pin) or _verify_files(folder_source(path, pin), pin, wanted, watched)


def _verify_wheel(path: Path, pin: Upstream) -> list[Finding]:
    found = files.sha256_file(path)
    if found == pin.sha256:
        return []
    match = re.match(r"flashinfer_python-([^-]+)-", path.name)
    if match and match.group(1) != pin.version:
        return [WrongVersion(path.name, pin.version, match.group(1))]
    return [FileChanged(path.name, pin.sha256, found)]


def _verify_folder(path: Path, pin: Upstream) -> list[Finding]:
    """Is it a FlashInfer at all, and of the pinned version? Never asks git: the folder around may be another repository."""
    if not any(path.iterdir()):
        owner = _submodule_owner(path)
        return [SubmoduleMissing(str(path)) if owner else EmptySource(str(path))]
    if not (path / "flashinfer" / "__init__.py").is_file():
        return [NotASource(str(path))]
    empty = [
        SubmoduleMissing(str(path / name)) for name in _submodules(path) if not _has_entries(path / name)
    ]
    return [*empty, *_version_findings(path, pin)]


def _version_findings(path: Path, pin: Upstream) -> list[Finding]:
    for name in VERSION_FILES:
        file = path / name
        if not file.is_file():
            continue
        text = file.read_text(errors="replace")
        match = re.search(r"__version__\s*=\s*\"([^\"]+)\"", text) or re.match(r"\s*([0-9][^\s]*)\s*$", text)
        if match:
            found = match.group(1)
            return [] if found == pin.version else [WrongVersion(name, pin.version, found)]
    return []


def _submodules(root: Path) -> list[str]:
    modules = root / ".gitmodules"
    if not modules.is_file():
        return []
    return re.findall(r"^\s*path\s*=\s*(\S+)\s*$", modules.read_text(errors="replace"), re.MULTILINE)


def _submodule_owner(path: Path) -> Path | None:
    """The checkout that lists ``path`` as a submodule, if one does."""
    absolute = path.resolve()
    for parent in absolute.parents:
        if str(absolute.relative_to(parent).as_posix()) in _submodules(parent):
            return parent
    return None


def _has_entries(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _verify_files(
    source: Source, pin: Upstream, wanted: Mapping[str, str], watched: Mapping[str, str]
) -> list[Finding]:
    findings: list[Finding] = []
    for name, expected in {**watched, **wanted}.items():
        data = source.read(name)
        if data is None:
            findings.append(FileMissing(name))
        elif (found := files.sha256_bytes(data)) != expected:
            findings.append(FileChanged(name, expected, found))
    for folder in pin.watched:
        findings += [FileAdded(name) for name in source.names(folder) if name not in watched]
    return sorted(findings, key=lambda finding: (finding.path, finding.kind))
