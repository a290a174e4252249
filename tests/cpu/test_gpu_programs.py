"""The programs for a machine with a GPU and no compilers: what they need, and that they run (here over the fake driver)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import builds
import pytest
from cpu.fake_driver.native import compiler
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

pytestmark = pytest.mark.slow

GPU = Path(__file__).resolve().parents[1] / "gpu"
LIBC = {"libc.so.6", "libdl.so.2", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
BUILT = {"c-gdn_prefill", "cpp-gdn_prefill", "cpp-xqa_decode", "stress", "devices", "launch", "cold"}
RUST = {"rust-gdn_prefill", "rust-xqa_decode"}


@pytest.fixture(scope="module")
def programs(example_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("programs")
    environment = {**os.environ, "PYTHON": sys.executable}
    command = [str(GPU / "build_programs.sh"), str(example_bundle), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("run_examples.sh", [], "0 arguments; usage: run_examples.sh PROGRAMS BUNDLE [KEY]"),
        ("run_examples.sh", ["", ""], "PROGRAMS '': not a folder"),
        ("run_examples.sh", ["has programs", "nowhere"], "BUNDLE 'nowhere': not the folder of a bundle"),
        ("run_examples.sh", ["has programs", "has bundle", "key"], "KEY 'key': not a file"),
        ("build_programs.sh", [], "0 arguments; usage: build_programs.sh BUNDLE OUT"),
        ("build_programs.sh", ["nowhere", "out"], "BUNDLE 'nowhere': not the folder of a bundle"),
        ("build_programs.sh", ["has bundle", ""], "OUT '': empty"),
        ("pack.sh", [], "0 arguments; usage: pack.sh OUT"),
        ("pack.sh", [""], "OUT '': empty"),
    ],
)
def test_a_script_says_how_it_is_used_before_it_touches_anything(
    tmp_path: Path, script: str, arguments: list[str], words: str
) -> None:
    (tmp_path / "has programs").mkdir()
    (tmp_path / "has programs/stress").write_text("")
    (tmp_path / "has programs/stress").chmod(0o755)
    (tmp_path / "has bundle").mkdir()
    (tmp_path / "has bundle/libkernseal.so").write_text("")
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name in ("rm", "cp", "mkdir", "kernseal", "python"):
        (stubs / name).write_text(f"#!/bin/sh\necho {name} >>{tmp_path}/touched\n")
        (stubs / name).chmod(0o755)
    own = {"PYTHON": str(stubs / "python"), "KERNSEAL": str(stubs / "kernseal"), "FLASHINFER_TESTS": ""}
    environment = {**os.environ, **own, "PATH": f"{stubs}:{os.environ['PATH']}"}
    command = [str(GPU / script), *arguments]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert not (tmp_path / "touched").exists()


def needs(program: Path) -> tuple[set[str], list[tuple[int, ...]]]:
    """Libraries that a program is linked with, and the versions of glibc that it asks for."""
    with program.open("rb") as file:
        elf = ELFFile(file)
        libraries = {tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
        versions = [
            aux.name
            for section in elf.iter_sections()
            if isinstance(section, GNUVerNeedSection)
            for _, auxes in section.iter_versions()
            for aux in auxes
        ]
    return libraries, [tuple(map(int, v.removeprefix("GLIBC_").split("."))) for v in versions]


def test_every_program_is_built(programs: Path) -> None:
    wanted = BUILT | (RUST if compiler("cargo") else set())
    assert {path.name for path in programs.iterdir()} == wanted


def test_a_program_needs_the_parts_of_glibc_2_17_and_nothing_else(programs: Path) -> None:
    for program in programs.iterdir():
        libraries, versions = needs(program)
        own = {"libkernseal.so"} if program.name.startswith("c-") else {"libpthread.so.0"}
        assert libraries <= LIBC | own, program.name
        assert versions and max(versions) <= (2, 17), program.name


def test_a_program_in_c_needs_libc_and_libdl_alone(programs: Path) -> None:
    assert needs(programs / "c-gdn_prefill")[0] == {"libkernseal.so", "libc.so.6", "libdl.so.2"}


def test_the_script_runs_all_of_them(
    programs: Path, example_bundle: Path, fake_process: dict[str, str]
) -> None:
    environment = {**fake_process, "PYTHON": sys.executable, "LAUNCHES": "20"}
    command = [
        str(GPU / "run_examples.sh"),
        str(programs),
        str(example_bundle),
        str(builds.CACHE / "tests.json"),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every state as alone" in done.stdout
    assert done.stdout.endswith(f"{18 if compiler('cargo') else 12} ran, 0 failed\n")


def test_the_script_notices_a_program_that_ends_otherwise(
    programs: Path, example_bundle: Path, fake_process: dict[str, str]
) -> None:
    environment = {k: v for k, v in fake_process.items() if k != "FAKE_CUDA_KERNEL"} | {
        "PYTHON": sys.executable
    }
    command = [str(GPU / "run_examples.sh"), str(programs), str(example_bundle)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "FAIL: " in done.stdout and " 0 failed" not in done.stdout


def test_the_stress_program_notices_a_lost_launch(
    programs: Path, example_bundle: Path, fake_process: dict[str, str]
) -> None:
    """A kernel that does nothing gives the same state however often it runs, which would prove nothing."""
    idle = {k: v for k, v in fake_process.items() if k != "FAKE_CUDA_KERNEL"}
    command = [str(programs / "stress"), str(example_bundle), "5"]
    done = subprocess.run(command, env=idle, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "this test would not see a lost launch" in done.stderr


def test_a_handle_used_on_the_wrong_device_is_refused(
    programs: Path, example_bundle: Path, fake_process: dict[str, str]
) -> None:
    command = [str(programs / "devices"), str(example_bundle)]
    two = {**fake_process, "FAKE_CUDA_DEVICES": "2"}
    done = subprocess.run(command, env=two, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "ok: two devices, each handle on its own, the same bits on both\n"


def test_a_run_is_timed_beside_bare_launches_of_what_it_launches(
    programs: Path, example_bundle: Path, fake_process: dict[str, str]
) -> None:
    command = [str(programs / "launch"), str(example_bundle), "2"]
    done = subprocess.run(command, env=fake_process, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert [(row["op"], row["kernels"]) for row in found["rows"]] == [("gdn_prefill", 1), ("xqa_decode", 1)]
    assert all(row["run_us"] > 0 and row["bare_us"] > 0 for row in found["rows"])


def test_a_cold_start_is_timed_part_by_part(
    programs: Path, example_bundle: Path, fake_process: dict[str, str]
) -> None:
    command = [str(programs / "cold"), str(example_bundle)]
    done = subprocess.run(command, env=fake_process, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = {"context_ms", "open_ms", "prepare_ms", "memory_ms", "first_run_ms"}
    assert json.loads(done.stdout).keys() == parts


def test_a_cold_start_of_a_model_prepares_what_the_model_needs(
    programs: Path, example_bundle: Path, fake_process: dict[str, str]
) -> None:
    command = [str(programs / "cold"), str(example_bundle), "model"]
    done = subprocess.run(command, env=fake_process, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "gdn_prefill: no variant for" in done.stderr and "pooled=1" in done.stderr
