"""The readers of manifest, envelope, pins, keys and cubins, on anything at all: they accept or refuse, and nothing else.

What they accept has properties of its own, which ``fuzz/readers.py`` asserts. Longer runs: ``HYPOTHESIS_EXAMPLES=50000``,
or the coverage-guided ``tests/fuzz/fuzz_readers.py``.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from fuzz.readers import EVERY_READER, READERS, drive, seeds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernseal.loader import canonical
from kernseal.loader.statement import parse_statement
from kernseal.loader.strict_json import parse
from kernseal.loader.violations import VerificationFailed

EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "300"))
SEEDS = seeds()
fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=40),
    st.sampled_from(["..", "/etc/passwd", "a" * 300, "\ud800", "\0", "sm_90a", "0" * 64, "manifest.json"]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)


@pytest.mark.parametrize("reader", sorted(EVERY_READER))
def test_a_good_document_is_accepted(reader: str) -> None:
    assert drive(reader, SEEDS[reader])


@pytest.mark.parametrize("reader", sorted(EVERY_READER))
@fuzzed
@given(data=st.binary(max_size=400))
def test_any_bytes_are_accepted_or_refused(reader: str, data: bytes) -> None:
    accepted = drive(reader, data)
    assert accepted in (True, False)


@pytest.mark.parametrize("reader", sorted(READERS))
@fuzzed
@given(value=JSON)
def test_any_json_is_accepted_or_refused(reader: str, value: object) -> None:
    accepted = drive(reader, json.dumps(value, indent=1, sort_keys=True).encode() + b"\n")
    assert accepted in (True, False)


@pytest.mark.parametrize("reader", sorted(READERS))
@fuzzed
@given(data=st.data())
def test_a_good_document_with_any_field_replaced_is_accepted_or_refused(
    reader: str, data: st.DataObject
) -> None:
    document = json.loads(SEEDS[reader])
    place: Any = document
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys)) if keys else None
        if (
            key is None
            or not isinstance(place[key], (dict, list))
            or not place[key]
            or data.draw(st.booleans())
        ):
            break
        place = place[key]
    replacement = data.draw(JSON)
    if key is None:
        document = replacement
    else:
        place[key] = replacement
    accepted = drive(reader, json.dumps(document, indent=1, sort_keys=True).encode() + b"\n")
    assert accepted in (True, False)


@pytest.mark.parametrize("reader", sorted(EVERY_READER))
@fuzzed
@given(data=st.data())
def test_a_good_document_with_any_bytes_changed_is_accepted_or_refused(
    reader: str, data: st.DataObject
) -> None:
    changed = bytearray(SEEDS[reader])
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(changed)))
        length = data.draw(st.sampled_from([0, 1, 2, 8, 100]))
        changed[start : start + length] = data.draw(st.binary(max_size=8))
    accepted = drive(reader, bytes(changed))
    assert accepted in (True, False)


@fuzzed
@given(
    value=st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.text(st.characters(exclude_categories=["Cs"]), max_size=8), inner, max_size=4
            )
        ),
        max_leaves=20,
    )
)
def test_what_is_written_is_read_as_it_was(value: object) -> None:
    assert parse(canonical.dumps(value), "x.json", limit=1 << 20).value == value


@fuzzed
@given(value=JSON)
def test_the_writer_takes_exactly_what_the_reader_takes(value: object) -> None:
    try:
        written = canonical.dumps(value)
    except ValueError:
        assert not drive("json", json.dumps(value).encode())
    else:
        assert drive("json", written)


def test_a_document_of_nothing_but_bad_fields_is_reported_whole_and_its_message_stays_short() -> None:
    document = json.loads(SEEDS["statement"])
    document["subject"] = [{"name": "/", "digest": {"sha256": index}} for index in range(20_000)]
    with pytest.raises(VerificationFailed) as caught:
        parse_statement(canonical.dumps(document))
    assert len(caught.value.violations) > 40_000
    assert len(str(caught.value)) < 10_000
