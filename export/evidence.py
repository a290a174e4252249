"""What is known of each (op, class, SM): ``kernels/<op>/evidence.yaml``, reviewed like any other source."""

from __future__ import annotations

from typing import Any

from kernseal.abi import yaml_text
from kernseal.export.spec import Op, Target
from kernseal.loader.errors import Malformed

CLASSES = ("ran", "retargeted", "glue", "inspected")
"""Best first: ran on that hardware; the same source ran built for another SM; host glue was checked against the recorded
driver; only inspected."""


def of(op: Op, class_name: str, target: Target) -> str:
    """Best evidence recorded for a target; ``inspected`` when nothing is (every build is inspected).

    Raises:
        Malformed: an entry that is not one.
    """
    path = op.folder / "evidence.yaml"
    entries: Any = yaml_text.load(path.read_text()) if path.is_file() else []
    best = len(CLASSES) - 1
    for index, entry in enumerate(entries or []):
        if (
            not isinstance(entry, dict)
            or entry.get("evidence") not in CLASSES
            or "sm" not in entry
            or "class" not in entry
        ):
            raise Malformed(
                f"kernels/{op.name}/evidence.yaml: entry {index}: needs class, sm and evidence ({', '.join(CLASSES)})"
            )
        if entry["class"] == class_name and entry["sm"] == target.name:
            best = min(best, CLASSES.index(entry["evidence"]))
    return CLASSES[best]
