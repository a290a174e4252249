"""The workflow and the hook that we ship: pinned, without secrets, and their very commands run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from builds import CACHE, PACKED, ROOT, compile_cache

from kernseal.export import build, lock, spec
from kernseal.export.build import Options

WORKFLOW: Any = yaml.safe_load((ROOT / ".github/workflows/gate.yml").read_text())
HOOKS: Any = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
JOB: Any = WORKFLOW["jobs"]["gate"]
STEPS: Any = JOB["steps"]
HOOK: Any = HOOKS[0]
ONE = f"--variant {PACKED}"


def step(name: str) -> str:
    (found,) = (str(item["run"]) for item in STEPS if item.get("name") == name)
    return found


def environment(folder: Path, **more: str) -> dict[str, str]:
    """As GitHub gives it to a step, with this environment's kernseal on the PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"RUNNER_TEMP": str(folder), "GITHUB_STEP_SUMMARY": str(folder / "summary.md"), "PATH": path}
    return {**os.environ, **own, "KERNSEAL_CACHE": str(CACHE), **more}


def test_every_action_is_pinned_by_commit_and_names_its_release() -> None:
    lines = (ROOT / ".github/workflows/gate.yml").read_text().splitlines()
    used = [line.strip().removeprefix("- ") for line in lines if "uses:" in line]
    assert len(used) == len([item for item in STEPS if "uses" in item]) > 0
    for line in used:
        assert re.fullmatch(r"uses: actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


def test_it_runs_for_pull_requests_with_no_more_than_the_right_to_read() -> None:
    triggers = WORKFLOW[True]  # YAML 1.1 reads the key `on` as true
    assert set(triggers) == {"pull_request", "push"}
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert "permissions" not in JOB
    assert "secrets" not in (ROOT / ".github/workflows/gate.yml").read_text().replace("without secrets", "")
    (checkout,) = (item for item in STEPS if "checkout" in item.get("uses", ""))
    assert checkout["with"] == {"persist-credentials": False}


def test_it_gates_every_sm_that_we_build() -> None:
    names = {spec.parse_target(sm, None, spec.load_ops()).name for sm in JOB["strategy"]["matrix"]["sm"]}
    assert names == {
        spec.parse_target(sm, None, spec.load_ops()).name for sm in spec.all_targets(spec.load_ops())
    }


def test_no_expression_is_pasted_into_a_script() -> None:
    assert [item["run"] for item in STEPS if "${{" in item.get("run", "")] == []


def test_its_environment_step_is_a_target_of_our_makefile() -> None:
    commands = [line for line in step("Environment").splitlines() if line.startswith("make ")]
    assert commands == ["make env"]
    asked = subprocess.run(["make", "-n", "env"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stderr


@pytest.mark.slow
def test_its_gate_step_passes_on_what_is_pinned_and_leaves_a_summary(tmp_path: Path) -> None:
    with compile_cache():
        variables = environment(tmp_path, SM="90", GATE_OPTIONS=ONE)
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", step("Gate")],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    summary = tmp_path / "summary.md"
    assert done.returncode == 0, done.stdout + done.stderr + (summary.read_text() if summary.exists() else "")
    assert "## sm_90a: as pinned (1 variants, a part of the profile)" in summary.read_text()


def test_its_gate_step_fails_when_the_gate_fails(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", step("Gate")],
        cwd=ROOT,
        env=environment(tmp_path, SM="75", GATE_OPTIONS=""),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "unsupported: SM 'sm_75a'" in done.stderr


@pytest.mark.slow
def test_the_hooks_command_passes_on_what_is_pinned(tmp_path: Path) -> None:
    command = [*shlex.split(HOOK["entry"]), *HOOK["args"], "--sm", "90", "--variant", PACKED]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sm_90a: 1 variants: as pinned" in done.stdout


def test_the_hook_is_one_that_pre_commit_accepts() -> None:
    (only,) = HOOKS
    assert {"id", "name", "entry", "language"} <= only.keys()
    assert only["pass_filenames"] is False
    assert only["stages"] == ["pre-push", "manual"]


def test_the_hook_runs_for_every_file_that_can_move_an_artifact() -> None:
    made = build.plan(
        spec.load_ops(), spec.parse_target("90", None, spec.load_ops()), Options(only=(PACKED,))
    )
    watched = re.compile(HOOK["files"])
    named = [name for name in lock.library_inputs(made) if "/" in name and (ROOT / name).is_file()]
    named += [f"patches/{patch.name}" for patches in made.patches.values() for patch in patches]
    named += ["kernels/gdn_prefill/kernel.yaml", "kernels/toolchain.yaml", "manifests/toolchain/wheels.json"]
    assert len(named) > 10
    assert [name for name in named if not watched.search(name)] == []
    assert not watched.search("docs/index.md")
