"""What a report says of one bundle: who vouches for it, its kernels, its sizes, and how it differs from the pins."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from kernseal.export import compressed, limits, occupancy, report_changes
from kernseal.export.occupancy import Occupancy
from kernseal.export.report_changes import Changes, Locks
from kernseal.loader import envelope
from kernseal.loader import statement as intoto
from kernseal.loader.errors import InvalidArgument, Malformed
from kernseal.loader.policy import Policy
from kernseal.loader.safe_read import MAX_FILE_BYTES, directory, printable, read_once
from kernseal.loader.statement import KERNEL_COUNTS, MORE_KERNELS, Statement, parse_statement
from kernseal.loader.verify import verify_report
from kernseal.loader.violations import Mismatch, VerificationFailed, failed

OWN_FILES = (intoto.FILE, envelope.FILE)
CODE = "headers, pins"
FOLDERS = {"cubin": "cubin", "ptx": "PTX", "licenses": "licences"}
ENDINGS = {".so": "library", ".h": CODE, ".hpp": CODE, ".rs": CODE}
OTHER = "manifest, SBOM, packaging"
KINDS = tuple(dict.fromkeys((*FOLDERS.values(), *ENDINGS.values(), OTHER)))


@dataclass(frozen=True)
class Kernel:
    """One kernel of an image; ``fits`` is None where the image does not say how large a CTA is."""

    entry: str
    registers: int
    spill_bytes: int
    static_smem: int
    dynamic_smem: int
    fits: Occupancy | None


@dataclass(frozen=True)
class Variant:
    """One variant, as the manifest records it."""

    op: str
    name: str
    bytes: int
    evidence: str
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True)
class Size:
    """Files of one kind; ``compressed`` is what a push sends of them."""

    kind: str
    files: int
    bytes: int
    compressed: int


@dataclass(frozen=True)
class Reported:
    """One bundle.

    Attributes:
        name: its folder.
        verdict: ``verify_report`` of it: the only thing that may be said about trust.
        statement: what its manifest says, vouched for only where the verdict accepts it; None where it cannot be read.
        changes: None where its target has no pins.
    """

    name: str
    verdict: Mapping[str, Any]
    statement: Statement | None
    variants: tuple[Variant, ...]
    sizes: tuple[Size, ...]
    changes: Changes | None

    @property
    def accepted(self) -> bool:
        return bool(self.verdict["accepted"])

    @property
    def target(self) -> str:
        return self.statement.target if self.statement else ""


def find(folder: Path) -> list[Path]:
    """``folder`` if it is a bundle, else the bundles in it, ``sm_90a`` before ``sm_100a``.

    Raises:
        InvalidArgument: there is none.
    """
    if not folder.is_dir():
        raise InvalidArgument(f"{folder}: not a folder; give a bundle's, or one with bundles in it")
    if _is_bundle(folder):
        return [folder]
    inside = [path for path in folder.iterdir() if not path.name.startswith(".") and _is_bundle(path)]
    if not inside:
        raise InvalidArgument(
            f"{folder}: no bundle in it; supported is a folder with {intoto.FILE}, or one with such"
        )
    return sorted(inside, key=lambda path: _natural(path.name))


def folder_name(path: Path) -> str:
    """What a folder is called, whatever path led to it, in letters that can be shown."""
    return printable(path.resolve().name or "/")


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(digits or 0), text) for text, digits in re.findall(r"([^0-9]*)([0-9]*)", name)]


def _is_bundle(path: Path) -> bool:
    return any((path / name).exists() for name in OWN_FILES)


def read(path: Path, policy: Policy, locks: Locks, now: datetime | None = None) -> Reported:
    """Verify a bundle, and read what its manifest says whether it was accepted or not.

    Raises:
        VerificationFailed: an accepted bundle changed before it was read.
    """
    verdict = verify_report(path, policy=policy, now=now)
    name = folder_name(path)
    try:
        with directory(path) as root:
            sha256 = verdict.get("manifest_sha256")
            manifest = _read_verified(root, intoto.FILE, sha256, intoto.MAX_BYTES)
            statement = parse_statement(manifest)
            variants, sizes = _contents(root, statement, bool(verdict["accepted"]))
    except VerificationFailed:
        if verdict["accepted"]:
            raise
        return Reported(name, verdict, None, (), (), None)
    return Reported(name, verdict, statement, variants, sizes, report_changes.since(statement, locks))


def _read_verified(root: int, name: str, sha256: str | None, limit: int = MAX_FILE_BYTES) -> bytes:
    """A file's bytes, which must have ``sha256`` unless it is None: nobody vouches for them."""
    found = read_once(root, name, limit=limit, keep=True)
    if sha256 is not None and found.sha256 != sha256:
        raise failed(Mismatch(name, f"sha256 {found.sha256}", f"sha256 {sha256}, as it was verified"))
    return found.data or b""


def _contents(
    root: int, statement: Statement, accepted: bool
) -> tuple[tuple[Variant, ...], tuple[Size, ...]]:
    """Variants and sizes, in one pass over the files; those that a refused bundle lacks count nothing."""
    recorded: dict[str, list[intoto.Kernel]] = {}
    for kernel in statement.kernels:
        recorded.setdefault(kernel.file, []).append(kernel)
    sums: dict[str, list[int]] = {}
    found: dict[tuple[str, str], Variant] = {}
    for name in (*statement.subjects, *OWN_FILES):
        try:
            data = _read_verified(root, name, statement.subjects.get(name) if accepted else None)
        except VerificationFailed:
            if accepted:
                raise
            data = b""
        else:
            total = sums.setdefault(kind(name), [0, 0, 0])
            for index, more in enumerate((1, len(data), len(compressed.pack(data)))):
                total[index] += more
        for kernel in recorded.get(name, ()):
            found[kernel.op, kernel.variant] = _variant(statement, kernel, data)
    sizes = tuple(Size(of, *sums[of]) for of in KINDS if of in sums)
    return tuple(found[key] for key in sorted(found)), sizes


def kind(name: str) -> str:
    """What a file of a bundle is, for people."""
    top = name.split("/", 1)[0]
    if top in FOLDERS and top != name:
        return FOLDERS[top]
    return ENDINGS.get(os.path.splitext(name)[1], OTHER)


def _variant(statement: Statement, recorded: intoto.Kernel, cubin: bytes) -> Variant:
    arch, record = statement.retarget or statement.sm, recorded.record
    kernels = tuple(
        Kernel(one["entry"], **{name: one[name] for name in KERNEL_COUNTS}, fits=_occupancy(arch, one, cubin))
        for one in (record, *record.get(MORE_KERNELS, ()))
    )
    return Variant(recorded.op, recorded.variant, record["bytes"], recorded.evidence, kernels)


def _occupancy(arch: str, record: Mapping[str, Any], cubin: bytes) -> Occupancy | None:
    """None also for what is no cubin and for an SM that is not ours: a report shows those bundles, too."""
    if arch not in limits._table():
        return None
    try:
        return occupancy.of_kernel(arch, record, cubin)
    except Malformed:
        return None
