"""Digests of the wheels that the export lock names: the end of `make lock`.

Downloads each wheel of each tool in ``kernels/toolchain.yaml``, for every machine and Python, checks it against
the lock, and writes the digest of its files to ``manifests/toolchain/wheels.json``. An installed tool is
compared with that file: it tells which reviewed wheel the files on disk are.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from kernseal.export import paths
from kernseal.export.toolchain import ToolPin, load_pins
from kernseal.export.toolchain_files import counts, tree_digest
from kernseal.loader.errors import ToolchainInvalid

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
LOCK = paths.manifests() / "toolchain/export.lock.txt"
WHEELS = paths.manifests() / "toolchain/wheels.json"
# What pip may take for a Linux machine with glibc 2.28, newest first.
_PLATFORMS = ("manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux_2_12")


def locked_hashes(lock: str, name: str, version: str) -> set[str]:
    """The SHA-256 hashes that a lock file's text gives for one release."""
    pattern = rf"^{re.escape(name)}=={re.escape(version)}[ \\].*\n((?:    --hash=sha256:[0-9a-f]+.*\n)+)"
    blocks = re.findall(pattern, lock, re.MULTILINE)
    return {digest for block in blocks for digest in re.findall(r"sha256:([0-9a-f]{64})", block)}


def wheel_digest(wheel: Path) -> str:
    """The digest that an installation of this wheel has."""
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if not n.endswith("/") and counts(n)]
        if moved := [n for n in names if ".data/" in n]:
            raise ToolchainInvalid(f"{wheel.name}: {moved[0]} is installed elsewhere than its path says")
        return tree_digest((n, hashlib.sha256(archive.read(n)).hexdigest()) for n in names)


def _download(tool: ToolPin, hashes: set[str], python: str, machine: str, folder: Path) -> Path:
    requirement = folder / "requirement.txt"
    allowed = " ".join(f"--hash=sha256:{h}" for h in sorted(hashes))
    requirement.write_text(f"{tool.name}=={tool.version} {allowed}")
    platforms = [word for p in _PLATFORMS for word in ("--platform", f"{p}_{machine}")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--python-version", python, "--implementation", "cp"]
    abis = [word for abi in (f"cp{python.replace('.', '')}", "abi3", "none") for word in ("--abi", abi)]
    subprocess.run([*command, *platforms, *abis, "--dest", str(folder), "-r", str(requirement)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def pin_tool(tool: ToolPin, lock: str) -> dict[str, dict[str, str]]:
    """Wheel file name -> its hash and the digest of its files."""
    hashes = locked_hashes(lock, tool.name, tool.version)
    if not hashes:
        raise ToolchainInvalid(f"{tool.name} {tool.version} of kernels/toolchain.yaml is not in {LOCK.name}")
    wheels: dict[str, dict[str, str]] = {}
    for machine in MACHINES:
        for python in PYTHONS:
            with tempfile.TemporaryDirectory() as folder:
                wheel = _download(tool, hashes, python, machine, Path(folder))
                if wheel.name not in wheels:
                    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
                    wheels[wheel.name] = {"sha256": sha256, "digest": wheel_digest(wheel)}
                if wheel.name.endswith("-any.whl"):
                    return wheels
                if "-py3-none-" in wheel.name:
                    break
    return wheels


def main() -> None:
    """Write ``wheels.json``."""
    lock = LOCK.read_text()
    tools: dict[str, Any] = {}
    for tool in load_pins(wheels=False):
        tools[tool.name] = {"version": tool.version, "wheels": pin_tool(tool, lock)}
        print(f"lock: {tool.name} {tool.version}: {len(tools[tool.name]['wheels'])} wheels", flush=True)
    content = {"schema": 1, "generated_by": "make lock", "tools": tools}
    WHEELS.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    print(f"lock: {WHEELS.name}")


if __name__ == "__main__":
    main()
