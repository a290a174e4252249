"""The compilers of one build: a few processes that have imported theirs and are asked for one variant after another."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from kernseal.export import run
from kernseal.export.compile_server import LOG
from kernseal.loader.errors import BuildFailed


class Compilers:
    """Starts a process when a compile finds none idle, and ends all of them on leaving.

    Attributes:
        libraries: by front end, what its process loads: CuTe DSL's runtime, libnvrtc.
    """

    def __init__(self, **libraries: Path) -> None:
        self.libraries = libraries
        self._idle: dict[str, list[run.Server]] = {name: [] for name in libraries}
        self._lock = threading.Lock()
        self._home = tempfile.TemporaryDirectory(prefix="kernseal-compilers-")

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        for servers in self._idle.values():
            while servers:
                servers.pop().close()
        self._home.cleanup()

    def compile(self, front_end: str, job: Path) -> None:
        """Compile ``job``; its files land beside it.

        Raises:
            BuildFailed: with what the compiler said last.
        """
        with self._borrowed(front_end) as server:
            code = int(server.ask(str(job)))
        if code:
            said = (
                (job.parent / LOG).read_text(errors="replace").strip() if (job.parent / LOG).exists() else ""
            )
            ended = f"\nended by signal {-code}; 9 is often a lack of memory, see --jobs" if code < 0 else ""
            raise BuildFailed(f"{said[-3000:]}{ended}")

    @contextlib.contextmanager
    def _borrowed(self, front_end: str) -> Iterator[run.Server]:
        with self._lock:
            server = self._idle[front_end].pop() if self._idle[front_end] else None
        if server is None:
            server = self._start(front_end)
        try:
            yield server
        except BaseException:
            server.close()
            raise
        with self._lock:
            self._idle[front_end].append(server)

    def _start(self, front_end: str) -> run.Server:
        module = "kernseal.export.compile_server"
        command = [sys.executable, "-m", module, front_end, str(self.libraries[front_end])]
        return run.Server(command, Path(self._home.name), environment(Path(self._home.name)))


def environment(work: Path) -> dict[str, str]:
    """What a compiler sees of the caller's environment: nothing that could reach its output."""
    kept = {
        name: os.environ[name]
        for name in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
        if name in os.environ
    }
    home = {name: str(work) for name in ("HOME", "TMPDIR", "CUTE_DSL_CACHE_DIR", "XDG_CACHE_HOME")}
    fixed = {
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return {**kept, **home, **fixed, "CUTE_DSL_DISABLE_FILE_CACHING": "1"}
