"""``cp_delta_rule`` for torch, with the arguments of FlashInfer's ``cp_delta_rule_dsl_sm90`` and
``cp_delta_rule_dsl_sm120``, and two rules for when to call it: ``cutting_pays``, which was measured, and ``should_use_cp``,
which is upstream's.

Say once which bundle serves a device, then call::

    use_bundle(open_bundle("dist/sm_90a-linux-x86_64"))
    if cutting_pays(num_seqs * num_heads, longest, sm_count):
        cp_delta_rule(o, state, q, k, v, alpha, beta, cu_seqlens, scale, initial_state=s, max_seqlen=longest)

Every call that upstream serves and this does not raises an error of ``kernseal.loader.errors``.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from kernseal.kernels.gdn_prefill.states import (
    DTYPES,
    INDEX_DTYPES,
    STATE_DTYPES,
    States,
    same_order,
    workspace,
)
from kernseal.loader import serving
from kernseal.loader.addresses import dtype_name
from kernseal.loader.errors import Unsupported
from kernseal.loader.op import Op
from kernseal.loader.serving import Served, served_by, use_bundle
from kernseal.loader.tensors import torch_stream

__all__ = ["REPLACES", "cp_delta_rule", "cutting_pays", "prepare", "should_use_cp", "use_bundle"]

_GDDR = ("geforce", "rtx", "workstation")
_GRANULARITY = 512
_PAYS = ((8, 2048), (4, 4096))
"""At most one in so many SMs has a sequence's head to work on, and so many tokens at least."""


def should_use_cp(parallel_work: int, num_sms: int, device_name: str) -> bool:
    """Whether upstream's ``use_cp="auto"`` cuts sequences into chunks, on SM90 and SM120: where the kernel that does not
    would leave half of the SMs idle (two thirds on a device with GDDR memory). Lengths play no part.

    Args:
        parallel_work: thread blocks of that kernel: sequences * max(q heads, v heads).
        num_sms: of the device.
        device_name: as the driver says it. Names with "GeForce", "RTX" or "Workstation" count as GDDR.
    """
    share = 3 if any(word in device_name.lower() for word in _GDDR) else 2
    return parallel_work * share < num_sms


def cutting_pays(parallel_work: int, longest: int, num_sms: int) -> bool:
    """Whether this op is faster than ``gdn_prefill``, as measured on an H200 with the kernels for SM90.

    Of 102 measured problems none takes more than 3.1 % longer than with the faster op (docs/kernel-benchmarks.md). Neither
    SM120 nor SM121 were measured. Where it is, the scratch is a tenth to a quarter of what Triton's kernels take,
    that of ``gdn_prefill`` next to nothing; and the bits of a sequence depend on how it is cut, which depends on the batch.

    Args:
        parallel_work: sequences * max(q heads, v heads).
        longest: tokens of the longest sequence.
        num_sms: of the device.
    """
    return any(parallel_work * share <= num_sms and longest >= tokens for share, tokens in _PAYS)


prepare = functools.partial(serving.prepare, "gdn_prefill_cp")
"""Prepare a variant ahead of the first call; see ``kernseal.loader.serving.prepare``."""


def cp_delta_rule(
    o: torch.Tensor,
    state: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    *,
    initial_state: torch.Tensor | None = None,
    state_indices: torch.Tensor | None = None,
    state_checkpoints: torch.Tensor | None = None,
    checkpoint_cu_starts: torch.Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    max_seqlen: int | None = None,
    cp_chunk_len: int | None = None,
    cp_chunk_len_granularity: int = _GRANULARITY,
) -> None:
    """Gated delta rule over few long packed sequences, on torch's current stream.

    A variant is prepared at its first use on a device. The workspace comes from torch's allocator.

    Args:
        o: [T, H, 128], written; H is max(Hq, Hv).
        state: final states, [N or rows, H, V, K], written; None for none. Laid out like ``initial_state``, of its type.
        q: [T, Hq, 128], bfloat16 or float16; a token slice of a wider tensor will do.
        k: [T, Hk, 128], likewise.
        v: [T, Hv, 128], likewise.
        alpha: [T, H] float32, the LINEAR decay exp(log gate).
        beta: [T, H] float32.
        cu_seqlens: [N + 1] int32 or int64.
        scale: multiplies the output.
        initial_state: [N or rows, H, V, K], float32 or bfloat16, contiguous (HVK) or the transposed view of a contiguous
            [.., K, V] tensor (HKV); None is zeros.
        state_indices: [N], the rows to read and write; negative: read zeros, write nothing.
        state_checkpoints: [count, H, V, K], of the state's type, written.
        checkpoint_cu_starts: [N + 1], running counts of seq_len // checkpoint_every_n_tokens.
        checkpoint_every_n_tokens: 0, or a multiple of 64.
        max_seqlen: at least the longest sequence; None is T, which launches idle thread blocks where there are several.
        cp_chunk_len: tokens of a chunk, a multiple of 64; None is upstream's choice.
        cp_chunk_len_granularity: 512.

    Raises:
        Unsupported: an argument asks for what these kernels do not do, or the bundle lacks the variant.
        InvalidArgument: a tensor's device, type, shape or strides do not fit.
        Capturing: under graph capture before the variant was prepared.
        NotPrepared: no bundle serves the device; see ``use_bundle``.
    """
    if cp_chunk_len_granularity != _GRANULARITY:
        raise Unsupported(
            f"cp_chunk_len_granularity: {cp_chunk_len_granularity}; supported: {_GRANULARITY}, or pass cp_chunk_len"
        )
    num_seqs = cu_seqlens.shape[0] - 1
    with torch.cuda.device(q.device):
        made = _states(
            initial_state, state, state_indices, (num_seqs, o.shape[1], q.shape[2], q.shape[2]), cu_seqlens
        )
        wanted = _Wanted(
            dtype=dtype_name(DTYPES, "q", q.dtype),
            state_dtype=dtype_name(STATE_DTYPES, "state", made.final.dtype),
            state_layout="hkv" if made.transposed else "hvk",
            index_dtype=dtype_name(INDEX_DTYPES, "cu_seqlens", cu_seqlens.dtype),
            initial_state=made.initial is not None,
            pooled=made.read_rows is not None,
            checkpoints=checkpoint_every_n_tokens > 0,
        )
        op = served_by(q.get_device()).ready("gdn_prefill_cp", wanted, _prepare)
        cut = {"max_seqlen": max_seqlen or 0, "chunk_len": cp_chunk_len or 0}
        op.run(
            q=q,
            k=k,
            v=v,
            o=o,
            alpha=alpha,
            beta=beta,
            initial_state=made.initial,
            final_state=made.final,
            cu_seqlens=cu_seqlens,
            state_indices=made.read_rows,
            output_state_indices=made.write_rows,
            checkpoints=state_checkpoints,
            checkpoint_cu_starts=checkpoint_cu_starts,
            checkpoint_every=checkpoint_every_n_tokens,
            scale=scale,
            workspace=workspace(op, q, k, v, cu_seqlens, **cut),
            stream=torch_stream(q.get_device()),
            **cut,
        )


_PLACE = "flashinfer.gdn_kernels"
_FUNCTIONS = {f"cp_delta_rule_dsl_{sm}": cp_delta_rule for sm in ("sm90", "sm120")}
REPLACES = {
    f"{_PLACE}.delta_rule_dsl.delta_rule_cp_sm90": {"cp_delta_rule_dsl_sm90": cp_delta_rule},
    f"{_PLACE}.delta_rule_dsl.delta_rule_cp_sm120": {"cp_delta_rule_dsl_sm120": cp_delta_rule},
    f"{_PLACE}.delta_rule_dsl": _FUNCTIONS,  # None in both without CuTe DSL
    _PLACE: _FUNCTIONS,
}
"""What stands where in FlashInfer; see ``kernseal.loader.flashinfer``."""


class _Wanted(NamedTuple):
    """What decides the variant: the axes of ``kernel.yaml``, by name."""

    dtype: str
    state_dtype: str
    state_layout: str
    index_dtype: str
    initial_state: bool
    pooled: bool
    checkpoints: bool


def _prepare(served: Served, wanted: _Wanted) -> Op:
    return served.prepare("gdn_prefill_cp", **wanted._asdict())


def _states(
    initial: torch.Tensor | None,
    final: torch.Tensor | None,
    rows: torch.Tensor | None,
    shape: tuple[int, ...],
    cu_seqlens: torch.Tensor,
) -> States:
    transposed = same_order(initial, final, "state")
    if initial is not None and final is not None and initial.dtype != final.dtype:
        raise Unsupported("state: its type must be that of initial_state")
    if transposed:
        initial, final = (None if one is None else one.transpose(-1, -2) for one in (initial, final))
    source, target = final if initial is None else initial, initial if final is None else final
    if rows is None or source is None or target is None:
        if final is None:  # the kernels always write it
            dtype = torch.float32 if initial is None else initial.dtype
            final = torch.empty(shape, dtype=dtype, device=cu_seqlens.device)
        return States(initial, final, transposed)
    # The pool that is missing is replaced by the one that is there, at rows that are not read or not written.
    rows = rows.to(cu_seqlens.dtype)
    nowhere = torch.full_like(rows, -1)
    read, write = nowhere if initial is None else rows, nowhere if final is None else rows
    return States(source, target, transposed, read, write)
