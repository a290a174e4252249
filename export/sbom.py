"""``sbom.cdx.json``: what a bundle is made of, as CycloneDX 1.6.

Written by hand rather than by a library (docs/decisions/0024-sbom-without-a-library.md): it is a file of the bundle, so
whatever writes it would be one more pinned tool. No time, no random serial: the same inputs give the same bytes.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from kernseal.export.patch import SourcePatch
from kernseal.export.ptx import PtxRule
from kernseal.export.source import Upstream
from kernseal.export.spec import Target
from kernseal.export.toolchain import ToolPin
from kernseal.loader import canonical

FILE = "sbom.cdx.json"
OWN_LICENCE = "Apache-2.0"
SERIALS = uuid.uuid5(uuid.NAMESPACE_URL, "https://kernseal.dev/sbom/v1")


def compose(
    target: Target,
    upstream: Upstream,
    tools: Sequence[ToolPin],
    patches: Sequence[SourcePatch],
    rules: Sequence[PtxRule],
) -> bytes:
    """Canonical bytes of the bill of materials.

    Args:
        tools: pins of everything that can change a byte.
        patches: source patches of the ops in the bundle.
        rules: PTX rules.
    """
    altered = {f"kernseal:patches/{item.name}": item.sha256 for item in patches}
    altered |= {f"kernseal:patches/ptx/{rule.name}": rule.sha256 for rule in rules}
    own = _own()
    bundle = _bundle(target, own["version"])
    source = _upstream(upstream, sorted({f"kernseal:patches/{item.name}" for item in patches}))
    made_with = [_tool(pin) for pin in sorted(tools, key=lambda pin: pin.name)]
    changes = [_file(name, altered[name]) for name in sorted(altered)]
    parts = [source, own, *changes]
    document: dict[str, Any] = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"lifecycles": [{"phase": "build"}], "component": bundle},
        "components": [*parts, *made_with],
        "dependencies": _dependencies(bundle, parts, made_with),
    }
    digest = hashlib.sha256(canonical.dumps(document)).hexdigest()
    return canonical.dumps({**document, "serialNumber": f"urn:uuid:{uuid.uuid5(SERIALS, digest)}"})


def _bundle(target: Target, version: str) -> dict[str, Any]:
    name = f"kernseal-bundle-{target.folder}"
    return {
        "type": "library",
        "bom-ref": name,
        "name": name,
        "version": version,
        "licenses": _licences(OWN_LICENCE),
    }


def _own() -> dict[str, Any]:
    version = metadata.version("kernseal")
    purl = f"pkg:pypi/kernseal@{version}"
    return {
        "type": "application",
        "bom-ref": purl,
        "name": "kernseal",
        "version": version,
        "purl": purl,
        "licenses": _licences(OWN_LICENCE),
    }


def _upstream(pin: Upstream, patches: Sequence[str]) -> dict[str, Any]:
    """The source, and that what ships is not quite it."""
    return {
        "type": "library",
        "bom-ref": pin.purl,
        "name": pin.name,
        "version": pin.version,
        "purl": pin.purl,
        "hashes": _hashes(pin.sha256),
        "licenses": _licences(pin.licence),
        "externalReferences": [
            {"type": "vcs", "url": f"https://github.com/{pin.repository}/tree/{pin.commit}"},
            {"type": "distribution", "url": pin.wheel, "hashes": _hashes(pin.sha256)},
        ],
        "pedigree": {"patches": [{"type": "unofficial", "diff": {"url": name}} for name in patches]},
    }


def _file(name: str, sha256: str) -> dict[str, Any]:
    return {
        "type": "file",
        "bom-ref": name,
        "name": name.removeprefix("kernseal:"),
        "hashes": _hashes(sha256),
        "licenses": _licences(OWN_LICENCE),
    }


def _tool(pin: ToolPin) -> dict[str, Any]:
    """A tool: every reviewed wheel of it, whichever of them this machine has; it does not run where the bundle does."""
    purl = f"pkg:pypi/{pin.name}@{pin.version}"
    wheels: Mapping[str, Mapping[str, str]] = pin.wheels
    return {
        "type": "application",
        "bom-ref": purl,
        "name": pin.name,
        "version": pin.version,
        "purl": purl,
        "scope": "excluded",
        "externalReferences": [
            {"type": "distribution", "url": name, "hashes": _hashes(wheels[name]["sha256"])}
            for name in sorted(wheels)
        ],
        "properties": [
            {"name": "kernseal:pin", "value": pin.pin},
            {"name": "kernseal:role", "value": pin.role},
        ],
    }


def _dependencies(
    bundle: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The bundle holds the parts; kernseal makes it with the tools."""
    held = sorted(part["bom-ref"] for part in parts)
    used = sorted(tool["bom-ref"] for tool in tools)
    own = next(part["bom-ref"] for part in parts if part["name"] == "kernseal")
    return [{"ref": bundle["bom-ref"], "dependsOn": held}, {"ref": own, "dependsOn": used}]


def _hashes(sha256: str) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": sha256}]


def _licences(name: str) -> list[dict[str, Any]]:
    return [{"license": {"id": name}}]
