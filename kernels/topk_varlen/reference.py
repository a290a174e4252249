"""Top-k of a decode step in plain PyTorch, one row at a time: the oracle of the tests. Slow and plain on purpose."""

from __future__ import annotations

import torch

from kernseal.kernels.topk_regions.reference import keys


def row_lengths(seq_lens: torch.Tensor, next_n: int, compress_ratio: int, max_len: int) -> list[int]:
    """Scores of every row."""
    lengths = []
    for tokens in seq_lens.tolist():
        for token in range(next_n):
            length = (tokens - next_n + token + 1) // compress_ratio
            lengths.append(min(max(length, 0), max_len))
    return lengths


def decode(
    scores: torch.Tensor, seq_lens: torch.Tensor, top_k: int, next_n: int = 1, compress_ratio: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """One right answer: columns [R, k] by falling score and rising column (-1 where a row has no more), and their scores
    (-inf there). A row with no more than k scores has its columns in rising order, as every answer has.

    Args:
        scores: [R, max_len].
        seq_lens: [R / next_n] int32.
    """
    shape = (scores.shape[0], top_k)
    indices = torch.full(shape, -1, dtype=torch.int32, device=scores.device)
    values = torch.full(shape, -torch.inf, dtype=scores.dtype, device=scores.device)
    for r, length in enumerate(row_lengths(seq_lens, next_n, compress_ratio, scores.shape[1])):
        order = torch.arange(length, device=scores.device)
        if length > top_k:
            order = keys(scores[r, :length]).sort(descending=True, stable=True).indices[:top_k]
        indices[r, : order.numel()] = order.int()
        values[r, : order.numel()] = scores[r, order]
    return indices, values


def spread(rows: int, max_len: int, sms: int, dtype: torch.dtype, smem_per_block: int) -> tuple[int, int]:
    """Scores that one thread block holds, and blocks that share a row; ``smem_per_block`` is that of the variant's class."""
    size = dtype.itemsize
    most = (smem_per_block - 2304) // size // (32 // size) * (32 // size)
    if sms < 2 * rows:
        fewest = -(-max_len // most)
        chunk = -(-max_len // fewest)
        chunk = min(chunk + -chunk % (32 // size), most)
    else:
        chunk = max(-(-max_len // (sms // rows)), 8192)
        if chunk < max_len <= 2 * chunk and chunk < 32768:
            chunk = max_len
        chunk = min(1 << (chunk - 1).bit_length(), 1 << (most.bit_length() - 1))
    return chunk, -(-max_len // chunk)
