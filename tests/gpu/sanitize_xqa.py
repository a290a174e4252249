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
from gpu.xqa_problems import Runner, axes_of, make, oracle, worst_row

LENGTHS = [1, 0, 16, 255, 257, 700]
LIMIT = 8e-3


def main() -> None:
    calls = 0
    with open_by_name(sys.argv[1]) as bundle:
        for axes in [axes_of(v) for v in bundle.variants() if v.op == "xqa_decode"]:
            p, runner = make(axes, LENGTHS, pages=64), Runner(bundle, axes)
            p.page_table[p.page_table == -1] = 2**31 - 1
            expected = oracle(p)
            for splits in (1, 3):
                out = runner.run(p, kv_splits=splits)
                live = p.seq_lens > 0
                if out[~live].count_nonzero() != 0 or not worst_row(out[live], expected[live]) <= LIMIT:
                    raise SystemExit(f"wrong result: {axes}, kv_splits={splits}")
                calls += 1
    print(f"{calls} calls, all as the oracle has them")


if __name__ == "__main__":
    main()
