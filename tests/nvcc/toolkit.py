"""The nvcc of the locked wheels: nvidia-cuda-nvcc and nvidia-cuda-runtime, with cicc, headers and CCCL of the test tools."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

HOME = "nvidia/cu13"
PARTS = {
    "nvidia-cuda-nvcc": "bin/nvcc",
    "nvidia-cuda-runtime": "include/cuda_runtime.h",
    "nvidia-nvvm": "nvvm/bin/cicc",
    "nvidia-cuda-crt": "include/crt/host_config.h",
    "nvidia-cuda-cccl": "include/cccl/nv/target",
}


@functools.cache
def unavailable() -> str | None:
    """What of nvcc is not installed here, or None."""
    lacking = [name for name, path in PARTS.items() if _file(name, path) is None]
    lacking += [] if shutil.which("g++") else ["g++"]
    return f"nvcc needs {', '.join(lacking)}: see `make env`" if lacking else None


def nvcc(arguments: Sequence[str], folder: Path) -> str:
    """Run it in ``folder`` and return what it printed; fails with its words."""
    program = _file("nvidia-cuda-nvcc", PARTS["nvidia-cuda-nvcc"])
    assert program is not None, unavailable()
    done = subprocess.run([str(program), *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout + done.stderr


def version() -> str:
    return metadata.version("nvidia-cuda-nvcc")


def _file(wheel: str, path: str) -> Path | None:
    try:
        found = Path(str(metadata.distribution(wheel).locate_file(f"{HOME}/{path}")))
    except metadata.PackageNotFoundError:
        return None
    return found if found.is_file() else None
