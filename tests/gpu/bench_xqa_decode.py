"""How fast XQA decode reads its cache, beside a plain copy: ``python -m gpu.bench_xqa_decode [--json FILE]``.

Both rules for splitting a sequence are timed, the library's own (``kv_splits`` 0) and the one that fills the device (-1),
alternating A B B A.
"""

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
from gpu.xqa_problems import Axes, Runner, axes_of, make, name_of

SHAPES = [(1, 1024), (1, 8192), (1, 32768), (8, 8192), (64, 1024), (64, 8192), (64, 32768), (128, 512)]
"""Batch size and KV length; 4 KV heads."""
KV_HEADS, ROUNDS = 4, 6
CAPACITY = 131072
"""Positions that the page table has room for: a table wider than its sequences must cost nothing."""
GEOMETRIES = ((64, 8), (128, 4), (128, 8), (256, 8))
RULES = {"library": 0, "fill": -1}


def median(samples: list[float]) -> float:
    return round(statistics.median(samples), 2)


def copy_rate() -> float:
    """TB/s of a device-to-device copy, both ways counted."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    taken = median([device_us(lambda: target.copy_(source)) for _ in range(15)])
    return round(2 * source.numel() / taken / 1e6, 3)


def measured(bundle: Any, axes: Axes, batch: int, length: int) -> dict[str, Any]:
    p = make(axes, [length] * batch, kv_heads=KV_HEADS, pages=CAPACITY // axes["page_size"])
    out, runner = torch.empty_like(p.q), Runner(bundle, axes)
    calls = {
        name: runner.arguments(p, out, kv_splits=rule, max_seq_len=length) for name, rule in RULES.items()
    }
    calls["library, length unknown"] = runner.arguments(p, out)
    for args in calls.values():
        for _ in range(3):
            runner.op.run(**args)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name in (*calls, *reversed(calls)):
            times[name].append(device_us(lambda args=calls[name]: runner.op.run(**args)))
    host = median([host_us(lambda: runner.op.run(**calls["library"])) for _ in range(ROUNDS)])
    values = 2 if axes["kv_dtype"] == "nvfp4" else 1
    bytes_read = 2 * batch * length * KV_HEADS * axes["head_dim"] * p.k.element_size() // values
    best = {name: median(samples) for name, samples in times.items()}
    return {
        "device_us": best,
        "host_us": host,
        "tb_per_s": {name: round(bytes_read / taken / 1e6, 3) for name, taken in best.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    stamp = provenance()
    if stamp["dirty"] is not False:
        raise SystemExit(
            "refused: the tree has uncommitted changes, or nothing says that it has none (KERNSEAL_DIRTY=0)"
        )
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {"copy_tb_per_s": copy_rate(), "rows": rows}
    for name in BUNDLES:
        if not folder(name).is_dir():
            continue
        with open_by_name(name) as bundle:
            for axes in [axes_of(v) for v in bundle.variants() if v.op == "xqa_decode"]:
                if axes["sliding_window"] or axes["spec_decode"] or axes["kv_dtype"] == "nvfp4":
                    continue
                if (axes["head_dim"], axes["group_size"]) not in GEOMETRIES:
                    continue
                for batch, length in SHAPES:
                    row = {"bundle": name, "variant": name_of(axes), "batch": batch, "length": length}
                    rows.append(row | measured(bundle, axes, batch, length))
                    print(json.dumps(rows[-1]), flush=True)
                    torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps({**stamp, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
