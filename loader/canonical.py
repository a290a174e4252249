"""The one way kernseal writes JSON that is hashed or signed.

Sorted keys, indent 1, ASCII, one trailing newline. Whatever is not exactly representable in every JSON reader
(floats, integers beyond 64 bits, lone surrogates) is refused, so that two writers never disagree about bytes.
"""

from __future__ import annotations

import json.encoder
from collections.abc import Callable, Mapping
from typing import Union

Json = Union[None, bool, int, str, "list[Json]", "dict[str, Json]"]

INT_MIN = -(2**63)
INT_MAX = 2**64 - 1


def dumps(value: object) -> bytes:
    """Canonical bytes of ``value``.

    Raises:
        ValueError: naming the path of the first value that has no canonical form.
    """
    parts: list[str] = []
    try:
        _write(value, "\n", parts.append)
    except _NoFormError:
        _check(value, "")
        raise
    parts.append("\n")
    return "".join(parts).encode("ascii")


class _NoFormError(Exception):
    pass


_quoted: Callable[[str], str] = json.encoder.encode_basestring_ascii


def _write(value: object, newline: str, put: Callable[[str], None]) -> None:
    """What ``json.dumps(value, sort_keys=True, indent=1)`` writes, which with an indent does so in Python, and slower."""
    if isinstance(value, str):
        put(_text(value))
    elif value is None:
        put("null")
    elif isinstance(value, bool):
        put("true" if value else "false")
    elif isinstance(value, int) and INT_MIN <= value <= INT_MAX:
        put(int.__repr__(value))
    elif isinstance(value, (list, tuple)):
        inner, before = newline + " ", "["
        for item in value:
            put(before + inner)
            _write(item, inner, put)
            before = ","
        put(newline + "]" if value else "[]")
    elif isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        inner, before = newline + " ", "{"
        for key in sorted(value):
            put(f"{before}{inner}{_text(key)}: ")
            _write(value[key], inner, put)
            before = ","
        put(newline + "}" if value else "{}")
    else:
        raise _NoFormError


def _text(value: str) -> str:
    if value.isascii() or is_text(value):
        return _quoted(value)
    raise _NoFormError


def is_text(value: str) -> bool:
    """Whether ``value`` can be written as UTF-8: JSON escapes can smuggle in half of a surrogate pair."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _check(value: object, path: str) -> None:
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, int):
        if not INT_MIN <= value <= INT_MAX:
            raise ValueError(f"{path or '/'}: integer beyond 64 bits")
    elif isinstance(value, str):
        if not is_text(value):
            raise ValueError(f"{path or '/'}: string with a lone surrogate")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check(item, f"{path}/{index}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str) or not is_text(key):
                raise ValueError(f"{path or '/'}: key {key!a} is not text")
            _check(item, f"{path}/{key}")
    else:
        raise ValueError(f"{path or '/'}: {type(value).__name__} has no canonical form")
