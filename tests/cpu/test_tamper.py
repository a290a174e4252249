"""Attacks on a bundle, systematically, and each kind once more by name.

The sweeps print tried / refused / accepted / crashed. An attack is *accepted* if the verifier hands out anything that is
not the untouched bundle's: other bytes, other hashes, another statement. It *crashed* if anything but a typed error came.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import synthetic_bundle as made

from kernseal.loader import canonical, errors
from kernseal.loader.envelope import PAYLOAD_TYPE
from kernseal.loader.pins import parse_pins
from kernseal.loader.policy import Policy
from kernseal.loader.verify import EVERYTHING, VerifiedBundle, verify_bundle
from kernseal.loader.violations import VerificationFailed

ENVELOPE, MANIFEST = made.ENVELOPE, made.MANIFEST
LIBRARY = "libkernseal.so"
CUBIN = "cubin/gdn_prefill/bf16_hvk.cubin"
OTHER_CUBIN = "cubin/gdn_prefill/bf16_hkv.cubin"

Attack = Callable[[], None]


@dataclass
class Tally:
    """The outcome of a sweep of attacks."""

    bundle: made.Made
    policy: Policy
    tried: int = 0
    refused: int = 0
    accepted: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.untouched = self.outcome(self.verify())

    def verify(self) -> VerifiedBundle:
        return verify_bundle(self.bundle.path, policy=self.policy, keep=EVERYTHING, now=made.NOW)

    def outcome(self, result: VerifiedBundle) -> object:
        return result.statement, result.files, {name: result.read(name) for name in result.files}

    def attack(self, name: str, attack: Attack) -> None:
        attack()
        self.tried += 1
        try:
            result = self.verify()
        except VerificationFailed:
            self.refused += 1
        except Exception as error:
            self.crashed.append(f"{name}: {error!r}")
        else:
            self.accepted.append(name)
            assert self.outcome(result) != self.untouched, f"{name}: is no attack"

    def report(self, title: str, capsys: pytest.CaptureFixture[str]) -> None:
        line = f"{title}: tried {self.tried}, refused {self.refused}"
        with capsys.disabled():
            print(f"\n{line}, accepted {len(self.accepted)}, crashed {len(self.crashed)}")
        assert self.accepted == []
        assert self.crashed == []
        assert self.tried == self.refused > 0


@pytest.fixture
def bundle(tmp_path: Path) -> made.Made:
    return made.make(tmp_path / "bundle")


def statuses(bundle: made.Made, policy: Policy | None = None, **options: Any) -> set[str]:
    with pytest.raises(VerificationFailed) as caught:
        verify_bundle(bundle.path, policy=policy or bundle.policy(), now=made.NOW, **options)
    return {violation.status for violation in caught.value.violations}


# --- sweeps -----------------------------------------------------------------------------------------------------------


def test_no_change_to_any_file_is_accepted(bundle: made.Made, capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally(bundle, bundle.policy())
    for name in [*bundle.contents, MANIFEST, ENVELOPE]:
        bundle.restore()
        for kind, attack in list(file_attacks(bundle.path, name)):
            for seal_name, reseal in reseals(bundle, name, kind):
                bundle.restore()
                tally.attack(f"{kind} {name}, {seal_name}", both(attack, reseal))
    tally.report("files", capsys)


def test_no_added_entry_is_accepted(bundle: made.Made, capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally(bundle, bundle.policy())
    for kind, attack in list(additions(bundle.path)):
        for seal_name, reseal in reseals(bundle, "added", kind):
            bundle.restore()
            tally.attack(f"{kind}, {seal_name}", both(attack, reseal))
    tally.report("added entries", capsys)


@pytest.mark.parametrize("signers", ["nobody", "old signature", "stranger", "revoked", "expired"])
def test_no_change_to_any_manifest_field_is_accepted(
    bundle: made.Made, capsys: pytest.CaptureFixture[str], signers: str
) -> None:
    tally = Tally(bundle, bundle.policy())
    for name, document in field_attacks(bundle.document):
        if signers in ("stranger", "expired") and "/git" in name:
            continue  # pins do not vouch for it, so it is not handed out: test_verify_bundle.py
        tally.attack(f"{name} signed by {signers}", partial(put, bundle, document, signers))
    tally.report(f"manifest fields, signed by {signers}", capsys)


def test_no_change_to_any_envelope_field_is_accepted(
    bundle: made.Made, capsys: pytest.CaptureFixture[str]
) -> None:
    tally = Tally(bundle, bundle.policy())
    envelope = json.loads((bundle.path / ENVELOPE).read_bytes())
    for name, document in field_attacks(envelope):
        tally.attack(name, partial(write_json, bundle.path / ENVELOPE, document))
    tally.report("envelope fields", capsys)


def test_no_flipped_bit_of_the_envelope_is_accepted(
    bundle: made.Made, capsys: pytest.CaptureFixture[str]
) -> None:
    tally = Tally(bundle, bundle.policy())
    path = bundle.path / ENVELOPE
    data = path.read_bytes()
    # All of the envelope but the payload's middle, which says no more than its ends do.
    for offset in [*range(200), *range(200, len(data) - 500, 97), *range(len(data) - 500, len(data))]:
        flipped = bytearray(data)
        flipped[offset] ^= 1 << offset % 8
        tally.attack(f"bit {offset % 8} of byte {offset}", partial(overwrite, path, bytes(flipped)))
    tally.report("flipped bits of the envelope", capsys)


def test_no_change_to_any_pins_field_lets_altered_bytes_in(
    bundle: made.Made, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever edits the pins is trusted; what must not happen is a crash, or pins read as something they do not say."""
    (bundle.path / LIBRARY).write_bytes(b"altered")
    bundle.put_manifest(canonical.dumps(bundle.rehashed()), made.STRANGER)
    tried = refused = 0
    for name, document in field_attacks(bundle.pins):
        tried += 1
        try:
            policy = Policy((parse_pins(loose_dumps(document), "sm_90a.lock.json"),))
            verify_bundle(bundle.path, policy=policy, now=made.NOW)
        except VerificationFailed:
            refused += 1
        else:
            pytest.fail(f"accepted: {name}")
    with capsys.disabled():
        print(f"\npins fields: tried {tried}, refused {refused}, accepted 0, crashed 0")
    assert tried == refused > 100


# --- each kind by name ------------------------------------------------------------------------------------------------


def test_a_flipped_byte_is_a_mismatch(bundle: made.Made) -> None:
    data = bytearray(bundle.contents[CUBIN])
    data[3] ^= 1
    (bundle.path / CUBIN).write_bytes(data)
    assert statuses(bundle) == {"mismatch"}


def test_a_truncated_file_is_a_mismatch(bundle: made.Made) -> None:
    os.truncate(bundle.path / CUBIN, 4)
    assert statuses(bundle) == {"mismatch"}


def test_an_extended_file_is_a_mismatch(bundle: made.Made) -> None:
    (bundle.path / CUBIN).write_bytes(bundle.contents[CUBIN] + b"\0")
    assert statuses(bundle) == {"mismatch"}


def test_a_deleted_file_is_missing(bundle: made.Made) -> None:
    (bundle.path / CUBIN).unlink()
    assert statuses(bundle) == {"missing"}


def test_an_added_file_is_unknown(bundle: made.Made) -> None:
    (bundle.path / "cubin/gdn_prefill/extra.cubin").write_bytes(b"")
    assert statuses(bundle) == {"unknown"}


def test_a_renamed_file_is_missing_and_unknown(bundle: made.Made) -> None:
    (bundle.path / CUBIN).rename(bundle.path / "cubin/gdn_prefill/renamed.cubin")
    assert statuses(bundle) == {"missing", "unknown"}


def test_two_swapped_cubins_are_two_mismatches(bundle: made.Made) -> None:
    swap(bundle.path / CUBIN, bundle.path / OTHER_CUBIN)
    with pytest.raises(VerificationFailed) as caught:
        verify_bundle(bundle.path, policy=bundle.policy(with_pins=False), now=made.NOW)
    assert [(v.path, v.status) for v in caught.value.violations] == [
        (OTHER_CUBIN, "mismatch"),
        (CUBIN, "mismatch"),
    ]


def test_swapped_cubins_with_a_manifest_to_match_fail_on_both_roots(bundle: made.Made) -> None:
    swap(bundle.path / CUBIN, bundle.path / OTHER_CUBIN)
    bundle.put_manifest(canonical.dumps(bundle.rehashed()), made.STRANGER)
    assert statuses(bundle) == {"mismatch", "untrusted_key"}


def test_a_bundle_for_another_sm_under_this_ones_name_is_refused(bundle: made.Made, tmp_path: Path) -> None:
    other = made.make(tmp_path / "other", sm="sm_120a", salt="120")
    policy = bundle.policy()
    assert statuses(other, Policy(policy.pins)) == {"untrusted_key"}
    assert statuses(other, policy, sm="sm_90a") == {"wrong_sm"}


def test_relabelling_the_sm_of_a_bundle_is_refused(bundle: made.Made, tmp_path: Path) -> None:
    other = made.make(tmp_path / "other", sm="sm_120a", salt="120")
    relabelled = other.edited()
    relabelled["predicate"]["buildDefinition"]["externalParameters"]["sm"] = "sm_90a"
    other.put_manifest(canonical.dumps(relabelled), made.STRANGER)
    assert statuses(other, bundle.policy(), sm="sm_90a") == {"mismatch", "untrusted_key"}


def test_an_older_signed_bundle_over_a_newer_one_is_refused_by_pins(
    bundle: made.Made, tmp_path: Path
) -> None:
    older = made.make(tmp_path / "older", version="1.2.2", salt="old")
    assert statuses(older, bundle.policy(with_keys=False)) == {"mismatch"}


def test_an_older_signed_bundle_is_refused_by_a_minimum_version(bundle: made.Made, tmp_path: Path) -> None:
    older = made.make(tmp_path / "older", version="1.2.2", salt="old")
    assert statuses(older, bundle.policy(min_version="1.2.3")) == {"mismatch"}


def test_a_file_of_an_older_bundle_in_a_newer_one_is_refused(bundle: made.Made, tmp_path: Path) -> None:
    older = made.make(tmp_path / "older", version="1.2.2", salt="old")
    (older.path / LIBRARY).rename(bundle.path / LIBRARY)
    assert statuses(bundle) == {"mismatch"}


def test_the_manifest_and_envelope_of_another_bundle_are_refused(bundle: made.Made, tmp_path: Path) -> None:
    other = made.make(tmp_path / "other", salt="other")
    for name in (MANIFEST, ENVELOPE):
        (other.path / name).rename(bundle.path / name)
    assert statuses(bundle) == {"mismatch"}


def test_a_manifest_without_its_own_envelope_is_refused(bundle: made.Made, tmp_path: Path) -> None:
    other = made.make(tmp_path / "other", salt="other")
    (other.path / ENVELOPE).rename(bundle.path / ENVELOPE)
    assert statuses(bundle) == {"mismatch"}


def test_a_manifest_rewritten_to_match_altered_bytes_is_refused_unsigned(bundle: made.Made) -> None:
    (bundle.path / CUBIN).write_bytes(b"altered")
    (bundle.path / MANIFEST).write_bytes(canonical.dumps(bundle.rehashed()))
    assert statuses(bundle) == {"mismatch"}


def test_a_manifest_rewritten_to_match_altered_bytes_is_refused_under_the_old_signature(
    bundle: made.Made,
) -> None:
    (bundle.path / CUBIN).write_bytes(b"altered")
    put(bundle, bundle.rehashed(), "old signature")
    assert statuses(bundle) == {"bad_signature"}


def test_a_manifest_rewritten_to_match_altered_bytes_is_refused_signed_by_another_key(
    bundle: made.Made,
) -> None:
    (bundle.path / CUBIN).write_bytes(b"altered")
    bundle.put_manifest(canonical.dumps(bundle.rehashed()), made.STRANGER)
    assert statuses(bundle) == {"mismatch", "untrusted_key"}
    assert statuses(bundle, bundle.policy(with_keys=False)) == {"mismatch"}
    assert statuses(bundle, bundle.policy(with_pins=False)) == {"untrusted_key"}


def test_a_manifest_rewritten_to_match_altered_bytes_is_refused_signed_by_a_revoked_key(
    bundle: made.Made,
) -> None:
    (bundle.path / CUBIN).write_bytes(b"altered")
    bundle.put_manifest(canonical.dumps(bundle.rehashed()), made.REVOKED)
    assert statuses(bundle) == {"mismatch", "revoked", "untrusted_key"}


def test_a_signature_under_the_name_of_a_trusted_key_is_bad(bundle: made.Made) -> None:
    (bundle.path / CUBIN).write_bytes(b"altered")
    bundle.put_manifest(canonical.dumps(bundle.rehashed()), made.STRANGER)
    path = bundle.path / ENVELOPE
    path.write_bytes(path.read_bytes().replace(made.STRANGER.keyid.encode(), made.RELEASE.keyid.encode()))
    assert statuses(bundle) == {"bad_signature"}


def test_one_signature_counted_twice_is_malformed(bundle: made.Made) -> None:
    bundle.put_manifest(canonical.dumps(bundle.document), made.RELEASE, made.RELEASE)
    assert statuses(bundle, Policy(keys=made.key_set(threshold=2))) == {"malformed"}


def test_signatures_in_another_order_are_malformed(bundle: made.Made) -> None:
    bundle.put_manifest(canonical.dumps(bundle.document), made.RELEASE, made.SECOND)
    envelope = json.loads((bundle.path / ENVELOPE).read_bytes())
    write_json(bundle.path / ENVELOPE, {**envelope, "signatures": envelope["signatures"][::-1]})
    assert statuses(bundle) == {"malformed"}


def test_more_signatures_than_anybody_needs_are_malformed_without_being_checked(bundle: made.Made) -> None:
    bundle.put_manifest(canonical.dumps(bundle.document), *(made.Identity(str(index)) for index in range(65)))
    with pytest.raises(errors.Malformed, match="at most 64"):
        verify_bundle(bundle.path, policy=bundle.policy(), now=made.NOW)


def test_more_entries_than_any_bundle_has_are_malformed(
    bundle: made.Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernseal.loader.safe_read.MAX_ENTRIES", 10)
    assert "malformed" in statuses(bundle, bundle.policy())


def test_an_envelope_without_signatures_is_malformed(bundle: made.Made) -> None:
    bundle.put_manifest(canonical.dumps(bundle.document))
    assert statuses(bundle) == {"malformed"}


def test_a_signature_over_another_payload_type_is_of_the_wrong_type(bundle: made.Made) -> None:
    bundle.put_manifest(canonical.dumps(bundle.document), made.RELEASE, payload_type="application/json")
    assert statuses(bundle) == {"wrong_type"}


def test_a_signature_made_for_another_payload_type_is_bad_for_ours(bundle: made.Made) -> None:
    payload = canonical.dumps(bundle.document)
    envelope = json.loads(made.forge(payload, made.RELEASE, payload_type="application/json"))
    envelope["payloadType"] = PAYLOAD_TYPE
    write_json(bundle.path / ENVELOPE, envelope)
    assert statuses(bundle) == {"bad_signature"}


@pytest.mark.parametrize("pointer", ["_type", "predicateType"])
def test_a_signature_over_another_kind_of_statement_is_of_the_wrong_type(
    bundle: made.Made, pointer: str
) -> None:
    document = {**bundle.document, pointer: "https://in-toto.io/attestation/vulns/v0.1"}
    bundle.put_manifest(canonical.dumps(document), made.RELEASE)
    assert statuses(bundle) == {"wrong_type"}


def test_a_signature_over_another_build_type_is_of_the_wrong_type(bundle: made.Made) -> None:
    document = bundle.edited()
    document["predicate"]["buildDefinition"]["buildType"] = "https://example.com/build/v1"
    bundle.put_manifest(canonical.dumps(document), made.RELEASE)
    assert statuses(bundle) == {"wrong_type"}


# What follows is signed by the trusted key: a reader must be safe from those whom it trusts, too.


@pytest.mark.parametrize("text", [b'{"_type": 1, "_type": 1}', b'{"a": {"b": 1, "b": 2}}'])
def test_duplicate_keys_are_malformed(bundle: made.Made, text: bytes) -> None:
    bundle.put_manifest(text, made.RELEASE)
    assert statuses(bundle) == {"malformed"}


@pytest.mark.parametrize(
    "name",
    [
        *("../outside", "cubin/../../outside", "a/./b", "a//b", "", ".", "..", "a/", "/etc/passwd", "//x"),
        *("a\\b", "a\nb", "é", "a\0b", "~/x", "x" * 200, "/".join("abcdefghij"), MANIFEST, ENVELOPE),
    ],
)
def test_a_name_that_could_lead_elsewhere_is_malformed(bundle: made.Made, name: str) -> None:
    (bundle.path.parent / "outside").write_bytes(b"outside")
    document = bundle.edited()
    document["subject"].append({"name": name, "digest": {"sha256": made.sha256(b"outside")}})
    document["subject"].sort(key=lambda item: item["name"])
    bundle.put_manifest(canonical.dumps(document), made.RELEASE)
    assert statuses(bundle) == {"malformed"}


def test_the_same_file_named_twice_is_malformed(bundle: made.Made) -> None:
    document = bundle.edited()
    document["subject"].insert(0, document["subject"][0])
    bundle.put_manifest(canonical.dumps(document), made.RELEASE)
    assert statuses(bundle) == {"malformed"}


def test_a_kernel_in_no_file_of_the_bundle_is_malformed(bundle: made.Made) -> None:
    document = bundle.edited()
    document["predicate"]["buildDefinition"]["internalParameters"]["kernels"][0]["file"] = "../outside"
    bundle.put_manifest(canonical.dumps(document), made.RELEASE)
    assert statuses(bundle) == {"malformed"}


def test_a_file_name_in_two_pins_of_one_target_is_refused(bundle: made.Made) -> None:
    other = {**bundle.pins, "files": {**bundle.pins["files"], LIBRARY: "0" * 64}}
    locks = [parse_pins(canonical.dumps(p), n) for p, n in ((bundle.pins, "a"), (other, "b"))]
    with pytest.raises(errors.Malformed):
        Policy(tuple(locks))


@pytest.mark.parametrize("name", [LIBRARY, CUBIN, MANIFEST, ENVELOPE])
def test_a_symbolic_link_to_the_right_bytes_is_malformed(bundle: made.Made, name: str) -> None:
    path = bundle.path / name
    copy_of = bundle.path.parent / "copy"
    path.rename(copy_of)
    path.symlink_to(copy_of)
    assert statuses(bundle) == {"malformed"}


def test_a_folder_that_is_a_link_to_the_right_files_is_malformed(bundle: made.Made) -> None:
    (bundle.path / "cubin").rename(bundle.path.parent / "elsewhere")
    (bundle.path / "cubin").symlink_to(bundle.path.parent / "elsewhere")
    assert statuses(bundle, bundle.policy(with_pins=False)) == {"malformed"}


@pytest.mark.parametrize("name", [LIBRARY, MANIFEST, ENVELOPE])
def test_a_fifo_is_malformed_and_does_not_block(bundle: made.Made, name: str) -> None:
    (bundle.path / name).unlink()
    os.mkfifo(bundle.path / name)
    assert statuses(bundle, bundle.policy(with_pins=False)) == {"malformed"}


@pytest.mark.parametrize("name", [LIBRARY, MANIFEST, ENVELOPE])
def test_a_huge_file_is_malformed_without_being_read(bundle: made.Made, name: str) -> None:
    os.truncate(bundle.path / name, 3 << 30)
    assert statuses(bundle, bundle.policy(with_pins=False)) == {"malformed"}


def test_a_file_that_may_not_be_read_is_an_io_error() -> None:
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path: only its owner can enter that
        Path(folder).chmod(0o755)
        bundle = made.make(Path(folder) / "bundle")
        (bundle.path / LIBRARY).chmod(0)
        with as_nobody():
            assert statuses(bundle, bundle.policy(with_pins=False)) == {"io_error"}


def test_a_folder_that_may_not_be_read_is_an_io_error() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        bundle = made.make(Path(folder) / "bundle")
        (bundle.path / "licenses").chmod(0)
        with as_nobody():
            assert statuses(bundle, bundle.policy(with_pins=False)) == {"io_error"}
        (bundle.path / "licenses").chmod(0o755)


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
def test_deep_json_is_malformed(bundle: made.Made, opening: str) -> None:
    for depth in (33, 100_000):
        bundle.put_manifest(opening.encode() * depth, made.RELEASE)
        assert statuses(bundle) == {"malformed"}


@pytest.mark.parametrize(
    "text", [b"\xff", b'{"a": "\xed\xa0\x80"}', b"\xef\xbb\xbf{}", '{"a":1}'.encode("utf-16")]
)
def test_invalid_utf8_is_malformed(bundle: made.Made, text: bytes) -> None:
    bundle.put_manifest(text, made.RELEASE)
    assert statuses(bundle) == {"malformed"}


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-Infinity", "1e999", "1.0", "1e2", "9" * 5000, "2e400", "-0.0"]
)
def test_a_number_that_is_no_64_bit_integer_is_malformed(bundle: made.Made, number: str) -> None:
    text = canonical.dumps(bundle.document).replace(b'"registers": 168', b'"registers": ' + number.encode())
    bundle.put_manifest(text, made.RELEASE)
    assert statuses(bundle) == {"malformed"}


def test_every_value_of_a_wrong_type_is_malformed_even_signed_by_a_trusted_key(bundle: made.Made) -> None:
    document = bundle.edited()
    document["predicate"]["buildDefinition"]["internalParameters"]["abi_version"] = True
    document["predicate"]["buildDefinition"]["internalParameters"]["git"]["dirty"] = 0
    document["subject"][0]["digest"]["sha256"] = 7
    bundle.put_manifest(canonical.dumps(document), made.RELEASE)
    with pytest.raises(VerificationFailed) as caught:
        verify_bundle(bundle.path, policy=bundle.policy(), now=made.NOW)
    assert [violation.path.rsplit("/", 1)[1] for violation in caught.value.violations] == [
        "abi_version",
        "dirty",
        "sha256",
    ]
    assert {violation.status for violation in caught.value.violations} == {"malformed"}


@pytest.mark.parametrize("slack", [b" ", b"\n", b"\0", b"{}"])
def test_slack_after_a_signed_manifest_is_refused(bundle: made.Made, slack: bytes) -> None:
    (bundle.path / MANIFEST).write_bytes(canonical.dumps(bundle.document) + slack)
    assert statuses(bundle) == {"mismatch"}
    bundle.put_manifest(canonical.dumps(bundle.document) + slack, made.RELEASE)
    assert statuses(bundle) == {"malformed"}


def test_the_same_manifest_in_another_form_is_malformed(bundle: made.Made) -> None:
    bundle.put_manifest(json.dumps(bundle.document).encode(), made.RELEASE)
    assert statuses(bundle) == {"malformed"}


# --- how the sweeps tamper --------------------------------------------------------------------------------------------


def both(first: Attack, second: Attack) -> Attack:
    def attack() -> None:
        first()
        second()

    return attack


def overwrite(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def move(path: Path, target: Path) -> None:
    path.rename(target)


def reseal(bundle: made.Made, signers: str) -> None:
    put(bundle, bundle.rehashed(), signers)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may read everything, so root's tests become somebody who may not."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if user == 0:
            os.seteuid(user)


def swap(first: Path, second: Path) -> None:
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)


def loose_dumps(document: object) -> bytes:
    """JSON that says NaN and 1e999, as only an attacker writes it."""
    return json.dumps(document, sort_keys=True, indent=1).encode() + b"\n"


def write_json(path: Path, document: object) -> None:
    path.write_bytes(loose_dumps(document))


def put(bundle: made.Made, document: object, signers: str) -> None:
    """Write a manifest; ``signers`` says what stands behind it."""
    payload = loose_dumps(document)
    if signers == "nobody":
        (bundle.path / MANIFEST).write_bytes(payload)
    elif signers == "old signature":
        envelope = json.loads(made.forge(canonical.dumps(bundle.document), made.RELEASE))
        new = json.loads(made.forge(payload, made.RELEASE))
        (bundle.path / MANIFEST).write_bytes(payload)
        write_json(bundle.path / ENVELOPE, {**new, "signatures": envelope["signatures"]})
    else:
        who = {"stranger": made.STRANGER, "revoked": made.REVOKED, "expired": made.EXPIRED}[signers]
        bundle.put_manifest(payload, who)


def reseals(bundle: made.Made, name: str, kind: str) -> Iterator[tuple[str, Attack]]:
    """What an attacker does to the manifest after having changed ``name``."""
    yield "manifest as it was", lambda: None
    if (
        name in (MANIFEST, ENVELOPE) or kind == "huge"
    ):  # hashing gigabytes would be the test's time, not the verifier's
        return
    for signers in ("stranger", "revoked"):  # the manifest sweeps have the others, too
        yield f"manifest rewritten, {signers}", partial(reseal, bundle, signers)


def file_attacks(root: Path, name: str) -> Iterator[tuple[str, Attack]]:
    path = root / name
    data = path.read_bytes()
    outside = root.parent / "outside"
    for offset in {0, len(data) // 2, len(data) - 1}:
        flipped = bytearray(data)
        flipped[offset] ^= 0x20
        yield f"flip byte {offset} of", partial(overwrite, path, bytes(flipped))
    for size in {0, 1, len(data) // 2, len(data) - 1}:
        yield f"truncate to {size}", partial(os.truncate, path, size)
    for tail in (b"\0", b"\n", b" ", data):
        yield f"append {len(tail)} bytes to", partial(overwrite, path, data + tail)
    yield "delete", path.unlink
    yield "rename", partial(move, path, path.with_name("renamed"))
    yield "move up", partial(move, path, root / "moved")
    yield "link to outside", lambda: link_to(path, outside, data)
    yield "link to inside", lambda: link_to(path, path.with_name("renamed"), data)
    yield "dangling link", both(path.unlink, lambda: path.symlink_to("/nonexistent"))
    yield "link to itself", both(path.unlink, lambda: path.symlink_to(path.name))
    yield "link to a device", both(path.unlink, lambda: path.symlink_to("/dev/zero"))
    yield "FIFO for", both(path.unlink, lambda: os.mkfifo(path))
    yield "socket for", both(path.unlink, lambda: bind(path))
    yield "folder for", both(path.unlink, path.mkdir)
    yield "huge", lambda: os.truncate(path, 3 << 30)
    others = [*made.files(), MANIFEST, ENVELOPE]
    for other in others:
        if (root / other).read_bytes() != data:
            yield f"swap with {other}", partial(swap, path, root / other)


def additions(root: Path) -> Iterator[tuple[str, Attack]]:
    for name in (
        "added",
        ".hidden",
        "cubin/added",
        "cubin/gdn_prefill/added.cubin",
        "new/added",
        "a b",
        "a\nb",
        "é",
    ):
        yield f"add {name!r}", partial(add, root / name, b"added")
    yield "add a copy", lambda: add(root / "copy.so", (root / LIBRARY).read_bytes())
    yield "add a name that is not UTF-8", lambda: add(Path(os.fsdecode(os.fsencode(root) + b"/\xff")), b"")
    yield "add an empty folder", lambda: (root / "empty").mkdir()
    yield "add a deep folder", lambda: (root / "/".join("abcdefghijklmnop")).mkdir(parents=True)
    yield "add a link", lambda: (root / "link").symlink_to(LIBRARY)
    yield "add a link to the root", lambda: (root / "cubin/link").symlink_to("/")
    yield "add a FIFO", lambda: os.mkfifo(root / "fifo")
    yield "add a socket", lambda: bind(root / "socket")


def field_attacks(document: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every node of a document, changed in every way that JSON allows."""
    for path in sorted(nodes(document), key=str):
        name = "/" + "/".join(map(str, path))
        value = resolve(document, path)
        for replacement in replacements(value):
            yield f"{name} = {json.dumps(replacement)[:40]}", changed(document, path, replacement)
        if path:
            yield f"{name} removed", without(document, path)
        if isinstance(value, dict):
            yield f"{name} with another key", changed(document, path, {**value, "zz": 1})
        if isinstance(value, list):
            yield f"{name} with another item", changed(document, path, [*value, *(value[:1] or [1])])
            if value != value[::-1]:
                yield f"{name} reversed", changed(document, path, value[::-1])


def replacements(value: Any) -> list[Any]:
    """Values of every other type, and others of the same."""
    choices: list[Any] = [
        None,
        True,
        0,
        2**70,
        float("nan"),
        float("inf"),
        "",
        "x",
        "\ud800",
        [],
        {},
        [[]],
        {"a": 1},
    ]
    if isinstance(value, str):
        choices += [value + " ", value.upper() if value.upper() != value else value + "A", value[:-1]]
    if isinstance(value, int):
        choices += [value + 1, -1, str(value)]
    return [choice for choice in choices if not (type(choice) is type(value) and choice == value)]


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from nodes(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from nodes(item, (*path, index))


def resolve(document: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        document = document[step]
    return document


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    result = copy.deepcopy(document)
    resolve(result, path[:-1])[path[-1]] = value
    return result


def without(document: Any, path: tuple[Any, ...]) -> Any:
    result = copy.deepcopy(document)
    del resolve(result, path[:-1])[path[-1]]
    return result


def add(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def link_to(path: Path, target: Path, data: bytes) -> None:
    target.write_bytes(data)
    path.unlink()
    path.symlink_to(target)


def bind(path: Path) -> None:
    """A socket; its name is bound relative to its folder, because socket paths are short."""
    here = os.getcwd()
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(path.parent)
        try:
            listener.bind(path.name)
        finally:
            os.chdir(here)
