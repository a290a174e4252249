"""The loader on a built bundle and a fake driver: what it opens, prepares, launches and refuses."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from builds import BOTH, PACKED, bundle, signing_key
from cpu.fake_driver.gpu import FakeGpu

from kernseal.loader import library as loader_library
from kernseal.loader.bundle import Bundle, open_bundle
from kernseal.loader.errors import (
    Capturing,
    DriverError,
    InvalidArgument,
    Misaligned,
    Mismatch,
    Unsupported,
    UntrustedKey,
    WorkspaceTooSmall,
    WrongSm,
)
from kernseal.loader.keys import PublicKey
from kernseal.loader.policy import Policy, trust_key

pytestmark = pytest.mark.slow

CAPTURE_ACTIVE = 1
NOW, DAY = datetime.now(timezone.utc), timedelta(days=1)
HKV_AXES = {"state_layout": "hkv", "pooled": True}
HEADS = {"num_q_heads": 16, "num_k_heads": 16, "num_v_heads": 32, "head_dim": 128}


def trusting() -> Policy:
    return trust_key(Policy(), PublicKey("tests", signing_key().keyid, NOW - DAY, NOW + DAY))


@pytest.fixture(scope="module")
def path() -> Path:
    return bundle("90", only=BOTH).path


@pytest.fixture
def opened(path: Path, gpu: FakeGpu) -> Iterator[Bundle]:
    with open_bundle(path, policy=trusting()) as result:
        yield result


def call(**changes: Any) -> dict[str, Any]:
    """A packed call in numbers."""
    pointers = (
        "q",
        "k",
        "v",
        "o",
        "alpha",
        "beta",
        "initial_state",
        "final_state",
        "cu_seqlens",
        "workspace",
    )
    addresses = {name: 0x7F0000000000 + 0x100000 * i for i, name in enumerate(pointers)}
    sizes = {"total_tokens": 100, "num_seqs": 2, "scale": 0.5, "workspace_bytes": 1 << 20, "stream": 0x1234}
    return {**HEADS, **addresses, **sizes, **changes}


def test_variants_are_what_the_manifest_says(opened: Bundle, path: Path) -> None:
    variants = {v.variant: v for v in opened.variants()}
    assert set(variants) == set(BOTH)
    packed = variants[PACKED]
    image = path / packed.file
    assert packed.op == "gdn_prefill" and packed.sm == "sm_90a" and packed.class_name == "sm90"
    assert packed.axes["state_layout"] == "hvk" and packed.axes["pooled"] == "0"
    assert packed.size == image.stat().st_size and len(packed.sha256) == 64
    assert packed.registers > 0 and packed.evidence in ("ran", "retargeted", "glue", "inspected")


def test_a_run_launches_one_kernel_on_the_given_stream(opened: Bundle, gpu: FakeGpu) -> None:
    op = opened.prepare("gdn_prefill")
    assert op.workspace_size() == 132 * 128
    before = len(gpu.log())
    op.run(**call())
    calls = gpu.log()[before:]
    assert [c["call"] for c in calls] == ["launch"]
    assert calls[0]["grid"] == [64, 1, 1]
    assert int(str(calls[0]["stream"]), 0) == 0x1234


def test_preparing_again_gives_the_same_op_and_loads_nothing(opened: Bundle, gpu: FakeGpu) -> None:
    op = opened.prepare("gdn_prefill", device=0)
    loads = len(gpu.log("load"))
    assert opened.prepare("gdn_prefill", device=0) is op
    assert opened.prepared("gdn_prefill", device=0) is op
    assert opened.prepared("gdn_prefill", device=0, **HKV_AXES) is None
    assert len(gpu.log("load")) == loads == 1


def test_the_evidence_of_a_variant_can_be_asked_and_asked_for(
    opened: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    (packed,) = [v for v in opened.variants() if v.variant == PACKED]
    assert opened.evidence("gdn_prefill") == packed.evidence == "ran"
    assert opened.prepare("gdn_prefill", at_least="ran") is opened.prepare("gdn_prefill")
    with pytest.raises(
        InvalidArgument, match="at_least is 'proven'; it must be inspected, glue, retargeted, ran"
    ):
        opened.prepare("gdn_prefill", at_least="proven")
    with pytest.raises(Unsupported, match="this bundle has no variant f16_"):
        opened.evidence("gdn_prefill", dtype="f16")
    monkeypatch.setattr(Bundle, "evidence", lambda *_, **__: "glue")
    assert opened.prepare("gdn_prefill", at_least="glue")
    with pytest.raises(
        Unsupported, match=f"evidence for {PACKED} is 'glue'; at least 'retargeted' was asked for"
    ):
        opened.prepare("gdn_prefill", at_least="retargeted")
    assert opened.prepare("gdn_prefill"), "a choice by hand stays open"


def test_two_threads_prepare_one_variant_once(opened: Bundle, gpu: FakeGpu) -> None:
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(opened.prepare("gdn_prefill"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(map(id, found))) == 1
    assert len(gpu.log("load")) == 1


def test_the_library_comes_from_sealed_memory_not_from_the_folder(opened: Bundle, path: Path) -> None:
    maps = Path("/proc/self/maps").read_text()
    assert "memfd:libkernseal.so" in maps
    assert str(path / "libkernseal.so") not in maps


def test_opening_twice_loads_the_library_once(opened: Bundle, path: Path) -> None:
    known = len(loader_library._loaded)
    with open_bundle(path, policy=trusting()) as again:
        assert len(again.variants()) == len(opened.variants())
    assert len(loader_library._loaded) == known


def test_closing_is_idempotent_and_ends_everything(path: Path, gpu: FakeGpu) -> None:
    bundle = open_bundle(path, policy=trusting())
    op = bundle.prepare("gdn_prefill")
    bundle.close()
    bundle.close()
    assert len(gpu.log("unload")) == 1
    for use in (
        bundle.variants,
        lambda: bundle.prepare("gdn_prefill"),
        lambda: op.run(**call()),
        op.workspace_size,
    ):
        with pytest.raises(InvalidArgument, match="closed"):
            use()


def test_a_changed_library_is_refused_before_it_is_loaded(path: Path, tmp_path: Path, gpu: FakeGpu) -> None:
    copy = shutil.copytree(path, tmp_path / "copy")
    library = copy / "libkernseal.so"
    data = bytearray(library.read_bytes())
    data[-1] ^= 1
    library.write_bytes(data)
    known = len(loader_library._loaded)
    with pytest.raises(Mismatch, match=r"libkernseal\.so"):
        open_bundle(copy, policy=trusting())
    assert len(loader_library._loaded) == known


def test_an_image_that_changes_after_open_is_refused_at_prepare(
    path: Path, tmp_path: Path, gpu: FakeGpu
) -> None:
    copy = shutil.copytree(path, tmp_path / "copy")
    with open_bundle(copy, policy=trusting()) as bundle:
        image = copy / f"cubin/gdn_prefill/{PACKED}.cubin"
        data = bytearray(image.read_bytes())
        data[-1] ^= 1
        image.write_bytes(data)
        with pytest.raises(Mismatch, match=PACKED):
            bundle.prepare("gdn_prefill")
        assert gpu.log("load") == []
        assert bundle.prepare("gdn_prefill", **HKV_AXES).name == "gdn_prefill"


def test_a_bundle_that_nobody_trusted_signed_is_refused(path: Path, gpu: FakeGpu) -> None:
    with pytest.raises(UntrustedKey):
        open_bundle(path, policy=Policy())


def test_a_device_of_another_sm_is_refused(opened: Bundle, gpu: FakeGpu) -> None:
    gpu.device((12, 0))
    with pytest.raises(WrongSm, match="sm_90a"):
        opened.prepare("gdn_prefill")


def test_prepare_under_capture_is_refused(opened: Bundle, gpu: FakeGpu) -> None:
    gpu.capturing(CAPTURE_ACTIVE)
    with pytest.raises(Capturing):
        opened.prepare("gdn_prefill")
    gpu.capturing(0)
    assert opened.prepare("gdn_prefill").workspace_size() > 0


def test_a_variant_that_is_not_there_is_refused_with_what_is(opened: Bundle) -> None:
    with pytest.raises(Unsupported, match=PACKED):
        opened.prepare("gdn_prefill", dtype="f16")


def test_an_op_that_is_not_there_is_refused(opened: Bundle) -> None:
    with pytest.raises(Unsupported, match="nothing_such"):
        opened.prepare("nothing_such")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q": 0x7F0000000004}, Misaligned, "q is"),
        ({"workspace_bytes": 16}, WorkspaceTooSmall, "workspace_bytes"),
        ({"head_dim": 64}, InvalidArgument, "head_dim is 64"),
        ({"alpha": None}, InvalidArgument, "alpha is null"),
        ({"num_seqs": None}, InvalidArgument, "missing: num_seqs"),
        ({"num_seqs": 1 << 70}, InvalidArgument, "num_seqs: 11805"),
        ({"scale": "half"}, InvalidArgument, "scale: 'half'"),
        ({"tokens": 3}, InvalidArgument, "tokens: no such field"),
        ({"q": object()}, InvalidArgument, "q: expected a tensor"),
        ({"stream": "main"}, InvalidArgument, "stream: expected"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else getattr(value, "__name__", value),
)
def test_bad_arguments_are_refused_by_name(
    opened: Bundle, gpu: FakeGpu, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    op = opened.prepare("gdn_prefill")
    with pytest.raises(error, match=words):
        op.run(**call(**change))
    assert gpu.log("launch") == []


def test_a_missing_stream_is_refused(opened: Bundle) -> None:
    op = opened.prepare("gdn_prefill")
    args = call()
    del args["stream"]
    with pytest.raises(InvalidArgument, match="stream: missing"):
        op.run(**args)


def test_a_driver_error_keeps_its_name(opened: Bundle, gpu: FakeGpu) -> None:
    op = opened.prepare("gdn_prefill")
    gpu.fail("cuLaunchKernelEx", 700)
    with pytest.raises(DriverError, match="700"):
        op.run(**call())


def test_axes_are_checked_by_name_and_value(opened: Bundle) -> None:
    with pytest.raises(InvalidArgument, match="colour: no such axis"):
        opened.prepare("gdn_prefill", colour="red")
    with pytest.raises(InvalidArgument, match=r"dtype: 'bfloat16'; known: .*bf16"):
        opened.prepare("gdn_prefill", dtype="bfloat16")
    with pytest.raises(InvalidArgument, match="pooled"):
        opened.prepare("gdn_prefill", pooled="yes")


def test_a_link_to_a_bundle_is_refused(path: Path, tmp_path: Path, gpu: FakeGpu) -> None:
    link = tmp_path / "link"
    os.symlink(path, link)
    with pytest.raises(Exception, match="link"):
        open_bundle(link, policy=trusting())


def test_a_retargeted_bundle_must_be_asked_for(gpu: FakeGpu) -> None:
    retargeted = bundle("120", "90", only=(PACKED,)).path
    with pytest.raises(WrongSm, match=r"(?i)validation"):
        open_bundle(retargeted, policy=trusting())
    with open_bundle(retargeted, policy=trusting(), allow_validation=True) as opened:
        opened.prepare("gdn_prefill").run(**call())
        assert len(gpu.log("launch")) == 1
