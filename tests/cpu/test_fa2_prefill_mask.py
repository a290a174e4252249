"""Which tiles of keys the FA2 kernels work through, and which of them without a mask: their own lines, run on the host.

The lines are cut out of a kernel's source, upstream's and patched, and put into a program that tries every small case.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from cpu.fake_driver.native import compiler

from kernseal.export import patch, paths, source, spec

KERNEL = "flashinfer/data/include/flashinfer/attention/prefill.cuh"
FUNCTIONS = {
    "ragged_prefill": "BatchPrefillWithRaggedKVCacheKernel(",
    "paged_prefill": "BatchPrefillWithPagedKVCacheDevice(",
}
LINES = (
    *("kv_start_idx", "max_chunk_size", "chunk_start", "chunk_end", "chunk_size"),
    *("num_iterations", "window_iteration", "mask_iteration"),
)
PROGRAM = """
#include <algorithm>
#include <cstdint>
#include <cstdio>
using std::min;
enum class MaskMode { kNone, kCausal, kMultiItemScoring };
static uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }
static uint32_t sub_if_greater_or_zero(uint32_t a, uint32_t b) { return a > b ? a - b : 0; }
static long wrong, wrong_with_enough_keys, tiles;

template <MaskMode MASK_MODE>
void look(uint32_t qo_len, uint32_t kv_len, uint32_t group_size, uint32_t CTA_TILE_Q, uint32_t CTA_TILE_KV,
          uint32_t qo_tile_idx, uint32_t kv_tile_idx, uint32_t kv_chunk_size, bool partition_kv) {
  const uint32_t window_left = kv_len;
  %s
  bool right = true;
  for (uint32_t packed = qo_tile_idx * CTA_TILE_Q; packed < (qo_tile_idx + 1) * CTA_TILE_Q; packed++) {
    const uint32_t row = packed / group_size;
    if (row >= qo_len) break;
    const int64_t seen = MASK_MODE == MaskMode::kCausal ? int64_t(kv_len) - qo_len + row + 1 : kv_len;
    for (uint32_t iter = 0; iter < num_iterations; iter++)
      for (uint32_t i = 0; i < CTA_TILE_KV && !(iter >= mask_iteration || iter < window_iteration); i++)
        right = right && chunk_start + iter * CTA_TILE_KV + i < chunk_end &&
                int64_t(chunk_start) + iter * CTA_TILE_KV + i < seen;
    for (int64_t key = chunk_start; key < min<int64_t>(seen, chunk_end); key++)
      right = right && key < int64_t(chunk_start) + int64_t(num_iterations) * CTA_TILE_KV;
  }
  tiles++;
  wrong += !right;
  wrong_with_enough_keys += !right && kv_len >= qo_len;
}

template <MaskMode mask>
void every() {
  for (uint32_t qo = 1; qo <= 40; qo++)
    for (uint32_t kv = 0; kv <= 40; kv++)
      for (uint32_t group : {1u, 3u, 4u, 7u})
        for (uint32_t tile_kv : {4u, 8u})
          for (uint32_t tile = 0; tile < ceil_div(qo * group, 16); tile++)
            for (uint32_t chunk : {1000u, 16u, 5u})
              for (uint32_t part = 0; part < ceil_div(std::max(kv, 1u), chunk); part++)
                look<mask>(qo, kv, group, 16, tile_kv, tile, part, chunk, chunk != 1000);
}

int main() {
  every<MaskMode::kCausal>();
  every<MaskMode::kNone>();
  std::printf("%%ld %%ld %%ld", tiles, wrong, wrong_with_enough_keys);
}
"""


def counts(text: str, function: str, folder: Path) -> tuple[int, int, int]:
    """Tiles that were tried, those that were wrong, and of these the ones of sequences with no fewer keys than queries."""
    body = text[text.index(function) :]
    found = [re.search(rf"\b{name} =(?! 0;).*?;", body, re.DOTALL) for name in LINES]
    assert None not in found
    (folder / "tiles.cpp").write_text(
        PROGRAM % "\n".join(f"const uint32_t {match[0]}" for match in found if match)
    )
    command = [str(compiler("g++", "c++", "clang++")), "-std=c++17", "-O2", "-o", "tiles", "tiles.cpp"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = subprocess.run([str(folder / "tiles")], capture_output=True, text=True, check=True).stdout
    tiles, wrong, with_keys = map(int, said.split())
    return tiles, wrong, with_keys


@pytest.mark.skipif(compiler("g++", "c++", "clang++") is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_tile_without_a_mask_is_seen_by_every_row_and_no_key_is_left_out(tmp_path: Path, name: str) -> None:
    op, function = spec.load_op(paths.kernels() / name), FUNCTIONS[name]
    opened, _ = source.open_source(None, source.upstream())
    upstream = source.read_set(opened, source.source_set(op.folder))
    patched = patch.apply(upstream, patch.load(paths.patches(), op.data["patches"]))
    tiles, wrong, _ = counts(patched[KERNEL].decode(), function, tmp_path)
    assert tiles > 100_000 and wrong == 0
    tiles, wrong, with_keys = counts(upstream[KERNEL].decode(), function, tmp_path)
    assert wrong > 0 and with_keys == 0, (
        "upstream is wrong where there are fewer keys than queries: patch 0003"
    )
