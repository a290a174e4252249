"""The NVRTC front end: what it is given, what it leaves, and that nothing of the machine gets in."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from cpu.fake_driver.xqa import axes_of, op

from kernseal.export import elf, front_end, nvrtc_worker, patch, paths, source, spec, toolchain
from kernseal.export.front_end import Tools
from kernseal.export.job import NvrtcJob, NvrtcProgram
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
def tools() -> Tools:
    try:
        return Tools(Path(), Path(), toolchain.nvrtc_path(), toolchain.cuda_headers())
    except ToolchainInvalid as error:
        pytest.skip(f"NVRTC is not installed as pinned: {error}")


def test_options_are_in_an_order_of_their_own() -> None:
    program = NvrtcProgram({"B": 2, "A": "x"}, ("--std=c++17",), "kernel", "smem")
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


def test_headers_are_the_source_set_without_the_program(tree: Path) -> None:
    found = nvrtc_worker.headers(job(tree))
    names = {Path(name).name for name in source.source_set(op().folder)}
    assert set(found) == names - {"mha.cu"}


def test_a_name_that_is_in_both_places_is_refused(tree: Path) -> None:
    with pytest.raises(ValueError, match=r"utils\.h: both a file of the source set and a CUDA header"):
        nvrtc_worker.headers(job(tree, headers={"utils.h": str(tree / "flashinfer/data/csrc/xqa/utils.h")}))


def test_every_axis_value_changes_the_macros() -> None:
    recipe = nvrtc_worker.load_recipe(str(op().folder / "recipe.py"))
    cls = op().data["classes"]["mha"]
    base = recipe.mha(SMALL, cls)
    changed = {
        "dtype": "f16",
        "kv_dtype": "e4m3",
        "out_dtype": "e4m3",
        "head_dim": 80,
        "group_size": 5,
        "page_size": 32,
        "sliding_window": True,
    }
    assert set(changed) == set(op().data["axes"])
    for axis, value in changed.items():
        other = recipe.mha({**SMALL, axis: value}, cls)
        assert sum(other.macros[name] != base.macros[name] for name in base.macros) == 1, axis
    small_tiles = recipe.mha(SMALL, op().data["classes"]["mha_sm12x"])
    assert set(small_tiles.macros) - set(base.macros) == {"KSEAL_SMALL_TILES"}


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
        assert (compiled.entry, compiled.host_function, compiled.dynamic_smem) == (
            "kernel_mha",
            None,
            "smemSize",
        )
        made.append((work / "raw.ptx").read_bytes())
    assert made[0] == made[1]
    assert b".target sm_90a" in made[0]
    for place in (str(tmp_path), str(tools.nvrtc.parent), str(paths.kernels())):
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
