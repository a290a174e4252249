"""A plan on the host from C++, Rust and Python, over a library whose kernels are made up."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.native import compile_c
from cpu.fake_driver.ragged_prefill import axes_of, library_of
from cpu.fake_driver.xqa import axes_of as xqa_axes
from cpu.fake_driver.xqa import library_of as xqa_library
from cpu.test_abi_examples import CARGO, CXX, CXXFLAGS
from cpu.test_abi_wrappers import sha256

from kernseal.abi import library
from kernseal.loader.bundle import Bundle
from kernseal.loader.errors import Unsupported, WorkspaceTooSmall
from kernseal.loader.library import Library

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def folder(fake_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory) -> Path:
    fake_gpu.reset()
    path = tmp_path_factory.mktemp("plan")
    library_of([axes_of()], path).close()
    return path


def bundle_of(folder: Path) -> Bundle:
    statement: Any = SimpleNamespace(sm="sm_90a", retarget=None)
    return Bundle(
        Library(str(folder / "libkernseal.so")), str(folder), statement, allow_validation=False, device=-1
    )


def check(command: list[str], environment: dict[str, str]) -> None:
    """Run a program that plans, and plans again with a byte too few."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    planned, refused = done.stdout.splitlines()
    assert planned == "ragplan2 1"
    assert refused.startswith("workspace_too_small: ragged_prefill: plan_bytes is ")


@pytest.mark.slow
@pytest.mark.skipif(CXX is None, reason="no C++ compiler on this machine")
def test_cpp_plans(folder: Path, tmp_path: Path, fake_process: dict[str, str]) -> None:
    flags = (
        *CXXFLAGS,
        f"-I{library.header().parent}",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    )
    program = compile_c([str(CXX)], [HERE / "cpp" / "test_plan.cpp"], tmp_path / "test_plan", *flags)
    check([str(program), str(folder), sha256(folder / "libkernseal.so")], fake_process)


CRATE = """
[package]
name = "plan"
version = "0.0.0"
edition = "2024"
[[bin]]
name = "plan"
path = "{source}"
[dependencies]
kernseal = {{ path = "{crate}" }}
"""


@pytest.mark.slow
@pytest.mark.skipif(CARGO is None, reason="no cargo on this machine")
def test_rust_plans(folder: Path, tmp_path: Path, cargo_target: Path, fake_process: dict[str, str]) -> None:
    crate = Path(library.__file__).resolve().parent / "rust"
    (tmp_path / "Cargo.toml").write_text(CRATE.format(source=HERE / "rust" / "plan.rs", crate=crate))
    command = [str(CARGO), "build", "--offline", "--quiet", "--target-dir", str(cargo_target)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    check(
        [str(cargo_target / "debug" / "plan"), str(folder), sha256(folder / "libkernseal.so")], fake_process
    )


def test_python_plans(folder: Path, gpu: FakeGpu) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    ends = torch.tensor([0, 100, 130], dtype=torch.int32)
    given = {"num_q_heads": 1, "num_kv_heads": 1, "sm_scale": 1.0, "total_q": 130, "total_kv": 130}
    with bundle_of(folder) as bundle:
        op = bundle.prepare("ragged_prefill", device=-1)
        size = op.plan_size(**given, qo_indptr=ends, kv_indptr=ends)
        plan = torch.zeros(size, dtype=torch.uint8)
        used = op.plan(**given, qo_indptr=ends, kv_indptr=ends, plan=plan)
        assert bytes(plan[:8].numpy()) == b"ragplan2" and 0 < used <= size
        with pytest.raises(WorkspaceTooSmall, match=f"this plan needs {used}"):
            op.plan(**given, qo_indptr=ends, kv_indptr=ends, plan=plan[: used - 1])


def test_python_has_no_plan_where_an_op_has_none(gpu: FakeGpu, tmp_path: Path) -> None:
    axes = xqa_axes()
    xqa_library([axes], "sm_90a", tmp_path).close()
    with bundle_of(tmp_path) as bundle:
        op = bundle.prepare("xqa_decode", device=-1, **axes)
        assert op.plan_size() == 0
        with pytest.raises(Unsupported, match="op 'xqa_decode': plans nothing"):
            op.plan()
