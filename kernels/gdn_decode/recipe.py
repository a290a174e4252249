"""How GDN decode is compiled: the upstream kernel's flags and its arguments as fake tensors.

The tensor layouts here and the argument list in ``launch.c`` are two sides of one thing: what is dynamic here (``sym_*``)
is a field of the structs there, in this order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute

D = 128
"""Head dimension of keys and values, the only one these kernels have."""

SOFTPLUS = (1.0, 20.0)
"""Slope, and the argument above which softplus is the identity."""

PACKED_FMA_SINCE = 100
"""SM whose float32 pipe does two multiply-adds an instruction."""

INDEX = {"i32": cutlass.Int32, "i64": cutlass.Int64}


def fake(dtype: Any, shape: tuple[Any, ...], stride: tuple[Any, ...], align: int = 16) -> Any:
    """A tensor that has a type but no memory; ``align`` in bytes."""
    return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=align)


def i32() -> Any:
    return cute.sym_int32()


def i64(divisibility: int) -> Any:
    return cute.sym_int64(divisibility=divisibility)


def vector(dtype: Any) -> Any:
    return fake(dtype, (i32(),), (1,), dtype.width // 8)


def heads(axes: Mapping[str, Any]) -> Any:
    """[B, T, heads, D], sequences and tokens apart by multiples of 16 bytes."""
    return fake(cutlass.BFloat16, (i32(), axes["tokens"], i32(), D), (i64(8), i64(8), D, 1))


def gate(axes: Mapping[str, Any]) -> Any:
    """[B, T, heads], tokens apart by anything: a and b are often columns of one projection."""
    return fake(cutlass.BFloat16, (i32(), axes["tokens"], i32()), (i64(1), i64(1), 1), 2)


class Tensors(NamedTuple):
    """The tensors of every upstream entry, in its order."""

    state: Any
    intermediate_states: Any
    a_log: Any
    a: Any
    dt_bias: Any
    q: Any
    k: Any
    v: Any
    b: Any
    o: Any
    state_indices: Any
    output_state_indices: Any


def tensors(axes: Mapping[str, Any]) -> Tensors:
    index, bf16 = INDEX[axes["index_dtype"]], cutlass.BFloat16
    return Tensors(
        state=fake(bf16, (i32(), i32(), D, D), (i64(8), D * D, D, 1)),
        intermediate_states=fake(bf16, (i32(), D, D), (D * D, D, 1)) if axes["intermediate_states"] else None,
        a_log=vector(cutlass.Float32),
        a=gate(axes),
        dt_bias=vector(cutlass.Float32),
        q=heads(axes),
        k=heads(axes),
        v=heads(axes),
        b=gate(axes),
        o=heads(axes),
        state_indices=vector(index),
        output_state_indices=vector(index) if axes["output_indices"] else None,
    )


def sizes(axes: Mapping[str, Any]) -> tuple[Any, ...]:
    """softplus, scale, Hv, T, steps of the intermediate buffer, Hq, K, V and tile."""
    t, one = axes["tokens"], cutlass.Int32(1)
    return (*SOFTPLUS, cutlass.Float32(1 / math.sqrt(D)), one, t, one, one, D, D, axes["tile_v"])


def flags(axes: Mapping[str, Any], cls: Mapping[str, Any]) -> tuple[bool, ...]:
    """l2norm, no final state, intermediate states, packed multiply-adds, same rows read and written."""
    packed = int(cls["arch"].removeprefix("sm_").rstrip("af")) >= PACKED_FMA_SINCE
    norm, update, steps = axes["qk_l2norm"], axes["update_state"], axes["intermediate_states"]
    return norm, not update, steps, packed, not axes["output_indices"]


def wide_t1(entry: Any, axes: Mapping[str, Any], cls: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    return entry, (*tensors(axes), *sizes(axes), *flags(axes, cls), driver.CUstream(0))


UNUSED = (None, None)
"""accepted_steps and ssm_state_indices."""


def wide(entry: Any, axes: Mapping[str, Any], cls: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    # Outputs are wanted; no recovery steps, accepted steps or scatter into the pool.
    more = (False, 0, False, False, False)
    return entry, (*tensors(axes), *UNUSED, *sizes(axes), *flags(axes, cls), *more, driver.CUstream(0))


def narrow(entry: Any, axes: Mapping[str, Any], cls: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    more = (False, False, False, False)
    return entry, (*tensors(axes), *UNUSED, *sizes(axes), *flags(axes, cls), *more, driver.CUstream(0))
