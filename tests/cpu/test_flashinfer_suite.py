"""The run of FlashInfer's tests: its references, what a test's end counts as, and that nothing can compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu import flashinfer_host  # noqa: E402
from gpu import flashinfer_plugin as plugin  # noqa: E402
from gpu import flashinfer_suite as suite  # noqa: E402
from gpu.flashinfer_references import (  # noqa: E402
    PagedAttention,
    PagedLatentAttention,
    nvfp4_quantize,
    nvfp4_to_float,
)

from kernseal.loader import flashinfer_jit  # noqa: E402
from kernseal.loader.errors import InvalidArgument, JitRefused, Unsupported  # noqa: E402
from kernseal.loader.op import Op  # noqa: E402

PAGE, HKV, GROUP, D = 4, 2, 3, 8
KV_LENS = [9, 4, 1]
INDPTR, LAST = [0, 3, 4, 5], [1, 4, 1]
PAGES = [5, 0, 3, 2, 1]


def table(layout: str) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A cache of 6 pages, and for each sequence its K and V in order."""
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(6, 2, PAGE, HKV, D, generator=generator)
    flat = []
    for row, length in enumerate(KV_LENS):
        own = cache[PAGES[INDPTR[row] : INDPTR[row + 1]]]
        flat.append((own[:, 0].flatten(0, 1)[:length], own[:, 1].flatten(0, 1)[:length]))
    return cache if layout == "NHD" else cache.transpose(2, 3).contiguous(), flat


def one_by_one(
    q: torch.Tensor, q_lens: list[int], flat: list[tuple[torch.Tensor, torch.Tensor]], causal: bool, left: int
) -> torch.Tensor:
    out, at = torch.zeros_like(q), 0
    for count, (k, v) in zip(q_lens, flat, strict=True):
        for token in range(count):
            own = len(k) - count + token
            seen = [j for j in range(len(k)) if (j <= own or not causal) and (left < 0 or j >= own - left)]
            for head in range(q.shape[1]):
                scores = k[seen, head // GROUP] @ q[at + token, head] * D**-0.5
                out[at + token, head] = scores.softmax(0) @ v[seen, head // GROUP]
        at += count
    return out


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("left", [-1, 2])
@pytest.mark.parametrize(("q_lens", "causal"), [([1, 1, 1], None), ([4, 0, 1], True), ([4, 2, 1], False)])
def test_paged_attention(layout: str, left: int, q_lens: list[int], causal: bool | None) -> None:
    cache, flat = table(layout)
    q = torch.randn(sum(q_lens), HKV * GROUP, D, generator=torch.Generator().manual_seed(1))
    common = {"page_size": PAGE, "window_left": left}
    indptr, indices, last = (torch.tensor(x, dtype=torch.int32) for x in (INDPTR, PAGES, LAST))
    wrapper = PagedAttention(torch.empty(0), layout)
    if causal is None:
        wrapper.plan(indptr=indptr, indices=indices, last_page_len=last, head_dim=D, **common)
    else:
        ends = torch.tensor([0, *q_lens]).cumsum(0)
        paged = {"paged_kv_indptr": indptr, "paged_kv_indices": indices, "paged_kv_last_page_len": last}
        wrapper.plan(qo_indptr=ends, head_dim_qk=D, causal=causal, **paged, **common)
    expected = one_by_one(q, q_lens, flat, causal is not False, left)
    torch.testing.assert_close(wrapper.run(q, cache), expected, rtol=1e-5, atol=1e-5)


def test_paged_latent_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    ckv, kpe = (torch.randn(6, PAGE, width, generator=generator) for width in (6, 2))
    q, rope = (torch.randn(3, 5, width, generator=generator) for width in (6, 2))
    wrapper = PagedLatentAttention(torch.empty(0), backend="fa2")
    indptr, indices = torch.tensor(INDPTR), torch.tensor(PAGES)
    wrapper.plan(
        torch.arange(4), indptr, indices, torch.tensor(KV_LENS), 5, 6, 2, PAGE, True, 0.3, None, None
    )
    found = wrapper.run(q, rope, ckv, kpe)
    for row, length in enumerate(KV_LENS):
        own = PAGES[INDPTR[row] : INDPTR[row + 1]]
        v, k = ckv[own].flatten(0, 1)[:length], kpe[own].flatten(0, 1)[:length]
        expected = ((q[row] @ v.T + rope[row] @ k.T) * 0.3).softmax(-1) @ v
        torch.testing.assert_close(found[row], expected, rtol=1e-5, atol=1e-5)


def test_nvfp4_keeps_what_it_can_hold_and_rounds_the_rest() -> None:
    row = torch.tensor([0.0, 0.5, -1.0, 1.5, 2.0, -3.0, 4.0, 6.0, -6.0, 0.2, 0.3, 2.4, 2.6, 5.1, -0.7, 0.8])
    x = torch.stack([row, row * 8, torch.zeros(16)])
    pairs, scales = nvfp4_quantize(x, torch.tensor(1.0))
    assert pairs.shape == (3, 8) and pairs.dtype == scales.dtype == torch.uint8
    assert scales.view(torch.float8_e4m3fn).float().tolist() == [[1.0], [8.0], [0.0]]
    rounded = torch.tensor(
        [0.0, 0.5, -1.0, 1.5, 2.0, -3.0, 4.0, 6.0, -6.0, 0.0, 0.5, 2.0, 3.0, 6.0, -0.5, 1.0]
    )
    expected = torch.stack([rounded, rounded * 8, torch.zeros(16)])
    assert torch.equal(nvfp4_to_float(pairs, scales, torch.tensor(1.0)), expected)


class Info:
    def __init__(self, value: BaseException) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("name", "error", "expected"),
    [
        ("test_a", JitRefused("mod"), ("not applicable", "its own helper compiles: mod")),
        (
            "test_a",
            Unsupported("no variant; to build it: kernseal build --sm 90 --variant op/x"),
            ("not applicable", "needs the variant op/x"),
        ),
        ("test_a", Unsupported("use_cp: not supported"), ("not applicable", "use_cp: not supported")),
        ("test_checkpoint_wrong_dtype", InvalidArgument("x"), ("not applicable", plugin.OWN_WORDS)),
        ("test_a", InvalidArgument("q: shape"), ("failed", "InvalidArgument: q: shape")),
        ("test_a", AssertionError("1\n2"), ("failed", "AssertionError: 1")),
        ("test_a", AssertionError(), ("failed", "AssertionError: AssertionError()")),
    ],
)  # fmt: skip
def test_what_a_failing_test_counts_as(name: str, error: BaseException, expected: tuple[str, str]) -> None:
    info: Any = Info(error)
    assert plugin._judge(name, SimpleNamespace(outcome="failed"), info) == expected


def test_passing_and_skipped_tests() -> None:
    assert plugin._judge("test_checkpoint_wrong_dtype", SimpleNamespace(outcome="passed"), None) == (
        "passed",
        "",
    )
    skipped = SimpleNamespace(outcome="skipped", longrepr=("file", 1, "Skipped: needs SM120"))
    assert plugin._judge("test_a", skipped, None) == ("not applicable", "skipped: needs SM120")


def test_what_would_be_compiled_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_jit, "refuse", flashinfer_jit.refuse)
    jit = plugin.Jit()
    jit.watch()
    with pytest.raises(JitRefused, match="about to compile norm"):
        flashinfer_jit.refuse("norm")
    assert jit.attempts == ["norm"]


ONLY_RESULTS = """
import json, os
from pathlib import Path
import pytest
from gpu import flashinfer_plugin
flashinfer_plugin.SECONDS = 0.0
def pytest_configure(config):
    path = json.loads(os.environ[flashinfer_plugin.SETTINGS])["results"]
    config.pluginmanager.register(flashinfer_plugin.Results(Path(path)))
@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call":
        found = {"outcome": report.outcome, "reason": "a reason", "asked": ["op/x"], "jit": []}
        report.user_properties.append(("kernseal", found))
    return report
"""
TESTS = """
import os, signal, sys, time
def test_a(): pass
def test_b(): {stop}
def test_c(): pass
"""


@pytest.mark.parametrize(
    ("stop", "complete", "passed"),
    [
        ("pass", True, 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", False, 1),
        ("os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)", False, 1),
    ],
)
def test_a_run_shows_its_progress_and_reports_what_had_ended(
    tmp_path: Path, stop: str, complete: bool, passed: int
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_it.py").write_text(TESTS.format(stop=stop))
    (tmp_path / "only_results.py").write_text(ONLY_RESULTS)
    start = "import sys; from gpu import flashinfer_suite as s; s.PLUGIN = 'only_results'; sys.exit(s.main())"
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-c", start, str(tmp_path), "--files", "tests/test_*.py", "--json", str(report)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == (0 if complete else 1), done.stderr
    found = json.loads(report.read_text())
    assert found["complete"] is complete
    assert found["files"]["tests/test_it.py"]["passed"] == passed
    assert done.stdout.startswith("...") if complete else done.stdout.startswith(".")
    assert f"tests/test_it.py: {passed} passed" in done.stdout
    assert ("pytest was stopped" in done.stdout) is not complete


def test_results_are_written_every_few_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(plugin.time, "monotonic", lambda: now)
    results = plugin.Results(tmp_path / "results.json")

    def written_after(seconds: float) -> int:
        nonlocal now
        now += seconds
        results._add("f.py::test", {"outcome": "passed", "reason": "", "asked": [], "jit": []})
        return int(json.loads(results.path.read_text())["f.py"]["passed"])

    assert [written_after(seconds) for seconds in (0, 1, 1, plugin.SECONDS, 1)] == [1, 1, 1, 4, 4]
    results.pytest_sessionfinish()
    assert json.loads(results.path.read_text())["f.py"]["passed"] == 5
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_what_no_class_has_is_not_asked_of_the_build(capsys: pytest.CaptureFixture[str]) -> None:
    """One name that the SM cannot have stopped the build of all."""
    built, others = "topk_regions/bf16", "paged_mqa_logits/e4m3_of32_wf32_af32_h32_d128_n1_p64"
    assert suite.why_not("sm_90a", built) == ""
    suite.show_variants({"a": {"asked": [built, others]}, "b": {"asked": [built]}}, "sm_90a")
    *_, said, last = capsys.readouterr().out.splitlines()
    assert last == f"--variant {built}"
    assert said == "2 variants in all, without 1 that sm_90a has not:"


def test_a_folder_without_the_tests_is_refused(tmp_path: Path) -> None:
    """pytest without a file would have run whatever it finds."""
    asked = SimpleNamespace(folder=tmp_path / "tests", files=("tests/attention/test_*xqa*.py",))
    with pytest.raises(SystemExit, match="must hold tests/ of FlashInfer"):
        suite.run(asked, lambda files: None)  # type: ignore[arg-type]


def test_an_op_that_launches_nothing_has_all_that_an_op_has() -> None:
    """What it lacked ended a test of FlashInfer's before it asked for its second variant."""
    own = {name for name, value in vars(Op).items() if callable(value) and not name.startswith("_")}
    assert own <= set(vars(flashinfer_host.Nothing))
