"""Runs the tools of a build, and can stop all that are running when the build is interrupted."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from kernseal.loader.errors import BuildFailed

_running: set[subprocess.Popen[str]] = set()
_lock = threading.Lock()
_stopping = threading.Event()


def run(
    command: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a tool to its end and return its exit status and output.

    Raises:
        BuildFailed: the build was interrupted.
    """
    with _lock:
        if _stopping.is_set():
            raise BuildFailed("interrupted")
        child = subprocess.Popen(
            list(command),
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        _running.add(child)
    try:
        out, err = child.communicate()
    finally:
        with _lock:
            _running.discard(child)
    return subprocess.CompletedProcess(list(command), child.returncode, out, err)


def allow() -> None:
    """Let tools start again, once those that were stopped have ended."""
    _stopping.clear()


def stop_all() -> None:
    """Kill every tool that is running and start no more until ``allow``."""
    _stopping.set()
    with _lock:
        for child in _running:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
