"""Small XQA decode calls for compute-sanitizer: ``compute-sanitizer --tool memcheck python -m gpu.sanitize_xqa sm90``.

Every buffer is an allocation of its own; the pages of the cache that no row uses and the padding of the page table would be
out of bounds if they were followed. Results are checked against the oracle. Ends with the number of calls.
"""

from __future__ import annotations

import os
import sys

# One cudaMalloc per tensor: an access past the end of one must not land in another.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

from gpu.bundles import open_by_name
from gpu.xqa_problems import Axes, Runner, axes_of, limit_of, make, name_of, oracle, same, worst_row

from kernseal.loader.bundle import Bundle

LENGTHS = [1, 0, 16, 255, 257, 700]
RAGGED = [1, 0, 3, 8, 2, 5]


def chosen(bundle: Bundle) -> list[Axes]:
    """One variant for each kind of code: the tools are slow, and geometries differ in constants only."""
    found: dict[object, Axes] = {}
    for axes in [axes_of(v) for v in bundle.variants() if v.op == "xqa_decode"]:
        large = axes["head_dim"] > 128
        flags = (axes["sliding_window"], axes["spec_decode"], axes["fp8_math"])
        # The smallest group of a kind leaves most of a tile of query rows empty.
        kind = (axes["dtype"], axes["kv_dtype"], axes["out_dtype"], large, *flags)
        found.setdefault(kind, axes)
    return list(found.values())


def main() -> None:
    calls = 0
    with open_by_name(sys.argv[1]) as bundle:
        for axes in chosen(bundle):
            p, runner = make(axes, LENGTHS, pages=64, q_lens=RAGGED), Runner(bundle, axes)
            p.page_table[p.page_table == -1] = 2**31 - 1
            expected = oracle(p)
            for splits in (1, 3):
                out = runner.run(p, kv_splits=splits)
                if not worst_row(out, expected) <= limit_of(axes):
                    raise SystemExit(f"wrong result: {name_of(axes)}, kv_splits={splits}")
                if not same(out, runner.run(p, kv_splits=splits)):
                    raise SystemExit(f"another result: {name_of(axes)}, kv_splits={splits}")
                calls += 2
    print(f"{calls} calls, all as the oracle has them")


if __name__ == "__main__":
    main()
