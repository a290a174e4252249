"""The NVRTC front end: what it is given, what it leaves, and that nothing of the machine gets in."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cpu.fake_driver.xqa import axes_of, op

from kernseal.export import elf, front_end, nvrtc_worker, patch, paths, source, spec, toolchain
from kernseal.export.compilers import Compilers
from kernseal.export.front_end import Tools
from kernseal.export.job import NvrtcJob, NvrtcKernel, NvrtcProgram
from kernseal.loader.errors import BuildFailed, Malformed, ToolchainInvalid

SMALL = axes_of(head_dim=64, group_size=4)


def job(tree: Path, **changes: Any) -> NvrtcJob:
    made = NvrtcJob(
        tree=str(tree),
        recipe=str(op().folder / "recipe.py"),
        cls=op().data["classes"]["mha"],
        axes=SMALL,
        arch="sm_90a",
        library="",
        headers={},
        out=str(tree),
    )
    return dataclasses.replace(made, **changes)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The patched source set."""
    opened, _ = source.open_source(None, source.upstream())
    patches = patch.load(paths.patches(), op().data["patches"])
    for name, data in patch.apply(source.read_set(opened, source.source_set(op().folder)), patches).items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "tree"


@pytest.fixture
def tools() -> Iterator[Tools]:
    try:
        library, headers = toolchain.nvrtc_path(), toolchain.cuda_headers()
    except ToolchainInvalid as error:
        pytest.skip(f"NVRTC is not installed as pinned: {error}")
    with Compilers(nvrtc=library) as compilers:
        yield Tools(Path(), compilers, headers)


def test_options_are_in_an_order_of_their_own() -> None:
    program = NvrtcProgram({"B": 2, "A": "x"}, ("--std=c++17",), (NvrtcKernel("kernel", "smem"),))
    assert nvrtc_worker.options(program, "sm_120a") == [
        "--gpu-architecture=compute_120a",
        "--std=c++17",
        "-DA=x",
        "-DB=2",
    ]


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    made = job(tmp_path, headers={"a.h": "/a.h"})
    made.save(tmp_path / "job.json")
    assert NvrtcJob.load(tmp_path / "job.json") == made


@pytest.mark.parametrize("name", ["mha", "gmma"])
def test_headers_are_the_source_set_without_the_program(tree: Path, name: str) -> None:
    cls = op().data["classes"][name]
    found = nvrtc_worker.headers(job(tree, cls=cls))
    names = {Path(name).name for name in source.source_set(op().folder)}
    assert set(found) == names - {Path(cls["module"]).name}


def test_a_name_that_is_in_both_places_is_refused(tree: Path) -> None:
    with pytest.raises(ValueError, match=r"utils\.h: both a file of the source set and a CUDA header"):
        nvrtc_worker.headers(job(tree, headers={"utils.h": str(tree / "flashinfer/data/csrc/xqa/utils.h")}))


def test_an_include_that_is_relative_to_its_file_is_written_out(tmp_path: Path) -> None:
    """NVRTC knows headers by the name in the include alone."""
    files = {
        "top.cu": b"",
        "a/b/x.h": b'#include "../y.h"\n # include "z.h"\n#include <z.h>\n#include "elsewhere.h"\nint i; // "z.h"\n',
        "a/b/z.h": b"",
        "a/y.h": b'#include "b/z.h"\n#include "a/y.h"\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text)
    found = nvrtc_worker.headers(job(tmp_path, cls={"module": "top.cu"}))
    assert set(found) == set(files) - {"top.cu"}
    assert found["a/b/x.h"] == (
        b'#include "a/y.h"\n # include "a/b/z.h"\n#include <z.h>\n#include "elsewhere.h"\nint i; // "z.h"\n'
    )
    assert found["a/y.h"] == b'#include "a/b/z.h"\n#include "a/y.h"\n'


CHANGED = {
    "dtype": ("f16", {"INPUT_FP16"}),
    "kv_dtype": ("e4m3", {"CACHE_ELEM_ENUM"}),
    "out_dtype": ("e4m3", {"LOW_PREC_OUTPUT"}),
    "head_dim": (80, {"HEAD_ELEMS"}),
    "group_size": (5, {"HEAD_GRP_SIZE"}),
    "page_size": (32, {"TOKENS_PER_PAGE"}),
    "sliding_window": (True, {"SLIDING_WINDOW"}),
    "spec_decode": (True, {"SPEC_DEC", "IS_SPEC_DEC_TREE"}),
}


def xqa_recipe() -> Any:
    return nvrtc_worker.load_recipe(str(op().folder / "recipe.py"))


def different(a: NvrtcProgram, b: NvrtcProgram) -> set[str]:
    return {name for name, value in (a.macros.items() ^ b.macros.items())}


def test_every_axis_value_changes_the_program() -> None:
    """By macros, all but fp8_math, which is another source."""
    cls = op().data["classes"]["mha"]
    assert {*CHANGED, "fp8_math"} == set(op().data["axes"])
    base = xqa_recipe().mha(SMALL, cls)
    for axis, (value, macros) in CHANGED.items():
        assert different(base, xqa_recipe().mha({**SMALL, axis: value}, cls)) == macros, axis
    sources = {
        value: op().class_for(spec.Target("sm_90a"), {**SMALL, "fp8_math": value}) for value in (False, True)
    }
    assert sources == {False: "mha", True: "gmma"}
    assert op().data["classes"]["gmma"]["module"] != cls["module"]


@pytest.mark.parametrize("values", [["bf16", "e4m3", "i8", "nvfp4"], ["f16", "e4m3", "i8", "nvfp4"]])
def test_every_cache_has_a_number_of_its_own(values: list[str]) -> None:
    cls = op().data["classes"]["mha_sm12x"]
    made = [xqa_recipe().mha({**SMALL, "dtype": values[0], "kv_dtype": value}, cls) for value in values]
    assert [program.macros["CACHE_ELEM_ENUM"] for program in made] == [0, 2, 1, 3]


def test_every_class_has_its_macros() -> None:
    classes = op().data["classes"]
    base = xqa_recipe().mha(SMALL, classes["mha"])
    assert different(base, xqa_recipe().mha(SMALL, classes["mha_sm10x"])) == set()
    assert different(base, xqa_recipe().mha(SMALL, classes["mha_sm12x"])) == {"KSEAL_SMALL_TILES"}
    assert different(base, xqa_recipe().gmma(SMALL, classes["gmma"])) == set()


@pytest.mark.slow
def test_two_compiles_in_two_places_give_the_same_bytes(tree: Path, tools: Tools, tmp_path: Path) -> None:
    variant, target = op().variant(spec.Target("sm_90a"), SMALL), spec.Target("sm_90a")
    made = []
    for name, environment in (("first", {}), ("second", {"TZ": "Asia/Tokyo", "LANG": "C"})):
        work = tmp_path / name
        work.mkdir()
        before = {key: os.environ.get(key) for key in environment}
        os.environ.update(environment)
        try:
            compiled = front_end.compile_variant(op(), variant, target, tree, tools, work)
        finally:
            for key, value in before.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})
        assert (compiled.kernels, compiled.host_function) == ({"kernel_mha": "smemSize"}, None)
        made.append((work / "raw.ptx").read_bytes())
    assert made[0] == made[1]
    assert b".target sm_90a" in made[0]
    for place in (str(tmp_path), str(tools.compilers.libraries["nvrtc"].parent), str(paths.kernels())):
        assert place.encode() not in made[0]


@pytest.mark.slow
def test_a_program_that_does_not_compile_is_reported_with_its_line(
    tree: Path, tools: Tools, tmp_path: Path
) -> None:
    file = tree / "flashinfer/data/csrc/xqa/mma.cuh"
    file.write_text(file.read_text() + "\nthis is not C++;\n")
    target = spec.Target("sm_90a")
    with pytest.raises(BuildFailed, match=r"xqa_decode/.* for sm_90a: NVRTC: (?s:.*)mma\.cuh\(\d+\): error"):
        front_end.compile_variant(op(), op().variant(target, SMALL), target, tree, tools, tmp_path)


@pytest.mark.slow
def test_a_header_of_the_machine_is_not_found(tree: Path, tools: Tools, tmp_path: Path) -> None:
    file = tree / "flashinfer/data/csrc/xqa/mma.cuh"
    file.write_text("#include <linux/limits.h>\n" + file.read_text())
    target = spec.Target("sm_90a")
    with pytest.raises(BuildFailed, match=r"could not open source file \"linux/limits\.h\""):
        front_end.compile_variant(op(), op().variant(target, SMALL), target, tree, tools, tmp_path)


def test_a_constant_that_a_cubin_lacks_is_named() -> None:
    with pytest.raises(Malformed, match="cubin: ELFError"):
        elf.constant_u32(b"not a cubin", "smemSize")
