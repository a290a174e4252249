"""What the torch functions of GDN prefill have in common, whichever kernels run: states, their memory order, and scratch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernseal.loader.errors import InvalidArgument, Unsupported
from kernseal.loader.op import Op

DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
STATE_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
INDEX_DTYPES = {torch.int32: "i32", torch.int64: "i64"}


class States(NamedTuple):
    """The states of a call in memory order: what HKV callers pass is transposed back to what is
    contiguous."""

    initial: torch.Tensor | None
    final: torch.Tensor
    transposed: bool
    read_rows: torch.Tensor | None = None
    write_rows: torch.Tensor | None = None

    @property
    def logical_final(self) -> torch.Tensor:
        """The final state as [.., V, K]."""
        return self.final.transpose(-1, -2) if self.transposed else self.final


def same_order(initial: torch.Tensor | None, final: torch.Tensor | None, final_name: str) -> bool:
    """Whether the states that are given are the transposed views of [.., K, V] memory.

    Raises:
        InvalidArgument: one has not four dimensions.
        Unsupported: one is neither that nor contiguous, or they differ.
    """
    orders = {
        _transposed(n, t) for n, t in (("initial_state", initial), (final_name, final)) if t is not None
    }
    if len(orders) > 1:
        raise Unsupported(f"{final_name}: its memory order must be that of initial_state")
    return orders == {True}


def _transposed(name: str, state: torch.Tensor) -> bool:
    if state.ndim != 4:
        raise InvalidArgument(f"{name}: shape {tuple(state.shape)}; expected [N or rows, H, V, K]")
    if state.stride(-1) == 1:
        return False
    if state.stride(-2) == 1:
        return True
    raise Unsupported(f"{name}: strides {state.stride()}; V or K must be contiguous")


def workspace(
    op: Op, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, **more: int
) -> torch.Tensor:
    """Scratch for a call on these tensors, and on ``more`` fields of args that say how much it is."""
    size = op.workspace_size(
        num_q_heads=q.shape[1],
        num_k_heads=k.shape[1],
        num_v_heads=v.shape[1],
        head_dim=q.shape[2],
        total_tokens=q.shape[0],
        num_seqs=cu_seqlens.shape[0] - 1,
        **more,
    )
    return torch.empty(size, dtype=torch.uint8, device=q.device)
