"""The header lists for each function the statuses that it returns: those that the tests provoke, no more and no fewer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cpu.fake_driver import xqa
from cpu.fake_driver.gpu import FakeGpu
from cpu.test_abi_c import FILES, C

from kernseal.abi import model

ABI = model.load()
OP = "kseal_gdn_prefill"
OF_OTHER_OPS = {f.name for op in ABI.ops if f"kseal_{op.name}" != OP for f in op.functions}
MACROS = {"OPEN_REFUSED": "kseal_open", "PREPARE_REFUSED": f"{OP}_prepare", "REFUSED": f"{OP}_run"}
PYTHON = {
    ("kseal_open", "KSEAL_NO_DRIVER"): "test_abi_library.py::test_no_driver_is_told",
    (
        "kseal_open",
        "KSEAL_WRONG_SM",
    ): "test_abi_library.py::test_kernels_rebuilt_for_another_sm_open_for_validation_only",
    ("_size", "KSEAL_ABI_MISMATCH"): "test_abi_versions.py::test_every_smaller_size_is_refused",
    ("_size", "KSEAL_MISALIGNED"): "test_abi_errors.py::test_scratch_sizes_are_refused_as_a_run_would_be",
    ("_size", "KSEAL_OVERFLOW"): "test_abi_errors.py::test_scratch_sizes_are_refused_as_a_run_would_be",
}
"""Provoked by a test in Python: function or the end of its name, status, test."""


def provoked() -> set[tuple[str, str]]:
    found = set()
    for file in FILES:
        text = (C / file).read_text()
        for macro, status in re.findall(r"^(\w+)\(\w+,(?: \"\w+\",)? (KSEAL_\w+),", text, re.MULTILINE):
            found.add((MACROS[macro], status))
        found |= {(call, status) for status, call in re.findall(r"REFUSES\((KSEAL_\w+), (kseal_\w+)\(", text)}
    public = {function.name for function in ABI.all_functions}
    return {(call, status) for call, status in found if call in public}


@pytest.mark.parametrize(
    "function", [f for f in ABI.all_functions if f.name not in OF_OTHER_OPS], ids=lambda f: f.name
)
def test_the_documented_errors_are_those_that_tests_provoke(function: model.Function) -> None:
    seen = {status for call, status in provoked() if call == function.name}
    seen |= {status for call, status in PYTHON if function.name.endswith(call)}
    assert seen == {error.c_name for error in function.errors}


@pytest.mark.parametrize("test", sorted(set(PYTHON.values())))
def test_the_tests_in_python_are_there(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"def {name}(" in (Path(__file__).parent / file).read_text()


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"kv_page_stride": 100}, "MISALIGNED", "kv_page_stride is 100"),
        ({"batch_size": 65536}, "OVERFLOW", "batch_size is 65536"),
        ({"num_kv_heads": 0}, "INVALID_ARGUMENT", "num_kv_heads is 0"),
    ],
)
def test_scratch_sizes_are_refused_as_a_run_would_be(
    gpu: FakeGpu, tmp_path: Path, changes: dict[str, int], status: str, words: str
) -> None:
    axes = xqa.axes_of()
    library = xqa.library_of([axes], "sm_90a", tmp_path)
    handle = library.prepare(xqa.OP, axes)
    sizes = {
        "num_q_heads": axes["group_size"],
        "num_kv_heads": 1,
        "batch_size": 1,
        "num_pages": 1,
        "max_pages_per_seq": 1,
    }
    args = library.struct("kseal_xqa_decode_args", **{**sizes, "q_scale": 1.0, **changes})
    for what in ("workspace", "semaphores"):
        size = library.ffi.new("uint64_t *", 77)
        found = getattr(library.c, f"kseal_xqa_decode_{what}_size")(handle, args, size)
        assert found == getattr(library.c, f"KSEAL_{status}") and words in library.error()
        assert size[0] == 77, "set on success only"
