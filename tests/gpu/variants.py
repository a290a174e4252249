"""Which variants of a bundle a GPU test runs on."""

from __future__ import annotations

from typing import Any

import pytest


def variants_of(bundle: Any, op: str) -> list[Any]:
    """Every variant of ``op``; without one the test is skipped."""
    found = [variant for variant in bundle.variants() if variant.op == op]
    if not found:
        pytest.skip(f"this bundle has no variant of {op}")
    return found
