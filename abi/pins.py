"""The hashes a C++ or Rust host compiles in, so that it can check a bundle without a signature library."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from kernseal.abi.library import abi_version

LIBRARY = "libkernseal.so"
_SHA256 = re.compile(r"[0-9a-f]{64}")


def _checked(files: Mapping[str, str]) -> list[tuple[str, str]]:
    for path, digest in files.items():
        if not _SHA256.fullmatch(digest):
            raise ValueError(f"{path}: sha256 {digest!r} is not 64 lowercase hex digits")
    if LIBRARY not in files:
        raise ValueError(f"files: {LIBRARY} is not there")
    return sorted(files.items())


def pins_header(sm: str, files: Mapping[str, str]) -> str:
    """``kernseal_pins.h``: the SM, the ABI version, and the SHA-256 of libkernseal.so and every other file.

    Args:
        sm: the SM that the bundle runs on.
        files: path in the bundle, to SHA-256; without the pin files themselves and the manifests.

    Raises:
        ValueError: a digest that is none, or no libkernseal.so.
    """
    rows = "".join(f'    {{{json.dumps(path)}, "{digest}"}}, \\\n' for path, digest in _checked(files))
    return f"""\
/* Generated with the bundle: what its files must hash to. */
#ifndef KERNSEAL_PINS_H
#define KERNSEAL_PINS_H

#define KSEAL_PINS_SM {json.dumps(sm)}
#define KSEAL_PINS_ABI_VERSION {abi_version()}u
#define KSEAL_PINS_LIBRARY_SHA256 "{files[LIBRARY]}"

/* For struct {{ const char *path; const char *sha256; }} pins[] = {{KSEAL_PINS_FILES}}; */
#define KSEAL_PINS_FILES \\
{rows}
#endif
"""


def pins_rust(sm: str, files: Mapping[str, str]) -> str:
    """``kernseal_pins.rs``: the same as constants. Arguments and errors as for :func:`pins_header`."""
    rows = "".join(f'    ({json.dumps(path)}, "{digest}"),\n' for path, digest in _checked(files))
    return f"""\
// Generated with the bundle: what its files must hash to.
pub const SM: &str = {json.dumps(sm)};
pub const ABI_VERSION: u32 = {abi_version()};
pub const LIBRARY_SHA256: &str = "{files[LIBRARY]}";
/// Path in the bundle, SHA-256.
pub const FILES: &[(&str, &str)] = &[
{rows}];
"""
