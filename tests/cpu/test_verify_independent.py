"""Tools that nobody here wrote read our envelopes, and we read theirs."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import synthetic_bundle as made
from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner

from kernseal.export import signing
from kernseal.loader import canonical, errors
from kernseal.loader.envelope import PAYLOAD_TYPE, open_envelope, public_key
from kernseal.loader.keys import public_pem
from kernseal.loader.statement import parse_statement


@pytest.fixture
def bundle(tmp_path: Path) -> made.Made:
    return made.make(tmp_path / "bundle")


def envelope_of(bundle: made.Made) -> bytes:
    return (bundle.path / made.ENVELOPE).read_bytes()


def test_sigstore_reads_our_envelope_and_its_encoding_is_what_we_signed(bundle: made.Made) -> None:
    dsse = pytest.importorskip("sigstore.dsse", reason="sigstore is not installed: pip install sigstore")
    envelope = dsse.Envelope._from_json(envelope_of(bundle))
    made.RELEASE.private.public_key().verify(envelope.signature, envelope.pae())
    payload = base64.b64decode(json.loads(envelope.to_json())["payload"])
    assert payload == (bundle.path / made.MANIFEST).read_bytes()


def test_sigstore_accepts_our_statement_and_finds_every_file_in_it(bundle: made.Made) -> None:
    dsse = pytest.importorskip("sigstore.dsse", reason="sigstore is not installed: pip install sigstore")
    statement = dsse.Statement((bundle.path / made.MANIFEST).read_bytes())
    names = {subject.name: subject.digest.root["sha256"] for subject in statement._inner.subjects}
    assert names == {name: made.sha256(data) for name, data in bundle.contents.items()}


def test_the_schemas_of_in_toto_accept_our_statement_and_provenance(bundle: made.Made) -> None:
    reason = "in-toto-attestation is not installed: pip install in-toto-attestation"
    attestation = pytest.importorskip("in_toto_attestation.v1.statement", reason=reason)
    statement_pb2 = pytest.importorskip("in_toto_attestation.v1.statement_pb2", reason=reason)
    provenance_pb2 = pytest.importorskip(
        "in_toto_attestation.predicates.provenance.v1.provenance_pb2", reason=reason
    )
    json_format = pytest.importorskip("google.protobuf.json_format", reason=reason)
    # Both parse strictly: a field that the specifications do not have is an error.
    statement = json_format.Parse((bundle.path / made.MANIFEST).read_bytes(), statement_pb2.Statement())
    attestation.Statement.copy_from_pb(statement).validate()
    assert len(statement.subject) == len(bundle.contents)
    provenance = json_format.ParseDict(bundle.document["predicate"], provenance_pb2.Provenance())
    assert provenance.build_definition.build_type == "https://kernseal.dev/build/v1"
    assert provenance.run_details.builder.version["kernseal"] == "1.2.3"
    with pytest.raises(json_format.ParseError):
        json_format.ParseDict({**bundle.document["predicate"], "extra": 1}, provenance_pb2.Provenance())


def test_openssl_verifies_our_signature_with_the_public_key_file(bundle: made.Made, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is not installed")
    envelope = json.loads(envelope_of(bundle))
    kind, payload = envelope["payloadType"].encode(), base64.b64decode(envelope["payload"])
    message = b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
    assert openssl(tmp_path, message, base64.b64decode(envelope["signatures"][0]["sig"])) == 0
    assert openssl(tmp_path, message + b" ", base64.b64decode(envelope["signatures"][0]["sig"])) != 0


def openssl(folder: Path, message: bytes, signature: bytes) -> int:
    (folder / "message").write_bytes(message)
    (folder / "signature").write_bytes(signature)
    (folder / "key.pem").write_text(public_pem(made.RELEASE.keyid))
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", "key.pem", "-rawin"]
    command += ["-in", "message", "-sigfile", "signature"]
    return subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode


def test_the_envelope_of_another_signer_is_read_once_it_is_in_canonical_form(bundle: made.Made) -> None:
    payload = (bundle.path / made.MANIFEST).read_bytes()
    envelope = Envelope(payload, PAYLOAD_TYPE, {})
    envelope.sign(CryptoSigner(made.SECOND.private, public_key(made.SECOND.keyid)))
    signed = open_envelope(canonical.dumps(envelope.to_dict()))
    assert (signed.payload, signed.keyids) == (payload, (made.SECOND.keyid,))
    assert parse_statement(signed.payload).target == "sm_90a"
    with pytest.raises(errors.Malformed, match="another form"):
        open_envelope(json.dumps(envelope.to_dict()).encode())


def test_securesystemslib_verifies_our_envelope_by_itself(bundle: made.Made) -> None:
    both = signing.add_signature(envelope_of(bundle), made.signing_key(made.SECOND))
    envelope = Envelope.from_dict(json.loads(both))
    keys = [public_key(who.keyid) for who in (made.RELEASE, made.SECOND)]
    assert set(envelope.verify(keys, 2)) == {made.RELEASE.keyid, made.SECOND.keyid}
