"""The schedule of paged MQA logits in Python integers: the oracle of the tests. Slow and plain on purpose.

Written from the semantics in ``kernel.yaml``, not from any kernel: the segments of all rows stand in one line, and each CTA
begins at one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

SEGMENT = 256
"""Positions of one unit of work."""


def rows_of(seq_lens: Sequence[int], atoms: int = 1) -> list[int]:
    """Positions of each row of work: a sequence is ``atoms`` rows, each sees 2 positions more than the one before it."""
    return [length - 2 * (atoms - 1 - atom) for length in seq_lens for atom in range(atoms)]


def schedule(seq_lens: Sequence[int], num_ctas: int, atoms: int = 1) -> list[tuple[int, int]]:
    """Where each CTA begins, and after them where all ends: the row, and the segments of it that come before."""
    rows = rows_of(seq_lens, atoms)
    line = [(row, part) for row, length in enumerate(rows) for part in range(-(-max(length, 0) // SEGMENT))]
    share, rest = divmod(len(line), num_ctas)
    starts = [cta * share + min(cta, rest) for cta in range(num_ctas + 1)]
    return [line[start] if start < len(line) else (len(rows), 0) for start in starts]
