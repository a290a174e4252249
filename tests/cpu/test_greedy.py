"""How two greedy runs are compared, and what counts as a failure."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu.greedy import Run, compared, failures, forced, typical  # noqa: E402

ROWS, STEPS, VOCAB = 2, 5, 7


def run(seed: int = 0) -> Run:
    logits = torch.randn(STEPS, ROWS, VOCAB, generator=torch.Generator().manual_seed(seed))
    return Run(logits.argmax(-1).T, logits)


def changed(stock: Run, row: int, step: int, by: float) -> Run:
    """Stock with its second best token of one step raised ``by`` over the best, and other logits from there on."""
    logits = stock.logits.clone()
    best, second = logits[step, row].topk(2).indices
    logits[step, row, second] = logits[step, row, best] + by
    logits[step + 1 :, row] += 100 * torch.randn(STEPS - step - 1, VOCAB)
    return Run(logits.argmax(-1).T, logits)


def test_a_run_is_as_itself() -> None:
    found = compared(run(), run())
    assert found["same_rows"] == ROWS and found["prefixes"] == [STEPS] * ROWS
    assert found["divergences"] == [] and found["differences"] == [0.0] * ROWS * STEPS


def test_steps_after_a_divergence_are_not_compared() -> None:
    stock = run()
    other = changed(stock, row=1, step=2, by=0.25)
    found = compared(stock, other)
    assert found["same_rows"] == 1 and found["prefixes"] == [STEPS, 2]
    best, second = stock.logits[2, 1].topk(2)[0].tolist()
    (parted,) = found["divergences"]
    assert (parted["row"], parted["step"]) == (1, 2)
    assert parted["picks"] == [int(stock.tokens[1, 2]), int(other.tokens[1, 2])]
    assert parted["stock_gap"] == pytest.approx(best - second)
    assert parted["other_gap"] == pytest.approx(0.25)
    assert parted["largest_difference"] == pytest.approx(best - second + 0.25)
    assert found["differences"] == [0.0] * (STEPS + 2) + [parted["largest_difference"]]


def test_with_the_tokens_given_every_step_is_compared() -> None:
    stock = run()
    logits = stock.logits.clone()
    for row, step in ((0, 1), (1, 1), (0, 4)):
        logits[step, row, stock.tokens[row, step]] -= 9
    found = forced(stock, logits)
    assert [(d["row"], d["step"]) for d in found["divergences"]] == [(0, 1), (1, 1), (0, 4)]
    assert len(found["differences"]) == ROWS * STEPS
    assert sorted(found["differences"])[-3:] == pytest.approx([9, 9, 9], abs=1e-5)


def case(gap: float, differences: list[float]) -> dict[str, Any]:
    return {"divergences": [{"row": 0, "step": 3, "stock_gap": gap}], "differences": differences}


@pytest.mark.parametrize(
    ("gap", "differences", "words"),
    [
        (0.39, [0.1, 0.2, 0.3], []),
        (0.41, [0.1, 0.2, 0.3], ["b, row 0, step 3: another token where stock's gap is 0.41; limit 0.4"]),
        (0.1, [0.1, 0.3, 0.3], ["logits usually differ by 0.3; limit 0.2"]),
        (float("nan"), [float("nan")] * 2, ["b, row 0, step 3", "logits usually differ by nan"]),
    ],
)
def test_only_what_rounding_can_decide_passes(gap: float, differences: list[float], words: list[str]) -> None:
    found = failures(0.1, {"b": case(gap, differences)})
    assert len(found) == len(words)
    assert all(line.startswith(start) for line, start in zip(found, words, strict=True))


def test_the_typical_difference_is_of_all_cases_together() -> None:
    assert typical([{"differences": [1.0, 2.0]}, {"differences": [9.0]}]) == 2.0
