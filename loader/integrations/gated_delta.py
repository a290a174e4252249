"""The chunked gated delta rule, as transformers calls it, on op gdn_prefill."""

from __future__ import annotations

import torch

from kernseal.loader.errors import InvalidArgument
from kernseal.loader.op import Op

from .variants import Variants, dtype_name, launching

OP = "gdn_prefill"
_NORM_EPSILON = 1e-6  # as in transformers and in fla


class GatedDelta:
    """transformers' rule on one model's variants.

    transformers keeps states as [N, H, K, V], the kernel's HKV layout, and gives the logarithm of the decay. The kernel
    wants the decay itself, q and k normalised, and sequences packed one after the other.
    """

    def __init__(self, variants: Variants) -> None:
        self._variants = variants

    def op(self, dtype: str, device: torch.device) -> Op:
        """The one variant that serves prompts and their continuations; a first call starts from a state of zeros."""
        return self._variants.op(
            OP,
            device,
            dtype=dtype,
            state_dtype="f32",
            state_layout="hkv",
            index_dtype="i64",
            initial_state=True,
            pooled=False,
            alpha=True,
            beta=True,
            checkpoints=False,
        )

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *,
        k_heads: int,
        initial_state: torch.Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the rule.

        Args:
            query, key: [B, T, H, K], each head of ``k_heads`` repeated for the value heads it serves.
            value: [B, T, H, V].
            g: [B, T, H] log of the decay.
            beta: [B, T, H].
            k_heads: heads of query and key before they were repeated.
            initial_state: [N, H, K, V], or None for zeros. N is B, or the sequences of ``cu_seqlens``.
            use_qk_l2norm_in_kernel: normalise query and key along K first.
            cu_seqlens: [N + 1] where the sequences begin in a batch of one, the last entry T; None for B sequences of T.

        Returns:
            The output [B, T, H, V] of query's type, and the final state [N, H, K, V] in float32.

        Raises:
            Unsupported: an element type or variant that the bundle lacks.
            InvalidArgument: shapes do not fit.
        """
        batch, tokens, heads, dim = value.shape
        op = self.op(dtype_name(query, "query"), value.device)
        ends = _ends(batch, tokens, cu_seqlens, value.device)
        if initial_state is None:
            start = final = value.new_zeros((len(ends) - 1, heads, query.shape[-1], dim), dtype=torch.float32)
        else:
            start = initial_state.float().contiguous()
            final = torch.empty_like(start)
        q, k = (_packed(_unrepeated(x, k_heads, use_qk_l2norm_in_kernel), value) for x in (query, key))
        output = value.new_empty((batch * tokens, heads, dim))
        with launching(value.device) as stream:
            op.run(
                q=q,
                k=k,
                v=_packed(value, value),
                o=output,
                alpha=_packed(g.float().exp()),
                beta=_packed(beta.float()),
                initial_state=start,
                final_state=final,
                cu_seqlens=ends,
                scale=query.shape[-1] ** -0.5,
                workspace=value.new_empty(op.workspace_size(), dtype=torch.uint8),
                stream=stream,
            )
        return output.view(value.shape), final


def _ends(batch: int, tokens: int, cu_seqlens: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    if cu_seqlens is None:
        return torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int64, device=device)
    if batch != 1:
        raise InvalidArgument(f"cu_seqlens: given with a batch of {batch}; it must be 1")
    return cu_seqlens.to(torch.int64)


def _unrepeated(x: torch.Tensor, heads: int, normalised: bool) -> torch.Tensor:
    x = x[:, :, :: x.shape[2] // heads]
    if not normalised:
        return x
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _NORM_EPSILON)


def _packed(x: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """[B, T, ...] as dense [B * T, ...], in the type of ``like``."""
    return x.to(x.dtype if like is None else like.dtype).flatten(0, 1).contiguous()
