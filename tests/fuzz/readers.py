"""What the fuzzers of the readers drive: one function a reader, each of which may raise only typed errors.

Shared by ``tests/cpu/test_fuzz_readers.py`` (hypothesis, in every run of the tests) and ``fuzz_readers.py`` (atheris).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import synthetic_bundle as made
from fuzz.small_elf import small_cubin

from kernseal.export import elf
from kernseal.loader import canonical, errors
from kernseal.loader.envelope import open_envelope, write_envelope
from kernseal.loader.envelope import read_envelope as parsed_envelope
from kernseal.loader.keys import _parse_policy, parse_key, write_key
from kernseal.loader.pins import parse_pins
from kernseal.loader.safe_read import NAME
from kernseal.loader.statement import parse_statement, statement_digest, without_git
from kernseal.loader.strict_json import parse
from kernseal.loader.violations import VerificationFailed


def read_json(data: bytes) -> None:
    """Whatever the strict reader accepts has one canonical form, and reads back from it as itself."""
    value = parse(data, "x.json", limit=1 << 20).value
    again = canonical.dumps(value)
    assert parse(again, "x.json", limit=1 << 22).value == value
    assert canonical.dumps(parse(again, "x.json", limit=1 << 22).value) == again


def read_statement(data: bytes) -> None:
    """Whatever is accepted is canonical, names only safe files and says the same without its git state."""
    statement = parse_statement(data)
    assert canonical.dumps(dict(statement.document)) == data
    for name in statement.subjects:
        assert NAME.fullmatch(name)
        assert not name.startswith("/")
        assert ".." not in name.split("/")
    assert statement_digest(without_git(statement).document) == statement_digest(statement.document)


def read_envelope(data: bytes) -> None:
    """Whatever is accepted is signed by every key it names."""
    signed = open_envelope(data)
    assert signed.keyids
    assert len(set(signed.keyids)) == len(signed.keyids)
    signatures = list(parsed_envelope(data).signatures.values())
    assert open_envelope(write_envelope(signed.payload, signatures)).payload == signed.payload


def read_pins(data: bytes) -> None:
    pins = parse_pins(data, "x.lock.json")
    assert all(NAME.fullmatch(name) for name in pins.files)


def read_key(data: bytes) -> None:
    key = parse_key(data, "x.json")
    assert parse_key(write_key(key), "x.json") == key


def read_policy(data: bytes) -> None:
    keys = _parse_policy(data, [])
    assert not keys.trusted


def read_cubin(data: bytes) -> None:
    """Whatever is accepted has entries with names of their own and a digest of its code."""
    cubin = elf.read(data)
    assert all(name == entry.name for name, entry in cubin.entries.items())
    assert all(entry.code_bytes <= len(data) for entry in cubin.entries.values())
    assert len(cubin.code_sha256) == 64
    with contextlib.suppress(errors.Malformed):
        assert elf.constant_u32(data, "smemSize") < 2**32


def read_object(data: bytes) -> None:
    """Names of imports, sorted."""
    names = elf.undefined_symbols(data)
    assert names == sorted(names)
    assert all(names)


READERS: Mapping[str, Callable[[bytes], None]] = {
    "json": read_json,
    "statement": read_statement,
    "envelope": read_envelope,
    "pins": read_pins,
    "key": read_key,
    "policy": read_policy,
}
BINARY_READERS: Mapping[str, Callable[[bytes], None]] = {"cubin": read_cubin, "object": read_object}
EVERY_READER = {**READERS, **BINARY_READERS}


def seeds() -> dict[str, bytes]:
    """A good document for each reader, to start from."""
    document = made.statement(made.files())
    payload = canonical.dumps(document)
    revoked = made.REVOKED.public(revoked=(made.NOW, "lost"))
    return {
        "json": payload,
        "statement": payload,
        "envelope": made.forge(payload, made.RELEASE, made.SECOND),
        "pins": canonical.dumps(made.pins(document)),
        "key": write_key(revoked),
        "policy": canonical.dumps({"schema": 1, "threshold": 1, "keys": []}),
        "cubin": small_cubin(),
        "object": small_cubin(),
    }


def drive(name: str, data: bytes) -> bool:
    """Whether the reader accepted; anything but a typed refusal goes through as the bug that it is."""
    try:
        EVERY_READER[name](data)
    except VerificationFailed as error:
        assert error.violations
        assert all(v.path and v.found and v.expected for v in error.violations)
        assert canonical.dumps(error.to_json())
        assert str(error).isascii()
        return False
    except errors.Malformed as error:  # of the ELF readers, which verification never calls
        assert name in BINARY_READERS
        assert str(error)
        return False
    return True
