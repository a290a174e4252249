"""Finds bundles that were installed as wheels (``kernseal wheel``), by what their metadata says; runs no code of theirs.

What is found is a folder and no more trusted than any other: ``open_bundle`` verifies it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from .errors import InvalidArgument, Missing

GROUP = "kernseal.bundles"
FOLDER = "bundle"
DEFAULT_HOST = "linux-x86_64"
_PACKAGE = re.compile(r"kernseal_bundle_[a-z0-9_]{1,64}")


def find_bundle(target: str, host: str = DEFAULT_HOST) -> Path:
    """The folder of the installed bundle for a target.

    Args:
        target: ``sm_120a``, or ``sm_120a-on-sm_90a`` for a retargeted one.
        host: the system its library is for.

    Raises:
        Missing: none is installed for it; the message lists what is.
        InvalidArgument: two are, or its metadata names no folder of its own.
    """
    wanted = f"{target}-{host}"
    found = sorted({path for name, path in _installed() if name == wanted})
    if not found:
        known = ", ".join(sorted({name for name, _ in _installed()})) or "none"
        raise Missing(f"target {wanted!r}: no such bundle is installed; installed are: {known}")
    if len(found) > 1:
        places = ", ".join(str(path) for path in found)
        raise InvalidArgument(f"target {wanted!r}: {len(found)} are installed ({places}); supported is one")
    return found[0]


def _installed() -> Iterator[tuple[str, Path]]:
    # Loading an entry point would run the package; where it lies is all that is asked.
    for point in metadata.entry_points(group=GROUP):
        if point.dist is None:
            continue
        if not _PACKAGE.fullmatch(point.value):
            expected = f"supported is {_PACKAGE.pattern}"
            raise InvalidArgument(f"entry point {point.name!r} of {GROUP}: names {point.value!r}; {expected}")
        yield point.name, Path(str(point.dist.locate_file(f"{point.value}/{FOLDER}")))
