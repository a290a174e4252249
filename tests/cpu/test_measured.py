"""What was measured, in ``docs/benchmarks``, and the pictures of it in ``docs/pictures``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from builds import ROOT

from kernseal.export import bench, commands_report, report

PICTURES = ROOT / "docs" / "pictures"
DOCUMENTS = sorted((ROOT / "docs" / "benchmarks").iterdir())


def test_every_picture_is_drawn_from_a_document_as_it_is() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    drawn = commands_report._pictures(report.draw([bench.read(path) for path in DOCUMENTS]), PICTURES)
    committed = sorted(PICTURES.iterdir())
    assert committed and [path for path in committed if drawn.get(path) != path.read_bytes()] == []


def test_the_readme_shows_them() -> None:
    shown = re.findall(r"!\[[^]]+\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert shown and all((ROOT / name).is_file() for name in shown)
    assert {Path(name).parent for name in shown} == {PICTURES.relative_to(ROOT)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_nothing_was_measured_on_a_changed_tree(path: Path) -> None:
    provenance = bench.read(path).provenance
    assert not provenance.dirty and len(provenance.commit) == 40
