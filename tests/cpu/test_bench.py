"""``make bench`` says what its numbers are of, and refuses a tree that is not the commit it would claim."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from builds import ROOT

BUNDLE = "sm_90a-linux-x86_64"
STUBS = {
    "make": "exit 0",
    "python": f'case "$*" in *json*) exec {sys.executable} "$@";; esac',
    "kernseal": '[ "$1" != list ] || { echo \'[{"op": "an_op", "variant": "a_variant"}]\'; exit; }\n'
    'said="$*"\necho "$@" >>"$(dirname "$0")/said"\n'
    'while [ $# != 0 ] && [ "$1" != --out ]; do shift; done\n'
    f'[ $# = 0 ] || {{ mkdir -p "$2/{BUNDLE}" && printf manifest > "$2/{BUNDLE}/manifest.json"; }}',
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clean checkout with the bench script and, where git does not look, commands that take no time."""
    root = tmp_path / "checkout"
    (root / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci/bench", root / ".ci/bench")
    shutil.copy(ROOT / ".gitignore", root / ".gitignore")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    commit(root)
    for name, text in STUBS.items():
        path = root / ".venv/bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    return root


def git(root: Path, *arguments: str) -> str:
    own = ["-c", "user.name=tests", "-c", "user.email=tests@localhost", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *own, *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(root: Path) -> None:
    git(root, "commit", "--quiet", "--message", "as it is")


def bench(root: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{root / '.venv/bin'}:{os.environ['PATH']}"}
    environment.pop("GIT_DIR", None)
    return subprocess.run(
        [str(root / ".ci/bench"), "90"], env=environment, capture_output=True, text=True, check=False
    )


def test_its_numbers_carry_commit_state_device_and_bundle_digest(checkout: Path) -> None:
    done = bench(checkout)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"commit     {git(checkout, 'rev-parse', 'HEAD')} (clean)" in lines
    assert any(re.fullmatch(r"device     \d+ x .+, GPU: .+", line) for line in lines)
    assert any(
        line.startswith("kernels    not measured by this: tests/gpu/run_all.sh bench ") for line in lines
    )
    digest = hashlib.sha256(b"manifest").hexdigest()
    assert f"bundle     {BUNDLE}, manifest sha256 {digest}" in lines
    assert sum(line.endswith(" s") for line in lines) == 15
    said = (checkout / ".venv/bin/said").read_text().splitlines()
    some = [line for line in said if "--no-cache --jobs" in line]
    assert [line.partition("--jobs ")[2][0] for line in some] == ["1", "2", "2", "1"] * 2
    assert [line.count("--variant an_op/a_variant") for line in some] == [32] * 4 + [8] * 4


def test_the_benchmarks_of_the_kernels_that_it_names_are_there(checkout: Path) -> None:
    (line,) = (line for line in bench(checkout).stdout.splitlines() if line.startswith("kernels "))
    script, *steps = line.partition(": ")[2].partition(", see ")[0].split()
    text = (ROOT / script).read_text()
    assert steps and all(f"\nrun_{step}() {{" in text for step in steps)
    assert (ROOT / line.partition(", see ")[2]).is_file()


def test_two_workers_are_compared_with_one_by_the_times_above(checkout: Path) -> None:
    stub = checkout / ".venv/bin/kernseal"
    stub.write_text(
        stub.read_text() + 'case "$said" in *"--jobs 1"*) sleep 0.4;; *"--jobs 2"*) sleep 0.2;; esac\n'
    )
    lines = bench(checkout).stdout.splitlines()
    for count in (8, 32):
        one, two = (
            sum(
                float(line.split()[-2])
                for line in lines
                if line.startswith(f"{count} variants of SM 90, workers: {jobs} ")
            )
            for jobs in (1, 2)
        )
        (ratio,) = (
            line.split()[-2] for line in lines if line.startswith(f"{count} variants, 2 workers to 1 ")
        )
        assert float(ratio) == pytest.approx(one / two, rel=0.1)
        assert float(ratio) > 1.2


@pytest.mark.parametrize("change", ["edited", "staged", "untracked", "deleted"])
def test_a_tree_that_differs_from_its_commit_is_refused_before_anything_is_measured(
    checkout: Path, change: str
) -> None:
    if change == "untracked":
        (checkout / "new.py").write_text("x = 1\n")
    elif change == "deleted":
        (checkout / ".gitignore").write_text("/.venv/\n")
        git(checkout, "rm", "--quiet", "--cached", ".gitignore")
    else:
        (checkout / ".gitignore").write_text("/.venv/\n# more\n")
    if change == "staged":
        git(checkout, "add", ".gitignore")
    done = bench(checkout)
    assert done.returncode == 2
    assert "the tree differs from it; supported is a clean checkout" in done.stderr
    assert done.stdout == ""


def test_a_tree_that_changes_while_it_is_measured_is_refused_in_the_end(checkout: Path) -> None:
    stub = checkout / ".venv/bin/make"
    stub.write_text("#!/bin/sh\necho x > new.py\n")
    done = bench(checkout)
    assert done.returncode == 2
    assert "the numbers above are of no commit" in done.stderr


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, checkout: Path) -> None:
    shutil.rmtree(checkout / ".git")
    done = bench(checkout)
    assert done.returncode == 2
    assert "supported is a clean checkout" in done.stderr


def test_the_commit_of_a_repository_around_it_is_not_its_own(checkout: Path, tmp_path: Path) -> None:
    around = tmp_path / "around"
    shutil.copytree(checkout, around / "inside", ignore=shutil.ignore_patterns(".git"))
    git(around, "init", "--quiet")
    git(around, "add", ".")
    commit(around)
    done = bench(around / "inside")
    assert done.returncode == 2
    assert "a folder around this one" in done.stderr
