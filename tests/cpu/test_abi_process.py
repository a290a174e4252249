"""Several libraries in one process, loaded and unloaded: under the sanitizers, and under valgrind, which sees leaks."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from cpu.fake_driver.native import STRICT, ZIG, build_fake_driver, compile_c, compiler
from cpu.fake_driver.valgrind import valgrind
from cpu.test_abi_c import DRIVER, C, address_sanitizer, records

from kernseal.abi import library

SOURCE = C / "test_process.c"
SENTENCES = re.findall(r"^    TEST\((\w+)\)", SOURCE.read_text(), re.MULTILINE)
TARGETS = ("sm_90a", "sm_120a")
Run = Callable[[str], "subprocess.CompletedProcess[str]"]


def build_one(sm: str, command: Sequence[str], flags: Sequence[str], folder: Path) -> Path:
    """The library of one SM and its images, as a bundle's folder."""
    folder.mkdir()
    for record in records():
        path = folder / record.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"image of {record.variant}, long enough to read")
    options = [*STRICT, "-O1", "-g", "-fPIC", "-shared", "-fvisibility=hidden", *flags]
    options += [f"-I{d}" for d in (*library.include_dirs(), C)]
    options.append(f"-Wl,--version-script,{library.version_script()}")
    sources = library.library_sources(sm, None, records(), folder / "generated")
    return compile_c(command, [*sources, C / "stub_host.c"], folder / "libkernseal.so", *options)


def build(command: Sequence[str], flags: Sequence[str], folder: Path, prefix: Sequence[str] = ()) -> Run:
    """Build driver, libraries and program alike; the result runs a test of the program."""
    driver = build_fake_driver(folder, command, *flags)
    libraries = [build_one(sm, command, flags, folder / sm) for sm in TARGETS]
    includes = [f"-I{library.header().parent}", f"-I{DRIVER}"]
    options = [*STRICT, "-O1", "-g", *flags, *includes, f"-Wl,-rpath,{folder}"]
    program = compile_c(command, [SOURCE, driver], folder / "program", *options)
    environment = {**os.environ, "TEST_LIBRARIES": ":".join(map(str, libraries))}

    def run(name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*prefix, str(program), name],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


@pytest.fixture(scope="module")
def under_asan(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return build(*address_sanitizer(), tmp_path_factory.mktemp("asan"))


@pytest.fixture(scope="module")
def under_tsan(tmp_path_factory: pytest.TempPathFactory) -> Run:
    found = compiler("gcc", "clang", "cc")
    command = [found] if found else ZIG
    return build(command, ["-fsanitize=thread"], tmp_path_factory.mktemp("tsan"))


@pytest.fixture(scope="module")
def under_valgrind(tmp_path_factory: pytest.TempPathFactory) -> Run:
    prefix = valgrind()
    if prefix is None:
        pytest.skip("no valgrind that starts on this machine")
    return build(ZIG, ["-mcpu=baseline", "-fno-sanitize=all"], tmp_path_factory.mktemp("valgrind"), prefix)


def assert_clean(done: subprocess.CompletedProcess[str]) -> None:
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", SENTENCES)
def test_sentence(under_asan: Run, name: str) -> None:
    assert_clean(under_asan(name))


@pytest.mark.parametrize("name", SENTENCES)
def test_sentence_under_the_thread_sanitizer(under_tsan: Run, name: str) -> None:
    assert_clean(under_tsan(name))


@pytest.mark.parametrize("name", SENTENCES)
def test_sentence_without_a_leak(under_valgrind: Run, name: str) -> None:
    assert_clean(under_valgrind(name))


def test_a_leak_is_noticed(under_valgrind: Run) -> None:
    done = under_valgrind("LEAK")
    assert done.returncode == 99
    assert "kseal_open" in done.stderr and "definitely lost" in done.stderr
