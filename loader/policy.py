"""Whom a caller trusts: committed pins, signatures by enough keys, or both. No policy trusts everybody."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from .errors import InvalidArgument
from .keys import KeySet, PublicKey, key_set, read_key, read_key_folder
from .pins import Pins, one_per_target, read_pins, read_pins_of
from .statement import Statement, version_order
from .strict_json import SHA256

AnyPath = str | os.PathLike[str]
NO_KEYS = KeySet({}, frozenset(), 1)


@dataclass(frozen=True)
class Policy:
    """What makes a bundle acceptable.

    Attributes:
        pins: at most one for each target.
        keys: the trusted keys and how many of them must have signed.
        both: ask for pins and signatures; otherwise either root is enough.
        min_version: refuse bundles built by an older kernseal (a signature alone does not stop a rollback).
        manifest_sha256: accept only this manifest.
        folder: lock files of further targets, each read when a bundle of its target is judged.
    """

    pins: tuple[Pins, ...] = ()
    keys: KeySet = NO_KEYS
    both: bool = False
    min_version: str | None = None
    manifest_sha256: str | None = None
    folder: Path | None = None

    def __post_init__(self) -> None:
        one_per_target(self.pins)
        if self.keys.threshold < 1 or self.keys.threshold > max(1, len(self.keys.trusted)):
            known = len(self.keys.trusted)
            raise InvalidArgument(f"threshold {self.keys.threshold}: {known} keys are trusted, so 1 to that")
        if self.min_version is not None:
            _checked_version(self.min_version)
        if self.manifest_sha256 is not None and not SHA256.fullmatch(self.manifest_sha256):
            raise InvalidArgument(f"manifest_sha256 {self.manifest_sha256!r}: 64 lower-case hex digits")

    @classmethod
    def default(cls) -> Policy:
        """The pins and keys of the installed package.

        Raises:
            VerificationFailed: the keys are damaged. Of pins a bundle's own are read when it is judged.
        """
        manifests = Path(str(resources.files("kernseal.manifests")))
        return cls(folder=manifests, keys=read_key_folder(manifests / "keys"))

    @classmethod
    def from_options(
        cls,
        pins: AnyPath | None = None,
        keys: AnyPath | Sequence[AnyPath] = (),
        threshold: int | None = None,
        *,
        both: bool = False,
        min_version: str | None = None,
        manifest_sha256: str | None = None,
    ) -> Policy:
        """The policy a command line describes: ``default`` if nothing is given, else only what is given.

        Args:
            pins: a lock file or a folder of them.
            keys: public key files, or one folder with its ``policy.json``.
            threshold: how many of the keys must sign; 1, or what ``policy.json`` says, when not given.

        Raises:
            VerificationFailed: a file is not what it must be.
            InvalidArgument: a threshold that cannot be met, a folder among other keys, no such version.
        """
        if pins is None and not keys:
            base = cls.default()
        else:
            files = [keys] if isinstance(keys, str | os.PathLike) else keys
            chosen = _keys([Path(file) for file in files])
            base = cls(read_pins(Path(pins)) if pins is not None else (), chosen)
        trusted = base.keys if threshold is None else KeySet(base.keys.keys, base.keys.trusted, threshold)
        return replace(
            base, keys=trusted, both=both, min_version=min_version, manifest_sha256=manifest_sha256
        )

    def pins_for(self, statement: Statement) -> Pins | None:
        """The pins of a bundle's target, or None.

        Raises:
            VerificationFailed: the lock file in ``folder`` is damaged.
        """
        wanted = (statement.target, statement.host)
        found = next((lock for lock in self.pins if lock.target == wanted), None)
        return found if found or self.folder is None else read_pins_of(self.folder, wanted)

    def all_pins(self) -> tuple[Pins, ...]:
        """Those of ``folder``, too.

        Raises:
            VerificationFailed: a lock file in ``folder`` is damaged.
        """
        return self.pins if self.folder is None else (*self.pins, *read_pins(self.folder))


def trust_key(policy: Policy, key: PublicKey) -> Policy:
    """``policy`` that also counts signatures by ``key``: how a user lets in their own developer key.

    Raises:
        InvalidArgument: the policy already knows the key, for instance as revoked.
    """
    if key.keyid in policy.keys.keys:
        known = policy.keys.keys[key.keyid].name
        raise InvalidArgument(f"key {key.name}: the policy already has it as {known}")
    old = policy.keys
    keys = KeySet({**old.keys, key.keyid: key}, old.trusted | {key.keyid}, old.threshold)
    return replace(policy, keys=keys)


def _keys(paths: Sequence[Path]) -> KeySet:
    folders = [path for path in paths if path.is_dir()]
    if not folders:
        return key_set([read_key(path) for path in paths], 1)
    if len(paths) > 1:
        raise InvalidArgument(f"keys: {folders[0]} has its own policy, so it must be the only one given")
    return read_key_folder(folders[0])


def _checked_version(version: str) -> None:
    try:
        version_order(version)
    except ValueError as error:
        raise InvalidArgument(f"min_version: {error}") from None
