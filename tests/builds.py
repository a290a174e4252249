"""Real builds for tests, made once a run and shared between workers. Nothing here is faked: compilers run."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kernseal.export import build, signing, spec
from kernseal.export.build import Options, Result

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build" / "test-cache"
PACKED = "bf16_sf32_hvk_i64_init_packed_alpha_beta"
POOLED_HKV = "bf16_sf32_hkv_i64_init_pooled_alpha_beta"
BOTH = (PACKED, POOLED_HKV)
XQA = "bf16_kvbf16_obf16_d128_g8_p16"


@contextmanager
def locked(name: str) -> Iterator[None]:
    """One worker at a time."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def compile_cache() -> Iterator[None]:
    """Compile into a cache of the tests' own: keyed by every input, so a changed input compiles again."""
    before = os.environ.get("KERNSEAL_CACHE")
    os.environ["KERNSEAL_CACHE"] = str(CACHE)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("KERNSEAL_CACHE")
        else:
            os.environ["KERNSEAL_CACHE"] = before


def signing_key() -> signing.SigningKey:
    """The tests' signing key."""
    path = CACHE / "tests.pem"
    with locked("key"):
        if not path.exists():
            signing.keygen(path, "tests")
    return signing.read_private(path)


def bundle(sm: str, retarget: str | None = None, only: Sequence[str] = BOTH) -> Result:
    """A bundle with a few variants for one target."""
    key = signing_key()
    ops = spec.load_ops()
    target = spec.parse_target(sm, retarget, ops)
    with locked(target.name), compile_cache():
        out = CACHE / "dist" / ("-".join(sorted(only)) if tuple(only) != BOTH else "both")
        return build.build(ops, target, Options(only=tuple(only), jobs=2, out=out), key)
