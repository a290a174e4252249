"""``gpu.bench_launch`` without a GPU: turns, the document, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from gpu import bench_gdn_prefill, bench_gdn_prefill_cp, bench_launch, bench_options, bench_xqa_decode
from gpu.bench_document import write
from gpu.bench_launch import LAUNCH, OURS, ROUNDS, RUN, WARM_UP, C

STAMP = {
    "device": "A GPU",
    "driver": "1.2",
    "commit": "0" * 40,
    "dirty": False,
    "date": "2026-11-30T12:00:00+00:00",
}


def clocks(**medians: float) -> dict[str, dict[str, float]]:
    return {name: {"median": value, "samples": 30} for name, value in medians.items()}


def report() -> dict[str, Any]:
    us = clocks(**{C: 2.0, LAUNCH: 5.0, RUN: 9.0, OURS: 14.0})
    rows = [{"bundle": "sm90", "op": "xqa_decode", "us": us, "left_out": {"FlashInfer": "ImportError: none"}}]
    native_row = {"op": "xqa_decode", "kernels": 1, "run_us": 2.5, "bare_us": 2.0, "ratio": 1.25}
    return {**STAMP, "rows": rows, "native": {"rounds": 21, "launches": 256, "rows": [native_row]}}


def test_ways_take_turns_and_the_first_rounds_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def sample(call: Any) -> float:
        order.append(call())
        return 1000.0 if len(order) <= 4 * WARM_UP else {"a": 1.0, "b": 3.0}[order[-1]]

    monkeypatch.setattr(bench_launch, "sample_us", sample)
    taken = bench_launch.alternate({"a": lambda: "a", "b": lambda: "b"}, ROUNDS)
    assert order == ["a", "b", "b", "a"] * (WARM_UP + ROUNDS)
    assert {name: clock["median"] for name, clock in taken.items()} == {"a": 1.0, "b": 3.0}
    assert {clock["samples"] for clock in taken.values()} == {2 * ROUNDS}


def test_the_document_says_what_the_report_does(tmp_path: Path) -> None:
    found = bench_launch.charts(report())
    document = write(tmp_path / "launch.json", "What a call costs the host", STAMP, "command", found, {})
    python, native = json.loads((tmp_path / "launch.json").read_text())["charts"]
    assert python["series"]["median"] == [[C, 2.0], [LAUNCH, 5.0], [RUN, 9.0], [OURS, 14.0]]
    assert native["series"]["median"] == [
        ["xqa_decode, kseal_*_run", 2.5],
        ["xqa_decode, bare launch", 2.0],
    ]
    assert document.title == "What a call costs the host"


def test_a_line_has_the_ratios_and_what_was_left_out() -> None:
    said = bench_launch.line(report()["rows"][0])
    assert f"{RUN} 4.5" in said and f"{LAUNCH} 2.5" in said and "(goal 4)" in said
    assert "left out: FlashInfer: ImportError: none" in said


@pytest.mark.parametrize("dirty", [True, None])
def test_a_tree_that_is_not_clean_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dirty: bool | None
) -> None:
    monkeypatch.setattr(bench_options, "provenance", lambda: {**STAMP, "dirty": dirty})
    monkeypatch.setattr(sys, "argv", ["bench_launch", "--json", str(tmp_path / "out.json")])
    with pytest.raises(SystemExit) as ended:
        bench_launch.main()
    assert ended.value.code == 2
    assert "refused: not a clean commit" in capsys.readouterr().out
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("program", [bench_launch, bench_gdn_prefill, bench_gdn_prefill_cp, bench_xqa_decode])
def test_a_machine_without_a_gpu_is_refused(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_options, "provenance", lambda: STAMP)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench", "--json", str(tmp_path / "out.json")])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2
    assert "refused: no GPU: torch " in capsys.readouterr().out
    assert not (tmp_path / "out.json").exists()
