"""Fixtures of the C tests: a fake driver in this process, and variants compiled by the real exporter."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.native import build_fake_driver


@pytest.fixture(scope="session")
def fake_gpu(tmp_path_factory: pytest.TempPathFactory) -> FakeGpu:
    return FakeGpu(build_fake_driver(tmp_path_factory.mktemp("driver")))


@pytest.fixture
def gpu(fake_gpu: FakeGpu) -> Iterator[FakeGpu]:
    """The fake driver, as new."""
    fake_gpu.reset()
    yield fake_gpu
    fake_gpu.reset()


@pytest.fixture(scope="session")
def built_variant() -> Callable[..., object]:
    """``compiled(sm, retarget, **axes)``: a variant's host objects, compiled by the exporter."""
    from cpu.fake_driver import host_objects

    if reason := host_objects.unavailable():
        pytest.skip(reason)
    return host_objects.compiled
