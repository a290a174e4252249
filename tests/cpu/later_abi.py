"""The repository as a later release would have it: version 1.1, with something appended wherever it may be."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from kernseal.abi import generate

ROOT = Path(__file__).resolve().parents[2]
FIELD = '{name: added, type: u64, since: "1.1", doc: New.}'
DTYPE = "      - {name: e5m2, value: 99, doc: New.}\n"
FUNCTION = """\
  - {name: kseal_more, returns: void, params: [], doc: New., lifetimes: ., threads: ., streams: ., errors: []}

"""


def copy_of(root: Path) -> Path:
    """The parts of the repository that the generator reads and writes, in ``root``."""
    ignore = shutil.ignore_patterns("target", "__pycache__", "examples")
    for name in ("abi", "kernels"):
        shutil.copytree(ROOT / name, root / name, ignore=ignore)
    (root / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "abi.md", root / "docs")
    return root


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def append_fields(root: Path) -> None:
    """Version 1.1 in ``root``: a field at the end of every public struct."""
    types = root / "abi" / "types.yaml"
    edit(types, "minor: 0", "minor: 1")
    edit(types, "  kseal_variant_info:", f"      - {FIELD}\n  kseal_variant_info:")
    edit(types, "\n# Parameter types:", f"      - {FIELD}\n\n# Parameter types:")
    for path in (root / "kernels").glob("*/kernel.yaml"):
        text, count = re.subn(r"(?<=\n)(?=  args:\n|\nlimits:)", f"    - {FIELD}\n", path.read_text())
        assert count == 2, path
        path.write_text(text)


def append_everything(root: Path) -> None:
    """A constant, a function and an op besides."""
    append_fields(root)
    edit(root / "abi" / "types.yaml", "  kseal_state_layout:", DTYPE + "  kseal_state_layout:")
    edit(root / "abi" / "types.yaml", "# The same for every op", FUNCTION + "# The same for every op")
    (root / "kernels" / "later").mkdir()
    text = (root / "kernels" / "gdn_prefill" / "kernel.yaml").read_text()
    (root / "kernels" / "later" / "kernel.yaml").write_text(text.replace("op: gdn_prefill", "op: later"))


def regenerate(root: Path) -> None:
    assert generate.main(["--root", str(root)]) == 0
