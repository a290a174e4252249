"""Pins (``manifests/<target>.lock.json``): the hashes of a release, reviewed in git; a root of trust."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .safe_read import NAME, NAME_RULE, directory, list_tree, read_all, read_path
from .statement import HOST, RESERVED, SM, Statement, statement_digest, target_name
from .strict_json import SHA256, Cursor, parse
from .violations import (
    Malformed,
    Mismatch,
    Missing,
    Unknown,
    VerificationFailed,
    Violation,
    failed,
    raise_first,
)

SUFFIX = ".lock.json"
MAX_BYTES = 16 << 20


@dataclass(frozen=True)
class Pins:
    """The pins of one target.

    Attributes:
        name: the file they came from.
        statement: ``statement_digest`` of the manifest, so that no field of it but the git state is free.
        files: SHA-256 of every file of the bundle but the manifest and its envelope.
    """

    name: str
    sm: str
    retarget: str | None
    host: str
    statement: str
    files: Mapping[str, str]

    @property
    def target(self) -> tuple[str, str]:
        return target_name(self.sm, self.retarget), self.host

    def compare(self, statement: Statement, found: Mapping[str, str]) -> list[Violation]:
        """Every way in which a bundle is not the pinned one; ``found`` has the hashes of its files."""
        violations: list[Violation] = []
        for path in sorted(self.files.keys() | found.keys()):
            pinned, actual = self.files.get(path), found.get(path)
            if pinned is None:
                violations.append(Unknown(path, "a file", f"no such file in {self.name}"))
            elif actual is None:
                violations.append(Missing(path, "nothing", f"sha256 {pinned} of {self.name}"))
            elif actual != pinned:
                violations.append(Mismatch(path, f"sha256 {actual}", f"sha256 {pinned} of {self.name}"))
        digest = statement_digest(statement.document)
        if digest != self.statement:
            expected = f"statement {self.statement} of {self.name}"
            violations.append(Mismatch("manifest.json", f"statement {digest}", expected))
        return violations


def parse_pins(data: bytes, name: str) -> Pins:
    """Read one lock file.

    Raises:
        VerificationFailed: Malformed.
    """
    root = parse(data, name, limit=MAX_BYTES)
    fields = root.fields("schema", "sm", "retarget", "host", "inputs", "statement", "variants", "files")
    fields["schema"].constant(1)
    fields["inputs"].entries()
    pins = Pins(
        name=name,
        sm=fields["sm"].text(SM, "an SM such as sm_120a"),
        retarget=None if fields["retarget"].null else fields["retarget"].text(SM, "an SM or null"),
        host=fields["host"].text(HOST, "a host such as linux-x86_64"),
        statement=fields["statement"].sha256(),
        files=_files(fields["files"]),
    )
    _check_variants(fields["variants"], pins.files)
    raise_first(root.sink)
    return pins


def read_pins(path: Path) -> tuple[Pins, ...]:
    """The pins in a lock file, or in every ``*.lock.json`` of a folder.

    Raises:
        VerificationFailed: Malformed (also when two files pin the same target), Missing or IoError.
    """
    if not path.is_dir():
        return (parse_pins(read_path(path, limit=MAX_BYTES), path.name),)
    with directory(path, follow=True) as root:
        tree = list_tree(root)
        raise_first(tree.violations)
        names = sorted(name for name in tree.files if name.endswith(SUFFIX) and "/" not in name)
        texts = {name: read_all(root, name, limit=MAX_BYTES) for name in names}
    pins: list[Pins] = []
    violations: list[Violation] = []
    for name, text in texts.items():
        try:
            pins.append(parse_pins(text, name))
        except VerificationFailed as error:
            violations += error.violations
    raise_first(violations)
    return one_per_target(pins)


def read_pins_of(folder: Path, target: tuple[str, str]) -> Pins | None:
    """The pins of one target in a folder, or None.

    Only the file that is named after the target is read, where there is one; reading all of them takes longer than
    everything else that opening a bundle does.

    Raises:
        VerificationFailed: as ``read_pins``.
    """
    for name in (target[0], "-".join(target)):
        path = folder / f"{name}{SUFFIX}"
        if path.is_file():
            (found,) = read_pins(path)
            if found.target == target:
                return found
    return next((lock for lock in read_pins(folder) if lock.target == target), None)


def one_per_target(pins: Sequence[Pins]) -> tuple[Pins, ...]:
    """``pins`` unchanged.

    Raises:
        VerificationFailed: Malformed, when two pin one target: no order of files may decide which counts.
    """
    seen: dict[tuple[str, str], str] = {}
    for lock in pins:
        if lock.target in seen:
            found = f"the target of {seen[lock.target]}, {' '.join(lock.target)}"
            raise failed(Malformed(lock.name, found, "one lock file for each target"))
        seen[lock.target] = lock.name
    return tuple(pins)


def _files(field: Cursor) -> dict[str, str]:
    files: dict[str, str] = {}
    for name, digest in field.entries().items():
        if not NAME.fullmatch(name) or name in RESERVED:
            expected = NAME_RULE + ", not the manifest or its envelope"
            digest.sink.append(Malformed(digest.path, ascii(name[:80]), expected))
        files[name] = digest.sha256()
    return files


def _check_variants(field: Cursor, files: Mapping[str, str]) -> None:
    """A variant's own hashes must be those of its files: a lock cannot say two things about one cubin."""
    for name, item in field.entries().items():
        entry = item.fields("cubin", "ptx", "code", "host", "inputs")
        for kind in ("cubin", "ptx"):
            if entry[kind].sha256() and files.get(f"{kind}/{name}.{kind}") != entry[kind].value:
                entry[kind].refuse(f"the hash that files gives for {kind}/{name}.{kind}")
        entry["code"].sha256()
        if not entry["host"].null:
            entry["host"].text(SHA256, "64 lower-case hex digits or null")
        for group in entry["inputs"].entries().values():
            group.sha256()
