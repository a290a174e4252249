"""The C library of a bundle, loaded from verified bytes, with statuses turned into exceptions."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

from kernseal.abi.generated import kernseal_ffi

from .errors import BY_VALUE, AbiMismatch, IoError, KernsealError
from .memfd import sealed_memfd

LIBRARY_FILE = "libkernseal.so"


def declarations() -> Any:
    """Return the C declarations this loader was built against, as cffi's FFI."""
    return kernseal_ffi.ffi


class Library:
    """``libkernseal.so`` in this process.

    It is never unloaded. Nor is its descriptor closed: the dynamic linker knows the library by the
    descriptor's name and would take a later file of that name for it.

    Attributes:
        ffi: the declarations.
        c: the functions, as cffi gives them.
    """

    def __init__(self, path: str) -> None:
        """Load the file at ``path``.

        Raises:
            IoError: the dynamic linker refused it.
            AbiMismatch: it has another ABI than this loader.
        """
        self.ffi = declarations()
        try:
            self.c: Any = self.ffi.dlopen(path)
        except OSError as error:
            raise IoError(f"{LIBRARY_FILE}: {error}") from error
        try:
            found = int(self.c.kseal_abi_version())
        except AttributeError as error:
            raise AbiMismatch(f"{LIBRARY_FILE}: {error}") from error
        wanted = int(self.c.KSEAL_ABI_VERSION)
        if found >> 16 != wanted >> 16 or found < wanted:  # the lower half counts additions
            raise AbiMismatch(f"{LIBRARY_FILE} has ABI {_dotted(found)}, this loader needs {_dotted(wanted)}")

    def enum(self, name: str) -> dict[str, int]:
        """Return a C enum: its names, in lower case and without the prefix, to their values."""
        prefix = name.upper() + "_"
        constants = [key for key in dir(self.c) if key.startswith(prefix)]
        return {key.removeprefix(prefix).lower(): int(getattr(self.c, key)) for key in constants}

    def check(self, status: int) -> None:
        """Return when ``status`` is 0, raise its exception with the library's message otherwise."""
        if status:
            raise self.error(status)

    def error(self, status: int) -> KernsealError:
        """Return the exception of the last failed call on this thread."""
        message = self.text(self.c.kseal_last_error())
        kind = BY_VALUE.get(status)
        if kind is None:
            return KernsealError(f"status {status}: {message}")
        return kind(message)

    def text(self, pointer: Any) -> str:
        """Return a C string, empty for null."""
        return self.ffi.string(pointer).decode("utf-8", "replace") if pointer else ""


def _dotted(version: int) -> str:
    return f"{version >> 16}.{version & 0xFFFF}"


_loaded: dict[bytes, Library] = {}
_lock = threading.Lock()


def load_library(data: bytes) -> Library:
    """Load verified library bytes, once a process for the same bytes.

    Raises:
        IoError: no sealed copy could be made, or the dynamic linker refused it.
        AbiMismatch: the library has another ABI than this loader.
    """
    digest = hashlib.sha256(data).digest()
    with _lock:
        library = _loaded.get(digest)
        if library is None:
            library = Library(f"/proc/self/fd/{sealed_memfd(LIBRARY_FILE, data)}")
            _loaded[digest] = library
        return library
