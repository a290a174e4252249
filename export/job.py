"""What a compile worker is told and what it answers: plain JSON, so that a build step is a process with files in and out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


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
        entry: the kernel's name in PTX and cubin.
        host_function: name of the host entry, without prefix.
        dynamic_smem: bytes of dynamic shared memory that the host code asks for at launch.
        modules: upstream files that the build imported, by path in the wheel.
    """

    entry: str
    host_function: str
    dynamic_smem: int
    modules: list[str]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> CuteAnswer:
        return CuteAnswer(**json.loads(path.read_text()))
