"""Where the data folders are, and where builds keep what they can make again."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path


def _folder(package: str) -> Path:
    return Path(str(resources.files(package)))


def kernels() -> Path:
    """Folder with one sub-folder an op and the upstream pin."""
    return _folder("kernseal.kernels")


def patches() -> Path:
    """Folder with source patches and PTX rules."""
    return _folder("kernseal.patches")


def manifests() -> Path:
    """Folder with the committed pins and public keys."""
    return _folder("kernseal.manifests")


def cache() -> Path:
    """User's cache folder for kernseal: ``$KERNSEAL_CACHE``, else ``$XDG_CACHE_HOME/kernseal``."""
    if explicit := os.environ.get("KERNSEAL_CACHE"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kernseal"
