"""kernseal: sealed GPU kernels. ``kernseal.open(folder)`` verifies a bundle and opens it.

The parts are subpackages: ``kernseal.loader`` runs, ``kernseal.export`` builds. Importing this one imports neither.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernseal.loader.bundle import Bundle
    from kernseal.loader.policy import Policy

__all__ = ["open"]


def open(
    path: str | os.PathLike[str],
    *,
    policy: Policy | None = None,
    allow_validation: bool = False,
    device: int | None = None,
) -> Bundle:
    """Verify the bundle in the folder ``path`` and open it; see ``kernseal.loader.bundle.open_bundle``."""
    from kernseal.loader.bundle import open_bundle

    return open_bundle(path, policy=policy, allow_validation=allow_validation, device=device)
