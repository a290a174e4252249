"""How many variants are compiled at once, unless the user says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernseal.export import machine

GB = 10**9


@pytest.fixture(autouse=True)
def machine_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def jobs(folder: Path, available: int, **cgroup: str) -> int:
    (folder / "meminfo").write_text(f"MemTotal: 99999999999 kB\nMemAvailable: {available // 1024} kB\n")
    for name, text in cgroup.items():
        (folder / name.replace("_", ".")).write_text(f"{text}\n")
    return machine.default_jobs()


@pytest.mark.parametrize(
    ("available", "cgroup", "expected"),
    [
        (64 * GB, {}, 8),
        (7 * GB, {}, 4),
        (1 * GB, {}, 1),
        (64 * GB, {"cpu_max": "250000 100000"}, 2),
        (64 * GB, {"cpu_max": "50000 100000"}, 1),
        (64 * GB, {"cpu_max": "max 100000"}, 8),
        (64 * GB, {"memory_max": str(6 * GB), "memory_current": str(1 * GB)}, 3),
        (64 * GB, {"memory_max": "max", "memory_current": str(1 * GB)}, 8),
    ],
)
def test_jobs_follow_from_what_this_process_may_use(
    tmp_path: Path, available: int, cgroup: dict[str, str], expected: int
) -> None:
    assert jobs(tmp_path, available, **cgroup) == expected


def test_a_machine_that_does_not_say_counts_its_memory() -> None:
    assert machine.memory() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
