"""Turns the reports of ``run_all.sh`` into the results page of XQA decode.

``PYTHONPATH=tests python -m gpu.results_xqa build/gpu > docs/results-xqa-decode.md``
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu.left_out import reasons
from gpu.results_page import commit_of, provenance, table

BUNDLES = {
    "sm90": "SM90",
    "sm90_more": "SM90, more variants",
    "sm120_on_sm90": "SM120 source built for sm_90a",
    "sm120_on_sm90_more": "the same, more variants",
}
INTRODUCTION = """# XQA decode and XQA MLA: what was run, where, with what result

Made by `python -m gpu.results_xqa` from the reports of `tests/gpu/run_all.sh`; no number below is typed by hand.
SM120 and SM121 artifacts are the same source built for their own SM, compiled and inspected; the source itself ran as
the retargeted bundles below (an NVFP4 cache with three instructions that Hopper lacks spelled out in software).
SM100 and SM103 are compiled and inspected; they were not run. Launches for SM90, SM100 and SM120 are compared byte for
byte with upstream's own host code in the CPU tests.

To repeat it on an H200 or H100: build `make artifacts SM=90` and `make artifacts SM=120 RETARGET=90`, then the same
two with `kernseal build --profile validation --out dist/validation`, and run
`tests/gpu/run_all.sh tests sanitizer_xqa sanitizer_mla bench_xqa` with `KERNSEAL_COMMIT=$(git rev-parse HEAD)
KERNSEAL_DIRTY=0 KERNSEAL_EXAMPLES=2500 KERNSEAL_STEPS=10000 KERNSEAL_VALIDATION_KEY=KEY.json`. What nvcc makes of the same
source: [results-xqa-compiled.md](results-xqa-compiled.md).
"""
GUARANTEES = """
## Bit for bit

On every variant of all four bundles: empty rows, lengths over the capacity, and rows shorter than their drafts are exact
zeros; padding of the page table and whatever memory holds past a row's length change no bit; a request gives the same bits
in every batch, with every table width and `max_seq_len` under the library's own split; HND, layer slices and interleaved
caches equal NHD; scales on the device equal scales by value; graph replay with rewritten buffers equals an eager call, with
and without PDL; semaphores end zeroed; nothing around the output is written.
"""
TESTS = {
    "test_every_variant_agrees_with_the_oracle": "every variant, lengths 1 .. 3001, six splits, drafts of four shapes",
    "test_long_sequences": "lengths 8,192 and 32,768",
    "test_windows": "windows 1 .. 5000",
    "test_sinks": "attention sinks",
    "test_generated_calls_agree_with_the_oracle": "generated calls (hypothesis)",
    "test_a_serving_loop_stays_correct": "serving loop under captured graphs",
}


def of_bundle(measured: Mapping[str, Mapping[str, Any]], test: str, bundle: str) -> list[Mapping[str, Any]]:
    return [
        v
        for name, v in measured.items()
        if name == f"{test}[{bundle}]" or name.startswith(f"{test}[{bundle}-")
    ]


def accuracy(report: Mapping[str, Any]) -> str:
    rows = []
    for test, words in TESTS.items():
        cells = []
        for bundle in BUNDLES:
            found = of_bundle(report["measured"], test, bundle)
            count = sum(v.get("examples", 0) + v.get("steps", 0) for v in found)
            worst = f"{max(v['worst'] for v in found):.1e}" if found else "-"
            cells.append(f"{worst} ({count:,})" if count else worst)
        rows.append([words, *cells])
    text = "\n## Accuracy\n\nLargest relative error of a head of a row against float64 (calls or steps, where counted). "
    text += "Limits: 1e-2; 6e-2 where `fp8_math` or an e4m3 output rounds.\n\n"
    return text + table(["what", *BUNDLES.values()], rows)


MLA_TEXT = """
## XQA MLA

The SM120 source built for sm_90a, where the load of transposed bytes that only newer SMs have is spelled out in software for
an e4m3 cache. Largest and mean relative error of a head against float64, lengths 1 .. 8,192 around every tile edge. The same
guarantees bit for bit are tested as above, and NaN in every row of the pool that no sequence has.

"""


def mla(report: Mapping[str, Any]) -> str:
    rows = []
    for bundle in ("sm120_on_sm90", "sm120_on_sm90_more"):
        for found in of_bundle(report["measured"], "test_mla_agrees_with_the_oracle", bundle):
            rows += [[name, f"{v['worst']:.1e}", f"{v['mean']:.1e}"] for name, v in sorted(found.items())]
    return MLA_TEXT + table(["variant", "largest", "mean"], rows)


def sanitizers(reports: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        [op, run["tool"], BUNDLES[run["bundle"]], run["calls"], run["findings"], commit_of(run, report)]
        for op, report in reports.items()
        for run in report["runs"]
        if run["calls"]
    ]
    text = (
        "\n## compute-sanitizer\n\nA tool that is not in the table did not run to its end on that bundle.\n\n"
    )
    return text + table(["op", "tool", "bundle", "calls", "findings", "commit"], rows)


SIDES = {
    "kernseal, library's split": ("sm90 library", "sm90 fp8_math library"),
    "kernseal, filling the device": ("sm90 fill", "sm90 fp8_math fill"),
    "kernseal FA2": ("sm90 fa2",),
    "FlashInfer XQA": ("flashinfer xqa",),
    "FlashInfer FA2": ("flashinfer fa2 tensor cores", "flashinfer fa2 cuda cores"),
    "Triton (SGLang)": ("triton",),
}
"""Columns of the speed table, and which contenders the faster of each is of."""


def speed(report: Mapping[str, Any]) -> str:
    rows = []
    for row in report["rows"]:
        taken = row["device_us"]
        fastest = [min((taken[n] for n in names if n in taken), default=None) for names in SIDES.values()]
        cells = ["-" if us is None else f"{us:.1f}" for us in fastest]
        shape = f"{row['batch']} x {row['length']:,}"
        rows.append([row["geometry"], shape, f"{row['floor_us']:.1f}", *cells])
    columns = ["cache and heads", "sequences x length", "floor", *SIDES]
    text = "\n## Speed\n\nDevice time of a launch in microseconds, SM90 bundle, 4 KV heads, nothing in L2; a page table for "
    text += "131,072 positions, for FlashInfer one as wide as the sequences. A plain copy moved "
    text += f"{report['copy_tb_per_s']:.2f} TB/s in the same run: the floor is the bytes of K and V at that speed. The "
    text += (
        "library's split is `kv_splits` 0 with `max_seq_len` given, filling the device -1; kernseal's FA2 is "
    )
    text += "`paged_prefill`, `kv_chunk` -1. Of `fp8_math` and not, and of FlashInfer's FA2 with and without tensor "
    text += "cores, the faster counts. Sides alternating (A B .. B A), medians."
    said = "\n".join(f"- {each}" for each in [*report["claims"], *reasons(report["rows"])])
    return f"{text}\n\n{table(columns, rows)}\n{said}\n\n{provenance(report)}"


def page(folder: Path) -> str:
    names = ("tests", "sanitizer_xqa", "sanitizer_mla", "bench_xqa")
    tests, xqa, latent, bench = (json.loads((folder / f"{name}.json").read_text()) for name in names)
    counts = (
        f"\n## Tests\n\n{provenance(tests)}\n{tests['tests']} tests collected, exit status {tests['exit']}.\n"
    )
    checked = sanitizers({"xqa_decode": xqa, "xqa_mla": latent})
    return INTRODUCTION + counts + accuracy(tests) + GUARANTEES + mla(tests) + checked + speed(bench)


if __name__ == "__main__":
    sys.stdout.write(page(Path(sys.argv[1])))
