"""The rule for when to cut sequences, against the measurements that it is from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu.cp_rule import ALLOWED

MEASURED = Path(__file__).parents[2] / "docs" / "measurements" / "gdn-prefill-cp-sm90.json"


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(MEASURED.read_text())
    return found


def test_it_loses_little_anywhere(measured: dict[str, Any]) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from kernseal.kernels.gdn_prefill_cp.torch_api import cutting_pays

    rows = [row for run in measured["runs"] for row in run["rows"]]
    taken, losses = set(), []
    for sequences, heads, tokens, plain, cut in rows:
        pays = cutting_pays(sequences * heads, tokens, measured["sms"])
        losses.append((cut if pays else plain) / min(cut, plain) - 1)
        taken.add(pays)
    assert len(rows) == 102 and taken == {True, False}
    assert max(losses) <= 0.0315 < ALLOWED  # 3.1 %, as the docstring has it


def test_both_conditions_count() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from kernseal.kernels.gdn_prefill_cp.torch_api import cutting_pays

    assert [cutting_pays(16, tokens, 132) for tokens in (2047, 2048)] == [False, True]
    assert [cutting_pays(work, 2048, 132) for work in (16, 17)] == [True, False]
    assert [cutting_pays(work, 4096, 132) for work in (33, 34)] == [True, False]
    assert [cutting_pays(33, tokens, 132) for tokens in (4095, 4096)] == [False, True]
