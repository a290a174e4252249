"""Small context-parallel GDN prefill calls for compute-sanitizer: ``compute-sanitizer --tool memcheck python -m
gpu.sanitize_gdn_cp sm90``; see ``gpu.sanitize``. Chunks of 64 tokens, once of 128, and each of the three fixup kernels.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from gpu.bundles import open_by_name
from gpu.problems import Case
from gpu.sanitize import PARTIAL, SMALL, check

from kernseal.loader.bundle import Bundle
from kernseal.loader.op import load_spec

OP = "gdn_prefill_cp"

LONG = (200, 0, 1, 64, 129)
MIXED = Case(lengths=LONG, heads=SMALL)
CASES = [
    *(Case(lengths=lengths, heads=SMALL) for lengths in (PARTIAL, (129,), (1,), (0, 0))),
    MIXED,
    Case(lengths=LONG, heads=(8, 8, 16)),
    Case(lengths=LONG, heads=(4, 4, 20)),
    Case(lengths=(0, 0), heads=(4, 4, 20)),
    Case(lengths=LONG, heads=(8, 2, 2), initial_state=False),
    Case(lengths=LONG, heads=(4, 4, 20), initial_state=False),
    Case(lengths=LONG, heads=SMALL, state_layout="hkv"),
    Case(lengths=LONG, heads=SMALL, pooled=True),
    Case(lengths=LONG, heads=SMALL, pooled=True, state_layout="hkv"),
    Case(lengths=LONG, heads=SMALL, pooled=True, state_dtype="bf16"),
    Case(lengths=LONG, heads=SMALL, pooled=True, index_dtype="i32"),
    Case(lengths=LONG, heads=SMALL, checkpoint_every=64),
    Case(lengths=LONG, heads=SMALL, dtype="f16"),
]


def served(bundle: Bundle) -> list[Case]:
    """Cases whose variant the bundle has."""
    spec = load_spec(OP)
    there = {v.variant for v in bundle.variants() if v.op == OP}
    axes: list[dict[str, Any]] = [
        {k: v for k, v in case.axes.items() if k in spec.config_defaults} for case in CASES
    ]
    return [case for case, chosen in zip(CASES, axes, strict=True) if spec.variant(chosen) in there]


def main() -> None:
    with open_by_name(sys.argv[1]) as bundle:
        cases, calls = served(bundle), 0
        for case in cases:
            for chunk_len in (64, 128) if case == MIXED else (64,):
                check(bundle, case, OP, chunk_len=chunk_len)
                calls += 1
        torch.cuda.synchronize()
    if not cases:
        raise SystemExit(f"this bundle has no variant of {OP}")
    print(f"{calls} calls, all as the oracle has them")


if __name__ == "__main__":
    main()
