"""The roots of trust as files: public keys, key folders, pins, and the policy options make of them."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import synthetic_bundle as made

from kernseal.export import signing
from kernseal.loader import canonical, errors
from kernseal.loader.keys import PublicKey, parse_key, read_key_folder, write_key
from kernseal.loader.pins import parse_pins, read_pins
from kernseal.loader.policy import Policy
from kernseal.loader.statement import version_order
from kernseal.loader.verify import verify_bundle

COMMITTED_KEYS = Path(__file__).parents[2] / "manifests" / "keys"


def folder(path: Path, known: list[PublicKey], **policy: Any) -> Path:
    path.mkdir()
    for key in known:
        (path / f"{key.name}.json").write_bytes(write_key(key))
    content = {"schema": 1, "threshold": 1, "keys": [key.name for key in known], **policy}
    (path / "policy.json").write_bytes(canonical.dumps(content))
    return path


def key_file(**changes: Any) -> bytes:
    return canonical.dumps({**json.loads(write_key(made.RELEASE.public())), **changes})


def test_a_public_key_survives_its_file() -> None:
    for key in (
        made.RELEASE.public(),
        made.REVOKED.public(revoked=(made.NOW, "lost")),
        PublicKey("x", made.SECOND.keyid),
    ):
        assert parse_key(write_key(key), "key.json") == key


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schema", 2),
        ("schema", True),
        ("schema", "1"),
        ("name", "../x"),
        ("name", ""),
        ("keyid", made.SECOND.keyid),
        ("keyid", made.RELEASE.keyid.upper()),
        ("keyid", ""),
        ("scheme", "rsa"),
        ("public", "-----BEGIN PUBLIC KEY-----\n"),
        ("valid_from", "2030-02-31T00:00:00Z"),
        ("valid_from", "2030-01-01T00:00:00+00:00"),
        ("valid_from", "2030-01-01"),
        ("valid_from", 0),
        ("valid_from", "0000-01-01T00:00:00Z"),
        ("valid_until", "2000-01-01T00:00:00Z"),
        ("revoked", False),
        ("revoked", {}),
        ("revoked", {"at": "2030-01-01T00:00:00Z"}),
        ("revoked", {"at": "2030-01-01T00:00:00Z", "reason": "a\nb"}),
        ("extra", 1),
    ],
)
def test_a_key_file_with_a_wrong_field_is_malformed_and_names_it(field: str, value: object) -> None:
    with pytest.raises(errors.Malformed, match=rf"key\.json#/(?:{field}|public)"):
        parse_key(key_file(**{field: value}), "key.json")


def test_a_key_folder_trusts_whom_its_policy_names(tmp_path: Path) -> None:
    keys = read_key_folder(
        folder(tmp_path / "keys", [made.RELEASE.public(), made.SECOND.public()], keys=["second"])
    )
    assert keys.trusted == {made.SECOND.keyid}
    assert set(keys.keys) == {made.RELEASE.keyid, made.SECOND.keyid}


def test_a_known_key_that_the_policy_does_not_name_does_not_count(tmp_path: Path) -> None:
    bundle = made.make(tmp_path / "bundle")
    keys = folder(tmp_path / "keys", [made.RELEASE.public(), made.SECOND.public()], keys=["second"])
    with pytest.raises(errors.UntrustedKey):
        verify_bundle(bundle.path, policy=Policy.from_options(keys=[keys]), now=made.NOW)


@pytest.mark.parametrize(
    "policy",
    [
        {"threshold": 0},
        {"threshold": 3},
        {"threshold": True},
        {"threshold": "1"},
        {"keys": ["nobody"]},
        {"keys": ["release", "release"]},
        {"keys": "release"},
        {"keys": [["release"]]},
        {"schema": 2},
        {"trust_all": True},
    ],
)
def test_a_wrong_key_policy_is_malformed(tmp_path: Path, policy: dict[str, Any]) -> None:
    with pytest.raises(errors.Malformed, match=r"policy\.json"):
        read_key_folder(folder(tmp_path / "keys", [made.RELEASE.public(), made.SECOND.public()], **policy))


def test_a_key_folder_without_a_policy_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "keys", [made.RELEASE.public()])
    (path / "policy.json").unlink()
    with pytest.raises(errors.Missing):
        read_key_folder(path)


def test_one_key_under_two_names_is_refused_so_that_nobody_counts_twice(tmp_path: Path) -> None:
    twin = PublicKey("twin", made.RELEASE.keyid)
    with pytest.raises(errors.Malformed, match="same key"):
        read_key_folder(folder(tmp_path / "keys", [made.RELEASE.public(), twin]))
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_bytes(write_key(made.RELEASE.public()))
    with pytest.raises(errors.Malformed, match="same key"):
        Policy.from_options(keys=[tmp_path / "a.json", tmp_path / "b.json"])


def test_a_key_file_must_have_its_keys_name(tmp_path: Path) -> None:
    path = folder(tmp_path / "keys", [made.RELEASE.public()], keys=[])
    (path / "release.json").rename(path / "other.json")
    with pytest.raises(errors.Malformed, match="name of its file"):
        read_key_folder(path)


def test_every_bad_key_of_a_folder_is_reported_at_once(tmp_path: Path) -> None:
    path = folder(tmp_path / "keys", [])
    (path / "a.json").write_bytes(b"{")
    (path / "b.json").write_bytes(key_file(schema=2))
    with pytest.raises(errors.Malformed, match=r"(?s)a\.json.*b\.json"):
        read_key_folder(path)


def test_the_committed_key_folder_reads() -> None:
    keys = read_key_folder(COMMITTED_KEYS)
    assert keys.threshold >= 1
    assert keys.trusted <= set(keys.keys)


def test_the_default_policy_is_the_packages_pins_and_keys() -> None:
    policy = Policy.default()
    assert policy.keys == read_key_folder(COMMITTED_KEYS)
    assert policy.all_pins() == read_pins(COMMITTED_KEYS.parent)
    assert Policy.from_options() == policy


def lock(folder: Path, sm: str, name: str, host: str = "linux-x86_64") -> None:
    pins = {**made.pins(made.statement(made.files(), sm=sm)), "host": host}
    (folder / f"{name}.lock.json").write_bytes(canonical.dumps(pins))


def wanted(sm: str, host: str = "linux-x86_64") -> Any:
    return SimpleNamespace(target=sm, host=host)


def test_of_a_folder_only_the_pins_of_the_bundle_are_read(tmp_path: Path) -> None:
    lock(tmp_path, "sm_90a", "sm_90a")
    lock(tmp_path, "sm_90a", "sm_90a-linux-aarch64", "linux-aarch64")
    (tmp_path / "sm_120a.lock.json").write_text("{")
    policy = Policy(folder=tmp_path)
    for host in ("linux-x86_64", "linux-aarch64"):
        found = policy.pins_for(wanted("sm_90a", host))
        assert found is not None and found.target == ("sm_90a", host)
    with pytest.raises(errors.Malformed, match=r"sm_120a\.lock\.json"):
        policy.pins_for(wanted("sm_120a"))
    with pytest.raises(errors.Malformed, match=r"sm_120a\.lock\.json"):
        policy.all_pins()


def test_pins_of_a_folder_count_under_any_name(tmp_path: Path) -> None:
    lock(tmp_path, "sm_120a", "sm_90a")  # says another target than its name
    lock(tmp_path, "sm_90a", "hopper")
    policy = Policy(folder=tmp_path)
    for sm in ("sm_90a", "sm_120a"):
        found = policy.pins_for(wanted(sm))
        assert found is not None and found.sm == sm
    assert policy.pins_for(wanted("sm_100a")) is None
    lock(tmp_path, "sm_120a", "again")
    with pytest.raises(errors.Malformed, match="one lock file for each target"):
        policy.pins_for(wanted("sm_90a"))


def test_given_options_replace_the_default(tmp_path: Path) -> None:
    (tmp_path / "sm_90a.lock.json").write_bytes(canonical.dumps(made.pins(made.statement(made.files()))))
    public = signing.keygen(tmp_path / "own.key")
    only_pins = Policy.from_options(pins=tmp_path / "sm_90a.lock.json")
    assert [lock.target for lock in only_pins.pins] == [("sm_90a", "linux-x86_64")]
    assert not only_pins.keys.trusted
    only_keys = Policy.from_options(keys=[public])
    assert (len(only_keys.keys.trusted), only_keys.keys.threshold, only_keys.pins) == (1, 1, ())
    # As text, and one by itself.
    assert Policy.from_options(pins=str(tmp_path / "sm_90a.lock.json")) == only_pins
    assert Policy.from_options(keys=[str(public)]) == Policy.from_options(keys=str(public)) == only_keys


def test_pins_of_a_folder_are_all_read_and_must_not_overlap(tmp_path: Path) -> None:
    for sm in ("sm_90a", "sm_120a"):
        document = made.statement(made.files(), sm=sm)
        (tmp_path / f"{sm}.lock.json").write_bytes(canonical.dumps(made.pins(document)))
    assert [lock.sm for lock in read_pins(tmp_path)] == ["sm_120a", "sm_90a"]
    (tmp_path / "again.lock.json").write_bytes((tmp_path / "sm_90a.lock.json").read_bytes())
    with pytest.raises(errors.Malformed, match="one lock file for each target"):
        read_pins(tmp_path)


def test_pins_that_say_two_things_about_one_cubin_are_malformed() -> None:
    lock = made.pins(made.statement(made.files()))
    lock["variants"]["gdn_prefill/bf16_hvk"]["cubin"] = "0" * 64
    with pytest.raises(errors.Malformed, match="cubin"):
        parse_pins(canonical.dumps(lock), "a.lock.json")


@pytest.mark.parametrize("threshold", [0, -1, 2])
def test_a_threshold_that_cannot_be_met_is_an_invalid_argument(tmp_path: Path, threshold: int) -> None:
    public = signing.keygen(tmp_path / "own.key")
    with pytest.raises(errors.InvalidArgument, match="threshold"):
        Policy.from_options(keys=[public], threshold=threshold)


def test_a_key_folder_among_other_keys_is_an_invalid_argument(tmp_path: Path) -> None:
    public = signing.keygen(tmp_path / "own.key")
    keys = folder(tmp_path / "keys", [made.RELEASE.public()])
    with pytest.raises(errors.InvalidArgument, match="only one"):
        Policy.from_options(keys=[keys, public])


def test_a_missing_root_of_trust_is_an_error_not_an_empty_one(tmp_path: Path) -> None:
    for options in ({"pins": tmp_path / "x.lock.json"}, {"keys": [tmp_path / "x.json"]}):
        with pytest.raises(errors.Missing):
            Policy.from_options(**options)


def test_no_minimum_version_that_is_none() -> None:
    with pytest.raises(errors.InvalidArgument, match="min_version"):
        Policy(min_version="latest")


def test_versions_sort_with_their_stages_around_them() -> None:
    ordered = ["0.9.10", "1.0.0.dev1", "1.0.0", "1.0.0.post1", "1.0.1", "1.10.0", "2.0.0rc1"]
    assert sorted(ordered, key=version_order) == ordered
    assert version_order("1.0.0+local") == version_order("1.0.0")


def test_a_revocation_says_when_and_why() -> None:
    key = made.REVOKED.public(revoked=(datetime(2030, 5, 1, tzinfo=timezone.utc), "the laptop was stolen"))
    refusal = key.refusal("manifest.dsse.json#/signatures/0", made.NOW)
    assert refusal is not None
    assert refusal.status == "revoked"
    assert "2030-05-01T00:00:00Z: the laptop was stolen" in refusal.found
