"""Fixtures of the C tests: a fake driver in this process, and variants compiled by the real exporter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import builds
import pytest
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.native import STRICT, ZIG, build_fake_driver, compile_c

FAKE_DRIVER = Path(__file__).resolve().parent / "fake_driver"


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


@pytest.fixture(scope="session")
def example_bundle() -> Path:
    """A bundle that was built as any other, with what the examples need."""
    return builds.bundle("90", only=(builds.XQA, builds.PACKED)).path


@pytest.fixture(scope="session")
def fake_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that has the fake driver, whose kernels compute."""
    folder = tmp_path_factory.mktemp("driver")
    build_fake_driver(folder, ZIG, "-mcpu=baseline")  # valgrind does not know every processor's instructions
    sources = [FAKE_DRIVER / name for name in ("kernels.c", "gdn_kernel.c", "xqa_kernel.c")]
    flags = (*STRICT, "-mcpu=baseline", "-O1", "-shared", "-fPIC", "-lm")
    kernels = compile_c(ZIG, sources, folder / "kernels.so", *flags)
    own = {"LD_LIBRARY_PATH": str(folder), "FAKE_CUDA_KERNEL": str(kernels), "FAKE_CUDA_CC": "90"}
    return {**os.environ, **own}


@pytest.fixture(scope="session")
def cargo_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where cargo builds: outside of the checkout, once for all tests."""
    return tmp_path_factory.mktemp("rust")
