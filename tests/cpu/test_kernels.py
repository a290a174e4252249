"""Variants with more than one kernel in their image: what the compilers say of each, and what the manifest does."""

from __future__ import annotations

import json

import pytest
import synthetic_bundle as made

from kernseal.abi.library import MAX_KERNELS, KernelRecord, VariantRecord, library_sources
from kernseal.abi.model import ABI_DIR
from kernseal.export import assemble, cute_worker, manifest
from kernseal.loader import canonical
from kernseal.loader.errors import BuildFailed
from kernseal.loader.statement import parse_statement
from kernseal.loader.violations import VerificationFailed

REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'merge' for 'sm_90a'
ptxas info    : Function properties for merge
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers
ptxas info    : Compiling entry function 'attend' for 'sm_90a'
ptxas info    : Function properties for attend
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Function properties for helper
    0 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, used 8 barriers, 1024 bytes smem
"""
CONFIG = "(!llvm.ptr) -> !llvm.ptr, !llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"


def launch(n: int, entry: str, smem: int) -> str:
    """What CuTe's host code has of one launch; ``n`` numbers its values."""
    return (
        f"    %{n}0 = llvm.mlir.constant({smem} : i64) : i64\n"
        f"    %{n}1 = llvm.getelementptr %{n}9[0, 2] : {CONFIG}\n"
        f"    llvm.store %{n}0, %{n}1 : i64, !llvm.ptr\n"
        f"    %{n}2 = llvm.mlir.addressof @kernels_{entry} : !llvm.ptr\n"
        f"    %{n}3 = llvm.load %{n}2 : !llvm.ptr -> !llvm.ptr\n"
        f"    %{n}4 = llvm.call @_cudaLaunchKernelEx(%{n}8, %{n}3, %{n}7) : (!llvm.ptr) -> i32\n"
    )


def module(*launches: str) -> str:
    other = "  llvm.func @cuda_load() {\n    %10 = llvm.mlir.constant(7 : i64) : i64\n  }\n"
    return f"module {{\n{other}  llvm.func @entry() {{\n{''.join(launches)}  }}\n}}\n"


def test_ptxas_says_of_each_kernel_what_is_its_own() -> None:
    assert assemble.read_reports(REPORT) == {
        "merge": assemble.Report(0, 0),
        "attend": assemble.Report(24, 1024),
    }


def test_a_kernel_without_a_word_on_spills_fails_the_build() -> None:
    with pytest.raises(BuildFailed, match="no spill report for merge"):
        assemble.read_reports(REPORT.replace("0 bytes spill stores, 0 bytes spill loads", "", 1))


def test_the_host_code_says_what_it_launches_with_how_much_shared_memory() -> None:
    text = module(launch(1, "first_0", 100), launch(2, "second_1", 3000), launch(3, "first_0", 200))
    assert cute_worker.launched_kernels(text) == [("first_0", 200), ("second_1", 3000)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (launch(1, "a", 1).replace("llvm.store %10, %11", "llvm.store %77, %11"), "expected one constant"),
        (launch(1, "a", 1).replace("addressof", "null"), "expected one kernel"),
        (launch(1, "a", 1) + launch(2, "b", 2).replace("[0, 2]", "[0, 3]"), "2 launches and 1 launch conf"),
    ],
)
def test_a_launch_that_cannot_be_told_fails_the_build(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cute_worker.launched_kernels(module(text))


def record(*kernels: KernelRecord) -> VariantRecord:
    return VariantRecord("gdn_prefill", "v", "sm90", {}, kernels, "f", 1, "0" * 64, "glue", None, None)


def test_the_manifest_has_every_kernel_and_the_first_in_the_variants_own_place() -> None:
    first, second = KernelRecord("attend", 255, 24, 1024, 4096), KernelRecord("merge", 40, 0, 0, 0)
    one = manifest.kernel_record(record(first), "", {}, {})
    two = manifest.kernel_record(record(first, second), "", {}, {})
    assert one["entry"] == "attend" and one["registers"] == 255 and "more_kernels" not in one
    assert two == {
        **one,
        "more_kernels": [
            {"entry": "merge", "registers": 40, "spill_bytes": 0, "static_smem": 0, "dynamic_smem": 0}
        ],
    }


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([{"entry": "merge", "registers": 40, "spill_bytes": 0, "static_smem": 0, "dynamic_smem": 0}], None),
        (
            [{"entry": "merge", "registers": -1, "spill_bytes": 0, "static_smem": 0, "dynamic_smem": 0}],
            "/0/registers",
        ),
        ([{"entry": "merge"}], "more_kernels/0/"),
        ("merge", "more_kernels"),
    ],
)
def test_a_statement_with_more_kernels_is_read_as_strictly(more: object, words: str | None) -> None:
    document = json.loads(canonical.dumps(made.statement(made.files())))
    document["predicate"]["buildDefinition"]["internalParameters"]["kernels"][0]["more_kernels"] = more
    if words is None:
        assert parse_statement(canonical.dumps(document)).kernels[0].record["more_kernels"] == more
        return
    with pytest.raises(VerificationFailed, match=words):
        parse_statement(canonical.dumps(document))


def test_the_core_has_room_for_as_many() -> None:
    assert f"#define KSEAL_MAX_KERNELS {MAX_KERNELS} " in (ABI_DIR / "core/variant.h").read_text()


@pytest.mark.parametrize("count", [0, 9])
def test_a_variant_has_one_to_eight_kernels(count: int, tmp_path: object) -> None:
    kernels = tuple(KernelRecord(f"k{i}", 1, 0, 0, 0) for i in range(count))
    with pytest.raises(ValueError, match=f"kernels: {count}; supported are 1 to 8"):
        library_sources("sm_90a", None, [record(*kernels)], tmp_path)  # type: ignore[arg-type]
