"""``verify_bundle``: from a folder of bytes to a ``VerifiedBundle``, or to everything that is wrong with it.

The order is the point. Signatures are checked over raw bytes before the statement is parsed; every file is
read once and hashed in that read; what a caller gets are those bytes: a file swapped later changes nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from . import envelope as dsse
from . import statement as intoto
from .envelope import SignedPayload, open_envelope
from .errors import InvalidArgument
from .policy import Policy
from .safe_read import directory, list_tree, printable, read_all, read_once
from .statement import Statement, parse_statement, version_order, without_git
from .violations import (
    AbiMismatch,
    Mismatch,
    Revoked,
    Unknown,
    UntrustedKey,
    VerificationFailed,
    Violation,
    WrongSm,
    gravest,
    ordered,
    raise_first,
)


class _Everything:
    def __contains__(self, name: object) -> bool:
        return True


EVERYTHING: Container[str] = _Everything()


@dataclass(frozen=True)
class VerifiedBundle:
    """A bundle that a root of trust vouches for.

    Attributes:
        path: where it was; nothing needs to be read from there again for the files that were kept.
        target: ``sm_90a``, or ``sm_120a-on-sm_90a`` for a retargeted validation bundle.
        statement: the manifest as far as it is vouched for. Pins cannot cover the git state (they live in the
            commit it names): without trusted signatures, ``commit`` is None and ``dirty`` is False.
        manifest_sha256: of the manifest's bytes.
        trusted_by: what vouched: ``pins:<lock file>`` and/or ``key:<name>``.
        files: SHA-256 of every file, by path.
    """

    path: str
    target: str
    statement: Statement
    manifest_sha256: str
    trusted_by: tuple[str, ...]
    files: Mapping[str, str]
    _kept: Mapping[str, bytes] = field(repr=False)

    def read(self, name: str) -> bytes:
        """The verified bytes of a file named in ``keep``.

        Raises:
            InvalidArgument: it was not kept.
        """
        if name not in self._kept:
            raise InvalidArgument(f"name {name!r}: its bytes were not kept; kept are {sorted(self._kept)}")
        return self._kept[name]


@dataclass(frozen=True)
class _Contents:
    """The files of a bundle as they were when each was read, once."""

    hashes: Mapping[str, str]
    kept: Mapping[str, bytes]
    violations: tuple[Violation, ...]


def verify_bundle(
    path: str | os.PathLike[str],
    *,
    policy: Policy,
    sm: str | None = None,
    abi_version: int | None = None,
    keep: Container[str] = (),
    now: datetime | None = None,
) -> VerifiedBundle:
    """Check a bundle against ``policy``, offline and without sources.

    Args:
        path: the bundle's folder; not a link.
        sm: the target it must be for (``VerifiedBundle.target``); any when None.
        abi_version: the C ABI it must have; any when None.
        keep: names of the files whose verified bytes the result holds; ``EVERYTHING`` for all.
        now: the time at which keys must be valid; the clock's when None.

    Raises:
        VerificationFailed: with every violation, sorted.
    """
    moment = now or datetime.now(timezone.utc)
    with directory(path) as root:
        manifest, signed = _open(root)
        statement = parse_statement(manifest)
        contents = _read_files(root, statement, keep)
    trusted_by, distrust = _judge(policy, statement, signed, contents.hashes, moment)
    raise_first(
        [
            *contents.violations,
            *distrust,
            *_compare_with_request(statement, sm, abi_version),
            *_compare_with_policy(policy, statement, manifest),
        ]
    )
    by_key = any(root_of_trust.startswith("key:") for root_of_trust in trusted_by)
    return VerifiedBundle(
        path=os.fspath(path),
        target=statement.target,
        statement=statement if by_key else without_git(statement),
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
        trusted_by=trusted_by,
        files=contents.hashes,
        _kept=contents.kept,
    )


def verify_report(
    path: str | os.PathLike[str],
    *,
    policy: Policy,
    sm: str | None = None,
    abi_version: int | None = None,
    now: datetime | None = None,
) -> dict[str, Any]:
    """``verify_bundle`` as plain data for a command line: for a bad bundle an ``exit_code``, no exception."""
    report: dict[str, Any] = {"bundle": printable(os.fspath(path)), "accepted": False}
    report |= {"trusted_by": [], "violations": []}
    try:
        bundle = verify_bundle(path, policy=policy, sm=sm, abi_version=abi_version, now=now)
    except VerificationFailed as error:
        worst = gravest(error.violations)
        return {**report, "status": worst.status, "exit_code": error.exit_code, "violations": error.to_json()}
    return {
        **report,
        "accepted": True,
        "status": "ok",
        "exit_code": 0,
        "trusted_by": list(bundle.trusted_by),
        "target": bundle.target,
        "host": bundle.statement.host,
        "version": bundle.statement.version,
        "abi_version": bundle.statement.abi_version,
        "manifest_sha256": bundle.manifest_sha256,
        "git": {"commit": bundle.statement.commit, "dirty": bundle.statement.dirty},
        "variants": len(bundle.statement.kernels),
        "files": len(bundle.files),
    }


def _open(root: int) -> tuple[bytes, SignedPayload]:
    """The manifest's bytes, over which every signature in the envelope is valid."""
    violations: list[Violation] = []
    texts: dict[str, bytes] = {}
    for name, limit in ((intoto.FILE, intoto.MAX_BYTES), (dsse.FILE, dsse.MAX_BYTES)):
        try:
            texts[name] = read_all(root, name, limit=limit)
        except VerificationFailed as error:
            violations += error.violations
    raise_first(violations)
    manifest, signed = texts[intoto.FILE], open_envelope(texts[dsse.FILE])
    if signed.payload != manifest:
        found, expected = (hashlib.sha256(data).hexdigest() for data in (manifest, signed.payload))
        payload = f"sha256 {expected}, the payload of {dsse.FILE}"
        raise_first([Mismatch(intoto.FILE, f"sha256 {found}", payload)])
    return manifest, signed


def _read_files(root: int, statement: Statement, keep: Container[str]) -> _Contents:
    """Hash every file the statement names, and note whatever else is there."""
    tree = list_tree(root)
    violations = list(tree.violations)
    named = {name[:end] for name in statement.subjects for end, mark in enumerate(name) if mark == "/"}
    for name in tree.files - statement.subjects.keys() - {intoto.FILE, dsse.FILE}:
        violations.append(Unknown(printable(name), "a file", "only files that the manifest names"))
    for name in tree.folders - named:
        violations.append(Unknown(printable(name) + "/", "a folder", "only folders of such files"))
    hashes: dict[str, str] = {}
    kept: dict[str, bytes] = {}
    for name, expected in statement.subjects.items():
        try:
            file = read_once(root, name, keep=name in keep)
        except VerificationFailed as error:
            violations += error.violations
            continue
        hashes[name] = file.sha256
        if file.sha256 != expected:
            violations.append(Mismatch(name, f"sha256 {file.sha256}", f"sha256 {expected} of {intoto.FILE}"))
        elif file.data is not None:
            kept[name] = file.data
    return _Contents(hashes, kept, ordered(violations))


def _judge(
    policy: Policy, statement: Statement, signed: SignedPayload, hashes: Mapping[str, str], now: datetime
) -> tuple[tuple[str, ...], list[Violation]]:
    """Which roots vouch for the bundle, or (nobody and) why that is not enough for the policy."""
    signers, refusals = _judge_signatures(policy, signed, now)
    lock = policy.pins_for(statement)
    differences = lock.compare(statement, hashes) if lock else [_nothing_pinned(policy, statement)]
    by_pins = (f"pins:{lock.name}",) if lock and not differences else ()
    by_keys = tuple(f"key:{name}" for name in signers)
    if (by_pins and by_keys) or (by_keys and not policy.both):
        return (*by_pins, *by_keys), []
    if policy.both:
        return (), [*differences, *refusals]
    # A revocation is a warning about everything its key signed: pins alone do not silence it.
    revocations: list[Violation] = [violation for violation in refusals if isinstance(violation, Revoked)]
    if by_pins:
        return by_pins, revocations
    # Where only pins could have vouched, that nobody trusted has signed is no news.
    return (), [*differences, *(revocations if lock and not policy.keys.trusted else refusals)]


def _judge_signatures(
    policy: Policy, signed: SignedPayload, now: datetime
) -> tuple[tuple[str, ...], list[Violation]]:
    """Names of the trusted signers if they reach the threshold, else nobody and why."""
    signers: list[str] = []
    refusals: list[Violation] = []
    for index, keyid in enumerate(signed.keyids):
        where = f"{dsse.FILE}#/signatures/{index}"
        key = policy.keys.keys.get(keyid)
        refusal = key.refusal(where, now) if key else None
        if refusal:
            refusals.append(refusal)
        elif keyid in policy.keys.trusted and key:
            signers.append(key.name)
        else:
            refusals.append(UntrustedKey(where, f"key {keyid}", _trusted_names(policy)))
    if len(signers) >= policy.keys.threshold:
        return tuple(sorted(signers)), []
    found = f"{len(signers)} trusted signatures"
    refusals.append(UntrustedKey(dsse.FILE, found, f"{policy.keys.threshold} by {_trusted_names(policy)}"))
    return (), refusals


def _trusted_names(policy: Policy) -> str:
    names = sorted(policy.keys.keys[keyid].name for keyid in policy.keys.trusted)
    return "one of the keys " + ", ".join(names) if names else "a trusted key (the policy has none)"


def _nothing_pinned(policy: Policy, statement: Statement) -> Violation:
    pinned = ", ".join(sorted(" ".join(lock.target) for lock in policy.all_pins())) or "none"
    found = f"no pins for {statement.target} {statement.host}"
    return UntrustedKey(intoto.FILE, found, f"one of the pinned targets: {pinned}")


def _compare_with_request(statement: Statement, sm: str | None, abi_version: int | None) -> list[Violation]:
    violations: list[Violation] = []
    if sm is not None and sm != statement.target:
        violations.append(WrongSm(intoto.FILE, statement.target, sm))
    if abi_version is not None and abi_version != statement.abi_version:
        violations.append(AbiMismatch(intoto.FILE, f"ABI {statement.abi_version}", f"ABI {abi_version}"))
    return violations


def _compare_with_policy(policy: Policy, statement: Statement, manifest: bytes) -> list[Violation]:
    violations: list[Violation] = []
    minimum = policy.min_version
    if minimum is not None and version_order(statement.version) < version_order(minimum):
        found = f"version {statement.version}"
        violations.append(Mismatch(intoto.FILE, found, f"version {minimum} or later"))
    digest = hashlib.sha256(manifest).hexdigest()
    if policy.manifest_sha256 is not None and digest != policy.manifest_sha256:
        violations.append(Mismatch(intoto.FILE, f"sha256 {digest}", f"sha256 {policy.manifest_sha256}"))
    return violations
