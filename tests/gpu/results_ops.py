"""Turns the reports of ``run_all.sh`` into the results page of the ops besides GDN prefill and XQA.

``PYTHONPATH=tests python -m gpu.results_ops build/gpu > docs/results-sparse-and-decode.md``. What has to be said about a run
stands in ``notes.md`` beside its reports.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpu.results_page import provenance, table
from gpu.results_xqa import BUNDLES, of_bundle

INTRODUCTION = """# Sparse attention, top-k, ragged and paged prefill, GDN decode: what was run, where, with what result

Made by `python -m gpu.results_ops` from the reports of `tests/gpu/run_all.sh`; no number is typed by hand unless the
notes say so. What says SM120 is the same source built for sm_90a. The attention of QSA and the paged MQA logits of
SM100 need tcgen05, which Hopper lacks: they are compiled and inspected, their launches are compared byte for byte
with those of CuTe's own host objects in the CPU tests, and they were not run. QSA's metadata kernels ran as the SM100
source built for sm_90a.

To repeat it on an H200 or H100: `tests/gpu/pack.sh OUT` on a machine with compilers, then
`tests/gpu/run_all.sh tests sanitizer_cp sanitizer_gdn_decode sanitizer_ragged sanitizer_paged sanitizer_mqa sanitizer_topk
sanitizer_varlen sanitizer_qsa` with `KERNSEAL_DIST=OUT/dist KERNSEAL_VALIDATION_KEY=OUT/key.json`.
"""
FILES = {
    "test_gdn_decode.py": "`gdn_decode`",
    "test_gdn_prefill_cp.py": "`gdn_prefill_cp`",
    "test_ragged_prefill.py": "`ragged_prefill`",
    "test_paged_prefill.py": "`paged_prefill`",
    "test_topk_regions.py": "`topk_regions`",
    "test_topk_varlen.py": "`topk_varlen`",
    "test_paged_mqa_schedule.py": "`paged_mqa_schedule`",
    "test_paged_mqa_logits.py": "`paged_mqa_logits` (SM120)",
    "test_qsa.py": "`qsa_metadata`",
    "test_qsa_selected.py": "`qsa_selected`",
}
ACCURACY = {
    ("test_decode_agrees_with_the_oracle", "worst"): "GDN decode, 1 .. 8 tokens, four head counts: output",
    ("test_one_sequence_in_chunks", "output"): "context-parallel prefill, one sequence: output",
    ("test_one_sequence_in_chunks", "state"): "the same: state",
    ("test_head_counts_in_chunks", "output"): "context-parallel prefill, head counts, ragged: output",
    ("test_head_counts_in_chunks", "state"): "the same: state",
    (
        "test_it_computes_what_gdn_prefill_does",
        "output",
    ): "context-parallel prefill beside `gdn_prefill`: output",
    (
        "test_every_tile_agrees_with_the_oracle",
        "worst",
    ): "ragged prefill, every tile, chunk and head count: output",
    ("test_every_tile_agrees_with_the_oracle", "lse"): "the same: log-sum-exp, absolute, base 2",
    ("test_what_the_plan_chooses_agrees", "worst"): "ragged prefill, as planned: output",
    (
        "test_every_tile_and_page_size_agrees",
        "worst",
    ): "paged prefill, every tile, chunk, group and page size: output",
    ("test_every_tile_and_page_size_agrees", "lse"): "the same: log-sum-exp, absolute, base 2",
    (
        "test_what_a_plan_over_pages_chooses_agrees",
        "worst",
    ): "paged prefill, decode and chunks as planned: output",
    ("test_logits_agree_with_the_oracle", ""): "paged MQA logits, every variant",
    ("test_logits_of_long_sequences", "worst"): "paged MQA logits, lengths up to 131,072",
    ("test_it_agrees_with_the_oracle", ""): "QSA over selected positions, splits 0 .. 64",
}
GUARANTEES = """
Limits: 8e-3 (GDN), 8e-3 in bfloat16 and 1.5e-3 in float16 (ragged and paged prefill; 1.2e-2 and 2e-3 where sequences are
split), 1e-2 (paged MQA, QSA). What top-k selects, the schedules and QSA's tables are compared entry by entry.

## Bit for bit

The same call gives the same bits again, a request the same bits in every batch (top-k: in deterministic mode), a replayed
graph with rewritten buffers those of an eager call; padding of page tables, unused rows and pages of pools, and what is
around inputs change no bit; nothing around outputs and scratch is written; counters, semaphores and histograms end zeroed;
empty batches do nothing. `qsa_selected`, the pages of `paged_prefill` and the rows of GDN decode's pool reach beyond what
int32 counts.
"""
SANITIZERS = {
    "sanitizer_gdn_decode": "gdn_decode",
    "sanitizer_cp": "gdn_prefill_cp",
    "sanitizer_ragged": "ragged_prefill",
    "sanitizer_paged": "paged_prefill",
    "sanitizer_topk": "topk_regions",
    "sanitizer_varlen": "topk_varlen",
    "sanitizer_mqa": "paged_mqa_schedule, paged_mqa_logits",
    "sanitizer_qsa": "qsa_selected",
}


def numbers(values: Mapping[str, Any], field: str) -> Iterator[float]:
    """Those of ``field``, however deep; all of them where it is empty."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from numbers(value, field)
        elif name == field or not field:
            yield value


def outcomes(report: Mapping[str, Any]) -> str:
    rows = [
        [op, *(report["outcomes"].get(file, {}).get(how, 0) for how in ("passed", "failed", "skipped"))]
        for file, op in FILES.items()
    ]
    text = f"\n## Tests\n\n{provenance(report)}\nSkipped is what a bundle has no variant of.\n\n"
    return text + table(["op", "passed", "failed", "skipped"], rows)


def accuracy(report: Mapping[str, Any]) -> str:
    rows = []
    for (test, field), words in ACCURACY.items():
        cells = []
        for bundle in BUNDLES:
            found = [x for v in of_bundle(report["measured"], test, bundle) for x in numbers(v, field)]
            cells.append(f"{max(found):.1e}" if found else "-")
        rows.append([words, *cells])
    text = "\n## Accuracy\n\nLargest relative error of a head of a row, or of a state, against float64.\n\n"
    return text + table(["what", *BUNDLES.values()], rows)


def sanitizers(folder: Path) -> str:
    """Each op and bundle a row, the findings of each tool; a dash where a tool did not run to its end."""
    tools = ("memcheck", "initcheck", "racecheck", "synccheck")
    rows = []
    for name, op in SANITIZERS.items():
        runs = json.loads((folder / f"{name}.json").read_text())["runs"]
        for bundle, words in BUNDLES.items():
            found = {r["tool"]: r for r in runs if r["bundle"] == bundle and r["calls"]}
            if found:
                cells = [found[tool]["findings"] if tool in found else "-" for tool in tools]
                rows.append([f"`{op}`", words, max(r["calls"] for r in found.values()), *cells])
    text = "\n## compute-sanitizer\n\nFindings; a dash: did not run to its end on this bundle.\n\n"
    return text + table(["op", "bundle", "calls", *tools], rows)


def page(folder: Path) -> str:
    report, notes = json.loads((folder / "tests.json").read_text()), folder / "notes.md"
    said = f"\n## Notes\n\n{notes.read_text()}" if notes.is_file() else ""
    return INTRODUCTION + outcomes(report) + accuracy(report) + GUARANTEES + sanitizers(folder) + said


if __name__ == "__main__":
    sys.stdout.write(page(Path(sys.argv[1])))
