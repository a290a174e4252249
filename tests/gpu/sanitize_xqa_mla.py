"""Small XQA MLA calls for compute-sanitizer.

``compute-sanitizer --tool memcheck python -m gpu.sanitize_xqa_mla sm120_on_sm90``. Every buffer is an allocation of its own;
the padding of the page table would be out of bounds if it were followed. Results are checked against the oracle. Ends with
the number of calls.
"""

from __future__ import annotations

import os
import sys

# One cudaMalloc per tensor: an access past the end of one must not land in another.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

from gpu.bundles import open_by_name
from gpu.xqa_mla_problems import Runner, axes_of, make, oracle, worst_row

LENGTHS = [1, 0, 16, 63, 65, 300]
LIMIT = {"bf16": 8e-3, "e4m3": 4e-2}


def main() -> None:
    calls = 0
    with open_by_name(sys.argv[1]) as bundle:
        for axes in [axes_of(v) for v in bundle.variants() if v.op == "xqa_mla"]:
            p, runner = make(axes, LENGTHS, pages=20), Runner(bundle, axes)
            p.page_table[p.page_table == -1] = 2**31 - 1
            expected, live = oracle(p), p.seq_lens > 0
            for pdl in (0, 1):
                out = runner.run(p, pdl=pdl)
                if (
                    out[~live].count_nonzero() != 0
                    or not worst_row(out[live], expected[live]) <= LIMIT[axes["dtype"]]
                ):
                    raise SystemExit(f"wrong result: {axes}, pdl={pdl}")
                calls += 1
    if calls == 0:
        raise SystemExit("this bundle has no variant of xqa_mla")
    print(f"{calls} calls, all as the oracle has them")


if __name__ == "__main__":
    main()
