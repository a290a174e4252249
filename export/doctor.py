"""What a build needs of this machine, checked one by one."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernseal.export import paths, toolchain
from kernseal.loader.errors import ToolchainInvalid

PYTHONS = ((3, 10), (3, 13))
MACHINES = ("x86_64", "aarch64")
FREE_GIB = 2


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        ok: false when a build can't work; what is only informative is always true.
        detail: what was found.
        hint: what to do, empty when there is nothing to do.
    """

    name: str
    ok: bool
    detail: str
    hint: str = ""


def doctor() -> list[Check]:
    """Every check, in the order in which a build would meet what they look at. Raises nothing."""
    return [
        _python(),
        _machine(),
        *_tools(),
        _runs("ptxas runs", toolchain.ptxas_path, "--version"),
        _runs("zig runs", toolchain.zig_argv, "version"),
        _cache(paths.cache()),
        _disk(paths.cache()),
        _driver(),
    ]


def _python() -> Check:
    oldest, newest = PYTHONS
    ok = oldest <= sys.version_info[:2] <= newest
    hint = "" if ok else f"use Python 3.{oldest[1]} to 3.{newest[1]}: make PYTHON=python3.12 ..."
    return Check("python", ok, f"{platform.python_version()} at {sys.executable}", hint)


def _machine() -> Check:
    found = f"{platform.system()} {platform.machine()}"
    ok = platform.system() == "Linux" and platform.machine() in MACHINES
    return Check("machine", ok, found, "" if ok else f"build on Linux, on {' or '.join(MACHINES)}")


def _tools() -> list[Check]:
    try:
        tools = toolchain.inspect_toolchain()
    except ToolchainInvalid as error:
        return [Check("tools", False, str(error), "make clean-env, then make env")]
    return [
        Check(tool.name, True, f"{tool.version}, {tool.files} files, digest {tool.digest[:16]}")
        for tool in tools
    ]


def _runs(name: str, find: Callable[[], Path | list[str]], argument: str) -> Check:
    try:
        found = find()
        command = [*found] if isinstance(found, list) else [os.fspath(found)]
        detail = _last_line([*command, argument])
    except (ToolchainInvalid, OSError, subprocess.SubprocessError) as error:
        return Check(name, False, str(error), "is the folder mounted noexec, or the machine of another kind?")
    return Check(name, True, detail)


def _last_line(command: Sequence[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True, stdin=subprocess.DEVNULL
    )
    return (done.stdout.strip().splitlines() or ["no output"])[-1]


def _cache(folder: Path) -> Check:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"kernseal")
    except OSError as error:
        return Check(
            "cache", False, f"{folder}: {error.strerror}", "set KERNSEAL_CACHE to a folder you can write to"
        )
    return Check("cache", True, f"{folder} can be written to")


def _disk(folder: Path) -> Check:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 2**30
    ok = free >= FREE_GIB
    return Check(
        "disk", ok, f"{free:.1f} GiB free at {folder}", "" if ok else f"a build wants {FREE_GIB} GiB there"
    )


def _driver() -> Check:
    version = ctypes.c_int()
    try:
        code = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return Check("driver", True, "no libcuda.so.1 here: bundles can be built and verified, not run")
    if code != 0:
        return Check(
            "driver", True, f"libcuda.so.1 is here, but cuDriverGetVersion gives {code}: nothing can run"
        )
    major, minor = version.value // 1000, version.value % 1000 // 10
    return Check("driver", True, f"libcuda.so.1 is here, for CUDA {major}.{minor}")
