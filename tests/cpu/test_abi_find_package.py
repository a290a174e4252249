"""``find_package(kernseal)`` and ``pkg-config kernseal`` from a bundle that lies wherever it was put."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import builds
import pytest
from cpu.fake_driver.native import compiler
from cpu.test_abi_examples import EXAMPLES, SAYS, run

from kernseal.abi import library, model

pytestmark = pytest.mark.slow
ABI = model.load()
VERSION = f"{ABI.major}.{ABI.minor}"
LISTS = """\
cmake_minimum_required(VERSION 3.16)
project(host C CXX)
find_package(kernseal ${WANTED} REQUIRED)
add_executable(gdn_prefill ${EXAMPLES}/cpp/gdn_prefill.cpp)
target_compile_features(gdn_prefill PRIVATE cxx_std_17)
target_link_libraries(gdn_prefill PRIVATE kernseal::headers)
add_executable(linked ${EXAMPLES}/c/gdn_prefill.c)
target_link_libraries(linked PRIVATE kernseal::kernseal m)
add_executable(linked_cpp linked.cpp)
target_compile_features(linked_cpp PRIVATE cxx_std_17)
target_link_libraries(linked_cpp PRIVATE kernseal::kernseal)
message(STATUS "bundle: ${kernseal_BUNDLE}, version ${kernseal_VERSION}")
"""
LINKED = """\
#include "kernseal.hpp"
#include <cstdio>
int main(int, char **argv) {
    const auto bundle = kernseal::Library::linked().open(argv[1]);
    for (const auto &variant : bundle.variants())
        std::puts(variant.variant);
}
"""


@pytest.fixture(params=["bundle", "with a space"])
def moved(request: pytest.FixtureRequest, example_bundle: Path, tmp_path: Path) -> Path:
    """The bundle at a place that it was not made for."""
    folder = tmp_path / request.param
    return shutil.copytree(example_bundle, folder)


def configure(folder: Path, moved: Path, wanted: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(parents=True)
    (folder / "CMakeLists.txt").write_text(LISTS)
    (folder / "linked.cpp").write_text(LINKED)
    variables = {"CMAKE_PREFIX_PATH": moved, "WANTED": wanted, "EXAMPLES": EXAMPLES}
    command = ["cmake", "-S", str(folder), "-B", str(folder / "build")]
    command += [f"-D{name}={value}" for name, value in variables.items()]
    return subprocess.run(command, capture_output=True, text=True, check=False)


needs_cmake = pytest.mark.skipif(
    compiler("cmake") is None or compiler("c++") is None, reason="no cmake or no C++ compiler on this machine"
)


@needs_cmake
def test_cmake_finds_it_and_programs_of_all_three_kinds_run(
    moved: Path, tmp_path: Path, fake_process: dict[str, str]
) -> None:
    project = tmp_path / "project"
    configured = configure(project, moved, VERSION)
    assert configured.returncode == 0, configured.stderr
    assert f"-- bundle: {moved}, version {VERSION}" in configured.stdout
    build = ["cmake", "--build", str(project / "build"), "--parallel", "2"]
    built = subprocess.run(build, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    for name in ("gdn_prefill", "linked"):
        done = run((str(project / "build" / name),), moved, fake_process)
        assert (done.stdout, done.stderr) == (SAYS["gdn_prefill"] + "\n", "")
    done = run((str(project / "build" / "linked_cpp"),), moved, fake_process)
    assert done.stdout.split() == [builds.PACKED, builds.XQA]


@needs_cmake
@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("", True),
        (f"{ABI.major}", True),
        (VERSION, True),
        (f"{ABI.major}.{ABI.minor + 1}", False),
        (f"{ABI.major + 1}.0", False),
        (f"{ABI.major - 1}.9", False),
    ],
)
def test_a_version_is_that_of_the_abi(example_bundle: Path, tmp_path: Path, wanted: str, found: bool) -> None:
    configured = configure(tmp_path / "project", example_bundle, wanted)
    assert (configured.returncode == 0) is found
    if not found:
        assert f"kernseal-config.cmake, version: {VERSION}" in configured.stderr


def pkg_config(bundle: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PKG_CONFIG_PATH": str(bundle / "lib" / "pkgconfig")}
    return subprocess.run(
        ["pkg-config", *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(compiler("pkg-config") is None, reason="no pkg-config on this machine")
def test_pkg_config_finds_it(moved: Path) -> None:
    folder = str(moved / "lib" / "pkgconfig" / ".." / "..").replace(" ", "\\ ")
    linked = pkg_config(moved, "--cflags", "--libs", "kernseal")
    assert linked.stdout.strip() == f"-I{folder} -L{folder} -lkernseal -ldl"
    loaded = pkg_config(moved, "--cflags", "--libs", "kernseal-headers")
    assert loaded.stdout.strip() == f"-I{folder} -ldl"
    assert pkg_config(moved, "--modversion", "kernseal").stdout.strip() == VERSION
    assert pkg_config(moved, "--exists", f"kernseal > {VERSION}").returncode == 1


def test_the_files_are_in_the_manifest_and_the_same_for_every_bundle(example_bundle: Path) -> None:
    manifest = json.loads((example_bundle / "manifest.json").read_text())
    named = {subject["name"] for subject in manifest["subject"]}
    for name, source in library.interface_files().items():
        assert name in named
        assert (example_bundle / name).read_bytes() == source.read_bytes()
