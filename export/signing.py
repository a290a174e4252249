"""Signing keys and signatures. A private key comes from a file or the environment and leaves through neither.

Signing never vouches for what verification would refuse: the statement is parsed, strictly, first.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner

from kernseal.loader.envelope import FILE as ENVELOPE_FILE
from kernseal.loader.envelope import MAX_BYTES as MAX_ENVELOPE_BYTES
from kernseal.loader.envelope import PAYLOAD_TYPE, open_envelope, public_key, read_envelope, write_envelope
from kernseal.loader.errors import InvalidArgument, IoError
from kernseal.loader.keys import NAME, POLICY_FILE, PublicKey, write_key
from kernseal.loader.policy import Policy, trust_key
from kernseal.loader.safe_read import directory, read_all
from kernseal.loader.statement import Statement, parse_statement
from kernseal.loader.verify import verify_bundle
from kernseal.loader.violations import Mismatch, raise_first

ENVIRONMENT = "KERNSEAL_SIGNING_KEY"
DEVELOPER = "developer"
MAX_KEY_BYTES = 16 << 10
VALID_DAYS = 730


@dataclass(frozen=True)
class SigningKey:
    """A private key and where it came from.

    Attributes:
        keyid: its public key in hex.
        origin: ``file <path>``, ``environment KERNSEAL_SIGNING_KEY`` or ``developer key <path>``, for people.
        developer: made by kernseal for this user; nobody else trusts it.
        created: made just now.
    """

    keyid: str
    origin: str
    developer: bool = False
    created: bool = False
    signer: CryptoSigner = field(repr=False, kw_only=True)


def sign(statement: bytes, key: SigningKey) -> bytes:
    """The envelope of a statement, with one signature.

    Raises:
        VerificationFailed: the statement is not one that verification would read.
    """
    parse_statement(statement)
    return write_envelope(statement, [key.signer.sign(_pae(statement))])


def add_signature(envelope: bytes, key: SigningKey) -> bytes:
    """The same envelope with one more signature, towards a threshold.

    Raises:
        VerificationFailed: a signature that is there does not verify, or the payload is not a statement.
        InvalidArgument: this key has already signed.
    """
    signed = open_envelope(envelope)
    parse_statement(signed.payload)
    if key.keyid in signed.keyids:
        raise InvalidArgument(f"key {key.keyid}: has already signed this envelope")
    added = key.signer.sign(_pae(signed.payload))
    return write_envelope(signed.payload, [*read_envelope(envelope).signatures.values(), added])


def endorse(bundle: Path, key: SigningKey, policy: Policy) -> tuple[bytes, Statement]:
    """Add a signature to the envelope of a bundle, after checking that ``policy`` accepts every file of it.

    Returns:
        the envelope to write, and the statement as it was signed. The new signature also vouches for its git commit
        and dirty state, which pins alone do not: show them to whoever signs.

    Raises:
        VerificationFailed: the policy does not accept the bundle.
        InvalidArgument: this key has already signed.
    """
    verified = verify_bundle(bundle, policy=policy)
    with directory(bundle) as root:
        envelope = read_all(root, ENVELOPE_FILE, limit=MAX_ENVELOPE_BYTES)
    payload = open_envelope(envelope).payload
    digest = hashlib.sha256(payload).hexdigest()
    if digest != verified.manifest_sha256:  # swapped since it was verified
        raise_first([Mismatch(ENVELOPE_FILE, f"sha256 {digest}", f"sha256 {verified.manifest_sha256}")])
    return add_signature(envelope, key), parse_statement(payload)


def find_key(path: Path | None = None, environment: Mapping[str, str] = os.environ) -> SigningKey:
    """The key to sign with: ``path``, else the environment's, else the developer's (made at first use).

    Raises:
        InvalidArgument: it is not an unencrypted Ed25519 private key in PEM, or others can read its file.
        IoError: it cannot be read, or the developer's cannot be made.
    """
    if path is not None:
        return read_private(path)
    text = environment.get(ENVIRONMENT)
    if text is not None:
        return _signing_key(text.encode("utf-8", "replace"), f"environment {ENVIRONMENT}")
    return developer_key(environment)


def developer_key(environment: Mapping[str, str] = os.environ) -> SigningKey:
    """The user's own key, ``$XDG_CONFIG_HOME/kernseal/developer.key``, made at first use.

    Raises:
        InvalidArgument, IoError: as ``find_key``.
    """
    path = developer_path(environment)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        created = not path.exists() and _write_private(path)
    except OSError as error:
        raise IoError(f"key {path}: {error.strerror}") from None
    key = read_private(path)
    if not developer_public_path(environment).exists():
        _write_public(developer_public_path(environment), key.keyid, DEVELOPER)
    origin = f"developer key {path}"
    return SigningKey(key.keyid, origin, developer=True, created=created, signer=key.signer)


def developer_path(environment: Mapping[str, str] = os.environ) -> Path:
    base = Path(environment.get("XDG_CONFIG_HOME") or "")
    if not base.is_absolute():  # as the XDG specification says
        base = Path(environment.get("HOME") or Path.home()) / ".config"
    return base / "kernseal" / f"{DEVELOPER}.key"


def developer_public_path(environment: Mapping[str, str] = os.environ) -> Path:
    """What to give ``Policy.from_options`` to accept bundles of one's own."""
    return developer_path(environment).with_name(f"{DEVELOPER}.json")


def keygen(path: Path, name: str | None = None, *, days: int = VALID_DAYS) -> Path:
    """Make a key pair: the private key at ``path`` (0600), the public key file beside it.

    Args:
        name: what the public key is called; the stem of ``path`` when None.
        days: how long it is valid, from today.

    Returns:
        the public key file, ``<name>.json``: what goes to ``manifests/keys/`` or to ``Policy.from_options``.

    Raises:
        InvalidArgument: one of the two files is already there, or the name is not a lower-case word.
        IoError: they cannot be written.
    """
    name = name or path.stem
    if not NAME.fullmatch(name) or f"{name}.json" == POLICY_FILE:
        raise InvalidArgument(f"name {name!r}: a key's name is {NAME.pattern}, and not 'policy'")
    public = path.with_name(f"{name}.json")
    if public.exists() or public == path:
        raise InvalidArgument(f"key {public}: is already there; a key is never overwritten")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _write_private(path):
            raise InvalidArgument(f"key {path}: is already there; a key is never overwritten")
    except OSError as error:
        raise IoError(f"key {path}: {error.strerror}") from None
    _write_public(public, read_private(path).keyid, name, days)
    return public


def read_private(path: Path) -> SigningKey:
    """A private key from a file that only its owner can read.

    Raises:
        InvalidArgument: not such a file, or not an unencrypted Ed25519 private key in PEM.
        IoError: it cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise IoError(f"key {path}: {error.strerror}") from None
    with open(descriptor, "rb") as handle:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise InvalidArgument(f"key {path}: not a regular file")
        if state.st_mode & 0o077:
            mode = stat.S_IMODE(state.st_mode)
            raise InvalidArgument(f"key {path}: mode {mode:04o} lets others at it; run: chmod 600 {path}")
        return _signing_key(handle.read(MAX_KEY_BYTES), f"file {path}")


def _signing_key(pem: bytes, origin: str) -> SigningKey:
    # The errors of the PEM reader are not chained: what they quote is private.
    try:
        private = load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        private = None
    if not isinstance(private, Ed25519PrivateKey):
        raise InvalidArgument(f"key from {origin}: not an unencrypted Ed25519 private key in PEM (PKCS #8)")
    keyid = private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()
    return SigningKey(keyid, origin, signer=CryptoSigner(private, public_key(keyid)))


def _pae(payload: bytes) -> bytes:
    return bytes(Envelope(payload, PAYLOAD_TYPE, {}).pae())


def _write_private(path: Path) -> bool:
    """A new private key at ``path``; False if something is there. Nobody ever sees half a key."""
    pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    descriptor, stage = tempfile.mkstemp(prefix=".key.", dir=path.parent)  # O_EXCL and 0600
    try:
        with open(descriptor, "wb") as handle:
            handle.write(pem)
            handle.flush()
            os.fsync(descriptor)
        os.link(stage, path, follow_symlinks=False)
    except FileExistsError:
        return False
    finally:
        Path(stage).unlink()
    return True


def _write_public(path: Path, keyid: str, name: str, days: int = VALID_DAYS) -> None:
    today = datetime.now(timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)
    key = PublicKey(name, keyid, today, today + timedelta(days=days))
    try:
        with contextlib.suppress(FileExistsError), path.open("xb") as handle:
            handle.write(write_key(key))
    except OSError as error:
        raise IoError(f"key {path}: {error.strerror}") from None


def trusting(policy: Policy, key: SigningKey) -> Policy:
    """``policy`` that also counts signatures by ``key``, valid now: for checking what was just signed with it."""
    if key.keyid in policy.keys.keys:
        return policy
    return trust_key(policy, PublicKey(DEVELOPER if key.developer else "signer", key.keyid))
