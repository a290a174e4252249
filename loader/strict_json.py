"""JSON as kernseal reads it: nothing is guessed, and every refusal names the field.

``parse`` bounds size and depth before anything is built, and refuses duplicate keys, NaN and infinities,
floats, integers beyond 64 bits, invalid UTF-8 and lone surrogates. ``Cursor`` reads typed fields and collects
what is wrong with all of them, so that one look at a damaged file shows all of the damage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Union

from . import canonical
from .violations import Malformed, Violation, failed

MAX_DEPTH = 32
SHA256 = re.compile(r"[0-9a-f]{64}")

_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)
_ABSENT = object()


class _Pairs(list[tuple[str, object]]):
    """A JSON object with its keys as written, duplicates included."""


class _Refused:
    """A number that JSON's grammar (or Python's reader) allows and kernseal does not."""

    def __init__(self, text: str) -> None:
        self.text = text


class Cursor:
    """One value of a document, with the path that leads to it.

    Readers return a neutral value when the type is wrong and note the violation in the shared ``sink``;
    whoever parses a document looks at ``sink`` once, at the end.
    """

    def __init__(self, value: object, path: str, sink: list[Violation]) -> None:
        self.value = value
        self.path = path
        self.sink = sink

    def refuse(self, expected: str) -> None:
        if self.value is not _ABSENT:  # already reported by fields()
            self.sink.append(Malformed(self.path, shown(self.value), expected))

    def text(self, pattern: re.Pattern[str] | None = None, expected: str = "a string") -> str:
        if isinstance(self.value, str) and (pattern is None or pattern.fullmatch(self.value)):
            return self.value
        self.refuse(expected)
        return ""

    def sha256(self) -> str:
        return self.text(SHA256, "64 lower-case hex digits")

    def integer(self, low: int, high: int) -> int:
        if isinstance(self.value, int) and not isinstance(self.value, bool) and low <= self.value <= high:
            return self.value
        self.refuse(f"an integer from {low} to {high}")
        return low

    def boolean(self) -> bool:
        if isinstance(self.value, bool):
            return self.value
        self.refuse("true or false")
        return False

    def one_of(self, choices: Iterable[str]) -> str:
        allowed = tuple(choices)
        if isinstance(self.value, str) and self.value in allowed:
            return self.value
        self.refuse("one of " + ", ".join(allowed))
        return ""

    def constant(self, value: int | str) -> None:
        if type(self.value) is not type(value) or self.value != value:
            self.refuse(json.dumps(value))

    @property
    def null(self) -> bool:
        return self.value is None

    def items(self) -> list[Cursor]:
        if not isinstance(self.value, list):
            self.refuse("a list")
            return []
        return [Cursor(item, f"{self.path}/{index}", self.sink) for index, item in enumerate(self.value)]

    def entries(self) -> dict[str, Cursor]:
        """An object whose keys are data."""
        if not isinstance(self.value, dict):
            self.refuse("an object")
            return {}
        return {key: self._child(key, item) for key, item in self.value.items()}

    def fields(self, *names: str, more: bool = False) -> dict[str, Cursor]:
        """An object that must have all of ``names``, and nothing else unless ``more``."""
        present = self.entries()
        if isinstance(self.value, dict):
            for name in names:
                if name not in present:
                    self.sink.append(Malformed(f"{self.path}/{_escaped(name)}", "nothing", "a value"))
            for name in present:
                if name not in names and not more:
                    self.sink.append(Malformed(present[name].path, "an unknown field", "no such field"))
        return {name: present.get(name) or self._child(name, _ABSENT) for name in names}

    def _child(self, key: str, value: object) -> Cursor:
        return Cursor(value, f"{self.path}/{_escaped(key)}", self.sink)


def parse(data: bytes, name: str, *, limit: int) -> Cursor:
    """The document in ``data``; ``name`` is how violations call it.

    Raises:
        VerificationFailed: with a Malformed for everything the grammar or the limits refuse.
    """
    if len(data) > limit:
        raise failed(Malformed(name, f"{len(data)} bytes", f"at most {limit} bytes"))
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise failed(Malformed(name, f"a byte that is not UTF-8 at offset {error.start}", "UTF-8")) from None
    _check_depth(text, name)
    try:
        raw = json.loads(
            text, object_pairs_hook=_Pairs, parse_float=_Refused, parse_constant=_Refused, parse_int=_integer
        )
    except json.JSONDecodeError as error:
        found = f"{error.msg} at line {error.lineno} column {error.colno}"
        raise failed(Malformed(name, found, "JSON")) from None
    sink: list[Violation] = []
    value = _plain(raw, f"{name}#", sink)
    if sink:
        raise failed(*sink)
    return Cursor(value, f"{name}#", sink)


def parse_canonical(data: bytes, name: str, *, limit: int) -> Cursor:
    """Like ``parse``, and the bytes must be what ``canonical.dumps`` writes: no slack in which to hide."""
    cursor = parse(data, name, limit=limit)
    if canonical.dumps(cursor.value) != data:
        expected = "canonical JSON: sorted keys, indent 1, ASCII, one newline at the end"
        raise failed(Malformed(name, "JSON in another form", expected))
    return cursor


def shown(value: object) -> str:
    """``value`` as short ASCII for a message."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return ascii(value if len(value) <= 80 else value[:77] + "...")
    if isinstance(value, int):
        return str(value)
    return "a list" if isinstance(value, list) else "an object"


def _check_depth(text: str, name: str) -> None:
    """Before the parser runs, because the parser recurses."""
    depth = 0
    for token in _TOKEN.finditer(text):
        mark = token.group()[0]
        if mark in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                found = f"nesting deeper than {MAX_DEPTH}"
                raise failed(Malformed(name, found, f"at most {MAX_DEPTH} levels"))
        elif mark in "]}":
            depth -= 1


def _integer(text: str) -> object:
    if len(text) > 20:  # int() itself refuses, or takes long over, very long ones
        return _Refused(text)
    value = int(text)
    return value if canonical.INT_MIN <= value <= canonical.INT_MAX else _Refused(text)


_Place = Union[str, "tuple[_Place, str | int]"]
"""Where something is: the document, or a key or index below another place. Written out where something is refused."""


def _written(place: _Place) -> str:
    if isinstance(place, str):
        return place
    above, step = place
    return f"{_written(above)}/{_escaped(step) if isinstance(step, str) else step}"


def _plain(raw: object, place: _Place, sink: list[Violation]) -> object:
    """``raw`` without the reader's marker types, noting each thing that must not be there."""
    if isinstance(raw, _Pairs):
        return _object(raw, place, sink)
    if isinstance(raw, list):
        return [_plain(item, (place, index), sink) for index, item in enumerate(raw)]
    if isinstance(raw, _Refused):
        sink.append(Malformed(_written(place), shown(raw.text), "a 64-bit integer"))
    elif isinstance(raw, str) and not canonical.is_text(raw):
        sink.append(Malformed(_written(place), "a lone surrogate", "text"))
    return raw


def _object(pairs: _Pairs, place: _Place, sink: list[Violation]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, item in pairs:
        where = (place, key)
        if not canonical.is_text(key):
            sink.append(Malformed(_written(where), "a lone surrogate in a key", "text"))
        if key in result:
            sink.append(Malformed(_written(where), "the same key twice", "each key once"))
        result[key] = _plain(item, where, sink)
    return result


def _escaped(key: str) -> str:
    """As in a JSON pointer, printable and bounded."""
    short = key if len(key) <= 80 else key[:77] + "..."
    return ascii(short)[1:-1].replace("~", "~0").replace("/", "~1")
