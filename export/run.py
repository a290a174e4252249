"""Runs the tools of a build, and can stop all that are running when the build is interrupted."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, cast

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


class Server:
    """A tool that answers each line of its input with a line, until it is closed."""

    def __init__(self, command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
        """Start it.

        Raises:
            BuildFailed: the build was interrupted.
        """
        self._said = os.memfd_create("said")
        with _lock:
            if _stopping.is_set():
                raise BuildFailed("interrupted")
            self._child = subprocess.Popen(
                list(command),
                cwd=cwd,
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
            )
            _running.add(self._child)
        self._to, self._from = cast(IO[str], self._child.stdin), cast(IO[str], self._child.stdout)

    def ask(self, line: str) -> str:
        """The answer to one line.

        Raises:
            BuildFailed: it ended instead, or the build was interrupted.
        """
        with contextlib.suppress(BrokenPipeError):
            self._to.write(f"{line}\n")
            self._to.flush()
        answer = self._from.readline()
        if not answer:
            code = self._child.wait()
            said = os.pread(self._said, 1 << 20, 0).decode(errors="replace").strip()
            raise BuildFailed("interrupted" if _stopping.is_set() else f"ended with {code}: {said[-3000:]}")
        return answer.rstrip("\n")

    def close(self) -> None:
        """End it; it may have ended already."""
        with contextlib.suppress(BrokenPipeError):
            self._child.communicate()
        with _lock:
            _running.discard(self._child)
        os.close(self._said)


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
