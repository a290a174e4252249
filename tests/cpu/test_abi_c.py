"""Runs the C tests of ``tests/cpu/c``, one process a test, under the sanitizers that this machine's compilers have."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from cpu.fake_driver.native import STRICT, ZIG, build_fake_driver, compile_c, compiler

from kernseal.abi import library
from kernseal.abi.library import KernelRecord, VariantRecord

C = Path(__file__).resolve().parent / "c"
DRIVER = Path(__file__).resolve().parent / "fake_driver"
FILES = ("test_core.c", "test_prepare.c", "test_refusals.c", "test_threads.c")
AXES: dict[str, str | bool] = {
    "dtype": "bf16",
    "state_dtype": "f32",
    "state_layout": "hvk",
    "index_dtype": "i64",
    "initial_state": True,
    "pooled": False,
    "alpha": True,
    "beta": True,
    "checkpoints": False,
}
VARIANTS: dict[str, tuple[str, dict[str, str | bool]]] = {
    "packed": ("sm90", {}),
    "pooled": ("sm90", {"pooled": True}),
    "pooled_ckpt": ("sm90", {"pooled": True, "checkpoints": True}),
    "plain": ("sm90", {"initial_state": False, "alpha": False, "beta": False}),
    "i32": ("sm90", {"index_dtype": "i32"}),
    "blackwell": ("sm100", {"state_dtype": "bf16"}),
}


STUB = KernelRecord("stub", 128, 8, 16, 1000)
SECOND = KernelRecord("second", 32, 0, 0, 0)


def records() -> list[VariantRecord]:
    """A library of stubs; fixture.h writes the images whose hashes these are."""
    base = VariantRecord("gdn_prefill", "", "", {}, (STUB,), "", 0, "", "glue", "", "f")
    made = []
    for name, (class_name, changes) in VARIANTS.items():
        image = f"image of {name}, long enough to read".encode()
        made.append(
            replace(
                base,
                variant=name,
                class_name=class_name,
                axes={**AXES, **changes},
                file=f"cubin/gdn_prefill/{name}.cubin",
                size=len(image),
                sha256=hashlib.sha256(image).hexdigest(),
                host_prefix=name,
                kernels=(STUB, SECOND) if name == "pooled_ckpt" else (STUB,),
            )
        )
    return made


def sentences(*files: str) -> list[tuple[str, str]]:
    pattern = re.compile(r"^(?:TEST|[A-Z]+_?REFUSED|REFUSED)\((\w+)[,)]", re.MULTILINE)
    return [(file, name) for file in files for name in pattern.findall((C / file).read_text())]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds one test program, once: file, compiler, flags, and what the library is for."""
    built: dict[tuple[object, ...], Path] = {}

    def get(
        file: str,
        command: Sequence[str],
        flags: Sequence[str],
        sm: str = "sm_90a",
        retarget: str | None = None,
    ) -> Path:
        key = (file, *command, *flags, sm, retarget)
        if key not in built:
            folder = tmp_path_factory.mktemp(Path(file).stem)
            driver = build_fake_driver(folder, command, *flags)
            sources = library.library_sources(sm, retarget, records(), folder)
            includes = [f"-I{d}" for d in (*library.include_dirs(), C, DRIVER)]
            # TSan's own warning about fences aside, the sources are clean under every warning.
            options = [
                *STRICT,
                "-O1",
                "-g",
                "-Dmalloc=test_malloc",
                *includes,
                *flags,
                f"-Wl,-rpath,{folder}",
            ]
            inputs = [C / file, C / "stub_host.c", *sources, driver]
            built[key] = compile_c(command, inputs, folder / "program", *options)
        return built[key]

    return get


def run_test(program: Path, name: str, folder: Path, **environment: str) -> None:
    options = {"ASAN_OPTIONS": "detect_leaks=0", "TEST_FOLDER": str(folder)}
    done = subprocess.run(
        [str(program), name],
        env={**os.environ, **options, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "the library prints nothing"
    assert done.stderr == "", "the library prints nothing"


def address_sanitizer() -> tuple[Sequence[str], Sequence[str]]:
    """A compiler with ASan and UBSan, or Zig with UBSan alone."""
    found = compiler("gcc", "clang", "cc")
    if found is not None:
        return [found], ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    return ZIG, ["-fsanitize=undefined", "-fno-sanitize-recover=all"]


@pytest.mark.parametrize(("file", "name"), sentences(*FILES))
def test_sentence(build: Callable[..., Path], tmp_path: Path, file: str, name: str) -> None:
    tmp_path.chmod(0o755)
    run_test(build(file, *address_sanitizer()), name, tmp_path)


def test_every_sentence_was_found() -> None:
    found = sentences(*FILES)
    assert len(found) == len(set(found)) > 150


def test_the_address_sanitizer_is_there() -> None:
    if compiler("gcc", "clang", "cc") is None:
        pytest.skip("no gcc or clang on this machine: the C tests ran with Zig's UBSan and without ASan")
    assert "-fsanitize=address,undefined" in address_sanitizer()[1]


@pytest.mark.parametrize(("file", "name"), sentences(*FILES))
def test_sentence_under_the_thread_sanitizer(
    build: Callable[..., Path], tmp_path: Path, file: str, name: str
) -> None:
    tmp_path.chmod(0o755)
    found = compiler("gcc", "clang", "cc")
    command = [found] if found else ZIG
    run_test(build(file, command, ["-fsanitize=thread"]), name, tmp_path)
