"""The DSSE envelope (``manifest.dsse.json``): signatures are checked before anything looks at the payload.

A key's id *is* its Ed25519 public key in hex. So every signature in every envelope can be checked by anybody,
trusted or not, and "does not verify" (BadSignature) is never confused with "but who is that" (UntrustedKey).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import UnverifiedSignatureError
from securesystemslib.signer import Signature, SSlibKey

from . import canonical
from .strict_json import Cursor, parse_canonical
from .violations import BadSignature, Malformed, Violation, WrongType, failed, raise_first

FILE = "manifest.dsse.json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
MAX_BYTES = 32 << 20
MAX_SIGNATURES = 64
KEYID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class SignedPayload:
    """A payload over which every listed key has a valid signature; whether to trust those is not said."""

    payload: bytes
    keyids: tuple[str, ...]


def open_envelope(data: bytes, name: str = FILE) -> SignedPayload:
    """Parse and check every signature.

    Raises:
        VerificationFailed: Malformed, WrongType (another payload type) or BadSignature.
    """
    envelope = read_envelope(data, name)
    if envelope.payload_type != PAYLOAD_TYPE:
        found = ascii(envelope.payload_type[:80])
        raise_first([WrongType(f"{name}#/payloadType", found, PAYLOAD_TYPE)])
    pae = envelope.pae()
    bad: list[Violation] = []
    for index, (keyid, signature) in enumerate(envelope.signatures.items()):
        if not _verifies(keyid, signature, pae):
            expected = "a signature over these bytes by the key it names"
            bad.append(BadSignature(f"{name}#/signatures/{index}/sig", f"no signature by {keyid}", expected))
    raise_first(bad)
    return SignedPayload(envelope.payload, tuple(envelope.signatures))


def read_envelope(data: bytes, name: str = FILE) -> Envelope:
    """Parse without checking signatures: only for code that goes on to check them.

    Raises:
        VerificationFailed: Malformed.
    """
    root = parse_canonical(data, name, limit=MAX_BYTES)
    fields = root.fields("payload", "payloadType", "signatures")
    payload = _bytes(fields["payload"])
    payload_type = fields["payloadType"].text()
    signatures: dict[str, Signature] = {}
    items = fields["signatures"].items()
    if len(items) > MAX_SIGNATURES:  # each costs a verification
        raise failed(Malformed(f"{name}#/signatures", f"{len(items)} items", f"at most {MAX_SIGNATURES}"))
    last = ""
    for item in items:
        entry = item.fields("keyid", "sig")
        keyid = entry["keyid"].text(KEYID, "an Ed25519 public key as 64 lower-case hex digits")
        if keyid and keyid <= last:
            entry["keyid"].refuse("key ids in ascending order, each once")
        last = keyid or last
        signatures[keyid] = Signature(keyid, _bytes(entry["sig"], length=64).hex())
    if not signatures:
        fields["signatures"].refuse("at least one signature")
    raise_first(root.sink)
    return Envelope(payload, payload_type, signatures)


def write_envelope(payload: bytes, signatures: Sequence[Signature]) -> bytes:
    """Canonical bytes of an envelope, signatures in the order of their key ids."""
    ordered = sorted(signatures, key=lambda s: s.keyid)
    return canonical.dumps(Envelope(payload, PAYLOAD_TYPE, {s.keyid: s for s in ordered}).to_dict())


def public_key(keyid: str) -> SSlibKey:
    """The key that a key id is.

    Raises:
        ValueError: it is not 32 bytes in hex.
    """
    return SSlibKey.from_crypto(Ed25519PublicKey.from_public_bytes(bytes.fromhex(keyid)), keyid)


def _verifies(keyid: str, signature: Signature, pae: bytes) -> bool:
    try:
        public_key(keyid).verify_signature(signature, pae)
    except (UnverifiedSignatureError, ValueError):  # ValueError: bytes that are no curve point
        return False
    return True


def _bytes(field: Cursor, length: int | None = None) -> bytes:
    """Standard base64 in its one canonical spelling."""
    expected = "base64" if length is None else f"base64 of {length} bytes"
    text = field.text(expected=expected)
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:  # binascii.Error is one; so is what a character beyond ASCII gives
        field.refuse(expected)
        return b""
    wrong_length = length is not None and len(data) != length
    if isinstance(field.value, str) and (wrong_length or base64.b64encode(data).decode("ascii") != text):
        field.refuse(expected)
    return data
