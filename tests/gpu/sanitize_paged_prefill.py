"""Small paged prefill calls for compute-sanitizer.

``compute-sanitizer --tool memcheck python -m gpu.sanitize_paged_prefill sm90``. Every buffer is an allocation of its own,
and rows of q past the sequences are not there. Results are checked against the oracle. Ends with the number of calls.
"""

from __future__ import annotations

import os
import sys

# One cudaMalloc per tensor: an access past the end of one must not land in another.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

from typing import Any

from gpu.fa2_problems import SANITIZED, sanitize
from gpu.paged_prefill_problems import Problem, Runner, axes_of, make, oracle


def problem(axes: dict[str, Any]) -> Problem:
    p = make(axes, SANITIZED, (6, 2))
    p.q = p.q[: p.qo[-1]].clone()
    return p


if __name__ == "__main__":
    sanitize(sys.argv[1], Runner, axes_of, problem, oracle)
