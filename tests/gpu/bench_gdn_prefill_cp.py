"""Context-parallel GDN prefill beside ``gdn_prefill``: which is faster for how many sequences, heads and tokens.

``PYTHONPATH=tests python -m gpu.bench_gdn_prefill_cp --json FILE [--quick]``. Each row says what upstream's rule would take,
and the end is the smallest rule that the rows allow. Refuses a tree that is not a clean commit, unless told that it is a
``--trial``.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
from gpu.bench_gdn_prefill import ours
from gpu.bench_options import bundles_here, parser, save, stamp, use_gpu
from gpu.bundles import open_by_name
from gpu.cp_rule import Point, verdict
from gpu.problems import Case, make_inputs
from gpu.timing import DEVICE, compare

from kernseal.kernels.gdn_prefill_cp.torch_api import should_use_cp
from kernseal.loader.bundle import Bundle

HEADS = [(4, 4, 8), (8, 8, 16), (16, 16, 32), (16, 16, 64)]
SEQUENCES = [1, 2, 4, 8]
TOKENS = [256, 1024, 2048, 4096, 8192, 32768, 65536]
"""Of each sequence."""
MOST_TOKENS = 65536
CHUNK_LENGTHS = [0, 256, 512, 1024, 2048, 4096]
"""0 is upstream's choice; the others are tried for one sequence."""
QUICK_HEADS, QUICK_CHUNK_LENGTHS = [(4, 4, 8), (16, 16, 32)], [0]


def rows_of(bundle: Bundle, quick: bool) -> list[dict[str, Any]]:
    rows, device = [], torch.cuda.get_device_properties(0)
    for heads, seqs, tokens in itertools.product(QUICK_HEADS if quick else HEADS, SEQUENCES, TOKENS):
        if seqs * tokens > MOST_TOKENS:
            continue
        case = Case(lengths=(tokens,) * seqs, heads=heads)
        x = make_inputs(case, made_on="cuda")
        contenders = {"gdn_prefill": ours(bundle, "gdn_prefill", case, x).call}
        for chunk_len in CHUNK_LENGTHS if seqs == 1 and not quick else QUICK_CHUNK_LENGTHS:
            if chunk_len < tokens:
                cut = {"chunk_len": chunk_len, "max_seqlen": tokens}
                made = ours(bundle, "gdn_prefill_cp", case, x, **cut)
                contenders[f"cp {chunk_len or 'upstream'}"] = made.call
        times = compare(contenders, rounds=2, samples=4, clocks=DEVICE)
        rule = should_use_cp(seqs * case.out_heads, device.multi_processor_count, device.name)
        rows.append({"heads": heads, "seqs": seqs, "tokens": tokens, "rule_says_cp": rule, "times": times})
        print(line(rows[-1]), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    times = {name: clocks["device_us"]["median"] for name, clocks in row["times"].items()}
    cells = " ".join(f"{name}: {us:.0f}" for name, us in times.items())
    best = min(times, key=lambda name: times[name])
    return f"{row['heads']} {row['seqs']} x {row['tokens']}: {cells} us; fastest {best}, rule {row['rule_says_cp']}"


def rule_of(rows: list[dict[str, Any]]) -> str:
    """What the rows say about when to take which op, with the library's choice of chunks."""
    points = []
    for row in rows:
        times = {name: clocks["device_us"]["median"] for name, clocks in row["times"].items()}
        work = row["seqs"] * max(row["heads"])
        points.append(Point(work, row["tokens"], times["gdn_prefill"], times["cp upstream"]))
    return verdict(points, torch.cuda.get_device_properties(0).multi_processor_count)


def main() -> int:
    options = parser(__doc__).parse_args()
    report = stamp(options.trial) | {"head_dim": 128, "dtype": "bf16", "quick": options.quick}
    use_gpu()
    names = bundles_here()
    report |= {"rows": {}, "rule": {}}
    for name in names:
        with open_by_name(name) as bundle:
            print(name)
            report["rows"][name] = rows_of(bundle, options.quick)
            torch.cuda.synchronize()
        report["rule"][name] = rule_of(report["rows"][name])
    save(options, "Context-parallel GDN prefill", report, [])
    for name, rule in report["rule"].items():
        print(f"{name}: {rule}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
