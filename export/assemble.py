"""PTX to cubin with the pinned ptxas."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kernseal.export.run import run
from kernseal.loader.errors import BuildFailed

FLAGS = ("-O3", "--verbose")


@dataclass(frozen=True)
class Report:
    """What ptxas says of one kernel.

    Attributes:
        spill_bytes: register spills, stores and loads together, its functions included.
        static_smem: bytes of shared memory it declares (the 1 KiB that the system reserves is not in it).
    """

    spill_bytes: int
    static_smem: int


@dataclass(frozen=True)
class Assembled:
    """A cubin, and what ptxas says of each kernel in it."""

    cubin: bytes
    reports: Mapping[str, Report] = field(hash=False)


def assemble(ptxas: Path, arch: str, ptx: bytes, work: Path) -> Assembled:
    """Assemble one PTX module for exactly ``arch``.

    Raises:
        BuildFailed: ptxas refused; the message has its words.
    """
    source, target = work / "kernel.ptx", work / "kernel.cubin"
    source.write_bytes(ptx)
    # Relative names in a private folder: ptxas writes what it was given into the cubin's notes.
    command = [str(ptxas), *FLAGS, "--gpu-name", arch, "--output-file", target.name, source.name]
    done = run(command, work)
    if done.returncode:
        raise BuildFailed(f"ptxas for {arch}: {(done.stderr or done.stdout).strip()[-2000:]}")
    reports = read_reports(done.stderr + done.stdout)
    if not reports:
        raise BuildFailed(f"ptxas for {arch}: no report in its output: {done.stderr.strip()[-400:]}")
    return Assembled(target.read_bytes(), reports)


def read_reports(text: str) -> dict[str, Report]:
    """What ``ptxas --verbose`` says, by kernel: each kernel's lines begin with the one that names it.

    Raises:
        BuildFailed: a kernel without a word on spills.
    """
    found = {}
    for name, said in re.findall(
        r"Compiling entry function '([^']+)'(.*?)(?=Compiling entry function|\Z)", text, re.DOTALL
    ):
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
        if not spills:
            raise BuildFailed(f"ptxas: no spill report for {name}: {said.strip()[-400:]}")
        smem = re.findall(r"(\d+) bytes smem", said)
        found[name] = Report(sum(map(int, spills)), sum(map(int, smem)))
    return found
