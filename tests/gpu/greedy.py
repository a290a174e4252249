"""Compares two greedy runs: how far the tokens are the same, and whether the logits could decide where they part."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

GAP_LIMIT = 4.0
"""How many times the usual difference between two stock paths a gap may be where ours picks another token."""

USUAL_LIMIT = 2.0
"""How many times it the usual difference of ours may be."""


@dataclass(frozen=True)
class Run:
    """What a model said.

    Attributes:
        tokens: [rows, steps].
        logits: [steps, rows, vocab], from which they were picked.
    """

    tokens: torch.Tensor
    logits: torch.Tensor


def gap(logits: torch.Tensor) -> float:
    """Between the best and the second."""
    best, second = logits.topk(2).values.tolist()
    return float(best - second)


def compared(stock: Run, other: Run) -> dict[str, Any]:
    """Same prefixes, first divergences, and the largest difference of any logit at every step up to them.

    Logits are compared while the tokens before them are the same, so up to and with the first pick that differs.
    """
    rows, steps = stock.tokens.shape
    prefixes, differences, divergences = [], [], []
    for row in range(rows):
        same = (stock.tokens[row] == other.tokens[row]).int().cumprod(0)
        prefix = int(same.sum())
        until = min(prefix + 1, steps)
        ours, theirs = other.logits[:until, row], stock.logits[:until, row]
        differences += (ours - theirs).abs().amax(-1).tolist()
        prefixes.append(prefix)
        if prefix < steps:
            divergences.append(
                {
                    "row": row,
                    "step": prefix,
                    "picks": [int(stock.tokens[row, prefix]), int(other.tokens[row, prefix])],
                    "stock_gap": gap(theirs[prefix]),
                    "other_gap": gap(ours[prefix]),
                    "largest_difference": differences[-1],
                }
            )
    return {
        "rows": rows,
        "steps": steps,
        "same_rows": rows - len(divergences),
        "prefixes": prefixes,
        "divergences": divergences,
        "differences": differences,
    }


def forced(stock: Run, logits: torch.Tensor) -> dict[str, Any]:
    """The same with stock's tokens given to both, so that every step counts."""
    picks = logits.argmax(-1)
    differences = (logits - stock.logits).abs().amax(-1)
    parted = [
        {
            "row": int(row),
            "step": int(step),
            "picks": [int(stock.tokens[row, step]), int(picks[step, row])],
            "stock_gap": gap(stock.logits[step, row]),
            "other_gap": gap(logits[step, row]),
            "largest_difference": float(differences[step, row]),
        }
        for step, row in (picks != stock.tokens.T).nonzero().tolist()
    ]
    return {
        "rows": logits.shape[1],
        "steps": logits.shape[0],
        "divergences": parted,
        "differences": differences.flatten().tolist(),
    }


def typical(cases: Iterable[Mapping[str, Any]]) -> float:
    """The usual largest difference of any logit at a step."""
    return statistics.median(value for case in cases for value in case["differences"])


def failures(noise: float, ours: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What cannot be put down to rounding.

    Args:
        noise: the typical difference between two stock paths.
        ours: comparisons with the stock path, by case.
    """
    limit, found = GAP_LIMIT * noise, []
    for name, case in ours.items():
        for d in case["divergences"]:
            if not d["stock_gap"] <= limit:
                place = f"{name}, row {d['row']}, step {d['step']}"
                found.append(
                    f"{place}: another token where stock's gap is {d['stock_gap']:.4g}; limit {limit:.4g}"
                )
    usual = typical(ours.values())
    if not usual <= USUAL_LIMIT * noise:
        found.append(f"logits usually differ by {usual:.4g}; limit {USUAL_LIMIT * noise:.4g}")
    return found
