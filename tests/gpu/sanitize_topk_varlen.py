"""Small calls of a decode step's top-k for compute-sanitizer.

``compute-sanitizer --tool memcheck python -m gpu.sanitize_topk_varlen sm90``. Every buffer is an allocation of its own, and
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
from gpu.topk_varlen_problems import OP, Runner, held, make, wrong


def calls(bundle: Any, variant: Any) -> Iterator[tuple[str, str]]:
    runner = Runner(bundle, variant)
    for max_len, call in ((1000, {}), (1001, {"next_n": 2}), (2 * held(variant) + 1, {})):
        p = make(variant, [max_len, 0, 100, 300, 2**31 - 1], max_len, 128, levels=200, **call)
        yield f"max_len={max_len}", wrong(p, runner.run(p))


if __name__ == "__main__":
    check_all(OP, calls)
