"""A small bundle with the structure of a real one, made without compilers, and the means to forge another.

Everything that is written goes through kernseal's own writers; what an attacker would have to write differently is in
``forge``, which signs any bytes at all.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import shutil
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from unittest import mock

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from kernseal.abi.library import KernelRecord, VariantRecord
from kernseal.export import manifest
from kernseal.export.git import Revision
from kernseal.export.signing import SigningKey, find_key, sign
from kernseal.export.spec import Target
from kernseal.loader import canonical
from kernseal.loader.envelope import PAYLOAD_TYPE
from kernseal.loader.keys import KeySet, PublicKey
from kernseal.loader.pins import parse_pins
from kernseal.loader.policy import Policy
from kernseal.loader.statement import statement_digest

NOW = datetime(2030, 6, 1, tzinfo=timezone.utc)
MANIFEST = "manifest.json"
ENVELOPE = "manifest.dsse.json"
VARIANTS = ("bf16_hvk", "bf16_hkv", "f16_hvk")


@dataclass(frozen=True)
class Identity:
    """A person with a key. The seed makes it the same in every run."""

    name: str

    @property
    def private(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(self.name.encode()).digest())

    @property
    def keyid(self) -> str:
        return self.private.public_key().public_bytes_raw().hex()

    def public(self, **changes: Any) -> PublicKey:
        window = {"valid_from": NOW - timedelta(days=365), "valid_until": NOW + timedelta(days=365)}
        return PublicKey(self.name, self.keyid, **{**window, **changes})


RELEASE = Identity("release")
SECOND = Identity("second")
STRANGER = Identity("stranger")
REVOKED = Identity("revoked")
EXPIRED = Identity("expired")


def key_set(threshold: int = 1) -> KeySet:
    """Two good keys, a revoked and an expired one, all of them named in the policy."""
    keys = [
        RELEASE.public(),
        SECOND.public(),
        REVOKED.public(revoked=(NOW - timedelta(days=1), "the laptop was stolen")),
        EXPIRED.public(valid_until=NOW - timedelta(days=1)),
    ]
    return KeySet({k.keyid: k for k in keys}, frozenset(k.keyid for k in keys), threshold)


def files(salt: str = "") -> dict[str, bytes]:
    """What the bundle holds besides its manifest and envelope."""
    result = {
        "libkernseal.so": b"\x7fELF library " + salt.encode() + bytes(range(256)),
        "kernseal.h": b"/* generated */\n",
        "kernseal_pins.h": b"#define KSEAL_PINS 1\n",
        "kernseal_pins.rs": b"pub const PINS: u32 = 1;\n",
        "licenses/flashinfer/LICENSE": b"Apache License\n",
    }
    for variant in VARIANTS:
        result[f"cubin/gdn_prefill/{variant}.cubin"] = b"\x7fELF cubin " + variant.encode() + salt.encode()
        result[f"ptx/gdn_prefill/{variant}.ptx"] = b".version 9.4 // " + variant.encode() + salt.encode()
    return result


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def statement(
    contents: dict[str, bytes], *, sm: str = "sm_90a", retarget: str | None = None, version: str = "1.2.3"
) -> dict[str, Any]:
    kernels = []
    for variant in VARIANTS:
        file = f"cubin/gdn_prefill/{variant}.cubin"
        record = VariantRecord(
            op="gdn_prefill",
            variant=variant,
            class_name="sm90",
            axes={"dtype": variant.split("_")[0], "checkpoints": False},
            kernels=(KernelRecord(f"kernel_{variant}", 168, 0, 1024, 200_000),),
            file=file,
            size=len(contents[file]),
            sha256=sha256(contents[file]),
            evidence="ran",
            host_prefix=variant,
            host_function="run",
        )
        inputs = {"source": sha256(b"source")}
        kernels.append(
            manifest.kernel_record(record, sha256(b"code " + variant.encode()), inputs, {"rule": 0})
        )
    with mock.patch("importlib.metadata.version", return_value=version):
        data = manifest.statement(
            Target(sm, retarget),
            "default",
            {name: sha256(data) for name, data in contents.items()},
            kernels,
            {"gdn_prefill": ["alpha is linear"]},
            [{"uri": "pkg:pypi/flashinfer-python@0.7.4", "digest": {"sha256": sha256(b"wheel")}}],
            Revision("1" * 40, False),
        )
    document: dict[str, Any] = json.loads(data)
    return document


def pins(document: dict[str, Any]) -> dict[str, Any]:
    """The lock file's content for a statement."""
    external = document["predicate"]["buildDefinition"]["externalParameters"]
    hashes = {item["name"]: item["digest"]["sha256"] for item in document["subject"]}
    variants = {
        f"gdn_prefill/{variant}": {
            "cubin": hashes[f"cubin/gdn_prefill/{variant}.cubin"],
            "ptx": hashes[f"ptx/gdn_prefill/{variant}.ptx"],
            "code": sha256(b"code " + variant.encode()),
            "host": None,
            "inputs": {"source": sha256(b"source")},
        }
        for variant in VARIANTS
    }
    return {
        "schema": 1,
        "sm": external["sm"],
        "retarget": external["retarget"],
        "host": external["host"],
        "inputs": {"source": sha256(b"source")},
        "statement": statement_digest(document),
        "variants": variants,
        "files": hashes,
    }


@dataclass
class Made:
    """A bundle on disk with what is needed to tamper with it."""

    path: Path
    contents: dict[str, bytes]
    document: dict[str, Any]
    pristine: dict[str, bytes] = field(default_factory=dict)

    @property
    def pins(self) -> dict[str, Any]:
        return pins(self.document)

    def policy(self, *, with_pins: bool = True, with_keys: bool = True, **options: Any) -> Policy:
        locks = (parse_pins(canonical.dumps(self.pins), "sm_90a.lock.json"),) if with_pins else ()
        return Policy(locks, key_set() if with_keys else KeySet({}, frozenset(), 1), **options)

    def restore(self) -> None:
        """Back to the untouched bundle."""
        self.pristine = self.pristine or sealed(self.contents, self.document)
        shutil.rmtree(self.path, ignore_errors=True)
        write_files(self.path, self.pristine)

    def edited(self) -> dict[str, Any]:
        return copy.deepcopy(self.document)

    def rehashed(self) -> dict[str, Any]:
        """The statement that an attacker would write for the files as they now are."""
        document = self.edited()
        found = {
            path.relative_to(self.path).as_posix(): path.read_bytes()
            for path in sorted(self.path.rglob("*"))
            if path.is_file() and path.name not in (MANIFEST, ENVELOPE)
        }
        document["subject"] = [
            {"name": name, "digest": {"sha256": sha256(data)}} for name, data in sorted(found.items())
        ]
        return document

    def put_manifest(self, payload: bytes, *signers: Identity, payload_type: str = PAYLOAD_TYPE) -> None:
        """Write these bytes as the manifest, and an envelope over them by these signers."""
        (self.path / MANIFEST).write_bytes(payload)
        (self.path / ENVELOPE).write_bytes(forge(payload, *signers, payload_type=payload_type))


def make(path: Path, *, salt: str = "", **options: Any) -> Made:
    contents = files(salt)
    document = statement(contents, **options)
    write_files(path, sealed(contents, document))
    return Made(path, contents, document)


def sealed(contents: dict[str, bytes], document: dict[str, Any]) -> dict[str, bytes]:
    """All files of the bundle, manifest and envelope included."""
    payload = canonical.dumps(document)
    return {**contents, MANIFEST: payload, ENVELOPE: sign(payload, signing_key(RELEASE))}


def write_files(path: Path, contents: dict[str, bytes]) -> None:
    for name, data in contents.items():
        target = path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def signing_key(identity: Identity) -> SigningKey:
    pem = identity.private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return find_key(environment={"KERNSEAL_SIGNING_KEY": pem.decode()})


def forge(payload: bytes, *signers: Identity, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """An envelope over any bytes, written from the DSSE specification alone."""
    kind = payload_type.encode()
    pae = b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
    signatures = [
        {"keyid": who.keyid, "sig": base64.b64encode(who.private.sign(pae)).decode()}
        for who in sorted(signers, key=lambda who: who.keyid)
    ]
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": payload_type,
        "signatures": signatures,
    }
    return json.dumps(envelope, sort_keys=True, indent=1).encode() + b"\n"
