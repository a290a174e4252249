"""The examples are built as a reader would build them, against a real bundle, and run over the fake driver.

`make example-cpp` and `make example-rust` are this file, one language each.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import builds
import pytest
from cpu.fake_driver.native import compile_c, compiler
from cpu.fake_driver.valgrind import valgrind

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "abi" / "examples"
CRATE = ROOT / "abi" / "rust"
CC, CXX, CARGO = compiler("cc", "gcc", "clang"), compiler("c++", "g++", "clang++"), compiler("cargo")
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror")
CXXFLAGS = ("-std=c++17", *WARNINGS, "-Wconversion", "-Wold-style-cast", "-O1", "-g")
SAYS = {
    "gdn_prefill": "ok: two tokens of GDN prefill, output and state as expected",
    "xqa_decode": "ok: two sequences of XQA decode, output as expected",
}
NEEDS = {"c": CC, "cpp": CXX, "rust": CARGO, "python": sys.executable}
PROGRAMS = (
    "c-gdn_prefill",
    "cpp-gdn_prefill",
    "cpp-xqa_decode",
    "rust-gdn_prefill",
    "rust-xqa_decode",
    "python-xqa_decode",
)
CHECKED = tuple(name for name in PROGRAMS if not name.startswith("c-"))
"""Those that check the library before they load it."""
GRAPHS = ("cpp-xqa_decode", "rust-xqa_decode")

Program = tuple[str, ...]
"""The start of a command: the folder of a bundle comes next, then what the language needs."""


def pkg_config(bundle: Path, *options: str) -> list[str]:
    """What pkg-config says of this bundle, or the same by hand where there is no pkg-config."""
    if shutil.which("pkg-config") is None:
        return [f"-I{bundle}"] if "--cflags" in options else [f"-L{bundle}", "-lkernseal", "-ldl"]
    environment = {**os.environ, "PKG_CONFIG_PATH": str(bundle / "lib" / "pkgconfig")}
    command = ["pkg-config", *options, "kernseal"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def build_c(bundle: Path, folder: Path) -> None:
    assert CC is not None
    source = EXAMPLES / "c" / "gdn_prefill.c"
    flags = ["-std=c11", *WARNINGS, "-O1", "-g", *pkg_config(bundle, "--cflags")]
    libraries = [*pkg_config(bundle, "--libs"), "-lm", f"-Wl,-rpath,{bundle}"]
    compile_c([CC], [source], folder / "gdn_prefill", *flags, "-Wl,--no-as-needed", *libraries)


def build_cpp(bundle: Path, folder: Path) -> None:
    assert CXX is not None
    for op in SAYS:
        compile_c([CXX], [EXAMPLES / "cpp" / f"{op}.cpp"], folder / op, *CXXFLAGS, f"-I{bundle}")


def cargo(*arguments: str, target: Path, last: tuple[str, ...] = (), **environment: str) -> str:
    assert CARGO is not None
    done = subprocess.run(
        [CARGO, *arguments, "--offline", "--locked", *last],
        cwd=CRATE,
        env={**os.environ, "CARGO_TARGET_DIR": str(target), "RUSTFLAGS": "-D warnings", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def program(
    example_bundle: Path, cargo_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Program]:
    """The command of an example, by its name in PROGRAMS; each language is built once."""
    folders: dict[str, Path] = {}

    def build(language: str) -> Path:
        if language == "rust":
            cargo("build", "--examples", target=cargo_target, KERNSEAL_BUNDLE=str(example_bundle))
            return cargo_target / "debug" / "examples"
        if language == "python":
            return EXAMPLES / "python"
        folder = tmp_path_factory.mktemp(language)
        (build_c if language == "c" else build_cpp)(example_bundle, folder)
        return folder

    def get(name: str) -> Program:
        language, _, op = name.partition("-")
        if NEEDS[language] is None:
            pytest.skip(f"no compiler for {language} on this machine")
        if language not in folders:
            folders[language] = build(language)
        if language == "python":
            return (sys.executable, str(folders[language] / f"{op}.py"))
        return (str(folders[language] / op),)

    return get


def run(command: Program, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    keys = [str(builds.CACHE / "tests.json")] if command[-1].endswith(".py") else []
    argv = [*command, str(folder), *keys]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_computes_and_checks_its_result(
    program: Callable[[str], Program], name: str, example_bundle: Path, fake_process: dict[str, str]
) -> None:
    done = run(program(name), example_bundle, fake_process)
    assert done.returncode == 0, done.stderr
    also = ", also from a graph" if name in GRAPHS else ""
    assert (done.stdout, done.stderr) == (SAYS[name.partition("-")[2]] + also + "\n", "")


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_says_how_it_is_called(
    program: Callable[[str], Program], name: str, fake_process: dict[str, str]
) -> None:
    done = subprocess.run(program(name), env=fake_process, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("usage: ") and "BUNDLE" in done.stderr


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_notices_a_wrong_result(
    program: Callable[[str], Program], name: str, example_bundle: Path, fake_process: dict[str, str]
) -> None:
    done = run(
        program(name), example_bundle, {k: v for k, v in fake_process.items() if k != "FAKE_CUDA_KERNEL"}
    )
    assert done.returncode == 1
    assert done.stderr.startswith("o of ") and "expected" in done.stderr and done.stdout == ""


@pytest.fixture
def copy(example_bundle: Path, tmp_path: Path) -> Path:
    return shutil.copytree(example_bundle, tmp_path / "bundle")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", CHECKED)
def test_an_example_refuses_a_changed_library(
    program: Callable[[str], Program], name: str, copy: Path, fake_process: dict[str, str]
) -> None:
    flip(copy / "libkernseal.so", -1)
    done = run(program(name), copy, fake_process)
    assert done.returncode == 1
    assert done.stderr.startswith("mismatch: ") and "libkernseal.so" in done.stderr


@pytest.mark.parametrize("name", CHECKED)
def test_an_example_refuses_a_bundle_without_its_library(
    program: Callable[[str], Program], name: str, copy: Path, fake_process: dict[str, str]
) -> None:
    (copy / "libkernseal.so").unlink()
    done = run(program(name), copy, fake_process)
    assert done.returncode == 1
    assert done.stderr.startswith("missing: ") and "libkernseal.so" in done.stderr


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_refuses_a_changed_image(
    program: Callable[[str], Program], name: str, copy: Path, fake_process: dict[str, str]
) -> None:
    op = name.partition("-")[2]
    (cubin,) = (copy / "cubin" / op).glob("*.cubin")
    flip(cubin, 100)
    done = run(program(name), copy, fake_process)
    assert done.returncode == 1
    assert done.stderr.startswith(f"mismatch: cubin/{op}/")


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_tells_of_another_gpu(
    program: Callable[[str], Program], name: str, example_bundle: Path, fake_process: dict[str, str]
) -> None:
    done = run(program(name), example_bundle, {**fake_process, "FAKE_CUDA_CC": "120"})
    assert done.returncode == 1
    assert done.stderr.startswith("wrong_sm: ")


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_tells_of_a_missing_bundle(
    program: Callable[[str], Program], name: str, tmp_path: Path, fake_process: dict[str, str]
) -> None:
    done = run(program(name), tmp_path / "nowhere", fake_process)
    assert done.returncode == 1
    assert done.stderr.startswith("missing: ") and "nowhere" in done.stderr


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_tells_of_a_missing_driver(
    program: Callable[[str], Program],
    name: str,
    example_bundle: Path,
    tmp_path: Path,
    fake_process: dict[str, str],
) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(b"")  # what this machine may have is out of reach
    done = run(program(name), example_bundle, {**fake_process, "LD_LIBRARY_PATH": str(tmp_path)})
    assert done.returncode == 1
    assert "libcuda.so.1" in done.stderr


FAILING = ("cuInit", "cuMemAlloc", "cuMemcpyHtoD", "cuMemcpyDtoH")
IN_GRAPHS = (
    "cuStreamCreate",
    "cuStreamSynchronize",
    "cuStreamBeginCapture",
    "cuStreamEndCapture",
    "cuGraphLaunch",
)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        *((name, call) for name in PROGRAMS for call in FAILING),
        *((name, call) for name in GRAPHS for call in (*IN_GRAPHS, "cuGraphInstantiateWithFlags")),
    ],
)
def test_an_example_tells_of_a_driver_call_of_its_own_that_fails(
    program: Callable[[str], Program],
    name: str,
    call: str,
    example_bundle: Path,
    fake_process: dict[str, str],
) -> None:
    done = run(program(name), example_bundle, {**fake_process, "FAKE_CUDA_FAIL": f"{call}:2"})
    assert done.returncode == 1
    assert "error 2" in done.stderr and done.stdout == ""


@pytest.mark.parametrize("call", ["cuLibraryLoadData", "cuKernelGetFunction", "cuLaunchKernelEx"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_tells_of_a_driver_call_of_the_library_that_fails(
    program: Callable[[str], Program],
    name: str,
    call: str,
    example_bundle: Path,
    fake_process: dict[str, str],
) -> None:
    done = run(program(name), example_bundle, {**fake_process, "FAKE_CUDA_FAIL": f"{call}:700"})
    assert done.returncode == 1
    assert done.stderr.startswith(f"driver_error: {call}: CUDA_ERROR_ILLEGAL_ADDRESS (700)")


@pytest.mark.parametrize("name", [name for name in PROGRAMS if not name.startswith("python")])
def test_an_example_leaks_nothing_and_touches_nothing_it_should_not(
    program: Callable[[str], Program], name: str, example_bundle: Path, fake_process: dict[str, str]
) -> None:
    prefix = valgrind()
    if prefix is None:
        pytest.skip("no valgrind that starts on this machine")
    done = run((*prefix, *program(name)), example_bundle, fake_process)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(CXX is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("op", SAYS)
def test_the_cpp_examples_are_clean_under_the_sanitizers(
    op: str, example_bundle: Path, tmp_path: Path, fake_process: dict[str, str]
) -> None:
    assert CXX is not None
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", *CXXFLAGS, f"-I{example_bundle}")
    built = compile_c([CXX], [EXAMPLES / "cpp" / f"{op}.cpp"], tmp_path / op, *flags)
    done = run((str(built),), example_bundle, fake_process)
    assert (done.returncode, done.stderr) == (0, "")


# ---- Rust: the crate by itself ----

needs_cargo = pytest.mark.skipif(CARGO is None, reason="no cargo on this machine")


@needs_cargo
def test_the_crates_own_tests_pass(cargo_target: Path) -> None:
    """SHA-256, and the doc tests: what must compile and what must not."""
    done = cargo("test", target=cargo_target)
    assert done.count("test result: ok. ") >= 2
    assert done.count("compile fail ... ok") == 4
    assert "0 passed; 0 failed; 0 ignored; 0 measured" not in done.split("Doc-tests")[1]


@needs_cargo
def test_the_crate_pleases_clippy_and_rustfmt(cargo_target: Path) -> None:
    if compiler("cargo-clippy") is None or compiler("cargo-fmt") is None:
        pytest.skip("no clippy or no rustfmt on this machine")
    cargo("clippy", "--all-targets", target=cargo_target)
    done = subprocess.run(["cargo", "fmt", "--check"], cwd=CRATE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@needs_cargo
def test_the_crate_is_all_there_is_to_a_build() -> None:
    assert [line for line in (CRATE / "Cargo.lock").read_text().splitlines() if "name = " in line] == [
        'name = "kernseal"'
    ]


@needs_cargo
def test_a_crate_that_was_built_without_a_bundle_has_no_pin(
    tmp_path: Path, example_bundle: Path, fake_process: dict[str, str]
) -> None:
    cargo("build", "--example", "xqa_decode", target=tmp_path)
    done = run((str(tmp_path / "debug" / "examples" / "xqa_decode"),), example_bundle, fake_process)
    assert done.returncode == 1
    assert done.stderr.startswith("invalid_argument: no library is pinned: build with KERNSEAL_BUNDLE")


@needs_cargo
@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"KERNSEAL_BUNDLE": "/nowhere"}, "KERNSEAL_BUNDLE: /nowhere/libkernseal.so: No such file"),
        ({"KERNSEAL_LIBRARY_SHA256": "ABC"}, 'KERNSEAL_LIBRARY_SHA256 is "ABC"; it must be 64 lowercase hex'),
        (
            {"KERNSEAL_LIBRARY_SHA256": "0" * 64, "KERNSEAL_BUNDLE": ""},
            "KERNSEAL_BUNDLE: SHA-256 of its library is",
        ),
    ],
    ids=["no bundle", "no digest", "two digests"],
)
def test_a_pin_that_is_none_fails_the_build(
    tmp_path: Path, example_bundle: Path, variables: dict[str, str], words: str
) -> None:
    given = {name: value or str(example_bundle) for name, value in variables.items()}
    with pytest.raises(AssertionError) as caught:
        cargo("build", target=tmp_path, **given)
    assert words in str(caught.value)
