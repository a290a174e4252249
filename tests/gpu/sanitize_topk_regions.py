"""Small top-k calls for compute-sanitizer.

``compute-sanitizer --tool memcheck python -m gpu.sanitize_topk_regions sm90``. Every buffer is an allocation of its own, and
lengths beyond a row would read outside if they were followed. Results are checked against the oracle. Ends with the number
of calls.
"""

from __future__ import annotations

import os
import sys

# One cudaMalloc per tensor: an access past the end of one must not land in another.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

from gpu.bundles import open_by_name
from gpu.topk_regions_problems import OP, SMEM, Runner, axes_of, make, wrong


def main() -> None:
    calls = 0
    with open_by_name(sys.argv[1]) as bundle:
        for variant in [v for v in bundle.variants() if v.op == OP]:
            size = 4 if axes_of(variant)["dtype"] == "f32" else 2
            group = 2 * ((SMEM[variant.class_name] - 2400) // size)
            for max_len in (1000, 1001, group):
                lengths = [max_len, 0, 100, 300, 2**31 - 1, -1]
                p = make(variant, lengths, max_len, 128, levels=200)
                why = wrong(p, Runner(bundle, p.axes).run(p))
                if why:
                    raise SystemExit(f"wrong result: {variant.variant}, max_len={max_len}: {why}")
                calls += 1
    if calls == 0:
        raise SystemExit(f"this bundle has no variant of {OP}")
    print(f"{calls} calls, all as the oracle has them")


if __name__ == "__main__":
    main()
