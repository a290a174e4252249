"""The in-toto Statement with SLSA provenance that is a bundle's ``manifest.json``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from . import canonical
from .safe_read import NAME, NAME_RULE
from .strict_json import Cursor, parse_canonical
from .violations import Malformed, WrongType, failed, raise_first

FILE = "manifest.json"
MAX_BYTES = 16 << 20
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "https://kernseal.dev/build/v1"
EVIDENCE = ("ran", "retargeted", "glue", "inspected")
RESERVED = (FILE, "manifest.dsse.json")

SM = re.compile(r"sm_[0-9]{2,3}[af]?")
HOST = re.compile(r"[a-z0-9]+-[a-z0-9_]+")
VERSION = re.compile(
    r"([0-9]{1,6})\.([0-9]{1,6})\.([0-9]{1,6})"
    r"((?:a|b|rc|\.dev|\.post)[0-9]{1,6})?(?:\+[a-z0-9.]{1,64})?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_PLAIN = re.compile(r"[ -~]{1,512}")
_KERNEL = ("op", "variant", "class", "axes", "entry", "file", "code_sha256", "evidence")
KERNEL_COUNTS = ("registers", "spill_bytes", "static_smem", "dynamic_smem")
"""What a manifest counts of a kernel."""
_COUNTS = (*KERNEL_COUNTS, "bytes")
MORE_KERNELS = "more_kernels"
"""Field of a variant with more than one kernel in its image: entry and counts of those after the first."""


@dataclass(frozen=True)
class Kernel:
    """One variant, as the statement records it. ``record`` is the whole entry."""

    op: str
    variant: str
    entry: str
    file: str
    code_sha256: str
    evidence: str
    record: Mapping[str, Any]


@dataclass(frozen=True)
class Statement:
    """What the manifest says. Nothing in here is believed before a root of trust vouches for it.

    Attributes:
        subjects: SHA-256 of every file of the bundle, by path.
        document: the JSON itself.
    """

    sm: str
    retarget: str | None
    host: str
    version: str
    abi_version: int
    subjects: Mapping[str, str]
    kernels: tuple[Kernel, ...]
    commit: str | None
    dirty: bool
    document: Mapping[str, Any]

    @property
    def target(self) -> str:
        """``sm_90a``, or ``sm_120a-on-sm_90a`` for a retargeted bundle, which so never passes as either."""
        return target_name(self.sm, self.retarget)


def target_name(sm: str, retarget: str | None) -> str:
    return f"{sm}-on-{retarget}" if retarget else sm


def parse_statement(data: bytes, name: str = FILE) -> Statement:
    """Read a statement strictly.

    Raises:
        VerificationFailed: Malformed with each bad field, or WrongType for another kind of statement.
    """
    root = parse_canonical(data, name, limit=MAX_BYTES)
    _check_types(root, name)
    top = root.fields("_type", "subject", "predicateType", "predicate")
    predicate = top["predicate"].fields("buildDefinition", "runDetails")
    definition = predicate["buildDefinition"].fields(
        "buildType", "externalParameters", "internalParameters", "resolvedDependencies"
    )
    external = definition["externalParameters"].fields(
        "sm", "retarget", "host", "profile", "variants", more=True
    )
    internal = definition["internalParameters"].fields("abi_version", "kernels", "flags", "git", more=True)
    git = internal["git"].fields("commit", "dirty")
    external["profile"].text(_PLAIN, "a name")
    external["variants"].items()
    internal["flags"].entries()
    _check_dependencies(definition["resolvedDependencies"])
    subjects = _subjects(top["subject"])
    statement = Statement(
        sm=external["sm"].text(SM, "an SM such as sm_120a"),
        retarget=None if external["retarget"].null else external["retarget"].text(SM, "an SM or null"),
        host=external["host"].text(HOST, "a host such as linux-x86_64"),
        version=_version(predicate["runDetails"]),
        abi_version=internal["abi_version"].integer(0, 2**32 - 1),
        subjects=subjects,
        kernels=_kernels(internal["kernels"], subjects),
        commit=None if git["commit"].null else git["commit"].text(_COMMIT, "a git commit or null"),
        dirty=git["dirty"].boolean(),
        document=root.value if isinstance(root.value, dict) else {},
    )
    raise_first(root.sink)
    return statement


def without_git(statement: Statement) -> Statement:
    """The statement less its git commit and dirty state.

    The pins live in the commit that the statement names, so they cannot cover its name.
    """
    document = _document_without_git(statement.document)
    return replace(statement, commit=None, dirty=False, document=document)


def statement_digest(document: Mapping[str, Any]) -> str:
    """What pins record of a statement: SHA-256 of its canonical bytes without git commit and dirty state."""
    return hashlib.sha256(canonical.dumps(_document_without_git(document))).hexdigest()


def version_order(version: str) -> tuple[int, int, int, int]:
    """Sorts ``X.Y.Z`` with its pre-releases before it and its post-releases after.

    Raises:
        ValueError: not such a version.
    """
    match = VERSION.fullmatch(version)
    if match is None:
        raise ValueError(f"{version!a} is not a version X.Y.Z")
    suffix = match[4] or ""
    stage = 0 if not suffix else 1 if suffix.startswith(".post") else -1
    return int(match[1]), int(match[2]), int(match[3]), stage


def _check_types(root: Cursor, name: str) -> None:
    """The three types first: a well-signed document of another kind is not a damaged one of ours."""
    document = root.value
    if not isinstance(document, dict):
        raise failed(Malformed(f"{name}#", "no object", "an in-toto Statement"))
    predicate = document.get("predicate")
    definition = predicate.get("buildDefinition") if isinstance(predicate, dict) else None
    build_type = definition.get("buildType") if isinstance(definition, dict) else None
    wrong = []
    for pointer, found, expected in (
        ("/_type", document.get("_type"), STATEMENT_TYPE),
        ("/predicateType", document.get("predicateType"), PREDICATE_TYPE),
        ("/predicate/buildDefinition/buildType", build_type, BUILD_TYPE),
    ):
        if isinstance(found, str) and found != expected:
            wrong.append(WrongType(f"{name}#{pointer}", ascii(found[:80]), expected))
        elif not isinstance(found, str):
            wrong.append(WrongType(f"{name}#{pointer}", "no type", expected))
    raise_first(wrong)


def _subjects(field: Cursor) -> dict[str, str]:
    subjects: dict[str, str] = {}
    last = ""
    for item in field.items():
        entry = item.fields("name", "digest")
        name = entry["name"].text(NAME, NAME_RULE)
        digest = entry["digest"].fields("sha256")["sha256"].sha256()
        if name and (name in RESERVED or name <= last):
            entry["name"].refuse("names in ascending order, each once, without the manifest and its envelope")
        last = name or last
        subjects[name] = digest
    if not subjects:
        field.refuse("at least one file")
    return subjects


def _kernels(field: Cursor, subjects: Mapping[str, str]) -> tuple[Kernel, ...]:
    kernels = []
    seen: set[tuple[str, str]] = set()
    for item in field.items():
        entry = item.fields(*_KERNEL, *_COUNTS, more=True)
        entry["class"].text(_PLAIN, "a name")
        entry["axes"].entries()
        for count in _COUNTS:
            entry[count].integer(0, 2**48)
        if MORE_KERNELS in item.entries():
            _check_more(item.entries()[MORE_KERNELS])
        kernel = Kernel(
            op=entry["op"].text(_PLAIN, "a name"),
            variant=entry["variant"].text(_PLAIN, "a name"),
            entry=entry["entry"].text(expected="the kernel's symbol"),
            file=entry["file"].text(),
            code_sha256=entry["code_sha256"].sha256(),
            evidence=entry["evidence"].one_of(EVIDENCE),
            record=item.value if isinstance(item.value, dict) else {},
        )
        if kernel.file not in subjects:
            entry["file"].refuse("a file of the bundle")
        if (kernel.op, kernel.variant) in seen:
            entry["variant"].refuse("each variant once")
        seen.add((kernel.op, kernel.variant))
        kernels.append(kernel)
    return tuple(kernels)


def _check_more(field: Cursor) -> None:
    for item in field.items():
        entry = item.fields("entry", *KERNEL_COUNTS)
        entry["entry"].text(expected="the kernel's symbol")
        for count in KERNEL_COUNTS:
            entry[count].integer(0, 2**48)


def _check_dependencies(field: Cursor) -> None:
    for item in field.items():
        entry = item.fields("digest", more=True)
        for digest in entry["digest"].entries().values():
            digest.text(_PLAIN, "a digest")


def _version(field: Cursor) -> str:
    builder = field.fields("builder", more=True)["builder"].fields("id", "version", more=True)
    builder["id"].text(_PLAIN, "a URI")
    return builder["version"].fields("kernseal", more=True)["kernseal"].text(VERSION, "a version X.Y.Z")


def _document_without_git(document: Mapping[str, Any]) -> dict[str, Any]:
    """What is below other names is shared with ``document``."""
    predicate = document["predicate"]
    definition = predicate["buildDefinition"]
    internal = {**definition["internalParameters"], "git": {"commit": None, "dirty": False}}
    definition = {**definition, "internalParameters": internal}
    return {**document, "predicate": {**predicate, "buildDefinition": definition}}
