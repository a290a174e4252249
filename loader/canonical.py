"""The one way kernseal writes JSON that is hashed or signed.

Sorted keys, indent 1, ASCII, one trailing newline. Whatever is not exactly representable in every JSON reader
(floats, integers beyond 64 bits, lone surrogates) is refused, so that two writers never disagree about bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Union

Json = Union[None, bool, int, str, "list[Json]", "dict[str, Json]"]

INT_MIN = -(2**63)
INT_MAX = 2**64 - 1


def dumps(value: object) -> bytes:
    """Canonical bytes of ``value``.

    Raises:
        ValueError: naming the path of the first value that has no canonical form.
    """
    _check(value, "")
    return (json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n").encode("ascii")


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
