"""Which commit of kernseal builds. A folder that is merely inside some other repository has none."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Revision:
    """Commit of the kernseal checkout that is running, and whether its tree differs from it. None outside a checkout."""

    commit: str | None
    dirty: bool


def revision(root: Path) -> Revision:
    """Revision of the checkout whose top folder is exactly ``root``."""
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return Revision(None, False)
    commit = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain", "--untracked-files=normal")
    return Revision(commit, bool(status) if commit else False)


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],  # noqa: S607  (whichever git the user has)
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
