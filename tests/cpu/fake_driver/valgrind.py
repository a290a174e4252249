"""valgrind, where there is one: installed, or unpacked by ``.ci/run`` into ``build/valgrind``."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

UNPACKED = Path(__file__).resolve().parents[3] / "build" / "valgrind"
OPTIONS = (
    "--quiet",
    "--error-exitcode=99",
    "--leak-check=full",
    "--errors-for-leak-kinds=definite,indirect",
    "--show-leak-kinds=definite,indirect",
)


@functools.cache
def valgrind() -> tuple[str, ...] | None:
    """The start of a command that fails on bad accesses and leaks, or None where there is no valgrind that starts."""
    for command in _candidates():
        done = subprocess.run([*command, shutil.which("true") or "true"], capture_output=True, check=False)
        if done.returncode == 0:
            return command
    return None


def _candidates() -> list[tuple[str, ...]]:
    found = []
    if installed := shutil.which("valgrind"):
        found.append((installed, *OPTIONS))
    program = UNPACKED / "usr" / "bin" / "valgrind.bin"
    if program.is_file():
        tools = f"VALGRIND_LIB={UNPACKED / 'usr' / 'libexec' / 'valgrind'}"
        symbols = f"--extra-debuginfo-path={os.fspath(UNPACKED / 'debug')}"
        found.append((shutil.which("env") or "env", tools, str(program), symbols, *OPTIONS))
    return found
