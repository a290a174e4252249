"""What a compile worker is told and what it answers: plain JSON, so that a build step is a process with files in and out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True)
class CuteJob:
    """One variant to compile with CuTe DSL.

    Attributes:
        tree: folder with the patched source set.
        recipe: the op's ``recipe.py``.
        cls: the class's entry in ``kernel.yaml``.
        axes: the variant's axis values.
        arch: SM the compiler targets.
        host: ``linux-x86_64`` or ``linux-aarch64``.
        prefix: prefix of every symbol of the host object.
        host_only: module to names that are imported but never called by a build.
        runtime: CuTe DSL's runtime library, preloaded so that the host code can be compiled.
        out: folder for ``raw.ptx``, ``dsl.cubin``, ``host.o`` and ``answer.json``.
    """

    tree: str
    recipe: str
    cls: Mapping[str, Any] = field(hash=False)
    axes: Mapping[str, Any] = field(hash=False)
    arch: str
    host: str
    prefix: str
    host_only: Mapping[str, list[str]] = field(hash=False)
    runtime: str
    out: str

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> CuteJob:
        return CuteJob(**json.loads(path.read_text()))


@dataclass(frozen=True)
class CuteAnswer:
    """What the compiler says of a variant beyond its files.

    Attributes:
        kernels: what the host code launches: entry, and bytes of dynamic shared memory that it asks for.
        host_function: name of the host entry, without prefix.
        modules: upstream files that the build imported, by path in the wheel.
    """

    kernels: list[tuple[str, int]]
    host_function: str
    modules: list[str]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> CuteAnswer:
        read = json.loads(path.read_text())
        return CuteAnswer([(entry, smem) for entry, smem in read.pop("kernels")], **read)


class NvrtcKernel(NamedTuple):
    """One kernel of a program.

    Attributes:
        entry: its name in PTX and cubin.
        dynamic_smem: bytes of dynamic shared memory that its launch needs, or the constant of the program that says so.
    """

    entry: str
    dynamic_smem: str | int


@dataclass(frozen=True)
class NvrtcProgram:
    """What an op's recipe says of one variant that NVRTC compiles.

    Attributes:
        macros: name to value; they are what makes the variant.
        options: further options of NVRTC, in order.
        kernels: those that are launched; ``kernel`` of a ``struct kseal_launch`` counts from the first.
    """

    macros: Mapping[str, str | int] = field(hash=False)
    options: tuple[str, ...]
    kernels: tuple[NvrtcKernel, ...]


@dataclass(frozen=True)
class NvrtcJob:
    """One variant to compile with NVRTC.

    Attributes:
        tree: folder with the patched source set.
        recipe: the op's ``recipe.py``.
        cls: the class's entry in ``kernel.yaml``; its ``module`` is the source file.
        axes: the variant's axis values.
        arch: SM the compiler targets.
        library: the pinned libnvrtc.
        headers: CUDA headers, by the name that includes them.
        out: folder for ``raw.ptx`` and ``answer.json``.
    """

    tree: str
    recipe: str
    cls: Mapping[str, Any] = field(hash=False)
    axes: Mapping[str, Any] = field(hash=False)
    arch: str
    library: str
    headers: Mapping[str, str] = field(hash=False)
    out: str

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> NvrtcJob:
        return NvrtcJob(**json.loads(path.read_text()))


@dataclass(frozen=True)
class NvrtcAnswer:
    """What is known of a variant beyond its PTX; see ``NvrtcProgram``."""

    kernels: list[NvrtcKernel]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> NvrtcAnswer:
        return NvrtcAnswer([NvrtcKernel(*kernel) for kernel in json.loads(path.read_text())["kernels"]])
