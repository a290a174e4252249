"""CTAs per SM are those of CUDA's own cuda_occupancy.h, and what a cubin says of its threads is read right."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import cffi
import pytest
import yaml
from cpu.fake_driver.native import ZIG, compile_c

from kernseal.export import occupancy, paths, toolchain
from kernseal.loader.errors import Malformed, ToolchainInvalid

SMS: dict[str, dict[str, Any]] = yaml.safe_load((paths.kernels() / "sms.yaml").read_text())
CDEF = """
int reference(int major, int minor, int threads_per_sm, int registers, int smem_per_sm, int smem_per_block, int reserved,
              int threads, int thread_registers, int smem);
"""
SOURCE = """
#include <cuda_occupancy.h>

int reference(int major, int minor, int threads_per_sm, int registers, int smem_per_sm, int smem_per_block, int reserved,
              int threads, int thread_registers, int smem) {
    cudaOccDeviceProp device = {.computeMajor = major, .computeMinor = minor, .maxThreadsPerBlock = 1024,
                                .maxThreadsPerMultiprocessor = threads_per_sm, .regsPerBlock = registers,
                                .regsPerMultiprocessor = registers, .warpSize = 32, .sharedMemPerBlock = 49152,
                                .sharedMemPerMultiprocessor = (size_t)smem_per_sm, .numSms = 1,
                                .sharedMemPerBlockOptin = (size_t)smem_per_block,
                                .reservedSharedMemPerBlock = (size_t)reserved};
    cudaOccFuncAttributes kernel = {.maxThreadsPerBlock = 1024, .numRegs = thread_registers,
                                    .shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN,
                                    .maxDynamicSharedSizeBytes = (size_t)smem_per_block};
    cudaOccDeviceState state = {.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED};
    cudaOccResult result;
    cudaOccError error = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, (size_t)smem);
    return error == CUDA_OCC_SUCCESS ? result.activeBlocksPerMultiprocessor : -1;
}
"""
THREADS = (1, 32, 96, 128, 160, 256, 384, 512, 672, 1024)
REGISTERS = (0, 1, 32, 40, 42, 64, 80, 96, 104, 127, 128, 129, 168, 182, 240, 255)
SMEM = (
    0,
    1,
    1024,
    31_000,
    35_456,
    49_152,
    66_176,
    98_000,
    101_376,
    112_256,
    115_712,
    145_024,
    200_000,
    232_448,
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    try:
        header = toolchain.cuda_headers()["cuda_occupancy.h"]
    except ToolchainInvalid as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("occupancy")
    (folder / "include").mkdir()
    shutil.copy(header, folder / "include")
    (folder / "reference.c").write_text(SOURCE)
    flags = ("-O1", "-w", "-shared", "-fPIC", f"-I{folder / 'include'}")
    path = compile_c(ZIG, [folder / "reference.c"], folder / "reference.so", *flags)
    ffi = cffi.FFI()
    ffi.cdef(CDEF)
    return ffi.dlopen(str(path))


@pytest.mark.parametrize("arch", SMS)
def test_it_is_what_cuda_says(reference: Any, arch: str) -> None:
    sm, digits = SMS[arch], int(arch.removeprefix("sm_").removesuffix("a"))
    device = (
        *divmod(digits, 10),
        sm["max_threads_per_sm"],
        sm["registers_per_sm"],
        sm["max_smem_per_sm"],
        sm["max_smem_per_block"],
        sm["reserved_smem_per_block"],
    )
    wrong, alone = [], set()
    for threads, registers, smem in itertools.product(THREADS, REGISTERS, SMEM):
        found = occupancy.of(arch, threads, registers, smem)
        expected = reference.reference(*device, threads, registers, smem)
        alone |= set(found.limited_by) if len(found.limited_by) == 1 else set()
        if found.ctas != expected:
            wrong.append((threads, registers, smem, found, expected))
    assert wrong == []
    assert alone == {"registers", "smem", "threads", "ctas"}


def test_every_limit_that_is_as_tight_is_named() -> None:
    found = occupancy.of("sm_90a", threads=1024, registers=64, smem=200_000)
    assert found == occupancy.Occupancy(1, ("registers", "smem"))


def test_the_numbers_of_an_sm_belong_together() -> None:
    for arch, sm in SMS.items():
        assert sm["max_smem_per_sm"] == sm["max_smem_per_block"] + sm["reserved_smem_per_block"], arch


def test_nonsense_is_no_cubin() -> None:
    with pytest.raises(Malformed, match="cubin: ELFError"):
        occupancy.block_threads(b"not a cubin", "kernel")


@pytest.mark.slow
def test_a_built_kernel_says_its_threads() -> None:
    from builds import PACKED, bundle

    built = bundle("90", only=(PACKED,))
    (kernel,) = built.statement["predicate"]["buildDefinition"]["internalParameters"]["kernels"]
    cubin = Path(built.path / "cubin" / "gdn_prefill" / f"{PACKED}.cubin").read_bytes()
    assert occupancy.block_threads(cubin, kernel["entry"]) == 512
    assert occupancy.block_threads(cubin, "another") is None
    assert occupancy.of_kernel("sm_90a", kernel, cubin) == occupancy.of(
        "sm_90a", 512, kernel["registers"], kernel["static_smem"] + kernel["dynamic_smem"]
    )
