"""Small calls of qsa_selected for compute-sanitizer.

``compute-sanitizer --tool memcheck python -m gpu.sanitize_qsa_selected sm120_on_sm90``. Every buffer is an allocation of its
own; page numbers that no row needs would be out of bounds if they were followed. Results are checked against the oracle.
Ends with the number of calls.
"""

from __future__ import annotations

import os
import sys

# One cudaMalloc per tensor: an access past the end of one must not land in another.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch
from gpu.bundles import open_by_name
from gpu.qsa_selected_problems import LIMIT, OP, SCALE, axes_of, make

COUNTS = [70, 1, 0, 33, 64]


def main() -> None:
    calls = 0
    with open_by_name(sys.argv[1]) as bundle:
        for axes in [axes_of(v) for v in bundle.variants() if v.op == OP]:
            p = make(axes, COUNTS, width=70, heads=(axes["tile_q"], 2), page_size=5)
            op = bundle.prepare(OP, **axes)
            for splits in (0, 1, 3, 64):
                out = p.outputs()
                given = {**p.tensors(), **out, "splits": splits, "scale": SCALE}
                size = op.workspace_size(**given, stream=0)
                workspace = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None
                op(**given, workspace=workspace, workspace_bytes=size)
                torch.cuda.synchronize()
                if not p.check(out) <= LIMIT:
                    raise SystemExit(f"wrong result: {axes}, {splits} splits")
                calls += 1
    if calls == 0:
        raise SystemExit("this bundle has no variant of qsa_selected")
    print(f"{calls} calls, all as the oracle has them")


if __name__ == "__main__":
    main()
