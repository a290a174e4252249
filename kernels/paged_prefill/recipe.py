"""How paged prefill is compiled: one program with a kernel for each tile of query rows, and the merge.

How many keys a tile takes is upstream's rule (``BatchPrefillWithPagedKVCacheDispatched``), which asks the device for its
shared memory; here the class says it. Upstream's JIT compiles with fast math, which is not set here: denormals are not
flushed. The exponentials are the same instructions either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernseal.export.job import NvrtcKernel, NvrtcProgram

ELEMENT_BYTES = 2
WARPS = 4
CHOICES = (8, 4, 2, 1)
"""What upstream instantiates: keys of a warp and tile, in units of 16."""


def tiles(head_dim: int) -> tuple[int, ...]:
    """Query rows of the tiles that a variant has: those that upstream's plan chooses among (``FA2DetermineCtaTileQ``)."""
    return (16, 64, 128) if head_dim <= 128 else (16, 64)


def mma_kv(tile_q: int, head_dim: int, smem: Mapping[str, int]) -> int:
    """Keys that a warp takes at a time, in units of 16."""
    warps_kv = WARPS if tile_q == 16 else 1
    fragments_q = 2 if tile_q == 128 else 1
    q_bytes = tile_q * head_dim * ELEMENT_BYTES
    kv_bytes = 2 * head_dim * 16 * warps_kv * ELEMENT_BYTES
    blocks = 2 if smem["per_sm"] >= 2 * (q_bytes + kv_bytes) else 1
    room = min(smem["per_sm"] // blocks, smem["per_block"]) - q_bytes
    most = min(room // kv_bytes, 8 // fragments_q)
    return next(choice for choice in CHOICES if choice <= most)


def fa2(axes: Mapping[str, Any], cls: Mapping[str, Any]) -> NvrtcProgram:
    """The kernels of upstream's FA2 prefill over a paged KV cache."""
    head_dim = axes["head_dim"]
    names = tiles(head_dim)
    keys = {f"KSEAL_MMA_KV_{tile}": mma_kv(tile, head_dim, cls["smem"]) for tile in names}
    return NvrtcProgram(
        macros={
            "KSEAL_F16": int(axes["dtype"] == "f16"),
            "KSEAL_HEAD_DIM": head_dim,
            "KSEAL_CAUSAL": int(axes["causal"]),
            **keys,
        },
        options=("--std=c++17", "--device-as-default-execution-space"),
        kernels=(
            *(NvrtcKernel(f"prefill_{tile}", f"smem_{tile}") for tile in names),
            NvrtcKernel("merge", "smem_merge"),
        ),
    )
