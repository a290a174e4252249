"""Links libkernseal.so with the pinned Zig: the C core, every op's launch code, the variants' host objects."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from kernseal.abi import library
from kernseal.abi.library import VariantRecord
from kernseal.export import cache
from kernseal.export.run import run
from kernseal.export.spec import Target
from kernseal.loader.errors import BuildFailed

ZIG_TARGETS = {"linux-x86_64": "x86_64-linux-gnu.2.17", "linux-aarch64": "aarch64-linux-gnu.2.17"}
CFLAGS = (
    "-std=c11",
    "-O2",
    "-g0",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wpedantic",
    "-Werror",
)
LDFLAGS = (
    "-shared",
    "-s",
    "-Wl,--build-id=none",
    "-Wl,-z,now",
    "-Wl,-z,relro",
    "-Wl,-z,noexecstack",
    "-ldl",
    "-lpthread",
)
CPU = {"linux-x86_64": "-mcpu=x86_64", "linux-aarch64": "-mcpu=generic"}
NAME = "libkernseal.so"


def link(
    zig: Sequence[str],
    target: Target,
    records: Sequence[VariantRecord],
    objects: Mapping[str, bytes],
    work: Path,
) -> bytes:
    """Bytes of the library.

    Args:
        zig: command that runs the pinned Zig.
        records: variants of the library.
        objects: host object of each that has one, by ``op/variant``.
        work: empty folder for what is made on the way.

    Raises:
        BuildFailed: the compiler or the linker refused; the message has its words.
    """
    sources = library.library_sources(target.sm, target.retarget, records, work / "generated")
    shutil.copyfile(library.version_script(), work / "exports.map")
    # Private copies under fixed names: no path of this machine reaches the compiler.
    includes = []
    for index, folder in enumerate(library.include_dirs()):
        shutil.copytree(folder, work / f"include{index}", ignore=_all_but_headers)
        includes.append(f"-Iinclude{index}")
    units = []
    for index, source in enumerate(sources):
        name = f"{index:02d}_{source.parent.name}_{source.name}"
        shutil.copyfile(source, work / name)
        units.append(name)
    for index, key in enumerate(sorted(objects)):
        name = f"host_{index:03d}.o"
        (work / name).write_bytes(objects[key])
        units.append(name)
    command = [*zig, "cc", "-target", ZIG_TARGETS[target.host], CPU[target.host], *CFLAGS, *includes]
    command += ["-Wl,--version-script,exports.map", *LDFLAGS, "-o", NAME, *units]
    done = run(command, work, _environment(work))
    if done.returncode:
        raise BuildFailed(f"zig cc for {target.folder}: {done.stderr.strip()[-3000:]}")
    return (work / NAME).read_bytes()


def _all_but_headers(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if not name.endswith(".h") and not Path(folder, name).is_dir()}


def _environment(work: Path) -> dict[str, str]:
    """Zig's caches: glibc stubs are kept for the next build, everything of ours goes with ``work``."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    local = {"ZIG_LOCAL_CACHE_DIR": str(work / "zig"), "HOME": str(work), "TMPDIR": str(work)}
    return {
        **kept,
        **local,
        "ZIG_GLOBAL_CACHE_DIR": str(cache.zig_folder()),
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
    }
