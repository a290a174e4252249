"""kernseal.hpp and the crate beyond what the examples use: ownership, errors, and libraries that do not fit."""

from __future__ import annotations

import hashlib
import re
import subprocess
from pathlib import Path

import pytest
from cpu.fake_driver.native import STRICT, ZIG, compile_c, compiler
from cpu.test_abi_examples import CARGO, CXX, CXXFLAGS, WARNINGS, cargo

from kernseal.abi import library, model

pytestmark = pytest.mark.slow
SOURCE = Path(__file__).resolve().parent / "cpp" / "test_wrapper.cpp"
OTHER_ABI = "a_library_of_another_abi_is_refused"
SENTENCES = [s for s in re.findall(r"^    TEST\((\w+)\)", SOURCE.read_text(), re.MULTILINE) if s != OTHER_ABI]
ABI = model.load()
SANITIZERS = ("address,undefined", "thread")
needs_cxx = pytest.mark.skipif(CXX is None, reason="no C++ compiler on this machine")


@pytest.fixture(scope="module")
def programs(example_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    assert CXX is not None
    folder = tmp_path_factory.mktemp("wrapper")
    flags = (*CXXFLAGS, f"-I{example_bundle}", "-fno-sanitize-recover=all")
    return {
        sanitizer: compile_c([CXX], [SOURCE], folder / sanitizer, *flags, f"-fsanitize={sanitizer}")
        for sanitizer in SANITIZERS
    }


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@needs_cxx
@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize("name", SENTENCES)
def test_sentence(
    programs: dict[str, Path], name: str, sanitizer: str, example_bundle: Path, fake_process: dict[str, str]
) -> None:
    digest = sha256(example_bundle / "libkernseal.so")
    command = [str(programs[sanitizer]), name, str(example_bundle), digest]
    done = subprocess.run(command, env=fake_process, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


REFUSED = {
    "another major": (ABI.version + (1 << 16), None, "has ABI 2.0, this "),
    "an earlier major": (ABI.version - (1 << 16), None, "has ABI 0.0, this "),
    "lacks a function": (ABI.version, "kseal_variant_at", "has no kseal_variant_at"),
}


@pytest.fixture(params=REFUSED)
def other(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A library with every function but one, that says of itself what it is told to; and what must be said of it."""
    version, missing, refusal = REFUSED[request.param]
    lines = ['#include "abi.h"']
    for function in ABI.all_functions:
        if function.name == missing:
            continue
        params = ", ".join(param.type.declare(param.name) for param in function.params) or "void"
        unused = " ".join(f"(void){param.name};" for param in function.params)
        value = {"kseal_abi_version": f"{version}u", "kseal_close": ""}.get(function.name, "0")
        lines.append(
            f"KSEAL_API {function.returns.declare(function.name)}({params}) {{ {unused} return {value}; }}"
        )
    (tmp_path / "other.c").write_text("\n".join(lines) + "\n")
    includes = [f"-I{folder}" for folder in library.include_dirs()]
    flags = (*STRICT, *includes, "-fPIC", "-shared", "-fvisibility=hidden")
    return compile_c(ZIG, [tmp_path / "other.c"], tmp_path / "libkernseal.so", *flags), refusal


@needs_cxx
def test_cpp_refuses_a_library_of_another_abi(
    programs: dict[str, Path], other: tuple[Path, str], fake_process: dict[str, str]
) -> None:
    path, refusal = other
    command = [str(programs["address,undefined"]), OTHER_ABI, str(path.parent), sha256(path)]
    environment = {**fake_process, "EXPECTED": refusal}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(CARGO is None, reason="no cargo on this machine")
def test_rust_refuses_a_library_of_another_abi(other: tuple[Path, str], cargo_target: Path) -> None:
    path, refusal = other
    variables = {
        "KERNSEAL_TEST_LIBRARY": str(path),
        "KERNSEAL_TEST_SHA256": sha256(path),
        "KERNSEAL_TEST_REFUSAL": refusal,
    }
    told = cargo("test", "--test", "library", target=cargo_target, last=("--", "--ignored"), **variables)
    assert "1 passed" in told


@needs_cxx
def test_the_header_asks_for_cpp17(tmp_path: Path) -> None:
    (tmp_path / "old.cpp").write_text('#include "kernseal.hpp"\n')
    command = [
        str(CXX),
        "-std=c++14",
        "-fsyntax-only",
        f"-I{library.header().parent}",
        str(tmp_path / "old.cpp"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "kernseal.hpp needs C++17" in done.stderr


COMPILERS = {"g++": (compiler("g++"),), "clang++": (compiler("clang++"),), "zig": (*ZIG[:-1], "c++")}


@pytest.mark.parametrize("standard", ["c++17", "c++20"])
@pytest.mark.parametrize("name", COMPILERS)
def test_the_header_is_clean_under_every_compiler_and_standard(
    tmp_path: Path, name: str, standard: str
) -> None:
    command = [part for part in COMPILERS[name] if part is not None]
    if not command:
        pytest.skip(f"no {name} on this machine")
    (tmp_path / "use.cpp").write_text('#include "kernseal.hpp"\nint main() {}\n')
    flags = (f"-std={standard}", *WARNINGS, "-Wconversion", f"-I{library.header().parent}")
    compile_c(command, [tmp_path / "use.cpp"], tmp_path / "use", *flags)
