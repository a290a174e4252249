"""The comparison of a bundle with nvcc's kernels: what it shows, what it writes, and when it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builds import bundle
from nvcc import compare, toolkit, upstream
from nvcc.compare import Numbers, Row
from nvcc.upstream import Kernel

from kernseal.export.occupancy import Occupancy

VARIANT = "bf16_kvbf16_obf16_d64_g4_p16"
NVCC = Kernel(128, 64, 8, 0, 142976, 256, (4,))


def numbers(spills: int) -> Numbers:
    return Numbers(100, 32, spills, 16, 1000, Occupancy(2, ("registers",)))


@pytest.mark.parametrize(
    ("ours", "theirs", "defect"), [(0, 0, False), (4, 8, False), (8, 8, False), (12, 8, True)]
)
def test_a_kernel_that_spills_more_is_a_defect(ours: int, theirs: int, defect: bool) -> None:
    row = Row("sm_90a", "xqa_decode", VARIANT, numbers(ours), numbers(theirs))
    assert row.defect == defect
    assert ("SPILLS MORE" in row.cells) == defect


def test_the_page_has_a_table_for_each_sm_and_the_command_that_makes_it() -> None:
    rows = [
        Row("sm_120a", "xqa_mla", "b", numbers(0), numbers(8)),
        Row("sm_90a", "xqa_decode", "a", numbers(12), numbers(8)),
        Row("sm_90a", "xqa_decode", "b", numbers(8), numbers(8)),
    ]
    text = compare.markdown(rows, [Path("/x/sm_90a-linux-x86_64"), Path("/x/sm_120a-linux-x86_64")])
    assert "make artifacts SM=90,120`" in text
    assert (
        "dist/sm_90a-linux-x86_64 dist/sm_120a-linux-x86_64 --markdown docs/results-xqa-compiled.md" in text
    )
    assert "/x/" not in text
    assert text.index("## sm_90a\n\n2 variants: 1 spill more than nvcc's, 0 less.") < text.index(
        "## sm_120a\n\n1 "
    )
    assert (
        "| xqa_decode | a | 100 | 32 | 12 | 1,016 | 2 (registers) | 100 | 32 | 8 | 1,016 | 2 (registers) |\n"
        in text
    )


@pytest.fixture(scope="module")
def path() -> Path:
    return bundle("90", only=(f"xqa_decode/{VARIANT}",)).path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["compare", *map(str, arguments)])
    return compare.main()


@pytest.mark.slow
@pytest.mark.skipif(toolkit.unavailable() is not None, reason=str(toolkit.unavailable()))
def test_a_bundle_is_compared_with_what_nvcc_makes(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, path, "--json", tmp_path / "a.json", "--markdown", tmp_path / "a.md") == 0
    (found,) = json.loads((tmp_path / "a.json").read_text())
    assert (found["sm"], found["variant"], found["defect"]) == ("sm_90a", VARIANT, False)
    ours, theirs = found["ours"], found["nvcc"]
    assert ours["dynamic_smem"] == theirs["dynamic_smem"] == 142976
    assert ours["occupancy"] == theirs["occupancy"] == {"ctas": 1, "limited_by": ["smem"]}
    assert 0 < ours["registers"] <= 256 and 0 < theirs["registers"] <= 128, "nvcc keeps room for two CTAs"
    assert VARIANT in capsys.readouterr().out
    assert f"| xqa_decode | {VARIANT} |" in (tmp_path / "a.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("ours", "code"), [(8, 0), (9, 1)])
def test_the_exit_code_says_whether_a_kernel_is_worse(
    path: Path, monkeypatch: pytest.MonkeyPatch, ours: int, code: int
) -> None:
    def with_spills(sm: str, record: Any, cubin: bytes) -> Numbers:
        return numbers(ours)

    monkeypatch.setattr(upstream, "compile_kernel", lambda op, axes, sm, folder: NVCC)
    monkeypatch.setattr(toolkit, "unavailable", lambda: None)
    monkeypatch.setattr(compare, "of_record", with_spills)
    assert run(monkeypatch, path) == code


@pytest.mark.slow
def test_a_retargeted_bundle_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bundle("120", "90", only=(f"xqa_decode/{VARIANT}",)).path
    monkeypatch.setattr(toolkit, "unavailable", lambda: None)
    with pytest.raises(SystemExit, match="is for sm_120a-on-sm_90a; upstream's sources have no such tiles"):
        run(monkeypatch, made)
