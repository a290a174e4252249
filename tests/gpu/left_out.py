"""Why a contender is missing, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

REASON_LENGTH = 200


def reason(error: BaseException) -> str:
    """One line."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:REASON_LENGTH]


def reasons(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each name and reason among the ``left_out`` of rows, with how many rows it is about."""
    counts = Counter(each for row in rows for each in row["left_out"].items())
    return [
        f"left out: {name}, in {count} of {len(rows)} rows: {why}" for (name, why), count in counts.items()
    ]
