"""Public keys (``manifests/keys/<name>.json``) and which are trusted (``manifests/keys/policy.json``)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from . import canonical
from .envelope import KEYID
from .safe_read import directory, list_tree, read_all, read_path
from .strict_json import Cursor, parse
from .violations import Expired, Malformed, Revoked, VerificationFailed, Violation, failed, raise_first

POLICY_FILE = "policy.json"
MAX_BYTES = 64 << 10

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")
_TIME_RULE = "a time such as 2030-01-31T00:00:00Z"
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_FOREVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=timezone.utc)


@dataclass(frozen=True)
class PublicKey:
    """One signer. ``keyid`` is the Ed25519 public key in hex.

    Attributes:
        revoked: when and why it stopped being trusted, for everything it ever signed; None while it is good.
    """

    name: str
    keyid: str
    valid_from: datetime = _EPOCH
    valid_until: datetime = _FOREVER
    revoked: tuple[datetime, str] | None = None

    def refusal(self, path: str, now: datetime) -> Violation | None:
        """Why a signature by this key does not count at ``now``, or None."""
        if self.revoked is not None:
            at, reason = self.revoked
            found = f"key {self.name}, revoked {write_time(at)}: {reason}"
            return Revoked(path, found, "a key that is not revoked")
        if not self.valid_from <= now < self.valid_until:
            window = f"{write_time(self.valid_from)} to {write_time(self.valid_until)}"
            return Expired(path, f"key {self.name}, valid {window}", f"a key valid at {write_time(now)}")
        return None


@dataclass(frozen=True)
class KeySet:
    """``threshold`` of the keys in ``trusted`` must sign; ``keys`` also holds those that are merely known."""

    keys: Mapping[str, PublicKey]
    trusted: frozenset[str]
    threshold: int


def parse_key(data: bytes, name: str) -> PublicKey:
    """Read one public key file.

    Raises:
        VerificationFailed: Malformed.
    """
    root = parse(data, name, limit=MAX_BYTES)
    fields = root.fields(
        "schema", "name", "keyid", "scheme", "public", "valid_from", "valid_until", "revoked"
    )
    fields["schema"].constant(1)
    fields["scheme"].constant("ed25519")
    key = PublicKey(
        name=fields["name"].text(NAME, "a lower-case name"),
        keyid=fields["keyid"].text(KEYID, "an Ed25519 public key as 64 lower-case hex digits"),
        valid_from=_time(fields["valid_from"]),
        valid_until=_time(fields["valid_until"]),
        revoked=_revocation(fields["revoked"]),
    )
    if key.keyid and fields["public"].text() != public_pem(key.keyid):
        fields["public"].refuse("the PEM of the key that keyid is")
    if key.valid_until < key.valid_from:
        fields["valid_until"].refuse("a time after valid_from")
    raise_first(root.sink)
    return key


def write_key(key: PublicKey) -> bytes:
    """The public key file that ``parse_key`` reads."""
    revoked = None if key.revoked is None else {"at": write_time(key.revoked[0]), "reason": key.revoked[1]}
    return canonical.dumps(
        {
            "schema": 1,
            "name": key.name,
            "keyid": key.keyid,
            "scheme": "ed25519",
            "public": public_pem(key.keyid),
            "valid_from": write_time(key.valid_from),
            "valid_until": write_time(key.valid_until),
            "revoked": revoked,
        }
    )


def read_key(path: Path) -> PublicKey:
    return parse_key(read_path(path, limit=MAX_BYTES), path.name)


def key_set(keys: Sequence[PublicKey], threshold: int) -> KeySet:
    """All of ``keys`` trusted.

    Raises:
        VerificationFailed: Malformed, when two of them are the same key: one signer must not count twice.
    """
    return KeySet(_by_id(keys), frozenset(key.keyid for key in keys), threshold)


def read_key_folder(folder: Path) -> KeySet:
    """A folder of key files with a ``policy.json``: which of them are trusted, and how many must sign.

    Raises:
        VerificationFailed: Malformed, Missing or IoError; every bad file of the folder is named.
    """
    violations: list[Violation] = []
    keys: list[PublicKey] = []
    with directory(folder, follow=True) as root:
        tree = list_tree(root)
        violations += tree.violations
        for name in sorted(n for n in tree.files if n.endswith(".json") and "/" not in n):
            if name == POLICY_FILE:
                continue
            data = read_all(root, name, limit=MAX_BYTES)
            try:
                key = parse_key(data, name)
            except VerificationFailed as error:
                violations += error.violations
                continue
            if f"{key.name}.json" != name:
                violations.append(Malformed(f"{name}#/name", ascii(key.name), "the name of its file"))
            keys.append(key)
        policy = read_all(root, POLICY_FILE, limit=MAX_BYTES)
    raise_first(violations)
    return _parse_policy(policy, keys)


def _parse_policy(data: bytes, keys: Sequence[PublicKey]) -> KeySet:
    root = parse(data, POLICY_FILE, limit=MAX_BYTES)
    fields = root.fields("schema", "threshold", "keys")
    fields["schema"].constant(1)
    by_id = _by_id(keys)
    by_name = {key.name: key for key in keys}
    trusted: list[str] = []
    for item in fields["keys"].items():
        name = item.text(NAME, "the name of a key file")
        if name and name not in by_name:
            item.refuse("the name of a key file in this folder")
        elif name and by_name[name].keyid in trusted:
            item.refuse("each key once")
        elif name:
            trusted.append(by_name[name].keyid)
    # An empty list is the state before the first ceremony: nothing is trusted, no threshold can be met.
    threshold = fields["threshold"].integer(1, max(1, len(trusted)))
    raise_first(root.sink)
    return KeySet(by_id, frozenset(trusted), threshold)


def _by_id(keys: Sequence[PublicKey]) -> dict[str, PublicKey]:
    result: dict[str, PublicKey] = {}
    for key in keys:
        if key.keyid in result:
            found = f"the same key as {result[key.keyid].name}"
            raise failed(Malformed(f"{key.name}.json#/keyid", found, "each key once"))
        result[key.keyid] = key
    return result


def public_pem(keyid: str) -> str:
    public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(keyid))
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode("ascii")


def write_time(value: datetime) -> str:
    return f"{value.year:04d}-" + value.strftime("%m-%dT%H:%M:%SZ")


def _time(field: Cursor) -> datetime:
    text = field.text(_TIME, _TIME_RULE)
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc) if text else _EPOCH
    except ValueError:  # the thirty-first of February
        field.refuse(_TIME_RULE)
        return _EPOCH


def _revocation(field: Cursor) -> tuple[datetime, str] | None:
    if field.null:
        return None
    fields = field.fields("at", "reason")
    return _time(fields["at"]), fields["reason"].text(re.compile(r"[ -~]{1,500}"), "one line of ASCII")
