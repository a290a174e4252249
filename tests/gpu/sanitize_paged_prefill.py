"""Small paged prefill calls for compute-sanitizer.

``compute-sanitizer --tool memcheck python -m gpu.sanitize_paged_prefill sm90``. Every buffer is an allocation of its own,
and rows of q past the sequences are not there. Results are checked against the oracle. Ends with the number of calls.
"""

from __future__ import annotations

import os
import sys

# One cudaMalloc per tensor: an access past the end of one must not land in another.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

from gpu.bundles import open_by_name
from gpu.paged_prefill_problems import Runner, axes_of, make, oracle, tiles, unseen_are_zeros, worst_row

LENGTHS = [(1, 1), (0, 3), (17, 65), (40, 20), (3, 0), (65, 130), (2, 300)]
LIMIT = {"bf16": 1.2e-2, "f16": 2e-3}
SCRATCH = 64 << 20
"""The tools keep some bytes for each byte of the device."""
CALLS = ((0, 0), (0, 1), (128, 0), (-1, 1))
"""kv_chunk and fixed_grid."""


def main() -> None:
    calls = 0
    with open_by_name(sys.argv[1]) as bundle:
        for axes in [axes_of(v) for v in bundle.variants() if v.op == "paged_prefill"]:
            p, runner = make(axes, LENGTHS, (6, 2)), Runner(bundle, axes, SCRATCH)
            p.q = p.q[: p.qo[-1]].clone()
            expected = oracle(p)[0]
            for tile in tiles(axes):
                for chunk, fixed in CALLS:
                    out, lse = runner.run(p, tile_q=tile, kv_chunk=chunk, fixed_grid=fixed, pdl=calls % 2)
                    right = worst_row(p, out, expected) <= LIMIT[axes["dtype"]]
                    if not (right and unseen_are_zeros(p, out, lse)):
                        raise SystemExit(
                            f"wrong result: {axes}, tile_q={tile}, kv_chunk={chunk}, fixed_grid={fixed}"
                        )
                    calls += 1
    if calls == 0:
        raise SystemExit("this bundle has no variant of paged_prefill")
    print(f"{calls} calls, all as the oracle has them")


if __name__ == "__main__":
    main()
