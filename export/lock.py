"""Committed pins of a target: writing them, and saying what differs from them and why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from kernseal.abi import library
from kernseal.export import build, evidence, files, git, inputs, paths
from kernseal.export.build import Options, Plan
from kernseal.export.spec import Target
from kernseal.export.variant import Built
from kernseal.loader.pins import SUFFIX
from kernseal.loader.statement import statement_digest

SCHEMA = 1
WHOLE_BUNDLE = ("host.py", "licences.py", "sbom.py")
"""Modules that write files which belong to no single variant."""
ARTIFACTS = {"cubin": "kernel.cubin", "ptx": "kernel.ptx", "host": "host.o"}


def path_of(target: Target) -> Path:
    """Where a target's pins are committed."""
    name = target.name if target.host == "linux-x86_64" else target.folder
    return paths.manifests() / f"{name}{SUFFIX}"


def library_inputs(made: Plan) -> dict[str, str]:
    """What decides the library beyond its variants."""
    found = {f"{path.parent.name}/{path.name}": files.sha256_file(path) for path in library.core_sources()}
    for folder in library.include_dirs():
        found |= {
            f"{folder.name}/{path.relative_to(folder).as_posix()}": files.sha256_file(path)
            for path in sorted(folder.rglob("*.h"))
        }
    found |= {
        f"generated/{path.name}": files.sha256_file(path) for path in library.interface_files().values()
    }
    known = {
        f"{p.op.name}/{p.variant.class_name}": evidence.of(p.op, p.variant.class_name, made.target)
        for p in made.planned
    }
    own = {f"export/{name}": files.sha256_file(Path(__file__).with_name(name)) for name in WHOLE_BUNDLE}
    pinned = {"kernels/upstream.yaml": files.sha256_file(paths.kernels() / "upstream.yaml")}
    version = {"kernseal's version": metadata.version("kernseal")}
    return {**found, **own, **pinned, **version, "evidence": inputs.digest(known)}


def shared_inputs(made: Plan) -> dict[str, dict[str, dict[str, Any]]]:
    """Item by item, what the digests of the variants' groups are made of: by op and group, and for the library."""
    found: dict[str, dict[str, dict[str, Any]]] = {"library": {"sources": library_inputs(made)}}
    for item in made.planned:
        groups = {name: dict(items) for name, items in item.inputs.groups.items() if name != "variant"}
        found[item.op.name] = groups
    return found


def compose(
    made: Plan, built: Mapping[str, Built], contents: Mapping[str, bytes], options: Options
) -> dict[str, Any]:
    """The lock of a complete build."""
    hashes = {name: files.sha256_bytes(data) for name, data in contents.items()}
    statement = build.describe(made, built, hashes, options, git.Revision(None, False))
    return {
        "schema": SCHEMA,
        "sm": made.target.sm,
        "retarget": made.target.retarget,
        "host": made.target.host,
        "inputs": shared_inputs(made),
        "statement": statement_digest(json.loads(statement)),
        "variants": variant_entries(made, built),
        "files": hashes,
    }


def variant_entries(made: Plan, built: Mapping[str, Built]) -> dict[str, Any]:
    return {
        item.variant.key: {
            **{name: built[item.variant.key].sha256.get(file) for name, file in ARTIFACTS.items()},
            "code": built[item.variant.key].code_sha256,
            "inputs": item.inputs.summary(),
        }
        for item in made.planned
    }


def write(path: Path, lock: Mapping[str, Any]) -> None:
    files.write_atomic(path, (json.dumps(lock, indent=1, sort_keys=True) + "\n").encode())


@dataclass(frozen=True)
class Move:
    """One artifact or input that is not as pinned.

    Attributes:
        artifact: variant, or file of the bundle.
        what: ``added``, ``removed``, ``code`` (other machine code), ``metadata`` (same code, other bytes around it),
            ``host`` (other host object), ``file`` (another file of the bundle), ``inputs`` (same bytes from other inputs).
        because: the inputs that moved, as ``group: item``; empty when none did.
        pinned, found: SHA-256, or None.
    """

    artifact: str
    what: str
    because: tuple[str, ...]
    pinned: str | None = None
    found: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def reason(self) -> str:
        return (
            "; ".join(self.because)
            or "NO INPUT MOVED: the build is not reproducible here, or something was tampered with"
        )


@dataclass(frozen=True)
class Comparison:
    """What a gate finds for one target; ``written`` when it also wrote new pins."""

    target: Target
    moves: tuple[Move, ...]
    compared: int
    partial: bool
    written: bool

    @property
    def ok(self) -> bool:
        return not self.moves


def compare(made: Plan, pinned: Mapping[str, Any], now: Mapping[str, Any], partial: bool) -> list[Move]:
    """Every difference between the committed lock and the one just made, each with the inputs that moved it.

    Args:
        partial: only some variants were built: what the lock has beyond them, and whole-bundle files, are not compared.
    """
    moves: list[Move] = []
    before, after = pinned["variants"], now["variants"]
    for key in sorted(before.keys() | after.keys()):
        if partial and key not in after:
            continue
        moves += variant_moves(key, before.get(key), after.get(key), _causes(key, pinned, now))
    if not partial:
        moves += _file_moves(pinned, now, moves)
    return moves


def variant_moves(
    key: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, causes: Sequence[str]
) -> list[Move]:
    """How one variant's entry in a lock differs from another one's; ``causes`` are the inputs that moved."""
    if before is None or after is None:
        entry = after or before or {}
        what = "added" if before is None else "removed"
        return [
            Move(
                key,
                what,
                ("variant: kernel.yaml profiles, excludes or classes",),
                (before or {}).get("cubin"),
                entry.get("cubin"),
            )
        ]
    because = tuple(causes)
    moves = []
    if before["code"] != after["code"]:
        moves.append(Move(key, "code", because, before["cubin"], after["cubin"]))
    elif before["cubin"] != after["cubin"] or before["ptx"] != after["ptx"]:
        moves.append(Move(key, "metadata", because, before["cubin"], after["cubin"]))
    if before["host"] != after["host"]:
        moves.append(Move(key, "host", because, before["host"], after["host"]))
    if not moves and before["inputs"] != after["inputs"]:
        moves.append(Move(key, "inputs", because, before["cubin"], after["cubin"]))
    return moves


def _causes(key: str, pinned: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    before, after = (
        pinned["variants"].get(key, {}).get("inputs", {}),
        now["variants"].get(key, {}).get("inputs", {}),
    )
    op = key.split("/", 1)[0]
    causes = []
    for group in sorted(before.keys() | after.keys()):
        if before.get(group) != after.get(group):
            items = _moved_items(
                pinned["inputs"].get(op, {}).get(group, {}), now["inputs"].get(op, {}).get(group, {})
            )
            causes += [f"{group}: {item}" for item in items] or [f"{group}: its definition"]
    return causes


def _moved_items(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    moved = []
    for item in sorted(before.keys() | after.keys()):
        if before.get(item) != after.get(item):
            moved.append(
                item
                if item in before and item in after
                else f"{item} ({'added' if item in after else 'removed'})"
            )
    return moved


def _file_moves(
    pinned: Mapping[str, Any], now: Mapping[str, Any], variant_moves: Sequence[Move]
) -> list[Move]:
    """Files that belong to no single variant: library, header, pins, licences; and the statement."""
    sources = _moved_items(
        pinned["inputs"].get("library", {}).get("sources", {}), now["inputs"]["library"]["sources"]
    )
    because = tuple(
        [f"library: {item}" for item in sources]
        + [f"variant: {key}" for key in sorted({m.artifact for m in variant_moves})]
    )
    moves = []
    own = {
        f"{kind}/{key}.{kind}"
        for kind in ("cubin", "ptx")
        for key in {**pinned["variants"], **now["variants"]}
    }
    for name in sorted(pinned["files"].keys() | now["files"].keys()):
        before, after = pinned["files"].get(name), now["files"].get(name)
        if name not in own and before != after:
            moves.append(Move(name, "file", because, before, after))
    if pinned["statement"] != now["statement"] and not moves and not variant_moves:
        moves.append(
            Move(
                "manifest.json",
                "file",
                because or ("statement: version, profile or semantics",),
                pinned["statement"],
                now["statement"],
            )
        )
    return moves
