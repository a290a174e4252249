"""Which bundle serves a device, and the names that the loader gives to variants."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kernseal.export import spec
from kernseal.loader import serving
from kernseal.loader.op import load_spec

OPS = spec.load_ops()


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_the_loader_names_variants_as_the_build_does(op: spec.Op) -> None:
    calls = load_spec(op.name)
    assert list(calls.tags) == list(op.data["axes"])
    target = spec.Target(next(iter(op.data["classes"].values()))["sms"][0])
    for variant in op.variants(target, "full"):
        assert calls.variant(variant.axes) == variant.id
    assert calls.variant(op.data["defaults"]) == spec.variant_id(op.data, op.data["defaults"])


@pytest.mark.parametrize(
    ("sm", "retarget", "options"),
    [
        ("sm_90a", None, "--sm 90"),
        ("sm_120a", "sm_90a", "--sm 120 --retarget 90"),
        ("sm_100f", None, "--sm 100f"),
    ],
)
def test_the_command_that_builds_a_variant(sm: str, retarget: str | None, options: str) -> None:
    bundle: Any = SimpleNamespace(statement=SimpleNamespace(sm=sm, retarget=retarget))
    axes = OPS[0].data["defaults"]
    name = f"{OPS[0].name}/{spec.variant_id(OPS[0].data, axes)}"
    assert serving.build_command(bundle, OPS[0].name, axes) == f"kernseal build {options} --variant {name}"


def test_a_device_is_served_by_the_last_bundle_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_served", {})
    bundles: list[Any] = [object(), object(), object()]
    serving.use_bundle(bundles[0], 0)
    serving.use_bundle(bundles[1], 1)
    serving.use_bundle(bundles[2], 0)
    assert [serving.served_by(device).bundle for device in (0, 1)] == [bundles[2], bundles[1]]
