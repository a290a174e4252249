"""How fast XQA decode reads its cache, beside a plain copy: ``python -m gpu.bench_xqa_decode [--json FILE]``."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from gpu.bundles import BUNDLES, folder, open_by_name
from gpu.provenance import provenance
from gpu.timing import device_us, host_us
from gpu.xqa_problems import Runner, axes_of, make

SHAPES = [(1, 1024), (1, 32768), (8, 8192), (64, 1024), (64, 8192), (64, 32768)]
"""Batch size and KV length; 4 KV heads."""
KV_HEADS, SAMPLES = 4, 15


def median(samples: list[float]) -> float:
    return round(statistics.median(samples), 2)


def copy_rate() -> float:
    """TB/s of a device-to-device copy, both ways counted."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    taken = median([device_us(lambda: target.copy_(source)) for _ in range(SAMPLES)])
    return round(2 * source.numel() / taken / 1e6, 3)


def measured(bundle: Any, axes: dict[str, Any], batch: int, length: int) -> dict[str, Any]:
    p, runner = make(axes, [length] * batch, kv_heads=KV_HEADS), Runner(bundle, axes)
    out = torch.empty_like(p.q)
    args = runner.arguments(p, out)
    for _ in range(3):
        runner.op.run(**args)
    taken = median([device_us(lambda: runner.op.run(**args)) for _ in range(SAMPLES)])
    host = median([host_us(lambda: runner.op.run(**args)) for _ in range(SAMPLES)])
    bytes_read = 2 * batch * length * KV_HEADS * axes["head_dim"] * p.k.element_size()
    return {"device_us": taken, "host_us": host, "tb_per_s": round(bytes_read / taken / 1e6, 3)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"copy_tb_per_s": copy_rate()}
    for name in BUNDLES:
        if not folder(name).is_dir():
            continue
        with open_by_name(name) as bundle:
            for axes in [axes_of(v) for v in bundle.variants() if v.op == "xqa_decode"]:
                if axes["sliding_window"] or axes["group_size"] not in (1, 4, 8, 16):
                    continue
                for batch, length in SHAPES:
                    key = f"{name} {axes['kv_dtype']} d{axes['head_dim']} g{axes['group_size']} {batch}x{length}"
                    found[key] = measured(bundle, axes, batch, length)
                    print(key, found[key], flush=True)
                    torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps({**provenance(), "measured": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
