"""Everything that can change a byte of a variant, in named groups, so that a changed hash can say which input moved it."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernseal.export import assemble, files
from kernseal.export.patch import SourcePatch
from kernseal.export.ptx import PtxRule
from kernseal.export.spec import Op, Target, Variant

BUILDER_MODULES = (
    "assemble.py",
    "compile_server.py",
    "compilers.py",
    "elf.py",
    "front_end.py",
    "job.py",
    "limits.py",
    "patch.py",
    "ptx.py",
    "recipe.py",
    "variant.py",
)
"""Modules of this package whose code decides bytes of a variant, with the worker of its front end."""


def digest(value: Any) -> str:
    return files.sha256_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


@dataclass(frozen=True)
class VariantInputs:
    """The inputs of one variant.

    Attributes:
        groups: group name to {item: digest or value}. Groups: source, patches, recipe, variant, flags, toolchain, builder.
    """

    groups: Mapping[str, Mapping[str, Any]]

    @property
    def key(self) -> str:
        return digest(self.groups)

    def summary(self) -> dict[str, str]:
        """One digest a group: what the lock file records for each variant."""
        return {name: digest(items) for name, items in self.groups.items()}


@functools.cache
def builder_files(front_end: str) -> dict[str, str]:
    folder = Path(__file__).parent
    return {name: files.sha256_file(folder / name) for name in (*BUILDER_MODULES, f"{front_end}_worker.py")}


def of_variant(
    op: Op,
    variant: Variant,
    target: Target,
    source_files: Mapping[str, str],
    patches: Sequence[SourcePatch],
    rules: Sequence[PtxRule],
    toolchain: Mapping[str, str],
) -> VariantInputs:
    """Collect the inputs of ``variant``.

    Args:
        source_files: the op's source set, path to SHA-256.
        patches: source patches of the op, in order.
        rules: every PTX rule; those that apply count.
        toolchain: tool name to pin.
    """
    cls = op.data["classes"][variant.class_name]
    return VariantInputs(
        {
            "source": dict(source_files),
            "patches": {
                **{patch.name: patch.sha256 for patch in patches},
                **{f"ptx/{rule.name}": rule.sha256 for rule in rules if rule.applies(variant, target)},
            },
            "recipe": {op.data["recipe"]: files.sha256_file(op.folder / op.data["recipe"])},
            "variant": {
                "op": op.name,
                "class": {
                    "id": variant.class_name,
                    "module": cls["module"],
                    "name": cls["name"],
                    "builder": cls["builder"],
                    **cls.get("compile", {}),
                },
                "axes": dict(variant.axes),
                "host_only": op.data.get("host_only", {}),
            },
            "flags": {
                "arch": target.arch,
                "host": target.host,
                "ptxas": list(assemble.FLAGS),
                "opt_level": 3,
            },
            "toolchain": dict(toolchain),
            "builder": builder_files(cls["front_end"]),
        }
    )
