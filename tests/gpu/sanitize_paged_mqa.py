"""Small schedules and paged MQA logits for compute-sanitizer.

``compute-sanitizer --tool memcheck python -m gpu.sanitize_paged_mqa sm90`` (schedules) or ``sm120_on_sm90`` (logits). Every
buffer is an allocation of its own; the padding of the page table would be out of bounds if it were followed. Results are
checked against the oracles. Ends with the number of calls.
"""

from __future__ import annotations

import os
import sys
from typing import Any

# One cudaMalloc per tensor: an access past the end of one must not land in another.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch
from gpu.bundles import open_by_name
from gpu.paged_mqa_problems import OP, Runner, axes_of, make, worst_row

from kernseal.kernels.paged_mqa_schedule.reference import schedule

LENGTHS = [1, 0, 0, 63, 65, 257, 300, 2]
LIMIT = 1e-2
CTAS = 132


def schedules(bundle: Any) -> int:
    calls = 0
    for atoms in sorted({int(v.axes["atoms"]) for v in bundle.variants() if v.op == "paged_mqa_schedule"}):
        op = bundle.prepare("paged_mqa_schedule", atoms=atoms)
        for batch in (1, 33, 257, 8192 // atoms):
            given = (LENGTHS * (batch // len(LENGTHS) + 1))[:batch]
            lengths = torch.tensor(given, dtype=torch.int32, device="cuda")
            out = torch.empty(CTAS + 1, 2, dtype=torch.int32, device="cuda")
            op.run(seq_lens=lengths, schedule=out, stream=torch.cuda.current_stream())
            if [tuple(row) for row in out.tolist()] != schedule(given, CTAS, atoms):
                raise SystemExit(f"wrong schedule: atoms {atoms}, batch {batch}")
            calls += 1
    return calls


def logits(bundle: Any) -> int:
    calls = 0
    for axes in [axes_of(v) for v in bundle.variants() if v.op == OP]:
        p = make(axes, LENGTHS, columns=20)
        if not worst_row(p, Runner(bundle, axes).run(p)) <= LIMIT:
            raise SystemExit(f"wrong result: {axes}")
        calls += 1
    return calls


def main() -> None:
    torch.zeros(1, device="cuda")  # a context for prepare
    with open_by_name(sys.argv[1]) as bundle:
        calls = schedules(bundle) + logits(bundle)
    if calls == 0:
        raise SystemExit("this bundle has no variant of paged MQA")
    print(f"{calls} calls, all as the oracle has them")


if __name__ == "__main__":
    main()
