"""What verify_bundle accepts, for which reason, and how it says no. Each kind of tampering is in test_tamper.py."""

from __future__ import annotations

import itertools
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import synthetic_bundle as made

from kernseal.loader import canonical, errors
from kernseal.loader.pins import parse_pins
from kernseal.loader.policy import NO_KEYS, Policy
from kernseal.loader.verify import EVERYTHING, verify_bundle, verify_report
from kernseal.loader.violations import VerificationFailed


@pytest.fixture
def bundle(tmp_path: Path) -> made.Made:
    return made.make(tmp_path / "bundle")


def refused(bundle: made.Made, policy: Policy, **options: Any) -> list[str]:
    """The statuses of the violations, in order."""
    with pytest.raises(VerificationFailed) as caught:
        verify_bundle(bundle.path, policy=policy, now=made.NOW, **options)
    return [violation.status for violation in caught.value.violations]


def accepted(bundle: made.Made, policy: Policy, **options: Any) -> tuple[str, ...]:
    return verify_bundle(bundle.path, policy=policy, now=made.NOW, **options).trusted_by


def test_pins_alone_make_a_bundle_trusted(bundle: made.Made) -> None:
    assert accepted(bundle, bundle.policy(with_keys=False)) == ("pins:sm_90a.lock.json",)


def test_a_trusted_signature_alone_makes_a_bundle_trusted(bundle: made.Made) -> None:
    assert accepted(bundle, bundle.policy(with_pins=False)) == ("key:release",)


def test_the_result_names_every_root_that_vouched(bundle: made.Made) -> None:
    assert accepted(bundle, bundle.policy()) == ("pins:sm_90a.lock.json", "key:release")


def test_an_empty_policy_trusts_nothing(bundle: made.Made) -> None:
    assert set(refused(bundle, Policy())) == {"untrusted_key"}


def test_a_policy_of_both_wants_both(bundle: made.Made) -> None:
    assert accepted(bundle, bundle.policy(both=True)) == ("pins:sm_90a.lock.json", "key:release")
    assert refused(bundle, bundle.policy(both=True, with_keys=False)) == ["untrusted_key"] * 2
    assert refused(bundle, bundle.policy(both=True, with_pins=False)) == ["untrusted_key"]


def test_a_valid_signature_by_a_stranger_is_untrusted_not_bad(bundle: made.Made) -> None:
    bundle.put_manifest(canonical.dumps(bundle.document), made.STRANGER)
    assert set(refused(bundle, bundle.policy(with_pins=False))) == {"untrusted_key"}


def test_pins_vouch_for_a_fresh_build_signed_by_its_developer(bundle: made.Made) -> None:
    bundle.put_manifest(canonical.dumps(bundle.document), made.STRANGER)
    assert accepted(bundle, bundle.policy()) == ("pins:sm_90a.lock.json",)


def test_pins_do_not_vouch_for_the_git_state_so_it_is_not_handed_out(bundle: made.Made) -> None:
    lie = bundle.edited()
    lie["predicate"]["buildDefinition"]["internalParameters"]["git"]["commit"] = "2" * 40
    bundle.put_manifest(canonical.dumps(lie), made.STRANGER)
    result = verify_bundle(bundle.path, policy=bundle.policy(), now=made.NOW)
    assert result.statement.commit is None
    assert "2" * 40 not in str(result)


def test_signatures_vouch_for_the_git_state(bundle: made.Made) -> None:
    result = verify_bundle(bundle.path, policy=bundle.policy(), now=made.NOW)
    assert (result.statement.commit, result.statement.dirty) == ("1" * 40, False)


def test_a_threshold_counts_distinct_trusted_signers(bundle: made.Made) -> None:
    policy = Policy(keys=made.key_set(threshold=2))
    payload = canonical.dumps(bundle.document)
    assert set(refused(bundle, policy)) == {"untrusted_key"}
    bundle.put_manifest(payload, made.RELEASE, made.STRANGER)
    assert set(refused(bundle, policy)) == {"untrusted_key"}
    bundle.put_manifest(payload, made.RELEASE, made.SECOND)
    assert accepted(bundle, policy) == ("key:release", "key:second")


def test_an_extra_valid_signature_by_a_stranger_changes_nothing(bundle: made.Made) -> None:
    bundle.put_manifest(canonical.dumps(bundle.document), made.RELEASE, made.STRANGER)
    assert accepted(bundle, bundle.policy(with_pins=False)) == ("key:release",)


def test_after_rotation_the_new_key_is_enough_although_the_old_one_is_revoked(bundle: made.Made) -> None:
    bundle.put_manifest(canonical.dumps(bundle.document), made.REVOKED, made.SECOND)
    assert accepted(bundle, bundle.policy(with_pins=False)) == ("key:second",)


def test_a_revoked_key_is_refused_even_where_the_pins_match(bundle: made.Made) -> None:
    bundle.put_manifest(canonical.dumps(bundle.document), made.REVOKED)
    assert refused(bundle, bundle.policy()) == ["revoked"]


def test_an_expired_key_does_not_count_and_pins_still_do(bundle: made.Made) -> None:
    bundle.put_manifest(canonical.dumps(bundle.document), made.EXPIRED)
    assert set(refused(bundle, bundle.policy(with_pins=False))) == {"expired", "untrusted_key"}
    assert accepted(bundle, bundle.policy()) == ("pins:sm_90a.lock.json",)


def test_a_key_that_is_not_valid_yet_does_not_count(bundle: made.Made) -> None:
    policy = bundle.policy(with_pins=False)
    with pytest.raises(VerificationFailed) as caught:
        verify_bundle(bundle.path, policy=policy, now=made.NOW - timedelta(days=700))
    assert "expired" in {violation.status for violation in caught.value.violations}


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("threshold", [0, 1, 2])
@pytest.mark.parametrize("pinned", ["as it is", "otherwise", "not at all"])
def test_whatever_is_accepted_has_a_root_that_vouched(
    bundle: made.Made, tmp_path: Path, pinned: str, threshold: int, both: bool
) -> None:
    """Every combination of roots and signers against the rule in one line; threshold 0 is a policy without keys."""
    locks = {"as it is": bundle.pins, "otherwise": made.make(tmp_path / "other", salt="x").pins}.get(pinned)
    policy = Policy(
        pins=(parse_pins(canonical.dumps(locks), "a.lock.json"),) if locks else (),
        keys=made.key_set(threshold) if threshold else NO_KEYS,
        both=both,
    )
    people = (made.RELEASE, made.SECOND, made.STRANGER, made.REVOKED, made.EXPIRED)
    for count in range(1, len(people) + 1):
        for signers in itertools.combinations(people, count):
            by_pins = pinned == "as it is"
            good = len({made.RELEASE, made.SECOND} & set(signers))
            by_keys = 0 < threshold <= good
            warned = made.REVOKED in signers and threshold > 0
            wanted = (by_pins and by_keys) if both else by_keys or (by_pins and not warned)
            bundle.put_manifest(canonical.dumps(bundle.document), *signers)
            report = verify_report(bundle.path, policy=policy, now=made.NOW)
            assert report["accepted"] == wanted, signers
            assert bool(report["trusted_by"]) == wanted
            assert bool(report["violations"]) != wanted


def test_a_bundle_for_another_sm_is_refused(bundle: made.Made) -> None:
    assert refused(bundle, bundle.policy(), sm="sm_120a") == ["wrong_sm"]
    assert accepted(bundle, bundle.policy(), sm="sm_90a")


def test_a_retargeted_bundle_passes_as_neither_of_its_sms(tmp_path: Path) -> None:
    bundle = made.make(tmp_path / "bundle", sm="sm_120a", retarget="sm_90a")
    for sm in ("sm_120a", "sm_90a"):
        assert refused(bundle, bundle.policy(), sm=sm) == ["wrong_sm"]
    assert accepted(bundle, bundle.policy(), sm="sm_120a-on-sm_90a")


def test_another_abi_is_refused(bundle: made.Made) -> None:
    assert refused(bundle, bundle.policy(), abi_version=2) == ["abi_mismatch"]


def test_a_minimum_version_stops_a_rollback_that_a_signature_alone_does_not(bundle: made.Made) -> None:
    assert accepted(bundle, bundle.policy(with_pins=False, min_version="1.2.3"))
    assert accepted(bundle, bundle.policy(with_pins=False, min_version="1.2.3rc1"))
    assert refused(bundle, bundle.policy(with_pins=False, min_version="1.2.4")) == ["mismatch"]


def test_an_expected_manifest_is_the_only_one_accepted(bundle: made.Made) -> None:
    digest = verify_bundle(bundle.path, policy=bundle.policy(), now=made.NOW).manifest_sha256
    assert accepted(bundle, bundle.policy(manifest_sha256=digest))
    assert refused(bundle, bundle.policy(manifest_sha256="0" * 64)) == ["mismatch"]


def test_kept_bytes_are_those_that_were_hashed(bundle: made.Made) -> None:
    result = verify_bundle(bundle.path, policy=bundle.policy(), keep=EVERYTHING, now=made.NOW)
    assert {name: result.read(name) for name in bundle.contents} == bundle.contents
    assert {name: made.sha256(data) for name, data in bundle.contents.items()} == result.files


def test_bytes_that_were_not_kept_are_not_read_again(bundle: made.Made) -> None:
    result = verify_bundle(bundle.path, policy=bundle.policy(), keep=("kernseal.h",), now=made.NOW)
    assert result.read("kernseal.h") == bundle.contents["kernseal.h"]
    with pytest.raises(errors.InvalidArgument, match=r"libkernseal\.so"):
        result.read("libkernseal.so")


def test_all_violations_come_at_once_and_sorted(bundle: made.Made) -> None:
    (bundle.path / "kernseal.h").write_bytes(b"other")
    (bundle.path / "added").write_bytes(b"")
    (bundle.path / "libkernseal.so").unlink()
    with pytest.raises(VerificationFailed) as caught:
        verify_bundle(bundle.path, policy=bundle.policy(with_pins=False), sm="sm_120a", now=made.NOW)
    assert [(v.path, v.status) for v in caught.value.violations] == [
        ("added", "unknown"),
        ("kernseal.h", "mismatch"),
        ("libkernseal.so", "missing"),
        ("manifest.json", "wrong_sm"),
    ]
    assert isinstance(caught.value, errors.Mismatch)
    assert caught.value.exit_code == errors.Mismatch.exit_code


def test_the_report_is_plain_data_with_the_same_names(bundle: made.Made) -> None:
    good = verify_report(bundle.path, policy=bundle.policy(), now=made.NOW)
    assert (good["accepted"], good["status"], good["exit_code"]) == (True, "ok", 0)
    assert good["git"] == {"commit": "1" * 40, "dirty": False}
    (bundle.path / "kernseal.h").write_bytes(b"other")
    bad = verify_report(bundle.path, policy=bundle.policy(), now=made.NOW)
    assert (bad["accepted"], bad["status"], bad["exit_code"]) == (False, "mismatch", 4)
    assert bad["violations"][0]["path"] == "kernseal.h"
    assert set(bad["violations"][0]) == {"status", "path", "found", "expected"}
    assert canonical.dumps(bad)


def test_a_bundle_verifies_wherever_it_is_copied_to(bundle: made.Made, tmp_path: Path) -> None:
    moved = bundle.path.rename(tmp_path / "else where ü")
    assert verify_bundle(moved, policy=bundle.policy(), now=made.NOW).trusted_by
    assert verify_bundle(f"{moved}/", policy=bundle.policy(), now=made.NOW).trusted_by


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_bundle_folder_that_is_a_link_is_refused(bundle: made.Made, tmp_path: Path, slash: str) -> None:
    (tmp_path / "link").symlink_to(bundle.path)
    with pytest.raises(errors.Malformed):
        verify_bundle(f"{tmp_path}/link{slash}", policy=bundle.policy(), now=made.NOW)


def test_no_bundle_there_is_missing(tmp_path: Path) -> None:
    with pytest.raises(errors.Missing):
        verify_bundle(tmp_path / "nothing", policy=Policy())


def test_two_pins_for_one_target_are_refused(bundle: made.Made) -> None:
    first, second = (
        parse_pins(canonical.dumps(bundle.pins), name) for name in ("a.lock.json", "b.lock.json")
    )
    with pytest.raises(errors.Malformed, match=r"b\.lock\.json.*a\.lock\.json"):
        Policy((first, second))
