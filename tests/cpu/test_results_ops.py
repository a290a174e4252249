"""The results page of the ops besides GDN prefill and XQA, from small reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu import results_ops
from pytest import fixture

STAMP = {
    "device": "none",
    "driver": "1",
    "torch": "2",
    "date": "2026-01-02",
    "commit": "c" * 40,
    "dirty": False,
}


def run_of(bundle: str, tool: str, findings: int, calls: int | None) -> dict[str, Any]:
    return {"bundle": bundle, "tool": tool, "findings": findings, "calls": calls, "exit": 0}


@fixture
def folder(tmp_path: Path) -> Path:
    measured = {
        "test_decode_agrees_with_the_oracle[sm90-(2, 4)]": {"a": {"worst": 1e-3}, "b": {"worst": 4e-3}},
        "test_decode_agrees_with_the_oracle[sm90_more-(2, 4)]": {"a": {"worst": 7e-3}},
        "test_every_tile_and_page_size_agrees[sm90-g8-p1-NHD]": {
            "bf16-d128-full-t16-c0": {"worst": 5e-3, "lse": 1e-3}
        },
        "test_it_agrees_with_the_oracle[sm120_on_sm90-3]": {"x": 2e-3, "y": 1e-3},
    }
    outcomes = {"test_gdn_decode.py": {"passed": 5, "skipped": 2}}
    report = STAMP | {"measured": measured, "outcomes": outcomes, "tests": 7, "exit": 0}
    (tmp_path / "tests.json").write_text(json.dumps(report))
    for name in results_ops.SANITIZERS:
        (tmp_path / f"{name}.json").write_text(json.dumps(STAMP | {"runs": []}))
    runs = [
        run_of("sm90", "memcheck", 0, 18),
        run_of("sm90", "racecheck", 3, 18),
        run_of("sm90", "synccheck", 0, None),
    ]
    (tmp_path / "sanitizer_cp.json").write_text(json.dumps(STAMP | {"runs": runs}))
    return tmp_path


def test_every_number_is_the_largest_of_its_bundle(folder: Path) -> None:
    lines = results_ops.page(folder).splitlines()
    decode = next(line for line in lines if line.startswith("| GDN decode"))
    assert decode.split(" | ")[1:] == ["4.0e-03", "7.0e-03", "-", "- |"]
    assert "| paged prefill, every tile, chunk, group and page size: output | 5.0e-03 | - | - | - |" in lines
    selected = next(line for line in lines if line.startswith("| QSA over selected"))
    assert selected.split(" | ")[1:] == ["-", "-", "2.0e-03", "- |"]


def test_how_tests_ended_and_what_the_tools_found(folder: Path) -> None:
    page = results_ops.page(folder)
    assert "| `gdn_decode` | 5 | 0 | 2 |" in page
    assert "| `gdn_prefill_cp` | SM90 | 18 | 0 | - | 3 | - |" in page, "a tool that did not end found nothing"
