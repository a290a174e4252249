"""What the documented commands write into a checkout is ignored by git: otherwise the next bundle would say ``dirty``."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import click
import pytest

from kernseal.export.cli import main

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
WRITTEN = re.compile(
    r"(?:--(?:out|summary|json|document|svg|key)|keygen|kernseal pull HOST/\S+|decode_attention\.py >) +([a-z0-9][\w./-]*\w)"
)


def documented() -> set[str]:
    """Every path that a command of the documentation writes, but for the documentation itself."""
    found = {match[1] for page in PAGES for match in WRITTEN.finditer(page.read_text())}
    return {path for path in found if not path.startswith("docs/")}


def defaults() -> set[str]:
    """Where the commands write unless they are told."""
    options = [(option, command) for command in main.commands.values() for option in command.params]
    return {
        str(option.default)
        for option, _ in options
        if isinstance(option, click.Option) and option.name == "out"
    }


def ignored(path: str) -> bool:
    return subprocess.run(["git", "check-ignore", "--quiet", path], cwd=ROOT, check=False).returncode == 0


def test_the_outputs_are_found() -> None:
    assert {"gate.md", "release.pem", "120.html", "pictures", "cold.json", "dist/mine"} <= documented()
    assert defaults() == {"dist", "report.html"}


@pytest.mark.parametrize("path", sorted(documented() | defaults() | {"release.json", "config.json"}))
def test_a_documented_output_is_ignored(path: str) -> None:
    assert ignored(f"{path}/file" if not Path(path).suffix else path)


def test_nothing_that_is_tracked_is_ignored() -> None:
    listing = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout == ""
