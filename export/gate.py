"""The CI gate: build, compare every hash with the committed pins, say which input moved which artifact."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kernseal.export import build, lock
from kernseal.export.build import Options
from kernseal.export.lock import Comparison
from kernseal.export.progress import Reporter
from kernseal.export.spec import Op, Target
from kernseal.loader.errors import Missing
from kernseal.loader.pins import parse_pins


def gate(ops: Sequence[Op], target: Target, options: Options, report: Reporter, update: bool) -> Comparison:
    """Compare one target; with ``update`` also write its lock.

    Raises:
        Missing: there are no pins for the target and ``update`` is False.
        KernsealError: the build failed.
    """
    path = lock.path_of(target)
    pinned = _pinned(path.read_bytes(), path.name) if path.is_file() else None
    if pinned is None and not update:
        raise Missing(
            f"manifests/{path.name}: no pins for {target.name}; `kernseal gate --sm {target.sm} --update` writes them"
        )
    made = build.plan(ops, target, options)
    built = build.compile_all(made, options, report)
    partial = bool(options.only)
    now = (
        _partial(made, built)
        if partial
        else lock.compose(made, built, build.contents(made, built, options), options)
    )
    moves = lock.compare(made, pinned, now, partial) if pinned else []
    written = update and not partial and pinned != now
    if written:
        lock.write(path, now)
    return Comparison(target, tuple(moves), len(made.planned), partial, written)


def _pinned(data: bytes, name: str) -> Mapping[str, Any]:
    parse_pins(data, name)
    loaded: dict[str, Any] = json.loads(data)
    return loaded


def _partial(made: build.Plan, built: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "inputs": lock.shared_inputs(made),
        "variants": lock.variant_entries(made, built),
        "files": {},
        "statement": "",
    }


def markdown(results: Sequence[Comparison]) -> str:
    """A summary for a pull request."""
    lines = ["# kernseal gate", ""]
    for result in results:
        scope = f"{result.compared} variants" + (
            ", a part of the profile" if result.partial else ", whole bundle"
        )
        lines += [
            f"## {result.target.name}: {'as pinned' if result.ok else 'differs from the pins'} ({scope})",
            "",
        ]
        if result.moves:
            lines += [
                "| artifact | what moved | because | pinned | found |",
                "| --- | --- | --- | --- | --- |",
            ]
            lines += [
                f"| `{m.artifact}` | {m.what} | {m.reason} | `{(m.pinned or 'none')[:12]}` | `{(m.found or 'none')[:12]}` |"
                for m in result.moves
            ]
            lines.append("")
    return "\n".join(lines) + "\n"
