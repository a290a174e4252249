"""Compiles C for the tests: with the Zig that bundles are built with, or a compiler of this machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
STRICT = ("-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror")
ZIG = (sys.executable, "-m", "ziglang", "cc")


def compiler(*names: str) -> str | None:
    """The first of ``names`` that is installed here."""
    return next((found for name in names if (found := shutil.which(name))), None)


def compile_c(command: Sequence[str], sources: Sequence[Path | str], out: Path, *flags: str) -> Path:
    """Compile and link; fails the test with the compiler's words."""
    argv = [*command, *flags, *map(str, sources), "-o", str(out), "-ldl", "-lpthread"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}\n{done.stderr}"
    return out


def build_fake_driver(folder: Path, command: Sequence[str] = ZIG, *flags: str) -> Path:
    """``libcuda.so.1`` without a GPU, in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = [HERE / name for name in ("recorder.c", "fake_cuda.c", "fake_cudart.c")]
    flags = (*STRICT, "-O1", "-g", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1", *flags)
    return compile_c(command, sources, folder / "libcuda.so.1", *flags)
