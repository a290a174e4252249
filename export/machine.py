"""How much of this machine a build may take: what this process is allowed, not what the machine has."""

from __future__ import annotations

import os
from pathlib import Path

BYTES_A_JOB = 1_500_000_000
"""The most that compiling one variant takes, its compiler and ptxas included: see docs/building.md."""
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def default_jobs() -> int:
    """As many compiles at once as there are processors and memory for."""
    return max(1, min(processors(), memory() // BYTES_A_JOB))


def processors() -> int:
    """Those this process may run on, and no more than its control group's share of time is worth."""
    allowed = len(os.sched_getaffinity(0))
    quota, _, period = _read(CGROUP / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        return max(1, min(allowed, int(quota) // int(period)))
    return allowed


def memory() -> int:
    """Bytes that are free here now, and no more than its control group has left."""
    available = [
        int(line.split()[1]) * 1024
        for line in _read(MEMINFO).splitlines()
        if line.startswith("MemAvailable:")
    ]
    found = available[0] if available else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, used = _read(CGROUP / "memory.max"), _read(CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit():
        found = min(found, int(limit) - int(used))
    return max(0, found)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
