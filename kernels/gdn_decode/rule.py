"""Upstream's rule for which kernel serves a batch: what ``wide`` and ``tile_v`` should be for speed. All are right."""

from __future__ import annotations

from typing import NamedTuple


class Kernel(NamedTuple):
    """Two axes of ``kernel.yaml``."""

    wide: bool
    tile_v: int


def kernel_for(tokens: int, work: int, sm_count: int) -> Kernel:
    """The kernel that upstream picks.

    Args:
        tokens: of every sequence.
        work: batch size times heads of v.
        sm_count: multiprocessors of the device.
    """
    if work >= 1024:
        return Kernel(True, 128)
    if work >= 512:
        return Kernel(True, 64)
    if tokens > 1:
        return Kernel(True, 32) if work >= 128 else Kernel(False, 16)
    if work <= 128:
        return Kernel(False, 16)
    # The largest tile of which four waves of CTAs fill the device.
    waves = (tile for tile in (128, 64) if work * (128 // tile) >= 4 * sm_count)
    return Kernel(False, next(waves, 32))
