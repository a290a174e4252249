"""What differs between a bundle and the pins that are committed for its target."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernseal.export import lock
from kernseal.export.lock import Move
from kernseal.loader.pins import MAX_BYTES, SUFFIX, one_per_target, parse_pins
from kernseal.loader.safe_read import read_path
from kernseal.loader.statement import FILE, Statement, statement_digest

Locks = Mapping[tuple[str, str], tuple[str, Mapping[str, Any]]]
"""By target and host: the name of a lock file and what it holds."""


@dataclass(frozen=True)
class Changes:
    """How a bundle differs from a lock."""

    lock: str
    moves: tuple[Move, ...]


def read_locks(path: Path) -> Locks:
    """A lock file, or every one of a folder.

    Raises:
        VerificationFailed: one is not what it must be, or two pin one target.
    """
    paths = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    texts = {item.name: read_path(item, limit=MAX_BYTES) for item in paths}
    pins = one_per_target([parse_pins(text, name) for name, text in texts.items()])
    return {item.target: (item.name, json.loads(texts[item.name])) for item in pins}


def since(statement: Statement, locks: Locks) -> Changes | None:
    """What changed since the pins of the statement's target; None where it has none.

    Of inputs a manifest has the digest of each group; which item of a group moved is for the gate to say.
    """
    found = locks.get((statement.target, statement.host))
    return Changes(found[0], tuple(_moves(statement, found[1]))) if found else None


def _moves(statement: Statement, pinned: Mapping[str, Any]) -> list[Move]:
    before, after = pinned["variants"], _entries(statement, pinned["variants"])
    moves: list[Move] = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if old is None or new is None:
            what = "added" if old is None else "removed"
            moves.append(Move(key, what, (), (old or {}).get("cubin"), (new or {}).get("cubin")))
        else:
            moves += lock.variant_moves(key, old, new, _groups(old["inputs"], new["inputs"]))
    return moves + _file_moves(statement, pinned, moves)


def _entries(statement: Statement, pinned: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The statement's variants as a lock has them. Host objects are in the library; their hashes are not in a manifest."""
    found = {}
    for kernel in statement.kernels:
        key = f"{kernel.op}/{kernel.variant}"
        found[key] = {
            "cubin": statement.subjects[kernel.file],
            "ptx": statement.subjects.get(f"ptx/{key}.ptx"),
            "code": kernel.code_sha256,
            "host": pinned.get(key, {}).get("host"),
            "inputs": inputs if isinstance(inputs := kernel.record.get("inputs"), dict) else {},
        }
    return found


def _groups(before: Mapping[str, Any], after: Mapping[str, Any]) -> Sequence[str]:
    return [group for group in sorted(before.keys() | after.keys()) if before.get(group) != after.get(group)]


def _file_moves(statement: Statement, pinned: Mapping[str, Any], variants: Sequence[Move]) -> list[Move]:
    """Files that belong to no variant; and the manifest, where it alone differs."""
    keys = {*pinned["variants"], *(f"{kernel.op}/{kernel.variant}" for kernel in statement.kernels)}
    own = {f"{kind}/{key}.{kind}" for kind in ("cubin", "ptx") for key in keys}
    moves = []
    for name in _groups(pinned["files"], statement.subjects):
        if name not in own:
            moves.append(Move(name, "file", (), pinned["files"].get(name), statement.subjects.get(name)))
    digest = statement_digest(statement.document)
    if not moves and not variants and digest != pinned["statement"]:
        moves.append(Move(FILE, "file", (), pinned["statement"], digest))
    return moves
