"""``bench_open``: every part is there, of a bundle that opens; one that does not is no measurement."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_open import medians
from builds import PACKED, bundle, signing_key

from kernseal.loader.keys import PublicKey, write_key

pytestmark = pytest.mark.slow


def test_every_part_of_opening_is_timed(tmp_path: Path) -> None:
    key = tmp_path / "key.json"
    key.write_bytes(write_key(PublicKey("tests", signing_key().keyid)))
    found = medians(bundle("90", only=(PACKED,)).path, key, samples=1)
    assert list(found) == ["import", "default policy", "open", "prepare"]
    assert all(taken > 0 for taken in found.values())


def test_a_bundle_that_nobody_vouches_for_is_not_measured() -> None:
    with pytest.raises(SystemExit, match=r"(?s)^bench_open: .*VerificationFailed"):
        medians(bundle("90", only=(PACKED,)).path, None, samples=1)
