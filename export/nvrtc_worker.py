"""Compiles one variant with NVRTC. No GPU, no host compiler. See ``compile_server`` for the process it runs in.

The program and the headers it includes are handed over in memory: the patched source set, and the CUDA headers of the pinned
wheel. NVRTC gets no folder to search, so no path of this machine reaches it, and a header that is not pinned is not found
(unless a pinned source named it by an absolute path).
"""

from __future__ import annotations

import ctypes
import posixpath
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from kernseal.export.job import NvrtcAnswer, NvrtcJob, NvrtcProgram
from kernseal.export.recipe import load_recipe


class NvrtcError(RuntimeError):
    """A call of NVRTC failed; the message has its words."""


class Nvrtc:
    """The few functions of libnvrtc that make PTX."""

    def __init__(self, library: str) -> None:
        self._c = ctypes.CDLL(library)
        self._c.nvrtcGetErrorString.restype = ctypes.c_char_p

    def ptx(self, name: str, text: bytes, headers: Mapping[str, bytes], options: Sequence[str]) -> bytes:
        """PTX of the program ``text``.

        Raises:
            NvrtcError: it does not compile; the message is the compiler's log.
        """
        program = ctypes.c_void_p()
        count = len(headers)
        self._check(
            self._c.nvrtcCreateProgram(
                ctypes.byref(program),
                text,
                name.encode(),
                count,
                (ctypes.c_char_p * count)(*headers.values()),
                (ctypes.c_char_p * count)(*(header.encode() for header in headers)),
            )
        )
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if self._c.nvrtcCompileProgram(program, len(options), given):
            raise NvrtcError(self._text(program, "ProgramLog").decode(errors="replace"))
        return self._text(program, "PTX")

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._c, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._c, f"nvrtcGet{what}")(program, buffer))
        return buffer.value

    def _check(self, code: int) -> None:
        if code:
            raise NvrtcError(self._c.nvrtcGetErrorString(code).decode())


def options(program: NvrtcProgram, arch: str) -> list[str]:
    """The command line: PTX for ``arch``, the recipe's options, the variant's macros in order of name."""
    macros = [f"-D{name}={program.macros[name]}" for name in sorted(program.macros)]
    return [f"--gpu-architecture={arch.replace('sm_', 'compute_')}", *program.options, *macros]


INCLUDE = re.compile(rb'^([ \t]*#[ \t]*include[ \t]*)"([^"\n]+)"', re.MULTILINE)


def headers(job: NvrtcJob) -> dict[str, bytes]:
    """What may be included: files beside and below the program, by their name there, and CUDA's.

    NVRTC looks for a name as it is written, not beside the file that includes it, so such names are written out.

    Raises:
        ValueError: a file of the source set has the name of a CUDA header.
    """
    source = Path(job.tree) / job.cls["module"]
    cuda = {name: Path(path).read_bytes() for name, path in job.headers.items()}
    paths = [path for path in sorted(source.parent.rglob("*")) if path.is_file() and path != source]
    ours = {path.relative_to(source.parent).as_posix(): path.read_bytes() for path in paths}
    for name in ours:
        if name in cuda:
            raise ValueError(f"{name}: both a file of the source set and a CUDA header")
    return cuda | {name: _written_out(name, text, ours) for name, text in ours.items()}


def _written_out(name: str, text: bytes, ours: Mapping[str, bytes]) -> bytes:
    """``text`` with the includes of files relative to it by their name from the program's folder."""

    def full(match: re.Match[bytes]) -> bytes:
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(name), match[2].decode()))
        return match[1] + b'"' + wanted.encode() + b'"' if wanted in ours else match[0]

    return INCLUDE.sub(full, text)


def compile_variant(job: NvrtcJob) -> None:
    program: NvrtcProgram = getattr(load_recipe(job.recipe), job.cls["builder"])(job.axes, job.cls)
    source = Path(job.tree) / job.cls["module"]
    ptx = Nvrtc(job.library).ptx(source.name, source.read_bytes(), headers(job), options(program, job.arch))
    out = Path(job.out)
    (out / "raw.ptx").write_bytes(ptx)
    NvrtcAnswer(list(program.kernels)).save(out / "answer.json")
