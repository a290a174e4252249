"""How the schedule kernel is compiled: the upstream class's flags and its arguments as fake tensors.

The tensor layouts here and the argument list in ``launch.c`` are two sides of one thing: what is dynamic here (``sym_*``)
is a field of the structs there, in this order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute

SEGMENT = 256
"""Positions of one unit of work: two compute tiles of 128, one for each warp group of the logits kernels."""

MAX_ROWS = 8192
"""Rows of work whose prefix sums fit the kernel's shared memory; ``limits.max_rows`` of ``kernel.yaml``."""

ATOM = {1: 1, 2: 2}
"""Query positions of a row, where they matter: two rows a sequence are next_n 4 cut in half."""


def schedule(
    upstream_class: Any, axes: Mapping[str, Any], cls: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...]]:
    kernel = upstream_class(MAX_ROWS, SEGMENT, atoms=axes["atoms"], atom=ATOM[axes["atoms"]])
    fake = cute.runtime.make_fake_tensor
    lengths = fake(cutlass.Int32, (cute.sym_int32(),), (cute.sym_int64(),), assumed_align=4)
    starts = fake(cutlass.Int32, (cute.sym_int32(), 2), (2, 1), assumed_align=16)
    return kernel, (lengths, starts, cutlass.Int32(1), driver.CUstream(0))
