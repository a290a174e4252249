"""PTX to cubin with the pinned ptxas."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kernseal.export.run import run
from kernseal.loader.errors import BuildFailed

FLAGS = ("-O3", "--verbose")


@dataclass(frozen=True)
class Assembled:
    """A cubin and what ptxas says of it.

    Attributes:
        spill_bytes: register spills, stores and loads together.
        static_smem: bytes of shared memory the program declares (the 1 KiB that the system reserves is not in it).
    """

    cubin: bytes
    spill_bytes: int
    static_smem: int


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
    report = done.stderr + done.stdout
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    if not spills:
        raise BuildFailed(f"ptxas for {arch}: no spill report in its output: {report.strip()[-400:]}")
    smem = re.findall(r"(\d+) bytes smem", report)
    return Assembled(target.read_bytes(), sum(map(int, spills)), sum(map(int, smem)))
