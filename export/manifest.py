"""The statement of a bundle: what every file hashes to and how all of it came to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

from kernseal.abi.library import VariantRecord, abi_version
from kernseal.export import assemble, host
from kernseal.export.git import Revision
from kernseal.export.spec import Target
from kernseal.loader import canonical
from kernseal.loader.statement import BUILD_TYPE, MORE_KERNELS, PREDICATE_TYPE, STATEMENT_TYPE

BUILDER = "https://kernseal.dev/builder/v1"


def kernel_record(
    record: VariantRecord, code_sha256: str, inputs: Mapping[str, str], rules: Mapping[str, int]
) -> dict[str, Any]:
    """One variant as the statement has it; its first kernel in the record itself, the others in a list beside it."""
    main, *others = record.kernels
    made = {
        "op": record.op,
        "variant": record.variant,
        "class": record.class_name,
        "axes": dict(record.axes),
        "entry": main.entry,
        "file": record.file,
        "bytes": record.size,
        "registers": main.registers,
        "spill_bytes": main.spill_bytes,
        "static_smem": main.static_smem,
        "dynamic_smem": main.dynamic_smem,
        "code_sha256": code_sha256,
        "evidence": record.evidence,
        "inputs": dict(inputs),
        "ptx_rules": dict(rules),
    }
    return {**made, MORE_KERNELS: [asdict(kernel) for kernel in others]} if others else made


def statement(
    target: Target,
    profile: str,
    subjects: Mapping[str, str],
    kernels: Sequence[Mapping[str, Any]],
    semantics: Mapping[str, Sequence[str]],
    dependencies: Sequence[Mapping[str, Any]],
    revision: Revision,
) -> bytes:
    """Canonical bytes of ``manifest.json``.

    Args:
        subjects: SHA-256 of every other file but the envelope, by path.
        kernels: ``kernel_record`` of each variant.
        semantics: by op, what its numbers mean (gate domain, state layout).
        dependencies: resource descriptors of source, patches and tools.
    """
    return canonical.dumps(
        {
            "_type": STATEMENT_TYPE,
            "predicateType": PREDICATE_TYPE,
            "subject": [{"name": name, "digest": {"sha256": subjects[name]}} for name in sorted(subjects)],
            "predicate": {
                "buildDefinition": {
                    "buildType": BUILD_TYPE,
                    "externalParameters": {
                        "sm": target.sm,
                        "retarget": target.retarget,
                        "host": target.host,
                        "profile": profile,
                        "variants": [f"{kernel['op']}/{kernel['variant']}" for kernel in kernels],
                    },
                    "internalParameters": {
                        "abi_version": abi_version(),
                        "kernels": list(kernels),
                        "semantics": {op: list(lines) for op, lines in semantics.items()},
                        "flags": {
                            "ptxas": list(assemble.FLAGS),
                            "cc": list(host.CFLAGS),
                            "link": list(host.LDFLAGS),
                        },
                        "git": {"commit": revision.commit, "dirty": revision.dirty},
                    },
                    "resolvedDependencies": list(dependencies),
                },
                "runDetails": {
                    "builder": {"id": BUILDER, "version": {"kernseal": metadata.version("kernseal")}}
                },
            },
        }
    )
