"""The smallest rule for when to take ``gdn_prefill_cp`` that measured times allow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ALLOWED = 0.05
"""How much slower than the faster op a rule may be, at any measured point."""


@dataclass(frozen=True)
class Point:
    """One measurement of both ops.

    Attributes:
        work: sequences * heads, the thread blocks of ``gdn_prefill``.
        tokens: of the longest sequence.
    """

    work: int
    tokens: int
    plain_us: float
    cp_us: float


@dataclass(frozen=True)
class Rule:
    """``gdn_prefill_cp`` where, for some step (most, least), work <= most and tokens >= least. No step is never."""

    steps: tuple[tuple[float, int], ...]

    def takes_cp(self, work: int, tokens: int) -> bool:
        return any(work <= most and tokens >= least for most, least in self.steps)

    def losses(self, points: Sequence[Point]) -> list[float]:
        """By how much more time each point takes than with the faster op."""
        return [
            (p.cp_us if self.takes_cp(p.work, p.tokens) else p.plain_us) / min(p.cp_us, p.plain_us) - 1
            for p in points
        ]

    def words(self, sms: int) -> str:
        if not self.steps:
            return "never gdn_prefill_cp"
        return "gdn_prefill_cp where " + ", or ".join(_step(most, least, sms) for most, least in self.steps)


def _step(most: float, least: int, sms: int) -> str:
    work = f"sequences * heads <= {most:g} ({most / sms:.2f} of {sms} SMs)" if math.isfinite(most) else ""
    tokens = f"the longest sequence has >= {least} tokens" if least else ""
    return " and ".join(filter(None, [work, tokens])) or "ever"


def _rules(points: Sequence[Point]) -> Iterator[list[Rule]]:
    """Rules by the number of their thresholds, fewest first; thresholds are values that were measured."""
    works, tokens = sorted({p.work for p in points}), sorted({p.tokens for p in points})
    yield [Rule(()), Rule(((math.inf, 0),))]
    yield [Rule(((work, 0),)) for work in works] + [Rule(((math.inf, least),)) for least in tokens]
    yield [Rule(((work, least),)) for work, least in itertools.product(works, tokens)]
    yield [
        Rule(steps)
        for fewer, more in itertools.combinations(works, 2)
        for short, long in itertools.combinations([0, *tokens], 2)
        for steps in [((fewer, short), (more, long))]
    ]


def smallest(points: Sequence[Point], allowed: float = ALLOWED) -> Rule:
    """The rule with the fewest thresholds that nowhere loses more than ``allowed``; of several, the one that loses least in
    all.

    Where there is none, the rule whose largest loss is smallest.
    """
    least_bad: Rule | None = None
    for rules in _rules(points):
        good = [rule for rule in rules if max(rule.losses(points)) <= allowed]
        if good:
            return min(good, key=lambda rule: sum(rule.losses(points)))
        least_bad = min(filter(None, [least_bad, *rules]), key=lambda rule: max(rule.losses(points)))
    assert least_bad is not None
    return least_bad


def verdict(points: Sequence[Point], sms: int, allowed: float = ALLOWED) -> str:
    """One line: the rule, and the most that it loses."""
    rule = smallest(points, allowed)
    worst = max(rule.losses(points))
    short = "" if worst <= allowed else f" (no rule of this kind keeps to {100 * allowed:.0f} %)"
    return f"{rule.words(sms)}: at most {100 * worst:.1f} % slower than the faster op, {len(points)} points{short}"
