"""The tools that make a bundle: which they are, where they are, and that they are the pinned ones."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import json
import os
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernseal.abi import yaml_text
from kernseal.export import paths
from kernseal.export.toolchain_files import DigestCache, Installed, find, read_record, unknown_files
from kernseal.loader.errors import ToolchainInvalid

_DSL_TOOL = "nvidia-cutlass-dsl-libs-cu13"
_DSL_COMPILER = "cutlass._mlir._mlir_libs._cutlass_ir"


@dataclass(frozen=True)
class ToolPin:
    """A tool as ``kernels/toolchain.yaml`` and ``manifests/toolchain/wheels.json`` pin it.

    Attributes:
        role: step of the build that it is.
        sealed: folders of site-packages where unknown files are refused.
        wheels: wheel file name -> its ``sha256`` and the ``digest`` of its files.
    """

    name: str
    version: str
    role: str
    sealed: tuple[str, ...]
    wheels: dict[str, dict[str, str]]

    @property
    def pin(self) -> str:
        """SHA-256 that moves when the reviewed release does; the same on every Python and machine."""
        hashes = {name: wheel["sha256"] for name, wheel in self.wheels.items()}
        text = json.dumps([self.name, self.version, hashes], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Tool:
    """A tool as it is installed, proven to be one of the pinned wheels.

    Attributes:
        purl: package URL, without a registry.
        digest: SHA-256 over (sha256, path) of the installed files.
        files: how many files that is.
        pin: see `ToolPin.pin`.
        wheel: the wheel that these files are.
        wheel_sha256: its SHA-256, as in the lock.
        role: step of the build that it is.
    """

    name: str
    version: str
    purl: str
    digest: str
    files: int
    pin: str
    wheel: str
    wheel_sha256: str
    role: str


@functools.cache
def _yaml() -> Any:
    return yaml_text.load((paths.kernels() / "toolchain.yaml").read_text(encoding="utf-8"))


def load_pins(*, wheels: bool = True) -> list[ToolPin]:
    """The pinned tools, in the order of ``kernels/toolchain.yaml``.

    Args:
        wheels: false while ``wheels.json`` is being made.

    Raises:
        ToolchainInvalid: the two pin files do not name the same releases.
    """
    locked: dict[str, Any] = {}
    if wheels:
        locked = json.loads((paths.manifests() / "toolchain/wheels.json").read_bytes())["tools"]
    pins = []
    for tool in _yaml()["tools"]:
        entry = locked.get(tool["name"], {"version": None, "wheels": {}})
        if wheels and entry["version"] != tool["version"]:
            raise ToolchainInvalid(
                f"{tool['name']}: kernels/toolchain.yaml pins {tool['version']}, "
                f"manifests/toolchain/wheels.json has {entry['version']}; run make lock"
            )
        sealed = tuple(tool.get("sealed", ()))
        pins.append(ToolPin(tool["name"], tool["version"], tool["role"], sealed, entry["wheels"]))
    return pins


def inspect_toolchain(cache_file: Path | None = None) -> list[Tool]:
    """Every tool, with the digest of its files as they are now.

    Files whose path, size, mtime, ctime and inode were seen before are not read again: see `DigestCache`.

    Args:
        cache_file: where digests are kept; by default in the user's cache folder.

    Raises:
        ToolchainInvalid: a tool is missing or of another version; a file is missing, altered or unknown; or
            its files are not those of a wheel that was reviewed.
    """
    cache = DigestCache(cache_file or paths.cache() / "toolchain.json")
    pins = load_pins()
    dists = {pin.name: read_record(pin.name, pin.version) for pin in pins}
    tools = [_tool(pin, dists[pin.name], cache.digest(dists[pin.name])) for pin in pins]
    _refuse_strangers(pins, dists)
    cache.save()
    return tools


def _tool(pin: ToolPin, dist: Installed, digest: str) -> Tool:
    for wheel, known in pin.wheels.items():
        if known["digest"] == digest:
            purl = f"pkg:pypi/{pin.name}@{pin.version}"
            count = len(dist.recorded)
            return Tool(pin.name, pin.version, purl, digest, count, pin.pin, wheel, known["sha256"], pin.role)
    expected = ", ".join(f"{known['digest']} ({wheel})" for wheel, known in sorted(pin.wheels.items()))
    raise ToolchainInvalid(
        f"{pin.name}: the files in {dist.site} agree with their RECORD, but their digest {digest} is that of "
        f"no pinned wheel; expected one of {expected}"
    )


def _refuse_strangers(pins: Sequence[ToolPin], dists: dict[str, Installed]) -> None:
    for pin in pins:
        site = dists[pin.name].site
        for folder in pin.sealed:
            known = set().union(*(dist.recorded for dist in dists.values() if dist.site == site))
            strangers = unknown_files(site, folder, known)
            if strangers and (strangers := _not_tolerated(strangers)):
                more = f" and {len(strangers) - 5} more" if len(strangers) > 5 else ""
                listed = ", ".join(strangers[:5]) + more
                raise ToolchainInvalid(f"{pin.name}: files in {folder} from no pinned wheel: {listed}")


def _not_tolerated(strangers: list[str]) -> list[str]:
    for entry in _yaml()["tolerated"]:
        try:
            known = read_record(entry["name"], entry["version"]).recorded
        except ToolchainInvalid:
            continue
        strangers = [path for path in strangers if path not in known]
    return strangers


def _file_of(tool: str, path: str) -> Path:
    version = next(entry["version"] for entry in _yaml()["tools"] if entry["name"] == tool)
    file = Path(str(find(tool, version).locate_file(path)))
    if not file.is_file():
        raise ToolchainInvalid(f"{tool}: {path} is not in {file.parent}")
    return file


def ptxas_path() -> Path:
    """The pinned assembler.

    Raises:
        ToolchainInvalid: it is not installed.
    """
    return _file_of("nvidia-cuda-nvcc", "nvidia/cu13/bin/ptxas")


def nvrtc_path() -> Path:
    """The pinned compiler library for CUDA C++.

    Raises:
        ToolchainInvalid: it is not installed.
    """
    return _file_of("nvidia-cuda-nvrtc", "nvidia/cu13/lib/libnvrtc.so.13")


def cuda_headers() -> dict[str, Path]:
    """CUDA's headers, those of the pinned wheel alone (other wheels put theirs into the same folder), by include name.

    Raises:
        ToolchainInvalid: they are not installed.
    """
    name, folder = "nvidia-cuda-runtime", "nvidia/cu13/include/"
    version = next(entry["version"] for entry in _yaml()["tools"] if entry["name"] == name)
    installed = read_record(name, version)
    return {
        path.removeprefix(folder): installed.site / path
        for path in sorted(installed.recorded)
        if path.startswith(folder)
    }


def zig_argv() -> list[str]:
    """Command that runs the pinned Zig; append ``cc`` and its arguments.

    Raises:
        ToolchainInvalid: it is not installed.
    """
    return [os.fspath(_file_of("ziglang", "ziglang/zig"))]


def dsl_runtime_path() -> Path:
    """The DSL's runtime library, which has to be loaded globally before a host object is exported.

    Raises:
        ToolchainInvalid: it is not installed.
    """
    return _file_of(_DSL_TOOL, "nvidia_cutlass_dsl/cu13/lib/libcute_dsl_runtime.so")


def dsl_compiler_path() -> Path:
    """The extension module of this Python that is the DSL's compiler.

    Raises:
        ToolchainInvalid: it is not installed for this Python.
    """
    name = f"_cutlass_ir.cu13{sysconfig.get_config_var('EXT_SUFFIX')}"
    return _file_of(_DSL_TOOL, f"nvidia_cutlass_dsl/dsl_packages/cutlass/_mlir/_mlir_libs/{name}")


def bind_dsl() -> None:
    """Make ``import cutlass`` use the pinned compiler. Call it first in every process that compiles.

    Left alone, the DSL takes the newest of its installed compilers that the machine's driver can run, so the
    same build would come out of another compiler on another machine, or none. It keeps one already loaded.

    Raises:
        ToolchainInvalid: another compiler is loaded already, or ``cutlass`` is not the pinned one.
    """
    path = dsl_compiler_path()
    loaded = sys.modules.get(_DSL_COMPILER)
    if loaded is None:
        spec = importlib.util.spec_from_file_location(_DSL_COMPILER, path)
        if spec is None or spec.loader is None:
            raise ToolchainInvalid(f"{_DSL_TOOL}: {path} is not an extension module of this Python")
        loaded = sys.modules[_DSL_COMPILER] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    if not os.path.samefile(str(loaded.__file__), path):
        raise ToolchainInvalid(f"{_DSL_TOOL}: {loaded.__file__} is loaded already, expected {path}")
    package = importlib.import_module(_DSL_COMPILER.rpartition(".")[0])
    if not os.path.samefile(str(package.__file__), path.parent / "__init__.py"):
        raise ToolchainInvalid(f"{_DSL_TOOL}: cutlass comes from {package.__file__}, expected {path.parent}")
    package._cutlass_ir = loaded  # type: ignore[attr-defined]  # what the DSL's own choice does last
