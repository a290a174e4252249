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
        ValueError: naming the path of the first value, as written, that has no canonical form.
    """
    parts: list[str] = []
    _write(value, "\n", None, parts.append)
    parts.append("\n")
    return "".join(parts).encode("ascii")


def is_text(value: str) -> bool:
    """Whether ``value`` can be written as UTF-8: JSON escapes can smuggle in half of a surrogate pair."""
    if value.isascii():
        return True
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


_quoted: Callable[[str], str] = json.encoder.encode_basestring_ascii
_Place = Union[None, "tuple[_Place, str | int]"]
"""The whole value, or a key or index below another place. Written out where something is refused."""


def _write(value: object, newline: str, place: _Place, put: Callable[[str], None]) -> None:
    """What ``json.dumps(value, sort_keys=True, indent=1)`` writes, which with an indent does so in Python, and slower."""
    if isinstance(value, str):
        if not is_text(value):
            raise _no_form(place, "string with a lone surrogate")
        put(_quoted(value))
    elif value is None:
        put("null")
    elif isinstance(value, bool):
        put("true" if value else "false")
    elif isinstance(value, int):
        if not INT_MIN <= value <= INT_MAX:
            raise _no_form(place, "integer beyond 64 bits")
        put(int.__repr__(value))
    elif isinstance(value, (list, tuple)):
        inner, before = newline + " ", "["
        for index, item in enumerate(value):
            put(before + inner)
            _write(item, inner, (place, index), put)
            before = ","
        put(newline + "]" if value else "[]")
    elif isinstance(value, Mapping):
        inner, before = newline + " ", "{"
        for key in sorted(_text_keys(value, place)):
            put(f"{before}{inner}{_quoted(key)}: ")
            _write(value[key], inner, (place, key), put)
            before = ","
        put(newline + "}" if value else "{}")
    else:
        raise _no_form(place, f"{type(value).__name__} has no canonical form")


def _text_keys(value: Mapping[object, object], place: _Place) -> list[str]:
    keys: list[str] = []
    for key in value:
        if not isinstance(key, str) or not is_text(key):
            raise _no_form(place, f"key {key!a} is not text")
        keys.append(key)
    return keys


def _no_form(place: _Place, why: str) -> ValueError:
    path = ""
    while place is not None:
        place, step = place
        path = f"/{step}{path}"
    return ValueError(f"{path or '/'}: {why}")
