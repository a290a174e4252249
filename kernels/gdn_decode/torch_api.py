"""``gated_delta_rule_decode_pretranspose`` for torch, with the arguments of
``flashinfer.gdn_decode.gated_delta_rule_decode_pretranspose``: its bfloat16-state path.

Say once which bundle serves a device, then call::

    use_bundle(open_bundle("dist/sm_90a-linux-x86_64"))
    out, pool = gated_delta_rule_decode_pretranspose(q, k, v, None, A_log, a, dt_bias, b, initial_state=pool,
    initial_state_indices=rows)

Every call that upstream serves and this does not raises an error of ``kernseal.loader.errors``.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from kernseal.kernels.gdn_decode.rule import kernel_for
from kernseal.loader import addresses, serving
from kernseal.loader.addresses import check_dtype, dense, dtype_name, launch_on, on_device
from kernseal.loader.errors import InvalidArgument, Unsupported
from kernseal.loader.op import Op
from kernseal.loader.serving import Served, served_by, use_bundle
from kernseal.loader.tensors import torch_stream

__all__ = ["REPLACES", "gated_delta_rule_decode_pretranspose", "prepare", "use_bundle"]

_BF16 = (torch.bfloat16,)
_F32 = (torch.float32,)
_INDEX_DTYPES = {torch.int32: "i32", torch.int64: "i64"}
_D = 128

prepare = functools.partial(serving.prepare, "gdn_decode")
"""Prepare a variant ahead of the first call; see ``kernseal.loader.serving.prepare``.

Calls choose among variants by batch size, see ``kernels/gdn_decode/rule.py``: prepare each that may come.
"""


def gated_delta_rule_decode_pretranspose(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor | None,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    use_qk_l2norm: bool = True,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    output_state_indices: torch.Tensor | None = None,
    intermediate_states_buffer: torch.Tensor | None = None,
    disable_state_update: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """T tokens of every sequence through the gated delta rule, on torch's current stream.

    Which kernel runs follows from the batch as in upstream; a variant is prepared at its first use on a device.

    Args:
        q: [B, T, Hq, 128] bfloat16; slices of a wider projection will do, here and in k, v, a and b.
        k: [B, T, Hq, 128] bfloat16.
        v: [B, T, Hv, 128] bfloat16.
        state: [B, Hv, V, K] bfloat16, updated in place; None with ``initial_state``.
        A_log: [Hv] float32.
        a: [B, T, Hv] bfloat16.
        dt_bias: [Hv] float32, or bfloat16, which every call then converts.
        b: [B, T, Hv] bfloat16.
        scale: multiplies the output; None is 1/sqrt(128).
        output: [B, T, Hv, 128] bfloat16 to write to; None allocates.
        use_qk_l2norm: normalise q and k.
        initial_state: [rows, Hv, V, K] bfloat16, a pool; rows may be padded.
        initial_state_indices: [B] int32 or int64, rows to read and, without ``output_state_indices``, to write. One outside
            the pool marks padding: its output is zeros and the pool is left alone, where upstream uses row 0.
        output_state_indices: [B], rows to write.
        intermediate_states_buffer: [B, >= T, Hv, V, K] bfloat16, dense but for the distance of sequences; T > 1 only.
        disable_state_update: leave the pool as it is; T > 1 only. It alone says so: upstream leaves the pool as it is also
            where a large batch comes with a buffer.
        backend: "auto" or "flashinfer".

    Returns:
        The output, and the pool or ``state``.

    Raises:
        Unsupported: an argument asks for what these kernels do not do, or the bundle lacks the variant.
        InvalidArgument: a tensor's device, type, shape or strides do not fit.
        Capturing: under graph capture before the variant was prepared.
        NotPrepared: no bundle serves the device; see ``use_bundle``.
    """
    if backend not in ("auto", "flashinfer"):
        raise Unsupported(f"backend: {backend!r} is not supported; supported: auto, flashinfer")
    device = q.get_device()
    served = served_by(device)
    batch, tokens, hq, _ = _shape("q", q, 4)
    hv = _shape("v", v, 4)[2]
    pool, rows, written = _pool(state, initial_state, initial_state_indices, output_state_indices, batch)
    wanted = _Wanted(
        tokens,
        *kernel_for(tokens, batch * hv, addresses.sm_count(device)),
        rows.dtype,
        use_qk_l2norm,
        written is not None,
        intermediate_states_buffer is not None,
        not disable_state_update,
    )
    op = served.ready("gdn_decode", wanted, _prepare)
    if output is None:
        output = torch.empty((batch, tokens, hv, _D), dtype=torch.bfloat16, device=q.device)
    heads, gates = (batch, tokens, hv, _D), (batch, tokens, hv)
    q_at, q_stride = _tokens("q", q, (batch, tokens, hq, _D), device)
    k_at, k_stride = _tokens("k", k, (batch, tokens, hq, _D), device)
    v_at, v_stride = _tokens("v", v, heads, device)
    o_at, o_stride = _tokens("output", output, heads, device)
    a_at, a_stride = _tokens("a", a, gates, device)
    b_at, b_stride = _tokens("b", b, gates, device)
    state_at, row_stride = _states("state" if initial_state is None else "initial_state", pool, hv, device)
    buffer_at, steps = _buffer(intermediate_states_buffer, (batch, tokens, hv), device)
    bias = dt_bias.float() if dt_bias.dtype == torch.bfloat16 else dt_bias
    run = {
        "num_q_heads": hq,
        "num_v_heads": hv,
        "head_dim": _D,
        "scale": 1.0 / math.sqrt(_D) if scale is None else scale,
        "batch_size": batch,
        "pool_rows": pool.shape[0],
        "intermediate_steps": steps,
        "q_token_stride": q_stride,
        "k_token_stride": k_stride,
        "v_token_stride": v_stride,
        "o_token_stride": o_stride,
        "a_token_stride": a_stride,
        "b_token_stride": b_stride,
        "state_row_stride": row_stride,
        "q": q_at,
        "k": k_at,
        "v": v_at,
        "a": a_at,
        "b": b_at,
        "a_log": dense("A_log", A_log, _F32, hv, device),
        "dt_bias": dense("dt_bias", bias, _F32, hv, device),
        "o": o_at,
        "state": state_at,
        "state_indices": dense("initial_state_indices", rows, (rows.dtype,), batch, device),
        "output_state_indices": (
            0 if written is None else dense("output_state_indices", written, (rows.dtype,), batch, device)
        ),
        "intermediate_states": buffer_at,
        "stream": torch_stream(device),
    }
    launch_on(device, op, run)
    return output, pool


REPLACES = {
    "flashinfer.gdn_decode": {"gated_delta_rule_decode_pretranspose": gated_delta_rule_decode_pretranspose}
}
"""What stands where in FlashInfer; see ``kernseal.loader.flashinfer``."""


class _Wanted(NamedTuple):
    """What decides the variant."""

    tokens: int
    wide: bool
    tile_v: int
    index_dtype: torch.dtype
    qk_l2norm: bool
    output_indices: bool
    intermediate_states: bool
    update_state: bool


def _prepare(served: Served, wanted: _Wanted) -> Op:
    index_dtype = dtype_name(_INDEX_DTYPES, "initial_state_indices", wanted.index_dtype)
    return served.prepare("gdn_decode", **{**wanted._asdict(), "index_dtype": index_dtype})


def _shape(name: str, tensor: torch.Tensor, rank: int) -> torch.Size:
    if tensor.ndim != rank or tensor.shape[-1] != _D:
        raise InvalidArgument(f"{name}: shape {tuple(tensor.shape)}; expected [B, T, heads, {_D}]")
    return tensor.shape


def _pool(
    state: torch.Tensor | None,
    initial: torch.Tensor | None,
    rows: torch.Tensor | None,
    written: torch.Tensor | None,
    batch: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The pool, the rows that are read and, where they are others, those that are written."""
    if (initial is None) != (rows is None):
        raise InvalidArgument("initial_state and initial_state_indices must be given together")
    if initial is not None and rows is not None:
        if written is None or written is rows:
            return initial, rows, None
        return initial, rows, written.to(rows.dtype)
    if written is not None:
        raise InvalidArgument("output_state_indices: needs initial_state")
    if state is None:
        raise InvalidArgument("state: missing; pass it or initial_state")
    if state.shape[:1] != (batch,):
        raise InvalidArgument(f"state: shape {tuple(state.shape)}; expected [{batch}, Hv, {_D}, {_D}]")
    return state, torch.arange(batch, dtype=torch.int32, device=state.device), None


def _tokens(name: str, tensor: torch.Tensor, shape: tuple[int, ...], device: int) -> tuple[int, int]:
    """The address and the distance of tokens, which must be the same within and between sequences."""
    check_dtype(name, tensor, _BF16)
    if tensor.shape != shape:
        raise InvalidArgument(f"{name}: shape {tuple(tensor.shape)}; expected {shape}")
    batch, tokens = shape[:2]
    sequence, token, *inner = tensor.stride()
    # What there is only one of may have any stride.
    if tokens == 1:
        token = sequence if batch > 1 else math.prod(shape[2:])
    elif batch > 1 and sequence != tokens * token:
        raise Unsupported(f"{name}: strides {tensor.stride()}; sequences must follow each other")
    if batch * tokens > 1 and token == 0:
        raise Unsupported(f"{name}: strides {tensor.stride()}; tokens must not share memory")
    if (len(inner) == 2 and shape[2] > 1 and inner[0] != _D) or (shape[-1] > 1 and inner[-1] != 1):
        raise Unsupported(f"{name}: strides {tensor.stride()}; what belongs to a token must be dense")
    return on_device(name, tensor, device), token


def _states(name: str, pool: torch.Tensor, hv: int, device: int) -> tuple[int, int]:
    """The address and the distance of rows."""
    if pool.dtype != torch.bfloat16:
        raise Unsupported(f"{name}: {pool.dtype}; supported: torch.bfloat16")
    if pool.shape[1:] != (hv, _D, _D):
        raise Unsupported(f"{name}: shape {tuple(pool.shape)}; supported: [rows, {hv}, {_D}, {_D}]")
    row, head, *inner = pool.stride()
    if inner != [_D, 1] or (hv > 1 and head != _D * _D) or (pool.shape[0] > 1 and row == 0):
        raise Unsupported(f"{name}: strides {pool.stride()}; a row must be dense and none shared")
    return on_device(name, pool, device), row if pool.shape[0] > 1 else hv * _D * _D


def _buffer(buffer: torch.Tensor | None, shape: tuple[int, int, int], device: int) -> tuple[int, int]:
    """The address of the intermediate states, and the steps for which each sequence has room."""
    if buffer is None:
        return 0, 0
    batch, tokens, hv = shape
    name, step = "intermediate_states_buffer", hv * _D * _D
    check_dtype(name, buffer, _BF16)
    given = tuple(buffer.shape)
    if buffer.ndim != 5 or (given[0], *given[2:]) != (batch, hv, _D, _D) or given[1] < tokens:
        raise InvalidArgument(f"{name}: shape {given}; expected ({batch}, >= {tokens}, {hv}, {_D}, {_D})")
    sequence, *inner = buffer.stride()
    steps = sequence // step if batch > 1 else given[1]
    if inner != [step, _D * _D, _D, 1] or sequence % step != 0:
        raise Unsupported(f"{name}: strides {buffer.stride()}; steps must be dense, {step} elements each")
    return on_device(name, buffer, device), steps
