"""PTX to cubin with the pinned ptxas."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kernseal.loader.errors import BuildFailed

FLAGS = ("-O3", "--verbose")


@dataclass(frozen=True)
class Assembled:
    """A cubin and what ptxas says of it: bytes of register spills (stores and loads together)."""

    cubin: bytes
    spill_bytes: int


def assemble(ptxas: Path, arch: str, ptx: bytes, work: Path) -> Assembled:
    """Assemble one PTX module for exactly ``arch``.

    Raises:
        BuildFailed: ptxas refused; the message has its words.
    """
    source, target = work / "kernel.ptx", work / "kernel.cubin"
    source.write_bytes(ptx)
    # Relative names in a private folder: ptxas writes what it was given into the cubin's notes.
    command = [str(ptxas), *FLAGS, "--gpu-name", arch, "--output-file", target.name, source.name]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildFailed(f"ptxas for {arch}: {(done.stderr or done.stdout).strip()[-2000:]}")
    report = done.stderr + done.stdout
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    if not spills:
        raise BuildFailed(f"ptxas for {arch}: no spill report in its output: {report.strip()[-400:]}")
    return Assembled(target.read_bytes(), sum(map(int, spills)))
