"""Signing keys: where they come from, how they are kept, and what they are willing to sign."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
from datetime import timedelta
from pathlib import Path

import pytest
import synthetic_bundle as made
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from kernseal.export import signing
from kernseal.loader import canonical, errors
from kernseal.loader.envelope import open_envelope
from kernseal.loader.keys import read_key
from kernseal.loader.policy import Policy, trust_key
from kernseal.loader.verify import verify_bundle


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(tmp_path / "config")}


@pytest.fixture
def statement() -> bytes:
    return canonical.dumps(made.statement(made.files()))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_keygen_writes_a_private_key_that_only_its_owner_can_read(tmp_path: Path) -> None:
    signing.keygen(tmp_path / "release.key")
    assert mode(tmp_path / "release.key") == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == ["release.json", "release.key"]


def test_the_umask_does_not_open_a_private_key(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        signing.keygen(tmp_path / "release.key")
    finally:
        os.umask(before)
    assert mode(tmp_path / "release.key") == 0o600


def test_keygen_writes_the_public_half_of_what_it_wrote(tmp_path: Path) -> None:
    public = read_key(signing.keygen(tmp_path / "a.pem", "release-2030", days=10))
    assert public.name == "release-2030"
    assert public.keyid == signing.read_private(tmp_path / "a.pem").keyid
    assert public.valid_until - public.valid_from == timedelta(days=10)


def test_keygen_never_overwrites(tmp_path: Path) -> None:
    signing.keygen(tmp_path / "release.key")
    before = (tmp_path / "release.key").read_bytes()
    with pytest.raises(errors.InvalidArgument, match="already there"):
        signing.keygen(tmp_path / "release.key", "another")
    with pytest.raises(errors.InvalidArgument, match="already there"):
        signing.keygen(tmp_path / "other.key", "release")
    assert (tmp_path / "release.key").read_bytes() == before
    assert not (tmp_path / "other.key").exists()


def test_keygen_does_not_write_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "release.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.InvalidArgument, match="already there"):
        signing.keygen(tmp_path / "release.key")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", ["policy", "Upper", "a b", "../x", "-", ""])
def test_keygen_refuses_a_name_that_no_key_file_has(tmp_path: Path, name: str) -> None:
    path = tmp_path / ("UPPER.key" if not name else "a.key")
    with pytest.raises(errors.InvalidArgument, match="name"):
        signing.keygen(path, name)
    assert list(tmp_path.iterdir()) == []


def test_the_developer_key_is_made_once_and_says_so(home: dict[str, str], statement: bytes) -> None:
    first, second = signing.find_key(environment=home), signing.find_key(environment=home)
    assert (first.developer, first.created) == (True, True)
    assert (second.developer, second.created) == (True, False)
    assert first.keyid == second.keyid
    assert "developer key" in first.origin
    assert mode(signing.developer_path(home)) == 0o600
    assert signing.sign(statement, first) == signing.sign(statement, second)


def test_the_developers_own_policy_accepts_the_developers_bundles(
    home: dict[str, str], tmp_path: Path
) -> None:
    bundle = made.make(tmp_path / "bundle")
    key = signing.find_key(environment=home)
    (bundle.path / made.ENVELOPE).write_bytes(signing.sign(canonical.dumps(bundle.document), key))
    policy = Policy.from_options(keys=[signing.developer_public_path(home)])
    assert verify_bundle(bundle.path, policy=policy).trusted_by == ("key:developer",)
    assert verify_bundle(bundle.path, policy=signing.trusting(Policy(), key)).trusted_by == ("key:developer",)


def test_a_lost_public_half_is_written_again(home: dict[str, str]) -> None:
    key = signing.find_key(environment=home)
    signing.developer_public_path(home).unlink()
    signing.find_key(environment=home)
    assert read_key(signing.developer_public_path(home)).keyid == key.keyid


def test_a_relative_config_folder_is_ignored(tmp_path: Path) -> None:
    path = signing.developer_path({"XDG_CONFIG_HOME": "relative", "HOME": str(tmp_path)})
    assert path == tmp_path / ".config/kernseal/developer.key"


def test_many_first_uses_at_once_agree_on_one_developer_key(home: dict[str, str]) -> None:
    with multiprocessing.get_context("fork").Pool(8) as pool:
        keys = pool.map(developer_keyid, [home] * 32)
        pool.close()  # and they end by themselves: a worker that inherited a handler of SIGTERM would not be terminated
        pool.join()
    assert len(set(keys)) == 1
    assert sorted(p.name for p in signing.developer_path(home).parent.iterdir()) == [
        "developer.json",
        "developer.key",
    ]


def test_the_environment_comes_before_the_developer_key(home: dict[str, str], tmp_path: Path) -> None:
    signing.keygen(tmp_path / "release.key")
    text = (tmp_path / "release.key").read_text()
    key = signing.find_key(environment={**home, signing.ENVIRONMENT: text})
    assert key.keyid == signing.read_private(tmp_path / "release.key").keyid
    assert (key.developer, key.origin) == (False, "environment KERNSEAL_SIGNING_KEY")
    assert not signing.developer_path(home).exists()


def test_a_bad_key_in_the_environment_is_an_error_and_no_other_key_is_taken(home: dict[str, str]) -> None:
    for text in ("", "garbage", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "\udcff"):
        with pytest.raises(errors.InvalidArgument, match="environment KERNSEAL_SIGNING_KEY"):
            signing.find_key(environment={**home, signing.ENVIRONMENT: text})
    assert not signing.developer_path(home).exists()


def test_a_file_comes_before_the_environment(home: dict[str, str], tmp_path: Path) -> None:
    signing.keygen(tmp_path / "release.key")
    key = signing.find_key(tmp_path / "release.key", {**home, signing.ENVIRONMENT: "garbage"})
    assert key.origin == f"file {tmp_path / 'release.key'}"


@pytest.mark.parametrize("bits", [0o040, 0o004, 0o020, 0o010, 0o077])
def test_a_private_key_that_others_can_get_at_is_refused(tmp_path: Path, bits: int) -> None:
    signing.keygen(tmp_path / "release.key")
    (tmp_path / "release.key").chmod(0o600 | bits)
    with pytest.raises(errors.InvalidArgument, match="chmod 600"):
        signing.read_private(tmp_path / "release.key")


def test_only_an_unencrypted_ed25519_key_signs(tmp_path: Path) -> None:
    pkcs8 = PrivateFormat.PKCS8
    other_curve = generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, pkcs8, NoEncryption())
    locked = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, pkcs8, BestAvailableEncryption(b"x"))
    public = made.RELEASE.public()
    for text in (other_curve, locked, b"", b"\xff" * 40_000, public.keyid.encode()):
        path = tmp_path / "key"
        path.write_bytes(text)
        path.chmod(0o600)
        with pytest.raises(errors.InvalidArgument, match="Ed25519"):
            signing.read_private(path)


def test_a_missing_key_is_an_io_error_and_a_fifo_does_not_block(tmp_path: Path) -> None:
    with pytest.raises(errors.IoError, match="No such file"):
        signing.read_private(tmp_path / "nothing")
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(errors.InvalidArgument, match="regular"):
        signing.read_private(tmp_path / "fifo")


def test_no_message_or_repr_shows_a_private_key(tmp_path: Path) -> None:
    signing.keygen(tmp_path / "release.key")
    secret = (tmp_path / "release.key").read_text().splitlines()[1]
    assert secret not in repr(signing.read_private(tmp_path / "release.key"))
    broken = f"-----BEGIN PRIVATE KEY-----\n{secret[:-4]}\n-----END PRIVATE KEY-----\n"
    with pytest.raises(errors.InvalidArgument) as caught:
        signing.find_key(environment={signing.ENVIRONMENT: broken})
    assert secret[:20] not in str(caught.value)
    assert caught.value.__cause__ is None


def test_signing_is_reproducible(statement: bytes) -> None:
    key = made.signing_key(made.RELEASE)
    assert signing.sign(statement, key) == signing.sign(statement, key) == made.forge(statement, made.RELEASE)


def test_what_verification_would_refuse_is_not_signed(statement: bytes) -> None:
    key = made.signing_key(made.RELEASE)
    document = json.loads(statement)
    for bad in (b"", b"{}", b" " + statement, canonical.dumps({**document, "predicateType": "x"})):
        with pytest.raises(errors.KernsealError):
            signing.sign(bad, key)


def test_a_second_signature_joins_the_first(statement: bytes) -> None:
    one = signing.sign(statement, made.signing_key(made.RELEASE))
    both = signing.add_signature(one, made.signing_key(made.SECOND))
    assert set(open_envelope(both).keyids) == {made.RELEASE.keyid, made.SECOND.keyid}
    assert both == made.forge(statement, made.RELEASE, made.SECOND)


def test_the_order_of_signing_leaves_no_trace(statement: bytes) -> None:
    keys = [made.signing_key(who) for who in (made.RELEASE, made.SECOND, made.STRANGER)]
    forward = backward = b""
    for key in keys:
        forward = signing.add_signature(forward, key) if forward else signing.sign(statement, key)
    for key in reversed(keys):
        backward = signing.add_signature(backward, key) if backward else signing.sign(statement, key)
    assert forward == backward


def test_a_key_signs_an_envelope_once(statement: bytes) -> None:
    key = made.signing_key(made.RELEASE)
    with pytest.raises(errors.InvalidArgument, match="already signed"):
        signing.add_signature(signing.sign(statement, key), key)


def test_no_signature_joins_one_that_does_not_verify(statement: bytes) -> None:
    envelope = made.forge(statement, made.STRANGER).replace(
        made.STRANGER.keyid.encode(), made.RELEASE.keyid.encode()
    )
    with pytest.raises(errors.BadSignature):
        signing.add_signature(envelope, made.signing_key(made.SECOND))


def test_a_second_signer_signs_what_the_policy_accepts_and_is_shown_the_git_state(tmp_path: Path) -> None:
    bundle = made.make(tmp_path / "bundle")
    policy = bundle.policy(with_keys=False)
    envelope, statement = signing.endorse(bundle.path, made.signing_key(made.SECOND), policy)
    (bundle.path / made.ENVELOPE).write_bytes(envelope)
    assert (statement.commit, statement.dirty) == ("1" * 40, False)
    result = verify_bundle(bundle.path, policy=Policy(keys=made.key_set(threshold=2)), now=made.NOW)
    assert result.trusted_by == ("key:release", "key:second")


def test_a_second_signer_does_not_sign_an_altered_bundle(tmp_path: Path) -> None:
    bundle = made.make(tmp_path / "bundle")
    (bundle.path / "libkernseal.so").write_bytes(b"altered")
    policy = bundle.policy(with_keys=False)
    with pytest.raises(errors.Mismatch, match=r"libkernseal\.so"):
        signing.endorse(bundle.path, made.signing_key(made.SECOND), policy)
    bundle.put_manifest(canonical.dumps(bundle.rehashed()), made.STRANGER)
    with pytest.raises(errors.Mismatch, match=r"libkernseal\.so"):
        signing.endorse(bundle.path, made.signing_key(made.SECOND), policy)


def test_an_envelope_swapped_after_verification_is_not_signed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, other = made.make(tmp_path / "bundle"), made.make(tmp_path / "other", salt="other")

    def verify_then_swap(path: Path, *, policy: Policy) -> object:
        verified = verify_bundle(path, policy=policy)
        (other.path / made.ENVELOPE).replace(path / made.ENVELOPE)
        return verified

    monkeypatch.setattr(signing, "verify_bundle", verify_then_swap)
    with pytest.raises(errors.Mismatch, match=r"manifest\.dsse\.json"):
        signing.endorse(bundle.path, made.signing_key(made.SECOND), bundle.policy(with_keys=False))


def test_trusting_a_key_does_not_bring_back_one_that_is_revoked() -> None:
    policy = Policy(keys=made.key_set())
    assert signing.trusting(policy, made.signing_key(made.REVOKED)) is policy
    with pytest.raises(errors.InvalidArgument, match="revoked"):
        trust_key(policy, made.REVOKED.public())


def developer_keyid(environment: dict[str, str]) -> str:
    return signing.find_key(environment=environment).keyid
