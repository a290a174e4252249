"""Paged MQA logits in float64: the oracle of the tests. Slow and plain on purpose.

Written from the semantics in ``kernel.yaml``, not from any kernel. It also packs pages and 4-bit values, so that tests can
make what a kernel reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the three low bits of a 4-bit float say; the fourth is the sign."""

GROUP = 32
"""Elements that share one power of two."""


def unpack_fp4(packed: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
    """[.., D/2] bytes and [.., D/32] bytes to [.., D] float64: the low half of a byte comes first."""
    halves = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()
    values = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float64, device=packed.device)[halves]
    scales = torch.exp2(powers.double() - 127)
    return values * scales.repeat_interleave(GROUP, dim=-1)


def interleave(powers: torch.Tensor) -> torch.Tensor:
    """[pages, 128, 4] powers of the tokens of a page, in the order in which the tensor core takes them."""
    pages = powers.shape[0]
    return powers.reshape(pages, 4, 32, 4).transpose(1, 2).reshape(pages, 512)


def pack_pages(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[pages, page_size, bytes] values and [pages, ..] scales to [pages, page bytes]: all values, then all scales."""
    return torch.cat([x.contiguous().view(torch.uint8).flatten(1) for x in (values, scales)], dim=1)


def paged_mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    scales: torch.Tensor | None,
    weights: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: Sequence[int],
) -> list[torch.Tensor]:
    """The logits of every row that are specified.

    Args:
        q: [B, next_n, H, D], in any type that holds its values.
        k: [pages, page_size, D], likewise.
        scales: [pages, page_size]; None is 1.
        weights: [B * next_n, H].
        page_table: [B, columns].
        seq_lens: positions of each sequence; zeros are allowed.

    Returns:
        For row b * next_n + t a float64 vector of max(0, seq_lens[b] - next_n + t + 1) logits.
    """
    next_n = q.shape[1]
    found = []
    for b, length in enumerate(seq_lens):
        pages = page_table[b, : -(-length // k.shape[1])].long()
        keys = k[pages].double().flatten(0, 1)[:length]
        factor = torch.ones(length, dtype=torch.float64, device=q.device)
        if scales is not None:
            factor = scales[pages].double().flatten()[:length]
        for t in range(next_n):
            seen = max(0, length - next_n + t + 1)
            scores = torch.relu(q[b, t].double() @ keys[:seen].T)
            found.append(weights[b * next_n + t].double() @ scores * factor[:seen])
    return found
