"""What a number was measured on and with."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import subprocess
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from gpu.bundles import BUNDLES, ROOT, folder


def not_clean(stamp: Mapping[str, Any]) -> str:
    """Why a measurement of what ``stamp`` says would not count; nothing where it would."""
    if stamp["commit"] is None or stamp["dirty"] is not False:
        return "not a clean commit (KERNSEAL_COMMIT and KERNSEAL_DIRTY say so where there is no git); --trial"
    return ""


def versions(names: Iterable[str]) -> dict[str, str]:
    """Of those packages that are installed."""
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def provenance() -> dict[str, Any]:
    """Device, driver, date, commit, whether the tree was dirty (None: not known), and the bundles' manifests."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    }
    commit, dirty = os.environ.get("KERNSEAL_COMMIT"), os.environ.get("KERNSEAL_DIRTY")
    if commit is None:
        git = ["git", "-C", str(ROOT)]
        asked = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        commit = asked.stdout.strip() or None
        if commit:
            state = subprocess.run(
                [*git, "status", "--porcelain"], capture_output=True, text=True, check=False
            )
            dirty = "1" if state.stdout.strip() else "0"
    found |= {"commit": commit, "dirty": None if dirty is None else dirty != "0"}
    for name in BUNDLES:
        manifest = folder(name) / "manifest.json"
        if manifest.is_file():
            found[f"bundle_{name}"] = hashlib.sha256(manifest.read_bytes()).hexdigest()
    try:
        import torch

        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
        device, driver = (
            subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split(", ")
        )
        found |= {"device": device, "driver": driver, "torch": torch.__version__, "cuda": torch.version.cuda}
    except (ImportError, OSError, ValueError, subprocess.CalledProcessError):
        found["device"] = None
    return found
