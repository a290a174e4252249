"""The programs that run on the GPU machine, as far as they can be tested without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gpu.sanitizer_report import merged, parse

GPU = Path(__file__).resolve().parents[1] / "gpu"

CLEAN = """\
== memcheck sm90
========= COMPUTE-SANITIZER
14 calls, all as the oracle has them
========= ERROR SUMMARY: 0 errors
== memcheck sm90: exit 0, 20s
== racecheck sm90
14 calls, all as the oracle has them
========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)
== racecheck sm90: exit 0, 40s
"""


def test_the_sanitizers_words_become_records() -> None:
    assert parse(CLEAN) == [
        {"tool": "memcheck", "bundle": "sm90", "findings": 0, "calls": 14, "exit": 0},
        {"tool": "racecheck", "bundle": "sm90", "findings": 0, "calls": 14, "exit": 0},
    ]


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("", "", 0),
        ("ERROR SUMMARY: 0", "ERROR SUMMARY: 3", 1),
        ("RACECHECK SUMMARY: 0", "RACECHECK SUMMARY: 1", 1),
        ("racecheck sm90: exit 0", "racecheck sm90: exit 124", 1),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", "", 1),
        ("14 calls", "0 calls", 1),
        (CLEAN, "", 1),
    ],
    ids=["clean", "an error", "a hazard", "a time-out", "no summary", "no call", "nothing ran"],
)
def test_only_a_log_without_findings_is_clean(tmp_path: Path, old: str, new: str, code: int) -> None:
    log, report = tmp_path / "log", tmp_path / "report.json"
    log.write_text(CLEAN.replace(old, new) if old else CLEAN)
    command = [sys.executable, "-m", "gpu.sanitizer_report", str(log), str(report)]
    path = ":".join([str(GPU.parent), *sys.path])
    done = subprocess.run(
        command, env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin"}, capture_output=True, check=False
    )
    assert done.returncode == code, done.stderr.decode()
    assert json.loads(report.read_text())["clean"] is (code == 0)


def test_a_later_report_counts_where_it_ran_to_its_end() -> None:
    done = {"bundle": "sm90", "tool": "memcheck", "findings": 0, "calls": 14, "exit": 0}
    stopped = {**done, "findings": None, "calls": None, "exit": 124}
    found, again = {**done, "tool": "racecheck", "findings": 3, "exit": 99}, {**done, "tool": "racecheck"}
    made = merged([{"commit": "a", "runs": [done, found]}, {"commit": "b", "runs": [stopped, again]}])
    assert made["runs"] == [{"commit": "a", **done}, {"commit": "b", **again}]
    assert made["clean"] and made["commit"] == "b"
    assert not merged([{"commit": "a", "runs": [stopped]}])["clean"]


@pytest.mark.parametrize("script", sorted(GPU.glob("*.sh")), ids=lambda path: path.name)
def test_the_scripts_are_bash_that_parses(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_every_test_that_needs_a_gpu_is_skipped_with_a_reason_where_there_is_none() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    command = [sys.executable, "-m", "pytest", str(GPU), "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=GPU.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "no CUDA device" in done.stdout
    assert "failed" not in done.stdout and "passed" not in done.stdout
