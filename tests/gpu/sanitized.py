"""What a program for compute-sanitizer does with its calls: each variant of an op in the bundle, and the count of calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu.bundles import open_by_name


def check_all(op: str, calls: Callable[[Any, Any], Iterator[tuple[str, str]]]) -> None:
    """Print how many calls of ``op`` were right, with the bundle that the command line names.

    Args:
        calls: bundle and variant to what each call was and what is wrong with its result, if anything.
    """
    count = 0
    torch.zeros(1, device="cuda")  # a context for prepare
    with open_by_name(sys.argv[1]) as bundle:
        for variant in [v for v in bundle.variants() if v.op == op]:
            for what, why in calls(bundle, variant):
                if why:
                    raise SystemExit(f"wrong result: {variant.variant}, {what}: {why}")
                count += 1
    if count == 0:
        raise SystemExit(f"this bundle has no variant of {op}")
    print(f"{count} calls, all as the oracle has them")
