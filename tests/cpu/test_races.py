"""Short versions of the programs in ``tests/races``; the long ones are commands (docs/threat-model.md)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cpu.fake_driver.gpu import FakeGpu
from races import builds as build_races
from races import opens

pytestmark = pytest.mark.slow


def test_an_attacker_who_swaps_files_and_folders_never_gets_unverified_bytes_loaded(
    tmp_path: Path, gpu: FakeGpu
) -> None:
    ends = opens.attack(opens.set_up(tmp_path), 300, gpu)
    assert sum(ends.values()) >= 300
    assert opens.both_met(ends), ends


def test_the_evil_library_would_be_noticed(tmp_path: Path) -> None:
    scene = opens.set_up(tmp_path)
    load = f"import ctypes; ctypes.CDLL({str(scene.evil / opens.LIBRARY)!r})"
    environment = {**os.environ, opens.MARK: str(scene.mark)}
    subprocess.run([sys.executable, "-c", load], check=True, env=environment)
    assert scene.mark.exists()


def test_builds_and_verifications_at_once_with_random_kills_leave_only_whole_bundles(tmp_path: Path) -> None:
    report = build_races.race(tmp_path, builds=12, at_once=6, kills=4, folders=2, seed=3)
    assert report.killed == 4, report
    assert report.finished >= 8, report
    assert report.accepted > 0, report
    assert report.refused.keys() <= {"missing"}, report
