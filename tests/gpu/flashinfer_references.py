"""What FlashInfer's tests compare with, in PyTorch: its own references would be compiled at their first call."""

from __future__ import annotations

from typing import Any

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
FP4_BLOCK = 16


def replace() -> None:
    """Put these where the tests look for FlashInfer's."""
    import flashinfer.decode
    import flashinfer.fp4_quantization
    import flashinfer.mla
    import flashinfer.prefill

    flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper = PagedAttention
    flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper = PagedAttention
    flashinfer.mla.BatchMLAPagedAttentionWrapper = PagedLatentAttention
    flashinfer.fp4_quantization.nvfp4_quantize = nvfp4_quantize
    flashinfer.fp4_quantization.e2m1_and_ufp8sf_scale_to_float = nvfp4_to_float


def rows_of(indptr: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """[B, most] entries of each row of a CSR table, its last one again where it has fewer."""
    begin, count = indptr[:-1].long(), (indptr[1:] - indptr[:-1]).long()
    column = torch.arange(int(count.max()), device=indices.device).minimum(count.clamp(min=1)[:, None] - 1)
    return indices[begin[:, None] + column].long()


def visible(q_lens: torch.Tensor, kv_lens: torch.Tensor, width: int, causal: bool, left: int) -> torch.Tensor:
    """[B, L, S]: which positions each of the last query tokens of a sequence sees."""
    token = torch.arange(int(q_lens.max()), device=kv_lens.device)[None, :, None]
    position = torch.arange(width, device=kv_lens.device)[None, None, :]
    own = kv_lens[:, None, None] - q_lens[:, None, None] + token
    seen = position < kv_lens[:, None, None]
    if causal:
        seen = seen & (position <= own)
    return seen & (position >= own - left) if left >= 0 else seen


class PagedAttention:
    """Attention over a paged cache in float32, planned as FlashInfer's decode and prefill wrappers are."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str = "NHD", **ignored: Any) -> None:
        self.heads_first = kv_layout == "HND"

    def plan(self, **args: Any) -> None:
        prefill = "qo_indptr" in args
        name = "paged_kv_" if prefill else ""
        indptr, last = args[f"{name}indptr"], args[f"{name}last_page_len"]
        self.table = rows_of(indptr, args[f"{name}indices"])
        self.kv_lens = (indptr[1:] - indptr[:-1] - 1) * args["page_size"] + last
        q_lens = args["qo_indptr"].diff() if prefill else torch.ones_like(self.kv_lens)
        self.q_lens = q_lens.to(self.kv_lens.device)
        self.causal, self.left = args.get("causal", False), args.get("window_left", -1)
        self.scale = args.get("sm_scale") or args["head_dim_qk" if prefill else "head_dim"] ** -0.5

    def run(self, q: torch.Tensor, cache: torch.Tensor, return_lse: bool = False) -> Any:
        pages = cache[self.table].float()  # [B, pages, 2, ...]
        if self.heads_first:
            pages = pages.transpose(-3, -2)
        k, v = (part.flatten(1, 2) for part in pages.unbind(2))
        batch, width, kv_heads, _ = k.shape
        token = torch.arange(int(self.q_lens.max()), device=q.device)
        there = token[None, :] < self.q_lens[:, None]
        padded = q.new_zeros(batch, len(token), *q.shape[1:], dtype=torch.float32)
        padded[there] = q.float()
        grouped = padded.unflatten(2, (kv_heads, -1))
        scores = torch.einsum("blhgd,bshd->bhgls", grouped, k) * self.scale
        seen = visible(self.q_lens, self.kv_lens, width, self.causal, self.left)
        weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1).nan_to_num(0.0)
        out = torch.einsum("bhgls,bshd->blhgd", weights, v).flatten(2, 3)[there].to(q.dtype)
        return (out, None) if return_lse else out


class PagedLatentAttention:
    """Multi-head latent attention over a paged cache in float32, one query token a sequence."""

    def __init__(self, workspace: torch.Tensor, **ignored: Any) -> None:
        pass

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_lens: torch.Tensor,
        *sizes_and_switches: Any,
    ) -> None:
        self.table, self.kv_lens = rows_of(kv_indptr, kv_indices), kv_lens
        self.scale = sizes_and_switches[5]

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv: torch.Tensor,
        kpe: torch.Tensor,
        return_lse: bool = False,
    ) -> torch.Tensor:
        v, rope = (part[self.table].flatten(1, 2).float() for part in (ckv, kpe))
        scores = torch.einsum("bhd,bsd->bhs", q_nope.float(), v)
        scores = (scores + torch.einsum("bhd,bsd->bhs", q_pe.float(), rope)) * self.scale
        seen = torch.arange(v.shape[1], device=v.device)[None, :] < self.kv_lens[:, None]
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        return torch.einsum("bhs,bsd->bhd", weights, v).to(q_nope.dtype)


def nvfp4_quantize(x: torch.Tensor, scale: torch.Tensor, **layout: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """E2M1 pairs [.., D / 2], the even element in the low bits, and their E4M3 scales [rows, D / 16], as bytes."""
    blocks = x.float().mul(scale).reshape(-1, x.shape[-1] // FP4_BLOCK, FP4_BLOCK)
    scales = (blocks.abs().amax(-1) / E2M1[-1]).to(torch.float8_e4m3fn)
    elements = blocks / scales.float()[..., None].clamp(min=2.0**-9)
    between = torch.tensor(E2M1_BETWEEN, device=x.device)
    codes = torch.bucketize(elements.abs(), between) | (elements < 0).long() << 3
    pairs = codes.to(torch.uint8).reshape(*x.shape[:-1], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, scales.view(torch.uint8)


def nvfp4_to_float(
    pairs: torch.Tensor, scales: torch.Tensor, scale: torch.Tensor, **layout: Any
) -> torch.Tensor:
    """What ``nvfp4_quantize`` stands for: [rows, D] float32."""
    codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2).long()
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=pairs.device)[codes]
    blocks = values.unflatten(-1, (-1, FP4_BLOCK)) * scales.view(torch.float8_e4m3fn).float()[..., None]
    return blocks.flatten(-2) * scale
