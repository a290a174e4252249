"""Keeps FlashInfer from compiling: what it would build raises ``JitRefused`` and names it. See ``loader.flashinfer``."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from .errors import JitRefused, Unsupported

PACKAGE = "flashinfer"
JIT = ("refuse", "allow")
COMPILERS = (
    *("nvcc", "cicc", "ptxas", "ptxas-blackwell", "fatbinary", "tileiras", "ninja", "cmake"),
    *("c++", "g++", "gcc", "cc", "clang", "clang++"),
)
QUESTIONS = ("--version", "-V", "-v", "-dumpversion")
"""What a compiler is started with to say which one it is; FlashInfer asks that of code which is compiled already."""

BUILDS: tuple[tuple[str, str | None, str], ...] = (
    ("flashinfer.jit.core", "JitSpec", "_timed_build"),
    ("flashinfer.jit.core", "JitSpecNvcc", "build"),
)
"""Where FlashInfer goes when ``try_load`` has found no code that was compiled ahead of time."""
IN_PROCESS: tuple[tuple[str, str, str | None, str], ...] = (
    ("CuTe DSL", "cutlass.base_dsl.compiler", "CompileCallable", "__call__"),
    ("CuTe DSL", "cutlass.base_dsl.compiler", "Compiler", "compile"),  # a function that is called uncompiled
    ("NVRTC", "cuda.bindings.nvrtc", None, "nvrtcCompileProgram"),
)
"""Compilers that are no process, where they are installed. What is not FlashInfer's may use them."""

_modes: list[str] = []


def enter(mode: str) -> Callable[[], None]:
    """Refuse or allow that FlashInfer compiles, in every thread, until what is returned is called. The last entered counts.

    Raises:
        Unsupported: this FlashInfer builds elsewhere than the one that kernseal knows.
    """
    undo: list[Callable[[], object]] = [_modes.pop]
    _modes.append(mode)
    try:
        if mode == "refuse":
            for module, owner, name in BUILDS:
                undo.append(_guard(module, owner, name, lambda args: str(args[0].name)))
            for compiler, module, owner, name in IN_PROCESS:
                if _importable(module):
                    undo.append(_guard(module, owner, name, functools.partial(_for_flashinfer, compiler)))
            _watch_processes()
    except BaseException:
        _leave(undo)
        raise
    return functools.partial(_leave, undo)


def refuse(what: str) -> None:
    """Raise JitRefused for what FlashInfer was about to build."""
    raise JitRefused(what)


def _leave(undo: list[Callable[[], object]]) -> None:
    while undo:
        undo.pop()()


def _refusing() -> bool:
    return _modes[-1:] == ["refuse"]


def _guard(
    module: str, owner: str | None, name: str, what: Callable[[Sequence[Any]], str | None]
) -> Callable[[], None]:
    """Let a function ask first, and return what takes that back."""
    try:
        found = importlib.import_module(module)
        holder = found if owner is None else getattr(found, owner)
        function = getattr(holder, name)
    except (ImportError, AttributeError) as error:
        expected = (
            "kernseal does not know where this FlashInfer compiles; jit='allow' installs without refusing"
        )
        raise Unsupported(f"{module}: {error}; {expected}") from None

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        asked = what(args) if _refusing() else None
        if asked is not None:
            refuse(asked)
        return function(*args, **kwargs)

    setattr(holder, name, guarded)
    return functools.partial(setattr, holder, name, function)


def _importable(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _for_flashinfer(compiler: str, args: Sequence[Any] = ()) -> str | None:
    """Name the module of FlashInfer that this thread is in, with its compiler; None outside."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] == PACKAGE:
            return f"{module} (by {compiler})"
        frame = frame.f_back
    return None


@functools.cache
def _watch_processes() -> None:
    """Once in a process: a hook cannot be taken away."""
    sys.addaudithook(_watch)


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if event not in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system") or not _refusing():
        return
    if event == "os.system":
        command = os.fsdecode(args[0]).split()
    else:
        given = args[1]
        command = [os.fsdecode(word) for word in ([given] if isinstance(given, (str, bytes)) else given)]
        command[:1] = [os.fsdecode(args[0] or command[0])]
    program = os.path.basename(command[0]) if command else ""
    if program in COMPILERS and not (len(command) == 2 and command[1] in QUESTIONS):
        asked = _for_flashinfer(program)
        if asked is not None:
            refuse(asked)
