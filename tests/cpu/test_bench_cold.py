"""``gpu.bench_cold``: whom it starts and in which order, what it says of them, and what the children do (kernseal's over the
fake driver, the others' with stubs).
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import builds
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu import bench_cold, bench_document  # noqa: E402
from gpu.bench_cold import Contender, turns  # noqa: E402
from gpu.cold import jit_calls, jit_child, problem, write_problem  # noqa: E402

from kernseal.export import bench, source  # noqa: E402
from kernseal.kernels.gdn_prefill.reference import gated_delta_rule  # noqa: E402
from kernseal.kernels.xqa_decode.reference import decode  # noqa: E402
from kernseal.loader.errors import Malformed  # noqa: E402
from kernseal.loader.op import load_spec  # noqa: E402

STAMP = {
    "device": "NVIDIA X1",
    "driver": "1.2.3",
    "commit": "0123456789abcdef",
    "dirty": False,
    "date": "2026-11-30T15:00:00+00:00",
}
CHILD = """
import json, os, pathlib, sys
log, name = pathlib.Path(sys.argv[1]), sys.argv[2]
before = log.read_text().split() if log.exists() else []
log.write_text(" ".join([*before, name]))
kept = pathlib.Path(os.environ["TRITON_CACHE_DIR"], "kernel")
print("a line of a library", {}, flush=True)
print(json.dumps({"open_ms": before.count(name), "prepare_ms": 1, "first_run_ms": 5, "found_ms": kept.exists()}))
kept.touch()
"""
"""Says how often it was started before, and whether its cache was empty."""
SMALL = write_problem.Sizes(tokens=3, heads=(2, 2, 2), kv_lens=(16, 5), kv_heads=2, also=())
"""What the kernels of the fake driver can do."""


Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run(contenders, *options)`` measures them on a clean tree with a bundle."""
    monkeypatch.setattr(bench_cold, "provenance", lambda: dict(STAMP))
    monkeypatch.setattr(bench_cold, "folder", lambda name: tmp_path)
    monkeypatch.setattr(bench_cold, "written", lambda place: {"problem": {}, "prepared": 4})

    def main(known: Mapping[str, Contender], *options: str) -> int:
        monkeypatch.setattr(bench_cold, "contenders", lambda place, programs: dict(known))
        return bench_cold.main(["--json", str(tmp_path / "report.json"), "--samples", "3", *options])

    return main


@pytest.fixture
def report(tmp_path: Path) -> Callable[[], dict[str, Any]]:
    return lambda: json.loads((tmp_path / "report.json").read_text())


def contender(tmp_path: Path, name: str, **changes: Any) -> Contender:
    command = (sys.executable, "-c", CHILD, str(tmp_path / "log"), name)
    return Contender(
        **{"label": f"the {name}", "command": command, "ready": ("open_ms", "prepare_ms"), **changes}
    )


def script(text: str, **changes: Any) -> Contender:
    return Contender("a script", (sys.executable, "-c", text), ("open_ms",), **changes)


def says(**parts: float) -> str:
    return f"print({json.dumps(parts)!r}, flush=True)\n"


def test_turns_go_forth_and_back_and_a_rare_one_comes_first() -> None:
    assert turns({"a": 3, "b": 3}) == ["a", "b", "b", "a", "a", "b"]
    assert turns({"a": 2, "rare": 1, "b": 2}) == ["a", "rare", "b", "b", "a"]
    assert turns({}) == []


def test_contenders_take_turns_after_a_run_that_does_not_count(
    tmp_path: Path, run: Run, report: Callable[[], dict[str, Any]]
) -> None:
    known = {name: contender(tmp_path, name) for name in ("a", "b")}
    assert run(known) == 0
    assert (tmp_path / "log").read_text() == "a b a b b a a b"
    found = report()
    assert found["order"] == ["a", "b", "b", "a", "a", "b"]
    assert [sample["open_ms"] for sample in found["contenders"]["a"]["samples"]] == [1, 2, 3]
    median = found["contenders"]["a"]["median"]
    assert (median["open_ms"], median["ready_ms"]) == (2, 3)
    for sample in found["contenders"]["b"]["samples"]:
        inside = sum(sample[part] for part in ("open_ms", "prepare_ms", "first_run_ms", "found_ms"))
        assert sample["total_ms"] == pytest.approx(inside + sample["process_ms"], abs=1e-3)
        assert sample["process_ms"] > 0
    assert found | STAMP == found
    assert found["command"].startswith("python -m gpu.bench_cold --json ")


def test_an_empty_cache_is_empty_each_time_and_a_warm_one_filled_before_it_counts(
    tmp_path: Path, run: Run, report: Callable[[], dict[str, Any]]
) -> None:
    same = {
        "command": (sys.executable, "-c", CHILD, str(tmp_path / "log"), "same"),
        "ready": ("first_run_ms",),
    }
    known = {cache: contender(tmp_path, cache, cache=cache, **same) for cache in ("empty", "warm")}
    assert run(known, "--empty-samples", "2") == 0
    found = report()["contenders"]
    assert [sample["found_ms"] for sample in found["empty"]["samples"]] == [False, False]
    assert [sample["found_ms"] for sample in found["warm"]["samples"]] == [True] * 3
    assert (tmp_path / "log").read_text().count("same") == 1 + 2 + 3


def test_the_document_is_what_kernseal_report_reads_and_shows_the_medians(
    tmp_path: Path, run: Run, report: Callable[[], dict[str, Any]]
) -> None:
    names = ("kernseal-model", "kernseal-gdn", "flashinfer-model-warm")
    document = tmp_path / "document.json"
    assert run({name: contender(tmp_path, name) for name in names}, "--document", str(document)) == 0
    read = bench.read(document)
    assert (read.provenance.device, read.provenance.dirty) == ("NVIDIA X1", False)
    assert read.provenance.date == "2026-11-30T15:00:00Z"
    assert read.provenance.versions["torch"] == torch.__version__
    ready, total = read.charts
    assert ready.title == "Open, verify and prepare: one model's ops" and "4 variants" in ready.measures
    assert total.title == "Fresh process to first correct result"
    assert {(chart.unit, chart.better, chart.named) for chart in read.charts} == {("ms", "lower", True)}
    assert ready.series["median"] == [("the kernseal-model", 3), ("the flashinfer-model-warm", 3)]
    measured = report()["contenders"]
    assert dict(total.series["median"]) == {
        f"the {name}": measured[name]["median"]["total_ms"] for name in names
    }
    before = document.read_bytes()
    document.unlink()
    assert run({}, "--from-json", "--document", str(document)) == 0  # measures nothing
    assert document.read_bytes() == before


def test_what_others_take_is_told_as_times_of_kernseals(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = script(says(open_ms=1, first_run_ms=800))
    assert run({"kernseal-model": contender(tmp_path, "kernseal-model"), "flashinfer-model-warm": slow}) == 0
    assert "first call 100 times kernseal's open, prepare and first run" in capsys.readouterr().out


def test_what_has_no_package_or_program_here_is_left_out_and_the_report_says_why(
    tmp_path: Path, run: Run, report: Callable[[], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    known = {
        "a": contender(tmp_path, "a"),
        "b": script("", modules=("json", "no_such_module"), tools=("no-such-tool",)),
        "c": script("", why="no --programs"),
    }
    assert run(known) == 0
    assert report()["left_out"] == {"b": "no module no_such_module, no no-such-tool", "c": "no --programs"}
    assert "left out: b: no module no_such_module" in capsys.readouterr().out
    assert list(report()["contenders"]) == ["a"]


WRONG = says(open_ms=1) + "import sys; sys.exit('o is off by 2')"
HANGS = "import time; time.sleep(60)"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (WRONG, "exit code 1: o is off by 2"),
        ("import sys; sys.exit('no such variant')", "exit code 1, no result: no such variant"),
        ("print('hello')", "exit code 0, no result"),
        (HANGS, "stopped after 5 s, no result"),
    ],
    ids=["wrong result", "error", "no line", "hangs"],
)
def test_one_that_fails_is_reported_and_the_others_are_measured(
    tmp_path: Path, run: Run, report: Callable[[], dict[str, Any]], text: str, why: str
) -> None:
    document = tmp_path / "document.json"
    options = ("--timeout", "0.5" if text == HANGS else "60", "--document", str(document))
    assert run({"bad": script(text)}, *options) == 1
    assert not document.exists()  # there is nothing to show
    # The time-out is for the one that hangs: on a busy machine the other could take as long.
    slow = ("--timeout", "60") if text != HANGS else ("--timeout", "5")
    known = {"bad": script(text), "good": contender(tmp_path, "good")}
    assert run(known, *slow) == 1
    found = report()
    assert list(found["failed"]) == ["bad"] and found["failed"]["bad"].startswith(why)
    assert len(found["contenders"]["good"]["samples"]) == 3
    assert "bad" not in found["contenders"]


def test_one_that_fails_later_is_not_started_again_and_not_shown(
    tmp_path: Path, run: Run, report: Callable[[], dict[str, Any]]
) -> None:
    runs = tmp_path / "runs"
    once = f"import pathlib, sys; runs = pathlib.Path({str(runs)!r}); runs.open('a').write('x')\n"
    once += says(open_ms=1) + "sys.exit('out of memory' if runs.read_text() == 'xxx' else 0)"
    document = tmp_path / "document.json"
    known = {"bad": script(once), "good": contender(tmp_path, "good")}
    assert run(known, "--document", str(document), "--samples", "5") == 1
    assert runs.read_text() == "xxx"
    assert len(report()["contenders"]["bad"]["samples"]) == 1
    (total,) = bench.read(document).charts
    assert [name for name, _ in total.series["median"]] == ["the good"]


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"dirty": True}, (), "not a clean commit"),
        ({"dirty": None}, (), "not a clean commit"),
        ({"commit": None}, (), "not a clean commit"),
        ({"device": None}, ("--trial", "--document", "d.json"), "--document has to name a device"),
        ({}, ("--programs", "/nowhere"), "no program /nowhere/cold"),
        ({}, ("--only", "a,z*"), "--only z*; there are a"),
        ({}, ("--from-json",), "--from-json goes with --document"),
    ],
)
def test_it_refuses_before_anything_is_started(
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    options: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.setattr(bench_cold, "provenance", lambda: STAMP | changes)
    assert run({"a": contender(tmp_path, "a")}, *options) == 2
    assert capsys.readouterr().out.startswith(f"refused: {words}")
    assert not (tmp_path / "log").exists() and not (tmp_path / "report.json").exists()


def test_a_trial_on_a_dirty_tree_says_so(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, report: Callable[[], dict[str, Any]]
) -> None:
    monkeypatch.setattr(bench_cold, "provenance", lambda: STAMP | {"dirty": True})
    document = tmp_path / "document.json"
    assert run({"a": contender(tmp_path, "a")}, "--trial", "--document", str(document)) == 0
    assert report()["trial"] and bench.read(document).provenance.dirty


def test_a_document_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    chart = bench_document.bars("", "nothing", "ms", "who", {"a": 1.0})
    with pytest.raises(Malformed, match=r"charts.0.title"):
        bench_document.write(tmp_path / "d.json", "title", STAMP, "command", [chart], {})


def test_each_contender_is_one_that_the_children_know() -> None:
    known = bench_cold.contenders(Path("problem"), Path("programs"))
    jit = {
        name: one.command[-3:] for name, one in known.items() if one.command[2:3] == ("gpu.cold.jit_child",)
    }
    for library, _, what in jit.values():
        assert {(library, op) for op in problem.asked(what)} <= jit_calls.CALLS.keys()
    own = [one.command for one in known.values() if one.command[2:3] == ("gpu.cold.kernseal_child",)]
    assert [command[-1] for command in own] == ["gdn_prefill", "xqa_decode", "model"]
    assert len(jit) + len(own) + 2 == len(known)
    assert known["kernseal-cpp-gdn"].command[0] == "programs/cold" and not known["kernseal-cpp-gdn"].why
    assert bench_cold.contenders(Path("problem"), None)["kernseal-cpp-gdn"].missing() == "no --programs"


def test_the_driver_script_runs_it_when_it_is_asked_to(tmp_path: Path) -> None:
    """PYTHON only says what it was called with."""
    script = builds.ROOT / "tests" / "gpu" / "run_all.sh"
    environment = {
        **os.environ,
        "PYTHON": "echo",
        "OUT": str(tmp_path),
        "PROGRAMS": "/programs",
        "BENCH_ARGS": "--trial",
    }
    done = subprocess.run(
        ["bash", str(script), "bench_cold"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    command = done.stdout.splitlines()[1].split()
    assert command[:2] == ["-m", "gpu.bench_cold"]
    options = bench_cold.arguments(command[2:])
    assert (options.json.name, options.document.name) == ("bench_cold.json", "bench_cold.document.json")
    assert (options.programs, options.trial) == (Path("/programs"), True)


# ---- what the children do ----


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("problem")
    write_problem.write(folder, SMALL)
    return folder


def own_child(
    bundle: Path, environment: dict[str, str], folder: Path, what: str
) -> subprocess.CompletedProcess[str]:
    """The problem's folder comes first where modules are looked for."""
    path = os.pathsep.join([str(folder), str(builds.ROOT / "tests"), *sys.path])
    own = {"PYTHONPATH": path, "KERNSEAL_DIST": str(bundle.parent)}
    own["KERNSEAL_TRUST_KEY"] = str(builds.CACHE / "tests.json")
    command = [sys.executable, "-m", "gpu.cold.kernseal_child", "sm90", str(folder), what]
    return subprocess.run(command, env=environment | own, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("what", bench_cold.OPS.values())
def test_kernseals_child_times_its_parts_and_finds_its_result_right(
    example_bundle: Path, fake_process: dict[str, str], small: Path, what: str
) -> None:
    done = own_child(example_bundle, fake_process, small, what)
    assert (done.returncode, done.stderr) == (0, "")
    parts = bench_cold.parts_of(done.stdout)
    wanted = ("import_ms", "context_ms", "open_ms", "prepare_ms", "memory_ms", "first_run_ms")
    assert tuple(parts) == wanted and all(value > 0 for value in parts.values())


@pytest.mark.slow
@pytest.mark.parametrize("what", bench_cold.OPS.values())
def test_kernseals_child_notices_a_wrong_result(
    example_bundle: Path, fake_process: dict[str, str], small: Path, what: str
) -> None:
    idle = {name: value for name, value in fake_process.items() if name != "FAKE_CUDA_KERNEL"}
    done = own_child(example_bundle, idle, small, what)
    assert done.returncode == 1 and "is off by nan" in done.stderr


@pytest.mark.slow
def test_kernseals_child_prepares_the_models_other_variants_and_needs_no_torch(
    example_bundle: Path, fake_process: dict[str, str], tmp_path: Path
) -> None:
    write_problem.write(tmp_path, SMALL)
    defined = problem.definition(tmp_path)
    defined["also"] = [{"op": "gdn_decode", "axes": {"tokens": 1}}]
    (tmp_path / "problem.json").write_text(json.dumps(defined))
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = own_child(example_bundle, fake_process, tmp_path, "xqa_decode")
    assert (done.returncode, done.stderr) == (0, "")
    done = own_child(example_bundle, fake_process, tmp_path, "model")
    assert done.returncode == 1 and "gdn_decode" in done.stderr and done.stdout == ""


def test_the_models_variants_are_all_in_the_default_bundle(small: Path) -> None:
    locked = json.loads((builds.ROOT / "manifests" / "sm_90a.lock.json").read_text())["variants"]
    run = [(op, one["axes"]) for op, one in problem.definition(small)["problems"].items()]
    names = {f"{op}/{load_spec(op).variant(axes)}" for op, axes in (*run, *write_problem.Sizes().also)}
    assert len(names) == 4 and names <= locked.keys()


def stub_gdn(q: Any, k: Any, v: Any, g: Any, beta: Any, **call: Any) -> tuple[Any, Any]:
    """FlashInfer's call, by the reference."""
    assert call.pop("use_cp") is False and call.pop("output_final_state")
    ends = call.pop("cu_seqlens")
    assert ends.dtype == torch.int64 and g.dtype == beta.dtype == torch.float32
    found = gated_delta_rule(q, k, v, ends.diff().tolist(), alpha=g, beta=beta, **call)
    return found.output.bfloat16(), found.final_state.float()


def stub_fla(q: Any, k: Any, v: Any, g: Any, beta: Any, **call: Any) -> tuple[Any, Any]:
    """fla-core's call, by the reference: a batch of one, log gates, states [N, H, K, V]."""
    assert call.pop("output_final_state") and beta.dtype == torch.bfloat16
    call["initial_state"] = call["initial_state"].transpose(-1, -2)
    lengths = call.pop("cu_seqlens").diff().tolist()
    found = gated_delta_rule(q[0], k[0], v[0], lengths, alpha=g[0].exp(), beta=beta[0], **call)
    return found.output.bfloat16()[None], found.final_state.float().transpose(-1, -2)


def stub_xqa(*call: Any, **more: Any) -> None:
    """FlashInfer's call, by the reference."""
    q, k, v, table, lengths, output, workspace, semaphores, kv_heads, page_size = call
    assert not more and k.shape[1:3] == (page_size, kv_heads)
    assert (table.dtype, lengths.dtype, lengths.shape[1]) == (torch.int32, torch.uint32, 1)
    assert (workspace.dtype, semaphores.dtype) == (torch.uint8, torch.uint32)
    assert not workspace.any() and not semaphores.view(torch.int32).any()
    output[:, 0] = decode(q[:, 0], k, v, table, lengths[:, 0].view(torch.int32)).bfloat16()


STUBS: Mapping[str, Mapping[str, Any]] = {
    "flashinfer.gdn_prefill": {"chunk_gated_delta_rule": stub_gdn},
    "flashinfer.xqa": {"xqa": stub_xqa},
    "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": stub_fla},
}


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries, on the host."""
    monkeypatch.setattr(jit_calls, "DEVICE", "cpu")
    for name, functions in STUBS.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**functions))


JIT = [
    ("flashinfer", "gdn_prefill"),
    ("flashinfer", "xqa_decode"),
    ("flashinfer", "model"),
    ("triton", "gdn_prefill"),
]


@pytest.mark.parametrize(("library", "what"), JIT)
@pytest.mark.usefixtures("stubs")
def test_a_compiling_librarys_child_passes_the_problem_as_it_is(
    small: Path, capsys: pytest.CaptureFixture[str], library: str, what: str
) -> None:
    jit_child.main(library, small, what)
    parts = bench_cold.parts_of(capsys.readouterr().out)
    assert tuple(parts) == ("import_ms", "context_ms", "memory_ms", "first_run_ms")


@pytest.mark.parametrize(("library", "what"), JIT)
@pytest.mark.usefixtures("stubs")
def test_a_compiling_librarys_child_notices_a_wrong_result(tmp_path: Path, library: str, what: str) -> None:
    write_problem.write(tmp_path, SMALL)
    for op in problem.OPS:
        path = tmp_path / f"{op}.v"
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(SystemExit, match=r"o is off by"):
        jit_child.main(library, tmp_path, what)


@pytest.mark.parametrize(("module", "function"), [("gdn_prefill", stub_gdn), ("xqa", stub_xqa)])
def test_flashinfers_functions_take_what_the_child_passes(module: str, function: Any) -> None:
    """Names in the pinned wheel; the stubs above say which of them are passed."""
    name = "chunk_gated_delta_rule" if function is stub_gdn else "xqa"
    with zipfile.ZipFile(source.fetch_wheel(source.upstream())) as wheel:
        tree = ast.parse(wheel.read(f"flashinfer/{module}.py"))
    (there,) = (node.args for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    names = [one.arg for one in there.args]
    if function is stub_gdn:
        assert names[:5] == list(inspect.signature(stub_gdn).parameters)[:5]
        assert {"scale", "initial_state", "output_final_state", "cu_seqlens", "use_cp"} <= set(names)
    else:
        assert names[: len(names) - len(there.defaults)] == [
            *("q", "k_cache", "v_cache", "page_table", "seq_lens", "output"),
            *("workspace_buffer", "semaphores", "num_kv_heads", "page_size"),
        ]
