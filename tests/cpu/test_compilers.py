"""Processes that import a compiler once: what they answer, and that one compile cannot reach the next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kernseal.export import compilers, run
from kernseal.export.compilers import Compilers
from kernseal.loader.errors import BuildFailed

COMPILER = textwrap.dedent("""
    import os, sys, time
    from pathlib import Path
    from kernseal.export import compile_server

    state = []
    print("imported", file=open(sys.argv[2], "a"))

    def compile_job(job):
        exec(job.read_text(), {"out": job.parent, "state": state})

    compile_server.serve(compile_job)
""")
"""A compile server whose jobs are Python, so that a job can do whatever a compiler might."""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compilers:
    (tmp_path / "compiler.py").write_text(COMPILER)
    found = Compilers(cute=tmp_path / "imports")

    def start(self: Compilers, front_end: str) -> run.Server:
        command = [sys.executable, str(tmp_path / "compiler.py"), front_end, str(self.libraries[front_end])]
        return run.Server(command, tmp_path, compilers.environment(tmp_path))

    monkeypatch.setattr(Compilers, "_start", start)
    return found


def job(tmp_path: Path, name: str, text: str) -> Path:
    (tmp_path / name).mkdir()
    path = tmp_path / name / "job.json"
    path.write_text(text)
    return path


def test_the_compiler_is_imported_once_and_no_compile_sees_another(made: Compilers, tmp_path: Path) -> None:
    text = "import os; state.append(1); (out / 'seen').write_text(f'{len(state)}{os.getcwd()}')"
    with made:
        for name in ("one", "two", "three"):
            made.compile("cute", job(tmp_path, name, text))
            assert (tmp_path / name / "seen").read_text() == f"1{tmp_path / name}"
    assert (tmp_path / "imports").read_text() == "imported\n"


def test_a_failure_is_told_in_the_compilers_words_and_the_next_compile_works(
    made: Compilers, tmp_path: Path
) -> None:
    with made:
        with pytest.raises(BuildFailed, match="no such register"):
            made.compile("cute", job(tmp_path, "bad", "raise ValueError('no such register')"))
        with pytest.raises(BuildFailed, match="written by C\nended by signal 11"):
            made.compile(
                "cute",
                job(
                    tmp_path,
                    "crash",
                    "import os, signal; os.write(2, b'written by C'); os.kill(os.getpid(), 11)",
                ),
            )
        made.compile("cute", job(tmp_path, "good", "(out / 'done').touch()"))
    assert (tmp_path / "good" / "done").exists()
    assert (tmp_path / "imports").read_text() == "imported\n"


def test_a_server_that_does_not_start_is_told(tmp_path: Path) -> None:
    words = r"ended with 1: (?s:.*)no-such-library\.so"
    with Compilers(cute=tmp_path / "no-such-library.so") as found, pytest.raises(BuildFailed, match=words):
        found.compile("cute", job(tmp_path, "job", ""))


def test_no_compile_outlives_its_server(tmp_path: Path) -> None:
    """An interrupted build kills its servers; what they were compiling ends with them."""
    text = "import os, time; (out / 'pid').write_text(str(os.getpid())); time.sleep(60)"
    path = job(tmp_path, "long", text)
    (tmp_path / "compiler.py").write_text(COMPILER)
    command = [sys.executable, str(tmp_path / "compiler.py"), "cute", str(tmp_path / "imports")]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    assert server.stdin is not None
    print(path, file=server.stdin, flush=True)
    deadline = time.monotonic() + 30
    while not ((tmp_path / "long/pid").exists() and (tmp_path / "long/pid").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    compiling = int((tmp_path / "long/pid").read_text())
    server.send_signal(signal.SIGKILL)
    server.wait()
    while _runs(compiling):
        assert time.monotonic() < deadline, "the fork is still there"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return state != "Z"
