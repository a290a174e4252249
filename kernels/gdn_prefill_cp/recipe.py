"""How context-parallel GDN prefill is compiled: one host function that launches upstream's kernels, one after the other.

Upstream launches four kernels from Python, each compiled apart. Here they are one module: ``Pipeline`` takes the tensors
once, calls upstream's classes, and picks the fixup kernel by the number of heads, as upstream's Python does. Before them
goes a kernel of ours that copies the states a run starts from (see ``GatherStates``).

The tensor layouts here and the argument list in ``launch.c`` are two sides of one thing: what is dynamic here (``sym_*``)
is a field of the structs there, in this order.
"""

# CuTe DSL has no types, its decorators neither; and it reads annotations as objects, so they are not postponed here.
# mypy: disable-error-code="untyped-decorator"

import inspect
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute

D = 128
"""Head dimension, the only one these classes have."""

BLOCK = 64
"""Tokens of a T block."""

SIMT4_HEADS, SIMT8_HEADS = 8, 16
"""Up to how many heads upstream takes the SIMT fixup kernels of 4 and of 8 rows a CTA; above them the tensor cores'."""

GATHER_THREADS = 256
GATHER_ROWS = 16
"""Rows of a state that one CTA copies."""

CUTLASS = {
    "bf16": cutlass.BFloat16,
    "f16": cutlass.Float16,
    "f32": cutlass.Float32,
    "i32": cutlass.Int32,
    "i64": cutlass.Int64,
}
INNER_STRIDES = {"hvk": (D * D, D, 1), "hkv": (D * D, 1, D)}
"""Strides of head, V and K within one row of a state, in elements."""


class GatherStates:
    """Copies the initial states to packed float32 [N, H, V, K]: zeros where the row is negative.

    Where a caller updates a pool in place, the last chunk of a sequence writes the row that its first chunk reads, in one
    launch and in no order. What is read is the copy.
    """

    @cute.jit
    def __call__(
        self,
        g_states: cute.Tensor,
        g_rows: cute.Tensor,
        g_packed: cute.Tensor,
        num_heads: cutlass.Int32,
        num_seqs: cutlass.Int32,
        stream: driver.CUstream,
    ) -> None:
        self.kernel(g_states, g_rows, g_packed).launch(
            grid=(num_heads, num_seqs, D // GATHER_ROWS), block=(GATHER_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, g_states: cute.Tensor, g_rows: cute.Tensor, g_packed: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        head, seq, part = cute.arch.block_idx()
        row = seq
        if cutlass.const_expr(g_rows is not None):
            row = cutlass.Int32(g_rows[seq])
        values = cute.make_rmem_tensor(GATHER_ROWS * D // GATHER_THREADS, cutlass.Float32)
        values.fill(0.0)
        first = part * GATHER_ROWS + thread // D
        if row >= cutlass.Int32(0):
            for step in cutlass.range_constexpr(cute.size(values)):
                v = first + step * (GATHER_THREADS // D)
                values[step] = g_states[row, head, v, thread % D].to(cutlass.Float32)
        for step in cutlass.range_constexpr(cute.size(values)):
            g_packed[seq, head, first + step * (GATHER_THREADS // D), thread % D] = values[step]


def tiles(data: Any, rows: int, num_heads: Any, count: Any) -> Any:
    """[rows, rows, H, count], the second mode contiguous: what upstream makes of a flat workspace."""
    size = rows * rows
    stride = cute.assume(cutlass.Int64(num_heads) * size, divby=size)
    return cute.make_tensor(
        data.iterator, cute.make_layout((rows, rows, num_heads, count), stride=(rows, 1, size, stride))
    )


def states(data: Any, num_seqs: Any, num_heads: Any) -> Any:
    """[N, H, V, K], packed."""
    stride = cute.assume(cutlass.Int64(num_heads) * (D * D), divby=D * D)
    return cute.make_tensor(
        data.iterator, cute.make_layout((num_seqs, num_heads, D, D), stride=(stride, D * D, D, 1))
    )


def fixup(kernel: Any, transfer: Any, added: Any, initial: Any, fixed: Any, *rest: Any) -> None:
    """Calls a fixup kernel of either class; those of SM120 can also write states, which upstream never asks of them."""
    if "g_output_state_t" in inspect.signature(kernel.__call__).parameters:
        kernel(transfer, added, initial, None, fixed, None, None, *rest)
    else:
        kernel(transfer, added, initial, None, fixed, *rest)


@dataclass(repr=False)
class Pipeline:
    """The kernels of one run, in order.

    Attributes:
        gather: copies initial states; None where there are none.
        t_precompute: the inverse that each block of 64 tokens needs.
        mn_precompute: each chunk's transfer matrix and the state it adds.
        fixups: the scan over the chunks of a sequence: for few, for more and for many heads.
        prefill: outputs and final states, each chunk from the state before it.
    """

    gather: Any
    t_precompute: Any
    mn_precompute: Any
    fixups: tuple[Any, Any, Any]
    prefill: Any

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        alpha: cute.Tensor,
        beta: cute.Tensor,
        final_state: cute.Tensor,
        initial_state: cute.Tensor,
        read_rows: cute.Tensor,
        write_rows: cute.Tensor,
        checkpoints: cute.Tensor,
        checkpoint_cu_starts: cute.Tensor,
        t: cute.Tensor,
        transfer: cute.Tensor,
        added: cute.Tensor,
        fixed: cute.Tensor,
        gathered: cute.Tensor,
        tensor_maps: cute.Tensor,
        cu_seqlens: cute.Tensor,
        scale: cutlass.Float32,
        num_q_heads: cutlass.Int32,
        num_k_heads: cutlass.Int32,
        num_v_heads: cutlass.Int32,
        num_heads: cutlass.Int32,
        num_seqs: cutlass.Int32,
        chunk_len: cutlass.Int32,
        t_blocks: cutlass.Int32,
        max_t_blocks: cutlass.Int32,
        chunks: cutlass.Int32,
        max_chunks: cutlass.Int32,
        total_checkpoints: cutlass.Int32,
        checkpoint_every: cutlass.Int32,
        stream: driver.CUstream,
    ) -> None:
        initial = None
        if cutlass.const_expr(self.gather is not None):
            initial = states(gathered, num_seqs, num_heads)
            self.gather(initial_state, read_rows, initial, num_heads, num_seqs, stream)

        heads = num_k_heads, num_v_heads, num_heads
        t_tiles = tiles(t, BLOCK, num_heads, t_blocks)
        self.t_precompute(
            k, beta, t, cu_seqlens, num_k_heads, num_heads, t_blocks, max_t_blocks, num_seqs, stream
        )
        self.mn_precompute(
            k,
            v,
            t_tiles,
            alpha,
            transfer,
            added,
            cu_seqlens,
            chunk_len,
            *heads,
            chunks,
            max_chunks,
            num_seqs,
            stream,
        )

        summaries = tiles(transfer, D, num_heads, chunks), tiles(added, D, num_heads, chunks)
        scan = *summaries, initial, fixed, cu_seqlens, chunk_len, chunks, num_seqs, num_heads, stream
        if num_heads <= SIMT4_HEADS:
            fixup(self.fixups[0], *scan)
        elif num_heads <= SIMT8_HEADS:
            fixup(self.fixups[1], *scan)
        else:
            fixup(self.fixups[2], *scan)

        self.prefill(
            q,
            k,
            v,
            t_tiles,
            o,
            alpha,
            final_state,
            fixed,
            initial,
            write_rows,
            checkpoints,
            checkpoint_cu_starts,
            tensor_maps,
            cu_seqlens,
            scale,
            num_q_heads,
            *heads,
            chunk_len,
            chunks,
            max_chunks,
            num_seqs,
            total_checkpoints,
            checkpoint_every,
            stream,
        )


def fake(dtype: Any, shape: tuple[Any, ...], stride: tuple[Any, ...], align: int = 16) -> Any:
    """A tensor that has a type but no memory; ``align`` in bytes."""
    return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=align)


def i32() -> Any:
    return cute.sym_int32()


def i64(divisibility: int) -> Any:
    return cute.sym_int64(divisibility=divisibility)


def vector(dtype: Any, align: int) -> Any:
    return fake(dtype, (i32(),), (1,), align)


def indices(axes: Mapping[str, Any]) -> Any:
    dtype = CUTLASS[axes["index_dtype"]]
    return vector(dtype, dtype.width // 8)


def state(axes: Mapping[str, Any]) -> Any:
    """[rows, H, V, K] in the layout of the variant; rows may be padded to a multiple of 16 bytes."""
    dtype = CUTLASS[axes["state_dtype"]]
    return fake(
        dtype, (i32(), i32(), D, D), (i64(16 * 8 // dtype.width), *INNER_STRIDES[axes["state_layout"]])
    )


def pipeline(upstream_class: Any, axes: Mapping[str, Any]) -> Pipeline:
    """The kernels of a variant, from the module of the prefill class."""
    module, sm = (
        sys.modules[upstream_class.__module__],
        upstream_class.__name__.removeprefix("CPDeltaRulePrefill"),
    )
    dtype, state_dtype, init = CUTLASS[axes["dtype"]], CUTLASS[axes["state_dtype"]], axes["initial_state"]
    simt = getattr(module, f"CPDeltaRuleFixupSimt{sm}")
    return Pipeline(
        gather=GatherStates() if init else None,
        t_precompute=getattr(module, f"CPDeltaRuleTPrecompute{sm}")(dtype),
        mn_precompute=getattr(module, f"CPDeltaRuleMNPrecompute{sm}")(dtype),
        fixups=(
            simt(needs_initial_state=init, rows_per_cta=4),
            simt(needs_initial_state=init, rows_per_cta=8),
            getattr(module, f"CPDeltaRuleFixupHmma{sm}")(needs_initial_state=init),
        ),
        prefill=upstream_class(
            dtype,
            needs_initial_state=init,
            store_final_state=True,
            state_dtype=state_dtype,
            checkpoint_state_dtype=state_dtype,
            use_state_indices=axes["pooled"],
            needs_checkpointing=axes["checkpoints"],
        ),
    )


def context_parallel(
    upstream_class: Any, axes: Mapping[str, Any], cls: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...]]:
    """SM90 and SM120 classes."""
    dtype = CUTLASS[axes["dtype"]]
    pooled, init, ckpt = axes["pooled"], axes["initial_state"], axes["checkpoints"]

    def dim_first() -> Any:
        return fake(dtype, (D, i32(), i32()), (1, i64(D), D))

    args = (
        fake(dtype, (i32(), D, i32()), (i64(D), 1, D)),
        dim_first(),
        dim_first(),
        dim_first(),
        vector(cutlass.Float32, 16),
        vector(cutlass.Float32, 16),
        state(axes),
        state(axes) if init else None,
        indices(axes) if pooled and init else None,
        indices(axes) if pooled else None,
        vector(CUTLASS[axes["state_dtype"]], 16) if ckpt else None,
        indices(axes) if ckpt else None,
        vector(dtype, 128),
        *(vector(cutlass.Float32, 128) for _ in range(3)),
        vector(cutlass.Float32, 128) if init else None,
        vector(cutlass.Uint8, 128),
        indices(axes),
        cutlass.Float32(1 / math.sqrt(D)),
        *(cutlass.Int32(1) for _ in range(12)),
        driver.CUstream(0),
    )
    return pipeline(upstream_class, axes), args
