"""``chunk_gated_delta_rule`` for torch, with the arguments of
``flashinfer.gdn_prefill.chunk_gated_delta_rule``.

Say once which bundle serves a device, then call::

    use_bundle(open_bundle("dist/sm_90a-linux-x86_64"))
    out, state = chunk_gated_delta_rule(q, k, v, g, beta, initial_state=s, output_final_state=True,
    cu_seqlens=ends)

Every call that upstream serves and this does not raises an error of ``kernseal.loader.errors``.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, TypeAlias

import torch

from kernseal.kernels.gdn_prefill.states import (
    DTYPES,
    INDEX_DTYPES,
    STATE_DTYPES,
    States,
    same_order,
    workspace,
)
from kernseal.kernels.gdn_prefill_cp.torch_api import cutting_pays
from kernseal.loader import serving
from kernseal.loader.addresses import dtype_name, look, on, sm_count
from kernseal.loader.errors import InvalidArgument, Unsupported
from kernseal.loader.op import Op
from kernseal.loader.serving import Served, known, served_by, use_bundle
from kernseal.loader.tensors import torch_stream

__all__ = ["REPLACES", "chunk_gated_delta_rule", "prepare", "use_bundle"]

_Result: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"

_CHANGING = (
    *("q", "k", "v", "alpha", "beta", "initial_state", "cu_seqlens", "state_indices", "output_state_indices"),
    *("checkpoints", "checkpoint_cu_starts", "o", "final_state", "workspace", "scale", "stream"),
)
"""Fields that are not among what is remembered of a call: the addresses of the tensors, the scale, the stream."""

prepare = functools.partial(serving.prepare, "gdn_prefill")
"""Prepare a variant ahead of the first call; see ``kernseal.loader.serving.prepare``."""


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: torch.Tensor | None = None,
    output_state: torch.Tensor | None = None,
    state_checkpoints: torch.Tensor | None = None,
    checkpoint_cu_starts: torch.Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: str | bool = "auto",
    state_indices: torch.Tensor | None = None,
    _cp_chunk_len: int | None = None,
    backend: str = "auto",
    max_seqlen: int | None = None,
    *,
    gate_domain: str = "linear",
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    beta_is_logit: bool = False,
    cu_seqlens_cpu: object = None,
    output_state_indices: torch.Tensor | None = None,
    checkpoint_state_indices: torch.Tensor | None = None,
    prefix_lens: torch.Tensor | None = None,
    cut_where_it_pays: bool = False,
) -> _Result:
    """Gated delta rule over packed sequences, on torch's current stream.

    The gate ``g`` is the LINEAR decay exp(log gate). A variant is prepared at its first use on a device.

    Args:
        q: [T, Hq, 128], bfloat16 or float16; a token slice of a wider tensor will do.
        k: [T, Hk, 128], likewise.
        v: [T, Hv, 128], likewise. H below is max(Hq, Hv).
        g: [T, H] float32 in (0, 1]; None is no decay.
        beta: [T, H] float32; None is 1.
        scale: multiplies the output; None or 0 is 1/sqrt(128).
        initial_state: [N or rows, H, V, K], float32 or bfloat16, contiguous (HVK) or the transposed view of a
            contiguous [.., K, V] tensor (HKV); None is zeros. With ``state_indices`` a pool of rows.
        output_final_state: also return the final state.
        cu_seqlens: [N + 1] int32 or int64; required.
        output: [T, H, 128] to write to; None allocates.
        output_state: where final states go, laid out like ``initial_state``; None allocates when packed.
            Pooled
            calls that want the final state must pass it.
        state_checkpoints: [count, H, V, K] to write to, of the state's type.
        checkpoint_cu_starts: [N + 1] running counts of seq_len // checkpoint_every_n_tokens.
        checkpoint_every_n_tokens: 0, or a multiple of 64.
        state_indices: [N] rows to read (negative: the zero state) and, without ``output_state_indices``,
            to write.
        output_state_indices: [N] rows to write (negative: nowhere).
        use_cp: True cuts sequences into chunks that run side by side (op ``gdn_prefill_cp``, SM90, SM120 and SM121), which
            pays for few long ones; False does not, nor does "auto" without ``cut_where_it_pays``.
        _cp_chunk_len: tokens of a chunk, a multiple of 64; implies ``use_cp``. None is upstream's choice.
        max_seqlen: with ``use_cp`` at least the longest sequence; None is T. Else a hint that is not needed.
        cu_seqlens_cpu: a hint of upstream, not needed here.
        cut_where_it_pays: let ``use_cp="auto"`` be True where that was measured to be faster, on SM90 alone
            (``kernseal.kernels.gdn_prefill_cp.torch_api.cutting_pays``). The longest sequence is ``max_seqlen``, or without
            one T / N, which it has at least. Not an argument of upstream. False gives a sequence the same bits whatever else
            is in the batch.

    Returns:
        The output, or (output, final state) with ``output_final_state``.

    Raises:
        Unsupported: an argument asks for what these kernels do not do, or the bundle lacks the variant.
        InvalidArgument: a tensor's device, type, shape or strides do not fit.
        Capturing: under graph capture before the variant was prepared.
        NotPrepared: no bundle serves the device; see ``use_bundle``.
    """
    cut: dict[str, int] = {}
    device = q.get_device()
    pays = cut_where_it_pays and use_cp == "auto" and _pays(device, q, v, cu_seqlens, max_seqlen)
    if use_cp is True or _cp_chunk_len is not None or pays:
        cut = {"max_seqlen": max_seqlen or 0, "chunk_len": _cp_chunk_len or 0}
    tensors = (
        *(q, k, v, g, beta, initial_state, cu_seqlens, state_indices, output_state_indices),
        *(state_checkpoints, checkpoint_cu_starts, output, output_state),
    )
    flags = (
        *(bool(output_final_state), checkpoint_every_n_tokens, use_cp, backend, gate_domain),
        *(use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log is None, dt_bias is None, beta_is_logit),
        *(checkpoint_state_indices is None, prefix_lens is None),
    )
    shown, addresses = look(tensors)
    key = "chunk_gated_delta_rule", flags, shown
    call: _Known | None = None if cut else known(device, key)
    if call is not None:
        with on(device):
            return call.launch(addresses, q, output, output_state, scale)
    _refuse(
        use_qk_l2norm_in_kernel=(use_qk_l2norm_in_kernel, "normalise q and k first"),
        backend=(backend not in ("auto", "flashinfer"), "supported: auto, flashinfer"),
        gate_domain=(gate_domain != "linear", "pass exp(g)"),
        use_gate_in_kernel=(use_gate_in_kernel or A_log is not None or dt_bias is not None, "pass exp(g)"),
        beta_is_logit=(beta_is_logit, "pass sigmoid(beta)"),
        checkpoint_state_indices=(checkpoint_state_indices is not None, "checkpoints are stored in order"),
        prefix_lens=(prefix_lens is not None, "checkpoints count from the first token of the call"),
    )
    if use_cp not in ("auto", True, False):
        raise InvalidArgument(f"use_cp: {use_cp!r}; must be 'auto', True or False")
    if cu_seqlens is None:
        raise InvalidArgument("cu_seqlens: missing")
    if output_state_indices is not None and state_indices is None:
        raise InvalidArgument("output_state_indices: needs state_indices")
    if state_indices is not None and output_final_state and output_state is None:
        raise InvalidArgument("output_state: must be the pool to write to when state_indices is given")
    heads = max(q.shape[1], v.shape[1])
    num_seqs = cu_seqlens.shape[0] - 1
    if cut:
        # Those kernels always read both.
        g, beta = (
            q.new_ones((q.shape[0], heads), dtype=torch.float32) if x is None else x for x in (g, beta)
        )
    with on(device):
        if state_indices is None or (initial_state is None and output_state is None):
            states = _packed(initial_state, output_state, (num_seqs, heads, q.shape[2], q.shape[2]), q.device)
        else:
            ends = state_indices, output_state_indices
            states = _pooled(initial_state, output_state, *ends, cu_seqlens.dtype)
        wanted = _Wanted(
            dtype=dtype_name(DTYPES, "q", q.dtype),
            state_dtype=dtype_name(STATE_DTYPES, "state", states.final.dtype),
            state_layout="hkv" if states.transposed else "hvk",
            index_dtype=dtype_name(INDEX_DTYPES, "cu_seqlens", cu_seqlens.dtype),
            initial_state=states.initial is not None,
            pooled=states.read_rows is not None,
            alpha=g is not None,
            beta=beta is not None,
            checkpoints=checkpoint_every_n_tokens > 0,
        )
        name, prepare_op = ("gdn_prefill_cp", _prepare_cut) if cut else ("gdn_prefill", _prepare)
        served = served_by(device)
        op = served.ready(name, wanted, prepare_op)
        if output is None:
            output = torch.empty((q.shape[0], heads, q.shape[2]), dtype=q.dtype, device=q.device)
        run = {
            "q": q,
            "k": k,
            "v": v,
            "o": output,
            "alpha": g,
            "beta": beta,
            "initial_state": states.initial,
            "final_state": states.final,
            "cu_seqlens": cu_seqlens,
            "state_indices": states.read_rows,
            "output_state_indices": states.write_rows,
            "checkpoints": state_checkpoints,
            "checkpoint_cu_starts": checkpoint_cu_starts,
            "checkpoint_every": checkpoint_every_n_tokens,
            "scale": scale or 1.0 / math.sqrt(q.shape[2]),
            "workspace": workspace(op, q, k, v, cu_seqlens, **cut),
            "stream": torch_stream(device),
            **cut,
        }
        op.run(**run)
        # Where the rows are the caller's own, so is all memory but what is made afresh for every call.
        own_rows = states.read_rows is state_indices and states.write_rows is output_state_indices
        if own_rows and not cut:
            served.remember(key, _Known(device, op, run, states.transposed, bool(output_final_state)))
    return (output, states.logical_final) if output_final_state else output


REPLACES = {
    "flashinfer.gdn_prefill": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
    "flashinfer": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
}
"""What stands where in FlashInfer; see ``kernseal.loader.flashinfer``."""


def _refuse(**asked: tuple[bool, str]) -> None:
    for name, (given, instead) in asked.items():
        if given:
            raise Unsupported(f"{name}: not supported; {instead}")


def _pays(
    device: int, q: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None, max_seqlen: int | None
) -> bool:
    """Whether cutting is faster, as measured on SM90."""
    num_seqs = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if num_seqs < 1 or served_by(device).sm != "sm_90a":
        return False
    longest = max_seqlen or -(-q.shape[0] // num_seqs)
    return cutting_pays(num_seqs * max(q.shape[1], v.shape[1]), longest, sm_count(device))


class _Wanted(NamedTuple):
    """What decides the variant: the axes of ``kernel.yaml``, by name."""

    dtype: str
    state_dtype: str
    state_layout: str
    index_dtype: str
    initial_state: bool
    pooled: bool
    alpha: bool
    beta: bool
    checkpoints: bool


class _Known:
    """A call that was made: with other memory and the same in all else, it is made again without another look."""

    def __init__(
        self, device: int, op: Op, run: dict[str, Any], transposed: bool, returns_state: bool
    ) -> None:
        self._call = op.settle(_CHANGING, **run)
        self._device = device
        self._scale = 1.0 / math.sqrt(run["q"].shape[2])
        self._output, self._state = tuple(run["o"].shape), tuple(run["final_state"].shape)
        self._state_dtype, self._workspace = run["final_state"].dtype, run["workspace"].numel()
        self._transposed, self._returns_state = transposed, returns_state

    def launch(
        self,
        addresses: list[int],
        q: torch.Tensor,
        output: torch.Tensor | None,
        state: torch.Tensor | None,
        scale: float | None,
    ) -> _Result:
        """``addresses``: of the caller's tensors."""
        *given, output_at, state_at = addresses
        if output is None:
            output = q.new_empty(self._output)
            output_at = output.data_ptr()
        if state is None:
            state = q.new_empty(self._state, dtype=self._state_dtype)
            state_at = state.data_ptr()
            if self._transposed:
                state = state.transpose(-1, -2)
        scratch = q.new_empty(self._workspace, dtype=torch.uint8)
        stream = torch_stream(self._device)
        self._call.launch([*given, output_at, state_at, scratch.data_ptr(), scale or self._scale, stream])
        return (output, state) if self._returns_state else output


def _prepare(served: Served, wanted: _Wanted) -> Op:
    return served.prepare("gdn_prefill", **wanted._asdict())


def _prepare_cut(served: Served, wanted: _Wanted) -> Op:
    axes = wanted._asdict()
    return served.prepare(
        "gdn_prefill_cp", **{name: axes[name] for name in axes if name not in ("alpha", "beta")}
    )


def _packed(
    initial: torch.Tensor | None, final: torch.Tensor | None, shape: tuple[int, ...], device: torch.device
) -> States:
    transposed = same_order(initial, final, "output_state")
    if final is None:  # the kernel always writes it
        final = torch.empty(shape, dtype=torch.float32 if initial is None else initial.dtype, device=device)
    elif transposed:
        final = final.transpose(-1, -2)
    if initial is not None and transposed:
        initial = initial.transpose(-1, -2)
    return States(initial, final, transposed)


def _pooled(
    initial: torch.Tensor | None,
    final: torch.Tensor | None,
    read_rows: torch.Tensor,
    write_rows: torch.Tensor | None,
    index_dtype: torch.dtype,
) -> States:
    transposed = same_order(initial, final, "output_state")
    read = read_rows.to(index_dtype)
    write = None if write_rows is None else write_rows.to(index_dtype)
    # The pool that is missing is replaced by the one that is there, at rows that are not read or not written.
    if initial is None:
        read, write = torch.full_like(read, -1), read if write is None else write
    elif final is None:
        write = torch.full_like(read, -1)
    pools = [pool for pool in (initial, final) if pool is not None]
    source, target = pools[0], pools[-1]
    if transposed:
        source, target = source.transpose(-1, -2), target.transpose(-1, -2)
    return States(source, target, transposed, read, write)
