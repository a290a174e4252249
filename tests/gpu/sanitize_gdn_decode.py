"""Small GDN decode calls for compute-sanitizer.

``compute-sanitizer --tool memcheck python -m gpu.sanitize_gdn_decode sm90``. Every buffer is an allocation of its own; rows
outside the pool would be out of bounds if they were followed. Results are checked against the oracle. Ends with the number
of calls.
"""

from __future__ import annotations

import os
import sys

# One cudaMalloc per tensor: an access past the end of one must not land in another.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

from gpu.bundles import open_by_name
from gpu.gdn_decode_problems import Runner, axes_in, check, make

ROWS, WRITTEN = [0, -1, 3, 2, 6, 2**31 - 1], [1, 4, -7, 5, 0, 2]


def main() -> None:
    calls = 0
    with open_by_name(sys.argv[1]) as bundle:
        for axes in axes_in(bundle):
            p = make(axes, ROWS, WRITTEN if axes["output_indices"] else None, pool_rows=6)
            check(p, Runner(bundle, axes).run(p, spare_steps=1))
            calls += 1
    if calls == 0:
        raise SystemExit("this bundle has no variant of gdn_decode")
    print(f"{calls} calls, all as the oracle has them")


if __name__ == "__main__":
    main()
