"""The kernel benchmarks, as far as they can be tested without a GPU: what they measure, who is left out, what they say."""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu import bench_gdn_prefill as gdn  # noqa: E402
from gpu import bench_options, contenders, left_out, results_page, results_xqa, timing, xqa_contenders  # noqa: E402
from gpu import bench_xqa_decode as xqa  # noqa: E402
from gpu.contenders import Contender, Contenders  # noqa: E402
from gpu.cp_rule import Point, Rule, smallest, verdict  # noqa: E402
from gpu.xqa_problems import Problem  # noqa: E402

from kernseal.export.bench import read  # noqa: E402

SMS = 132
STAMP = {
    "device": "NVIDIA H200",
    "driver": "580.159.04",
    "commit": "0123456789abcdef",
    "dirty": False,
    "date": "2026-11-30T10:00:00+00:00",
    "torch": "2.11.0",
    "command": "python -m gpu.bench",
    "versions": {"triton": "3.6.0"},
}


def clocks(us: float) -> dict[str, dict[str, float]]:
    return {clock: {"median": us} for clock in ("wall_us", "device_us", "host_us")}


def gdn_row(sequences: int, length: int, **us: float) -> dict[str, Any]:
    scratch = {"sm90": 128.0, "sm90 cp": 4096.0, "triton": 1e6}
    return {
        "sequences": sequences,
        "length": length,
        "times": {name.replace("_", " "): clocks(value) for name, value in us.items()},
        "scratch_bytes": scratch,
        "left_out": {},
    }


GDN_ROWS = [
    gdn_row(1, 128, sm90=10, sm90_cp=30, flashinfer=10, triton=12),
    gdn_row(1, 4096, sm90=200, sm90_cp=100, flashinfer=198, triton=400),
    gdn_row(8, 4096, sm90=220, sm90_cp=300, flashinfer=230, triton=400),
    gdn_row(64, 2048, sm90=500),
]


def test_the_grids_are_bounded_and_reach_what_the_claims_are_about() -> None:
    full, quick = gdn.grid(False), gdn.grid(True)
    assert set(quick) < set(full) and len(quick) <= 12
    assert max(count * length for count, length in full) == gdn.MOST_TOKENS
    assert {length for _, length in full} >= {128, 131072} and {count for count, _ in full} >= {1, 64}

    cells, some = xqa.grid(xqa.GEOMETRIES, False), xqa.grid(xqa.QUICK_GEOMETRIES, True)
    assert set(some) < set(cells) and len(some) <= 20
    assert max(xqa.kv_bytes(*cell) for cell in cells) <= 16 << 30
    assert {length for _, _, length in cells} >= {512, 65536} and {batch for _, batch, _ in cells} >= {1, 128}
    assert {batch for _, batch, _ in some} >= set(xqa.CHARTED)


def test_a_full_run_takes_minutes() -> None:
    """Measurements of some 5 ms and never more contenders than these."""
    gdn_count = len(gdn.grid(False)) * 7 * 2 * gdn.ROUNDS * gdn.SAMPLES
    xqa_count = len(xqa.grid(xqa.GEOMETRIES, False)) * 16 * 2 * xqa.ROUNDS * xqa.SAMPLES
    assert max(gdn_count, xqa_count) * 5.5e-3 < 150


def contender(values: list[float]) -> Callable[[], Contender]:
    return lambda: Contender(lambda: None, lambda: torch.tensor(values), 7)


def fails() -> Contender:
    raise ImportError("No module\nnamed 'fla'")


def test_who_is_absent_or_computes_something_else_is_left_out_by_name_and_reason() -> None:
    found = Contenders(limit=1e-2, wait=lambda: None)
    for name, make in {
        "first": contender([1.0, 2.0]),
        "absent": fails,
        "same": contender([1.0, 2.001]),
        "other": contender([1.0, 3.0]),
        "nothing": contender([1.0, math.nan]),
    }.items():
        found.add(name, make)
    assert list(found.calls) == ["first", "same"] == list(found.scratch_bytes)
    assert found.left_out["absent"] == "ImportError: No module named 'fla'"
    assert "differs by 4.5e-01, limit 1e-02" in found.left_out["other"]
    assert "inf" in found.left_out["nothing"]


def test_who_takes_long_to_fail_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up: dict[str, str] = {}
    monkeypatch.setattr(contenders, "PATIENCE_S", -1.0)
    Contenders(1e-2, given_up, lambda: None).add("slow", fails)
    again = Contenders(1e-2, given_up, lambda: None)
    again.add("slow", contender([1.0]))
    assert not again.calls and again.left_out == given_up == {"slow": "ImportError: No module named 'fla'"}


def test_reasons_are_a_line_each_with_how_often() -> None:
    rows: list[dict[str, dict[str, str]]]
    rows = [{"left_out": {"a": "no"}}, {"left_out": {"a": "no", "b": "never"}}, {"left_out": {}}]
    assert left_out.reasons(rows) == ["left out: a, in 2 of 3 rows: no", "left out: b, in 1 of 3 rows: never"]


def test_contenders_are_compared_with_the_clocks_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    called: list[str] = []
    both = {name: functools.partial(called.append, name) for name in "ab"}
    found = timing.compare(both, rounds=1, samples=2, clocks={"device_us": lambda call: call() or 1.0})
    assert called == [*"aaabbb", *"aabbbbaa"]
    assert {name: each["device_us"]["samples"] for name, each in found.items()} == {"a": 4, "b": 4}
    assert all(each.keys() == {"device_us"} for each in found.values())


def point(work: int, tokens: int, plain: float, cp: float) -> Point:
    return Point(work, tokens, plain, cp)


GRID = [(work, tokens) for work in (16, 32, 64, 128, 256) for tokens in (256, 1024, 4096, 16384)]


@pytest.mark.parametrize(
    "steps",
    [
        (),
        ((math.inf, 0),),
        ((64, 0),),
        ((math.inf, 4096),),
        ((64, 4096),),
        ((32, 1024), (128, 16384)),
        ((32, 0), (256, 16384)),
    ],
)
def test_the_rule_that_made_the_times_is_found(steps: tuple[tuple[float, int], ...]) -> None:
    made = Rule(steps)
    points = [point(w, t, 100, 50 if made.takes_cp(w, t) else 200) for w, t in GRID]
    assert smallest(points) == made


def test_a_smaller_rule_is_taken_where_it_loses_little() -> None:
    points = [point(w, t, 100, 50 if w <= 64 and t >= 1024 else 104 if w <= 64 else 200) for w, t in GRID]
    assert smallest(points) == Rule(((64, 0),))
    assert smallest(points, allowed=0.03) == Rule(((64, 1024),))
    assert verdict(points, SMS) == (
        "gdn_prefill_cp where sequences * heads <= 64 (0.48 of 132 SMs): "
        "at most 4.0 % slower than the faster op, 20 points"
    )


def test_a_verdict_says_that_no_rule_is_good_enough() -> None:
    points = [point(w, t, 100, 50 if (w * t) % 3 == 1 else 200) for w, t in GRID]
    assert "no rule of this kind keeps to 5 %" in verdict(points, SMS)


def test_what_the_gdn_rows_say_is_the_worst_of_them() -> None:
    said = gdn.claims(GDN_ROWS, "sm90", SMS)
    assert "sm90: at least 1.82 x Triton from 2048 tokens on, at 8 x 4096" in said
    assert "sm90: at most 1.010 x flashinfer's time, at 1 x 4096" in said
    assert "sm90 cp: scratch at most 0.41 % of Triton's, at 1 x 128" in said
    assert any("gdn_prefill_cp where sequences * heads <= 32" in line and "3 points" in line for line in said)
    assert gdn.claims([], "sm90", SMS) == []


def xqa_row(geometry: str, batch: int, length: int, **us: float) -> dict[str, Any]:
    taken = {name.replace("_", " ").replace("fp8 math", "fp8_math"): value for name, value in us.items()}
    row = {
        "geometry": geometry,
        "batch": batch,
        "length": length,
        "left_out": {"triton": "no --triton-decode"},
    }
    return row | xqa.rates(10**9, taken, 4.0)


XQA_ROWS = [
    xqa_row("bf16-d128-g8", 1, 512, sm90_library=500, sm90_fill=400, flashinfer_xqa=404, triton=600),
    xqa_row("bf16-d128-g8", 8, 2048, sm90_library=300, flashinfer_fa2_cuda_cores=330),
    xqa_row(
        "bf16-d128-g8",
        8,
        512,
        sm90_fill=300,
        sm90_fa2=280,
        flashinfer_xqa=300,
        flashinfer_fa2_tensor_cores=350,
    ),
    xqa_row("e4m3-d128-g8", 64, 512, sm90_fill=300, sm90_fp8_math_fill=250, flashinfer_xqa=240),
]


def test_times_are_set_beside_the_floor() -> None:
    assert XQA_ROWS[0]["floor_us"] == 250.0
    assert XQA_ROWS[0]["share_of_floor"]["sm90 fill"] == 0.625
    assert XQA_ROWS[0]["tb_per_s"]["sm90 library"] == 2.0


def test_what_the_xqa_rows_say_compares_the_best_of_each_and_the_same_kernel() -> None:
    said = xqa.claims(XQA_ROWS, "sm90")
    assert "sm90: at least 0.96 x flashinfer's speed, at e4m3-d128-g8 64 x 512" in said
    assert "sm90: at least 1.10 x flashinfer fa2's speed, at bf16-d128-g8 8 x 2048" in said
    assert "sm90 fa2: at most 0.800 x flashinfer fa2's time on tensor cores, at bf16-d128-g8 8 x 512" in said
    assert "sm90: at least 1.50 x triton's speed, at bf16-d128-g8 1 x 512" in said
    assert "sm90 fp8_math fill: at most 1.042 x flashinfer xqa's time, at e4m3-d128-g8 64 x 512" in said
    assert xqa.claims(XQA_ROWS, "sm120_on_sm90") == []


def test_both_of_our_kernels_have_a_line() -> None:
    chart = next(c for c in xqa.charts(XQA_ROWS, "sm90", 4.0) if c["title"].endswith("bf16-d128-g8, batch 8"))
    names = ["kernseal, library's split", "kernseal, filling the device", "kernseal FA2", "FlashInfer XQA"]
    assert list(chart["series"]) == [*names, "FlashInfer FA2"]


@pytest.mark.parametrize(
    ("charts", "titles"),
    [
        (
            lambda: gdn.charts(GDN_ROWS, "sm90"),
            {"GDN prefill, one sequence", "GDN prefill: speed-up over Triton"},
        ),
        (
            lambda: xqa.charts(XQA_ROWS, "sm90", 4.0),
            {
                "XQA decode: KV read, bf16-d128-g8, batch 1",
                "XQA decode: KV read, bf16-d128-g8, batch 8",
                "XQA decode: KV read, e4m3-d128-g8, batch 64",
                "XQA decode: share of the floor, bf16-d128-g8",
            },
        ),
    ],
    ids=["gdn", "xqa"],
)
def test_charts_are_documents_that_the_product_reads(
    tmp_path: Path, charts: Callable[[], list[Any]], titles: set[str]
) -> None:
    options = argparse.Namespace(json=tmp_path / "all.json", document=tmp_path / "charts.json")
    bench_options.save(options, "kernels", dict(STAMP), charts())
    document = read(options.document)
    assert {chart.title for chart in document.charts} >= titles
    assert all(chart.x_log and not chart.named for chart in document.charts)
    assert json.loads(options.json.read_text())["driver"] == document.provenance.driver


def test_reports_of_parts_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = {**STAMP, "bundles": ["sm90"], "bundle_sm90": "ab", "complete": True, "copy_tb_per_s": 4.0}
    halves = [part | {"rows": XQA_ROWS[:3], "complete": False, "claims": []}, part | {"rows": XQA_ROWS[3:]}]
    names = []
    for number, half in enumerate([*halves, halves[1] | {"commit": "another"}]):
        names.append(str(tmp_path / f"{number}.json"))
        Path(names[-1]).write_text(json.dumps(half))
    whole, document = tmp_path / "whole.json", tmp_path / "charts.json"
    command = ["bench", "--json", str(whole), "--document", str(document), "--from-json", *names[:2]]
    monkeypatch.setattr("sys.argv", command)
    assert xqa.main() == 0
    report = json.loads(whole.read_text())
    assert (report["rows"], report["complete"]) == (XQA_ROWS, False)
    assert report["claims"] == xqa.claims(XQA_ROWS, "sm90")
    assert len(read(document).charts) == len(xqa.charts(XQA_ROWS, "sm90", 4.0))
    monkeypatch.setattr("sys.argv", [*command, names[2]])
    with pytest.raises(SystemExit, match="commit is 0123456789abcdef and another"):
        xqa.main()


def test_a_chart_has_no_line_without_points_and_no_document_is_empty(tmp_path: Path) -> None:
    assert bench_options.lines("t", "m", "u", "x", {"a": []}) == []
    options = argparse.Namespace(json=None, document=tmp_path / "charts.json")
    bench_options.save(options, "kernels", dict(STAMP), [])
    assert not options.document.exists()


def test_the_pages_show_who_is_missing() -> None:
    rows = [{**GDN_ROWS[0], "lengths": "128", "left_out": {"flashinfer": "ImportError: no"}}]
    report = {**STAMP, "grid": GDN_ROWS, "prefill": rows, "claims": ["a claim"], "hkv": {}}
    assert "- a claim\n- left out: flashinfer, in 1 of 5 rows: ImportError: no" in results_page.said(report)

    report = {**STAMP, "rows": XQA_ROWS, "copy_tb_per_s": 4.0, "claims": ["a claim"]}
    page = results_xqa.speed(report)
    assert "- left out: triton, in 4 of 4 rows: no --triton-decode" in page
    assert "| bf16-d128-g8 | 8 x 512 | 250.0 | - | 300.0 | 280.0 | 300.0 | 350.0 | - |" in page
    widths = {line.count("|") for line in page.splitlines() if line.startswith("|")}
    assert len(widths) == 1


@pytest.mark.parametrize("text", ["bf16-d128", "f64-d128-g8", "bf16-128-g8", "bf16-dx-g8"])
def test_a_geometry_that_is_none_is_refused(text: str) -> None:
    assert xqa.geometry_of("e4m3-d128-g4") == ("e4m3", 128, 4)
    with pytest.raises(argparse.ArgumentTypeError, match="supported is"):
        xqa.geometry_of(text)


def paged() -> Problem:
    """Two sequences of 20 tokens in pages of 16, in a table with room for more."""
    cache = torch.zeros(6, 16, 2, 8)
    table = torch.tensor([[4, 1, -1], [0, 5, -1]], dtype=torch.int32)
    lengths = torch.tensor([20, 20], dtype=torch.int32)
    return Problem(
        {"page_size": 16, "head_dim": 8}, torch.zeros(2, 4, 8), cache, cache, table, lengths, [1, 1]
    )


def test_others_get_the_same_pages() -> None:
    p = paged()
    assert xqa_contenders.pages_of(p).tolist() == [[4, 1], [0, 5]]
    rows = xqa_contenders.token_rows(p)
    assert rows.dtype == torch.int64
    assert rows.tolist() == [*range(64, 80), *range(16, 20), *range(16), *range(80, 84)]


def test_splits_are_worth_trying() -> None:
    assert xqa_contenders.splits_to_try(128, 4, 65536, SMS) == [1, 2, 4]
    assert xqa_contenders.splits_to_try(1, 4, 512, SMS) == [1, 2, 4, 8, 16]
    assert max(xqa_contenders.splits_to_try(1, 4, 65536, SMS)) == 128
    assert xqa_contenders.splits_to_try(4096, 8, 16, SMS) == [1]


def test_another_triton_file_is_refused_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "decode_attention.py"
    file.write_text("def decode_attention_fwd(): ...\n")
    assert "supported is 2673adaad3d71209" in str(xqa.triton_or_why(file))
    assert xqa.triton_or_why(None) == "no --triton-decode"


def test_the_triton_file_is_imported_with_a_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "decode_attention.py"
    file.write_text("from sglang.srt.utils import is_hip\nhip = is_hip()\n")
    monkeypatch.setattr(xqa_contenders, "TRITON_SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    loaded = xqa.triton_or_why(file)
    assert getattr(loaded, "hip", None) is False
