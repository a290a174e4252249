"""PTX rules: textual replacements with the count they must find, applied before assembling."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from kernseal.export import files
from kernseal.export.spec import Target, Variant
from kernseal.loader.errors import Malformed, RuleFailed

FIELDS = {"name", "reason", "upstream", "remove_when", "sms", "ops", "pattern", "replacement", "expect"}


@dataclass(frozen=True)
class PtxRule:
    """One file under ``patches/ptx``.

    Attributes:
        sms: architectures (as given to the compiler) that it applies to.
        ops: names, or ``all``.
        expect: replacements that each variant's PTX must need.
    """

    name: str
    sms: tuple[str, ...]
    ops: tuple[str, ...] | str
    pattern: str
    replacement: str
    expect: int
    sha256: str

    def applies(self, variant: Variant, target: Target) -> bool:
        return target.arch in self.sms and (self.ops == "all" or variant.op in self.ops)


def load(folder: Path) -> list[PtxRule]:
    """Rules in order of file name.

    Raises:
        Malformed: a field is missing, unknown or of the wrong type.
    """
    return [_load_one(path) for path in sorted(folder.glob("*.yaml"))]


def _load_one(path: Path) -> PtxRule:
    text = path.read_text()
    data = yaml.safe_load(text)
    if not isinstance(data, dict) or set(data) != FIELDS:
        raise Malformed(f"patches/ptx/{path.name}: fields must be {', '.join(sorted(FIELDS))}")
    if not isinstance(data["expect"], int) or data["expect"] < 0:
        raise Malformed(f"patches/ptx/{path.name}: expect: {data['expect']!r} is not a count")
    ops = data["ops"] if data["ops"] == "all" else tuple(data["ops"])
    return PtxRule(
        data["name"],
        tuple(data["sms"]),
        ops,
        data["pattern"],
        data["replacement"],
        data["expect"],
        files.sha256_bytes(text.encode()),
    )


def apply(
    text: str, rules: Sequence[PtxRule], variant: Variant, target: Target
) -> tuple[str, dict[str, int]]:
    """Patched PTX, and how often each rule that applies replaced something.

    Raises:
        RuleFailed: a count is not the expected one; the message gives file and lines.
    """
    counts: dict[str, int] = {}
    for rule in rules:
        if not rule.applies(variant, target):
            continue
        lines = [text.count("\n", 0, match.start()) + 1 for match in re.finditer(rule.pattern, text)]
        if len(lines) != rule.expect:
            where = ", ".join(map(str, lines[:10])) or "none"
            raise RuleFailed(
                f"PTX rule {rule.name}: {variant.key}.ptx for {target.arch}: "
                f"expected {rule.expect} places, found {len(lines)} (lines {where})"
            )
        text = re.sub(rule.pattern, rule.replacement, text)
        counts[rule.name] = len(lines)
    return text, counts
