"""The canonical form: what the standard library writes, and nothing that has no such form."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernseal.loader import canonical, strict_json
from kernseal.loader.violations import VerificationFailed

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
LEAVES = st.none() | st.booleans() | st.integers(canonical.INT_MIN, canonical.INT_MAX) | TEXT
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=30,
)


@given(VALUES)
def test_it_is_what_the_standard_library_writes_and_reads_back(value: Any) -> None:
    written = canonical.dumps(value)
    assert written == (json.dumps(value, sort_keys=True, indent=1) + "\n").encode("ascii")
    assert strict_json.parse_canonical(written, "it", limit=1 << 20).value == value


def test_tuples_are_lists_and_empty_ones_have_no_lines() -> None:
    assert canonical.dumps((1, ())) == b"[\n 1,\n []\n]\n"
    assert canonical.dumps({"a": {}, "b": []}) == b'{\n "a": {},\n "b": []\n}\n'


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [0, 1.5]}, "/a/1: float has no canonical form"),
        ({"a": 2**64}, "/a: integer beyond 64 bits"),
        ([-(2**63) - 1], "/0: integer beyond 64 bits"),
        ({"a": {"b": "\ud800"}}, "/a/b: string with a lone surrogate"),
        ({"\udfff": 1}, "key '\\udfff' is not text"),
        ({1: 2}, "key 1 is not text"),
        ({"a": b"bytes"}, "/a: bytes has no canonical form"),
        (float("nan"), "/: float has no canonical form"),
    ],
    ids=str,
)
def test_what_has_no_canonical_form_is_refused_with_its_place(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        canonical.dumps(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": {"b": 1, "b": 2}}', "it#/a/b: malformed: found the same key twice"),
        ('{"a": [1, 1.5]}', "it#/a/1"),
        ('{"a": [NaN]}', "it#/a/0"),
        ('{"a": "\\ud800"}', "it#/a: malformed: found a lone surrogate"),
        ('{"\\ud800": 1}', "a lone surrogate in a key"),
        ('{"a": 18446744073709551616}', "it#/a"),
    ],
)
def test_what_a_document_must_not_have_is_named(text: str, words: str) -> None:
    with pytest.raises(VerificationFailed) as caught:
        strict_json.parse(text.encode(), "it", limit=1 << 20)
    assert words in str(caught.value)
