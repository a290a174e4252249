"""The examples are compiled as a reader would, and run against a bundle over the fake driver."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cpu.fake_driver.host_objects import HostObject
from cpu.fake_driver.kernseal_library import build_library
from cpu.fake_driver.native import STRICT, ZIG, build_fake_driver, compile_c, compiler

from kernseal.abi import library
from kernseal.abi.pins import pins_header, pins_rust

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "abi" / "examples"
FAKE = Path(__file__).resolve().parent / "fake_driver"
CXX = compiler("c++", "g++", "clang++")
CARGO = compiler("cargo")
CXXFLAGS = ("-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1")


@pytest.fixture(scope="module")
def bundle(built_variant: Callable[..., HostObject], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle's folder with the default variant for SM90, and the pins of its files."""
    made = built_variant("sm_90a")
    folder = tmp_path_factory.mktemp("bundle")
    build_library("sm_90a", None, [(made.record, made.ours, made.cubin)], folder)
    shutil.copy(library.header(), folder)
    names = ["libkernseal.so", "kernseal.h", made.record.file]
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    (folder / "kernseal_pins.h").write_text(pins_header("sm_90a", digests))
    (folder / "kernseal_pins.rs").write_text(pins_rust("sm_90a", digests))
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A process that has the fake driver, whose one kernel computes."""
    folder = tmp_path_factory.mktemp("driver")
    build_fake_driver(folder)
    kernel = compile_c(
        ZIG, [FAKE / "gdn_kernel.c"], folder / "gdn_kernel.so", *STRICT, "-O1", "-shared", "-fPIC"
    )
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder),
        "FAKE_CUDA_KERNEL": str(kernel),
        "FAKE_CUDA_CC": "90",
    }


def run(program: Path, bundle: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), str(bundle)], env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def cpp(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if CXX is None:
        pytest.skip("no C++ compiler on this machine")
    out = tmp_path_factory.mktemp("cpp") / "gdn_prefill"
    return compile_c([CXX], [EXAMPLES / "cpp" / "main.cpp"], out, *CXXFLAGS, f"-I{bundle}")


@pytest.fixture(scope="module")
def rust(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if CARGO is None:
        pytest.skip("no cargo on this machine")
    target = tmp_path_factory.mktemp("rust")
    pins = {
        "KERNSEAL_PINS": str(bundle / "kernseal_pins.rs"),
        "CARGO_TARGET_DIR": str(target),
        "RUSTFLAGS": "-D warnings",
    }
    command = [CARGO, "build", "--offline", "--locked", "--example", "gdn_prefill"]
    done = subprocess.run(
        command,
        cwd=EXAMPLES / "rust",
        env={**os.environ, **pins},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return target / "debug" / "examples" / "gdn_prefill"


@pytest.mark.skipif(CARGO is None, reason="no cargo on this machine")
def test_the_crates_own_tests_pass(tmp_path: Path) -> None:
    assert CARGO is not None
    command = [CARGO, "test", "--offline", "--locked", "--lib"]
    environment = {**os.environ, "CARGO_TARGET_DIR": str(tmp_path)}
    done = subprocess.run(
        command, cwd=EXAMPLES / "rust", env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "1 passed" in done.stdout


@pytest.fixture(params=["cpp", "rust"])
def program(request: pytest.FixtureRequest) -> Path:
    path = request.getfixturevalue(request.param)
    assert isinstance(path, Path)
    return path


def test_an_example_computes_and_checks_its_result(
    program: Path, bundle: Path, environment: dict[str, str]
) -> None:
    done = run(program, bundle, environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ok: two tokens of GDN prefill, output and state as expected\n"


def test_an_example_notices_a_wrong_result(program: Path, bundle: Path, environment: dict[str, str]) -> None:
    without_kernel = {k: v for k, v in environment.items() if k != "FAKE_CUDA_KERNEL"}
    done = run(program, bundle, without_kernel)
    assert done.returncode == 1
    assert "o of token 0 is 0" in done.stderr


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return shutil.copytree(bundle, tmp_path / "bundle")


def test_an_example_refuses_a_changed_library(program: Path, copy: Path, environment: dict[str, str]) -> None:
    data = bytearray((copy / "libkernseal.so").read_bytes())
    data[-1] ^= 1
    (copy / "libkernseal.so").write_bytes(bytes(data))
    done = run(program, copy, environment)
    assert done.returncode == 1
    assert "libkernseal.so: SHA-256 is" in done.stderr


def test_an_example_refuses_a_changed_image(program: Path, copy: Path, environment: dict[str, str]) -> None:
    (cubin,) = copy.rglob("*.cubin")
    data = bytearray(cubin.read_bytes())
    data[100] ^= 1
    cubin.write_bytes(bytes(data))
    done = run(program, copy, environment)
    assert done.returncode == 1
    assert done.stderr.startswith("mismatch: cubin/gdn_prefill/")


def test_an_example_tells_of_another_gpu(program: Path, bundle: Path, environment: dict[str, str]) -> None:
    done = run(program, bundle, {**environment, "FAKE_CUDA_CC": "120"})
    assert done.returncode == 1
    assert done.stderr.startswith("wrong_sm: ")


def test_an_example_tells_of_a_missing_bundle(
    program: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    done = run(program, tmp_path / "nowhere", environment)
    assert done.returncode == 1
    assert "nowhere" in done.stderr
