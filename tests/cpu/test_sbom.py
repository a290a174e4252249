"""The bill of materials: CycloneDX as its own library reads it, complete, and the same bytes whoever builds."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builds import PACKED, ROOT, bundle

from kernseal.export import build, paths, sbom, source, spec, toolchain
from kernseal.export.build import Options

OPS = spec.load_ops()
SM120 = spec.parse_target("120", None, OPS)
CYCLONEDX = "cyclonedx-python-lib is not installed: pip install 'cyclonedx-python-lib[json-validation]'"


@pytest.fixture(scope="module")
def plan() -> build.Plan:
    return build.plan(OPS, SM120, Options(only=(PACKED,)))


@pytest.fixture(scope="module")
def text(plan: build.Plan) -> bytes:
    return build._sbom(plan)


@pytest.fixture(scope="module")
def document(text: bytes) -> Any:
    return json.loads(text)


def by_ref(document: Any) -> dict[str, Any]:
    return {component["bom-ref"]: component for component in document["components"]}


def test_the_schema_of_cyclonedx_accepts_it(text: bytes) -> None:
    validation = pytest.importorskip("cyclonedx.validation.json", reason=CYCLONEDX)
    schema = pytest.importorskip("cyclonedx.schema", reason=CYCLONEDX)
    validator = validation.JsonStrictValidator(schema.SchemaVersion.V1_6)
    assert validator.validate_str(text.decode()) is None
    spoilt = text.replace(b'"SHA-256"', b'"SHA-257"')
    assert validator.validate_str(spoilt.decode()) is not None


def test_the_library_of_cyclonedx_reads_every_component(text: bytes, document: Any) -> None:
    model = pytest.importorskip("cyclonedx.model.bom", reason=CYCLONEDX)
    bom = model.Bom.from_json(json.loads(text))
    assert bom.validate()
    assert {str(component.bom_ref.value) for component in bom.components} == set(by_ref(document))
    assert bom.get_component_by_purl(next(c.purl for c in bom.components if c.name == "ziglang")) is not None


def test_it_names_the_source_with_hash_licence_and_the_patches_on_it(document: Any, plan: build.Plan) -> None:
    pin = source.upstream()
    component = by_ref(document)[pin.purl]
    assert component["hashes"] == [{"alg": "SHA-256", "content": pin.sha256}]
    assert component["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    patches = {f"kernseal:patches/{patch.name}": patch.sha256 for patch in plan.patches["gdn_prefill"]}
    assert {item["diff"]["url"] for item in component["pedigree"]["patches"]} == set(patches)
    for name, digest in patches.items():
        assert by_ref(document)[name]["hashes"] == [{"alg": "SHA-256", "content": digest}]
    for rule in plan.rules:
        assert f"kernseal:patches/ptx/{rule.name}" in by_ref(document)


def test_it_names_every_pinned_tool_with_version_pin_and_wheels(document: Any) -> None:
    for pin in toolchain.load_pins():
        component = by_ref(document)[f"pkg:pypi/{pin.name}@{pin.version}"]
        assert component["version"] == pin.version
        assert {"name": "kernseal:pin", "value": pin.pin} in component["properties"]
        wheels = {ref["url"]: ref["hashes"][0]["content"] for ref in component["externalReferences"]}
        assert wheels == {name: wheel["sha256"] for name, wheel in pin.wheels.items()}


def test_every_dependency_is_a_component_and_every_component_is_one(document: Any) -> None:
    bundle_ref = document["metadata"]["component"]["bom-ref"]
    refs = {bundle_ref, *by_ref(document)}
    named = {ref for item in document["dependencies"] for ref in item["dependsOn"]}
    assert {item["ref"] for item in document["dependencies"]} <= refs
    assert named == refs - {bundle_ref}


def test_there_is_no_time_and_the_serial_follows_the_content(text: bytes, plan: build.Plan) -> None:
    assert b"timestamp" not in text
    again = build._sbom(plan)
    other = build._sbom(replace(plan, target=spec.parse_target("90", None, OPS)))
    assert again == text
    assert json.loads(other)["serialNumber"] != json.loads(text)["serialNumber"]


PRINT = """
import sys
from kernseal.export import build, spec
from kernseal.export.build import Options
ops = spec.load_ops()
plan = build.plan(ops, spec.parse_target("120", None, ops), Options(only=(sys.argv[1],)))
sys.stdout.buffer.write(build._sbom(plan))
"""


def test_another_process_in_another_folder_with_another_hash_seed_writes_the_same_bytes(
    text: bytes, tmp_path: Path
) -> None:
    child = subprocess.run(
        [sys.executable, "-c", PRINT, PACKED],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "7", "HOME": str(tmp_path), "TZ": "Asia/Tokyo"},
        capture_output=True,
        check=True,
    )
    assert child.stdout == text


@pytest.mark.slow
def test_a_bundle_carries_it_and_its_manifest_and_pins_header_name_it() -> None:
    result = bundle("90")
    data = (result.path / sbom.FILE).read_bytes()
    digest = sbom.hashlib.sha256(data).hexdigest()
    subjects = {item["name"]: item["digest"]["sha256"] for item in result.statement["subject"]}
    assert subjects[sbom.FILE] == digest
    assert digest in (result.path / "kernseal_pins.h").read_text()
    assert json.loads(data)["metadata"]["component"]["name"] == "kernseal-bundle-sm_90a-linux-x86_64"


def test_a_new_version_of_kernseal_is_named_by_the_gate_as_what_moved_it(plan: build.Plan) -> None:
    from kernseal.export import lock

    sources = lock.library_inputs(plan)
    assert sources["kernseal's version"]
    assert {"export/sbom.py", "kernels/upstream.yaml"} <= sources.keys()
    assert (ROOT / "kernels/upstream.yaml").samefile(paths.kernels() / "upstream.yaml")
