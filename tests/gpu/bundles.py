"""Which bundles the GPU programs run on."""

from __future__ import annotations

import os
from pathlib import Path

from kernseal.loader.bundle import Bundle, open_bundle
from kernseal.loader.policy import Policy

ROOT = Path(__file__).resolve().parents[2]
DIST = Path(os.environ.get("KERNSEAL_DIST", ROOT / "dist"))
BUNDLES = {"sm90": "sm_90a-linux-x86_64", "sm120_on_sm90": "sm_120a-on-sm_90a-linux-x86_64"}
"""The shipped product for this GPU, and the SM120 class rebuilt for it."""
MORE = {name + "_more": f"validation/{path}" for name, path in BUNDLES.items()}
"""Variants of the profile `validation`, which no pins cover: signed by the key in ``KERNSEAL_VALIDATION_KEY``."""
ALL = BUNDLES | MORE


def policy(name: str = "") -> Policy:
    """The committed pins and keys, or the public key in ``KERNSEAL_TRUST_KEY``. ``name`` may be a folder, too."""
    unpinned = ALL.get(name, name).startswith("validation/")
    key = os.environ.get("KERNSEAL_VALIDATION_KEY" if unpinned else "KERNSEAL_TRUST_KEY")
    return Policy.from_options(keys=[Path(key)]) if key else Policy.default()


def folder(name: str) -> Path:
    return DIST / ALL[name]


def open_by_name(name: str) -> Bundle:
    """Open the bundle called ``name``; see ``open_bundle`` for what can go wrong."""
    return open_bundle(folder(name), policy=policy(name), allow_validation="-on-" in ALL[name])
