"""A compiler that is imported once and compiles one variant after another.

``python -m kernseal.export.compile_server cute LIBRARY`` reads the path of a job a line and answers with an exit status a
line. Each job is compiled in a fork, which starts from the same state every time: nothing that one compile leaves behind
can reach the next. What the fork says is in ``log`` beside the job.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from kernseal.export import nvrtc_worker
from kernseal.export.job import CuteJob, NvrtcJob

LOG = "log"
PR_SET_PDEATHSIG = 1


def import_cute(runtime: str) -> Callable[[Path], None]:
    """The DSL, with what every recipe imports."""
    from kernseal.export import cute_worker

    cute_worker.import_dsl(runtime)
    importlib.import_module("torch")
    return lambda job: cute_worker.compile_variant(CuteJob.load(job))


def import_nvrtc(library: str) -> Callable[[Path], None]:
    ctypes.CDLL(library)
    return lambda job: nvrtc_worker.compile_variant(NvrtcJob.load(job))


FRONT_ENDS = {"cute": import_cute, "nvrtc": import_nvrtc}


def serve(compile_job: Callable[[Path], None]) -> None:
    """Answer every line of standard input."""
    for line in sys.stdin:
        job = Path(line.rstrip("\n"))
        child = os.fork()
        if child == 0:
            _in_fork(compile_job, job)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _in_fork(compile_job: Callable[[Path], None], job: Path) -> None:
    """Compile and end, whatever happens; with the server, should that be killed."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _move_to(job.parent)
        compile_job(job)
        code = 0
    except nvrtc_worker.NvrtcError as error:
        print(error, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _move_to(work: Path) -> None:
    """Let everything that a compiler writes land in its own folder."""
    log = os.open(work / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(work)
    os.environ |= {name: str(work) for name in ("HOME", "TMPDIR", "CUTE_DSL_CACHE_DIR", "XDG_CACHE_HOME")}
    tempfile.tempdir = None


if __name__ == "__main__":
    serve(FRONT_ENDS[sys.argv[1]](sys.argv[2]))
