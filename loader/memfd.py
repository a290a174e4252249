"""Hand verified bytes to the dynamic linker so that nothing can change them in between."""

from __future__ import annotations

import fcntl
import os

from .errors import IoError

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def sealed_memfd(name: str, data: bytes) -> int:
    """Return a descriptor of an anonymous file that holds ``data`` and can no longer be written.

    The caller owns the descriptor and opens the file as ``/proc/self/fd/<descriptor>``.

    Raises:
        IoError: the kernel refused to create, fill or seal the file.
    """
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise IoError(f"memfd_create({name!r}): {error.strerror}") from error
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(descriptor)
        raise IoError(f"memfd of {name!r}: {error.strerror}") from error
    return descriptor
