"""Static inspection: does an artifact stay within what its SM allows?"""

from __future__ import annotations

import functools
import re
from typing import Any

import yaml

from kernseal.export import paths
from kernseal.loader.errors import BuildFailed


@functools.cache
def _table() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load((paths.kernels() / "sms.yaml").read_text())
    return data


def check(label: str, arch: str, ptx: str, static_smem: int, dynamic_smem: int) -> None:
    """Check one variant against ``kernels/sms.yaml``.

    Args:
        label: how messages call it.
        arch: SM it is assembled for.
        static_smem: bytes fixed at compile time.
        dynamic_smem: bytes asked for at launch.

    Raises:
        BuildFailed: too much shared memory, or an instruction that the SM lacks; the message gives value, limit and lines.
    """
    limits = _table()[arch]
    total, allowed = static_smem + dynamic_smem, limits["max_smem_per_block"]
    if total > allowed:
        raise BuildFailed(
            f"{label}: shared memory {total} bytes ({static_smem} static); {arch} allows {allowed} a block"
        )
    for pattern in limits["forbidden_ptx"]:
        lines = [ptx.count("\n", 0, match.start()) + 1 for match in re.finditer(pattern, ptx)]
        if lines:
            raise BuildFailed(
                f"{label}: PTX matches {pattern!r}, which {arch} lacks, at lines {', '.join(map(str, lines[:10]))}"
            )
