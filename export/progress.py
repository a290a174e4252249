"""Progress of a build: a bar on a terminal, lines elsewhere, nothing when asked for silence. Always on standard error."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Reporter(Protocol):
    """What a build tells whoever watches."""

    def note(self, text: str) -> None:
        """One step of the build."""

    def steps(self, title: str, total: int) -> contextlib.AbstractContextManager[Step]:
        """A stretch of ``total`` steps."""


class Step(Protocol):
    def __call__(self, text: str) -> None:
        """One step is done."""


class Silent:
    """Tells nobody."""

    def note(self, text: str) -> None:
        del text

    @contextlib.contextmanager
    def steps(self, title: str, total: int) -> Iterator[Step]:
        del title, total
        yield self.note


class Lines:
    """For logs: a line a step, with the count and the seconds since the start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._start = time.monotonic()

    def note(self, text: str) -> None:
        self._console.print(
            f"[{time.monotonic() - self._start:6.1f} s] {text}", markup=False, highlight=False, soft_wrap=True
        )

    @contextlib.contextmanager
    def steps(self, title: str, total: int) -> Iterator[Step]:
        done = 0
        lock = threading.Lock()

        def step(text: str) -> None:
            nonlocal done
            with lock:
                done += 1
                self.note(f"{title} {done}/{total}: {text}")

        yield step


class Bar(Lines):
    """For terminals."""

    @contextlib.contextmanager
    def steps(self, title: str, total: int) -> Iterator[Step]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[last]}"),
        )
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task(title, total=total, last="")
            yield lambda text: progress.update(task, advance=1, last=text)
        self.note(f"{title}: {total} done")


def reporter(quiet: bool = False) -> Reporter:
    console = Console(stderr=True)
    if quiet:
        return Silent()
    return Bar(console) if console.is_terminal else Lines(console)
