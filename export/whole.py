"""A bundle as bytes in memory, verified: what is packed or pushed is what was checked, whatever happens to the folder."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from kernseal.export import host
from kernseal.loader import envelope as dsse
from kernseal.loader import statement as intoto
from kernseal.loader.policy import Policy
from kernseal.loader.safe_read import directory, read_all
from kernseal.loader.verify import EVERYTHING, VerifiedBundle, verify_bundle
from kernseal.loader.violations import Mismatch, raise_first


@dataclass(frozen=True)
class Whole:
    """Every file of a bundle, manifest and envelope among them, by path."""

    verified: VerifiedBundle
    files: dict[str, bytes]


def read(bundle: Path, policy: Policy) -> Whole:
    """Verify a bundle and keep every byte of it.

    Raises:
        VerificationFailed: the policy does not accept it.
    """
    verified = verify_bundle(bundle, policy=policy, keep=EVERYTHING)
    with directory(bundle) as root:
        envelope = read_all(root, dsse.FILE, limit=dsse.MAX_BYTES)
    manifest = dsse.open_envelope(envelope).payload
    digest = hashlib.sha256(manifest).hexdigest()
    if digest != verified.manifest_sha256:  # another envelope since it was verified
        raise_first([Mismatch(dsse.FILE, f"sha256 {digest}", f"sha256 {verified.manifest_sha256}")])
    found = {name: verified.read(name) for name in verified.files}
    return Whole(verified, {**found, intoto.FILE: manifest, dsse.FILE: envelope})


def mode(name: str) -> int:
    """Permissions of a bundle's file."""
    return 0o755 if name == host.NAME else 0o644
