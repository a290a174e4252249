"""Small top-k calls for compute-sanitizer.

``compute-sanitizer --tool memcheck python -m gpu.sanitize_topk_regions sm90``. Every buffer is an allocation of its own, and
lengths beyond a row would read outside if they were followed. Results are checked against the oracle. Ends with the number
of calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

# One cudaMalloc per tensor: an access past the end of one must not land in another.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

from gpu.sanitized import check_all
from gpu.topk_regions_problems import OP, SMEM, Runner, axes_of, make, wrong


def calls(bundle: Any, variant: Any) -> Iterator[tuple[str, str]]:
    size = 4 if axes_of(variant)["dtype"] == "f32" else 2
    group = 2 * ((SMEM[variant.class_name] - 2400) // size)
    for max_len in (1000, 1001, group):
        p = make(variant, [max_len, 0, 100, 300, 2**31 - 1, -1], max_len, 128, levels=200)
        yield f"max_len={max_len}", wrong(p, Runner(bundle, p.axes).run(p))


if __name__ == "__main__":
    check_all(OP, calls)
