"""The server's loop of ``gpu.bench_serving``: on a clock that is turned by hand, and over small models on a host."""

from __future__ import annotations

import functools
import itertools
import json
import math
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from gpu import serving_report
from gpu.serving_loop import (
    Answer,
    Clock,
    Closed,
    Open,
    Request,
    Source,
    alternate,
    poisson,
    serve,
    stream,
)

STEP = 1.0


class Time(Clock):
    """Passes where something takes time."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def wait_until(self, at: float) -> None:
        self.at = max(self.at, at)


class Engine:
    """A prompt takes a second a token, a step one second. Rows are known by their seeds, which are their tokens, too."""

    def __init__(self, time: Time) -> None:
        self.time = time
        self.rows: list[int] = []
        self.log: list[Any] = []

    def start(self, request: Request) -> int:
        self.time.at += request.prompt
        self.rows.append(request.seed)
        self.log.append(f"start {request.seed}")
        return request.seed

    def step(self) -> list[int]:
        self.time.at += STEP
        self.log.append(list(self.rows))
        return list(self.rows)

    def keep(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]


def served(source: Source, slots: int = 8) -> tuple[list[Answer], Engine]:
    engine = Engine(time := Time())
    return serve(engine, source, slots, time), engine


def asked(*whats: tuple[int, int, float] | tuple[int, int, float, float]) -> list[Request]:
    """Of prompt, tokens, arrival and patience."""
    return [Request(seed, *what) for seed, what in enumerate(whats)]


def test_a_turn_takes_in_one_prompt_and_then_gives_everybody_a_token() -> None:
    answers, engine = served(Open(asked((3, 3, 0.0), (5, 2, 0.0), (1, 1, 0.0))))
    assert engine.log == ["start 0", [0], "start 1", [0, 1], "start 2"]
    assert [answer.times for answer in answers] == [[3, 4, 10], [9, 10], [11]]
    assert [answer.tokens for answer in answers] == [[0, 0, 0], [1, 1], [2]]
    assert [answer.ended for answer in answers] == [10, 10, 11]
    assert engine.rows == [] and not any(answer.cancelled for answer in answers)


def test_who_came_first_is_taken_in_first_as_soon_as_there_is_a_slot() -> None:
    answers, engine = served(Open(asked((1, 3, 0.1), (1, 3, 0.0), (1, 3, 0.2))), slots=1)
    assert engine.log == ["start 1", [1], [1], "start 0", [0], [0], "start 2", [2], [2]]
    assert [(answer.request.seed, answer.times) for answer in answers] == [
        (1, [1, 2, 3]),
        (0, [4, 5, 6]),
        (2, [7, 8, 9]),
    ]


def test_time_to_a_token_counts_from_when_it_was_asked_for_not_from_when_the_loop_looked() -> None:
    late, _ = served(Open(asked((10, 1, 0.0), (1, 1, 2.0))))
    assert late[1].arrival == 2.0 and late[1].times == [11]
    (alone,), _ = served(Open(asked((1, 1, 7.5))))
    assert (alone.arrival, alone.times) == (7.5, [8.5])


def test_a_client_that_goes_away_stops_its_request_and_no_other() -> None:
    answers, engine = served(Open(asked((1, 9, 0.0, 4.5), (1, 9, 0.0), (1, 1, 0.0, 3.5))), slots=2)
    first, second, never = answers
    assert (first.cancelled, first.ended, first.times) == (True, 5, [1, 2, 4, 5])
    assert (second.cancelled, len(second.tokens)) == (False, 9)
    assert (never.cancelled, never.ended, never.times) == (True, 4, [])
    assert "start 2" not in engine.log and engine.rows == []


def test_patience_that_ends_with_the_last_token_is_an_answer() -> None:
    (answer,), _ = served(Open(asked((1, 2, 0.0, 2.0))))
    assert (answer.ended, answer.cancelled) == (2, False)


@pytest.mark.parametrize("clients", [1, 2, 4])
def test_a_client_of_a_closed_loop_asks_again_when_its_request_ended(clients: int) -> None:
    answers, engine = served(Closed(iter(asked(*[(1, 9, 0.0)] * 99)), clients, until=60), slots=clients)
    assert max(len(rows) for rows in engine.log if isinstance(rows, list)) == clients
    assert all(len(answer.tokens) == 9 for answer in answers)
    times = sorted([(a.arrival, 1) for a in answers] + [(a.ended, -1) for a in answers])
    assert max(itertools.accumulate(change for _, change in times)) == clients
    last = max(answer.arrival for answer in answers)
    assert 40 < last < 60 <= engine.time.at  # none is sent later, all are answered
    follows = {answer.ended for answer in answers}
    assert {answer.arrival for answer in answers} - follows == {0.0}


def test_requests_of_one_token_keep_a_closed_loop_going() -> None:
    answers, _ = served(Closed(iter(asked(*[(1, 1, 0.0)] * 9)), 1, until=5))
    assert [answer.times for answer in answers] == [[1], [2], [3], [4], [5]]


def test_a_stream_is_the_same_for_the_same_seed_and_as_mixed_as_it_says() -> None:
    some = list(itertools.islice(stream(1), 3000))
    assert some == list(itertools.islice(stream(1), 3000)) != list(itertools.islice(stream(2), 3000))
    lengths, tokens = [request.prompt for request in some], [request.tokens for request in some]
    assert 64 <= min(lengths) < 70 and 3800 < max(lengths) <= 4096
    assert statistics.median(lengths) == pytest.approx(512, rel=0.1)
    assert (min(tokens), max(tokens)) == (16, 64)
    assert len({request.seed for request in some}) == len(some)


def test_arrivals_are_as_dense_as_the_rate_and_as_patient_as_it_says() -> None:
    found = poisson(stream(1), 1, rate=20.0, until=500.0, patience=3.0)
    assert found == poisson(stream(1), 1, rate=20.0, until=500.0, patience=3.0)
    assert len(found) == pytest.approx(10_000, rel=0.05)
    gaps = [later.arrival - earlier.arrival for earlier, later in itertools.pairwise(found)]
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.05)  # as of a Poisson process
    assert max(request.arrival for request in found) < 500.0
    waits = [request.patience for request in found if request.patience < math.inf]
    assert len(waits) / len(found) == pytest.approx(0.2, abs=0.02)
    assert min(waits) < 0.1 and 2.9 < max(waits) < 3.0


def test_at_any_rate_the_requests_are_the_same() -> None:
    slow, fast = (poisson(stream(1), 1, rate, 100.0, 3.0) for rate in (1.0, 3.0))
    assert len(slow) < len(fast)
    for one, other in zip(slow, fast, strict=False):
        assert (one.seed, one.prompt, one.tokens, one.patience) == (
            other.seed,
            other.prompt,
            other.tokens,
            other.patience,
        )
        assert one.arrival == pytest.approx(3 * other.arrival)


def test_sides_take_turns_and_their_turns_are_numbered_alike() -> None:
    order: list[tuple[str, int]] = []

    def call(name: str, turn: int) -> int:
        order.append((name, turn))
        return turn

    found = alternate({name: functools.partial(call, name) for name in "AB"}, rounds=2)
    assert "".join(name for name, _ in order) == "ABBAABBA"
    assert found == {"A": [0, 1, 2, 3], "B": [0, 1, 2, 3]}
    assert [turn for _, turn in order] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_percentiles_are_values_that_were_measured() -> None:
    hundred = [n / 1000 for n in range(100, 0, -1)]
    assert serving_report.percentiles(hundred) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert serving_report.percentiles([0.25]) == {"p50": 250.0, "p90": 250.0, "p99": 250.0}
    assert serving_report.percentiles([]) == {"p50": None, "p90": None, "p99": None}


def answer(arrival: float, *times: float, ended: float, cancelled: bool = False) -> Answer:
    return Answer(Request(0, 1, 9), arrival, [1] * len(times), list(times), ended, cancelled)


ANSWERS = [
    answer(0.5, 1.5, 2.5, 3.5, ended=3.5),  # sent too early; its last two tokens came in time
    answer(2.0, 2.25, 3.25, ended=3.25),
    answer(3.0, 4.0, 4.5, ended=5.0, cancelled=True),
    answer(3.5, ended=4.0, cancelled=True),
    answer(5.0, 7.0, 20.0, ended=20.0),  # sent in time, the rest comes when nothing counts any more
    answer(6.0, 6.5, 6.6, ended=6.6),  # sent too late
]


def test_only_what_was_sent_or_came_between_two_times_counts() -> None:
    found = serving_report.seen(ANSWERS, 2.0, 6.0)
    figures, counts = found["figures"], found["counts"]
    assert figures["ttft_ms"] == {"p50": 1000.0, "p90": 2000.0, "p99": 2000.0}  # of 250, 1000, 2000
    assert figures["between_tokens_ms"] == {
        "p50": 1000.0,
        "p90": 1000.0,
        "p99": 1000.0,
    }  # 500 and three of 1000
    assert figures["request_ms"] == {"p50": 1250.0, "p90": 15000.0, "p99": 15000.0}
    assert figures["tokens_per_s"] == 6 / 4
    assert figures["requests_per_s"] == 2 / 4
    assert counts == {"sent": 4, "finished": 2, "cancelled": 2, "unanswered": 1, "tokens": 6, "gaps": 4}


def turn(ttft: float | None, sent: int, calls: dict[str, Any]) -> dict[str, Any]:
    return {
        "figures": {"ttft_ms": {"p50": ttft}, "tokens_per_s": 7.0},
        "counts": {"sent": sent, "calls": calls},
    }


def test_over_turns_figures_are_medians_and_counts_are_sums() -> None:
    calls = [
        {"xqa_decode": {"served": 3, "left": {}}},
        {"xqa_decode": {"served": 4, "left": {"too long": 2}}},
        {"xqa_decode": {"served": 5, "left": {"too long": 1, "too wide": 8}}},
    ]
    turns = [turn(ttft, n, c) for ttft, n, c in zip((9.0, 1.0, 2.0), (1, 2, 3), calls, strict=True)]
    found = serving_report.over_turns(turns)
    assert found["figures"] == {"ttft_ms": {"p50": 2.0}, "tokens_per_s": 7.0}
    assert found["counts"] == {
        "sent": 6,
        "calls": {"xqa_decode": {"served": 12, "left": {"too long": 3, "too wide": 8}}},
    }
    assert found["turns"] == [one["figures"] for one in turns]
    assert serving_report.left(found["counts"]) == 11
    assert serving_report.left({"calls": {}}) == 0


def test_a_turn_in_which_nothing_came_does_not_count() -> None:
    turns = [turn(None, 0, {}), turn(3.0, 1, {}), turn(5.0, 1, {})]
    assert serving_report.over_turns(turns)["figures"]["ttft_ms"] == {"p50": 4.0}
    assert serving_report.over_turns(turns[:1])["figures"]["ttft_ms"] == {"p50": None}


PROVENANCE = ("date", "device", "driver", "commit", "dirty")


def reported() -> dict[str, Any]:
    """A report as of a machine with a GPU."""
    counts = {"graph_replays": 0, "calls": {}}
    found = serving_report.seen(ANSWERS, 2.0, 6.0)
    side = serving_report.over_turns([{**found, "counts": found["counts"] | counts}] * 4)
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "device": "NVIDIA H200",
        "driver": "1.2",
        "commit": "0" * 40,
        "dirty": False,
        "command": "python -m gpu.bench_serving --json a.json",
        "versions": {"transformers": "5.17.0"},
        "scenarios": {name: {"stock": side, "kernseal": side} for name in ("1 client", "load 0.5")},
    }


def test_a_report_makes_a_document(tmp_path: Path) -> None:
    pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    source, target = tmp_path / "report.json", tmp_path / "document.json"
    source.write_text(json.dumps(reported()))
    assert serving_report.main(str(source), str(target)) == 0
    document = json.loads(target.read_text())
    assert [chart["title"] for chart in document["charts"]][:2] == [
        "Output tokens a second",
        "Time to first token, p50",
    ]
    assert document["charts"][0]["series"]["stock"] == [["1 client", 1.5], ["load 0.5", 1.5]]
    assert [chart["better"] for chart in document["charts"]] == ["higher"] + ["lower"] * 6
    assert "median of 4 turns" in document["charts"][1]["measures"]


def test_a_figure_that_nobody_has_is_left_out_of_a_chart() -> None:
    report = json.loads(json.dumps(reported()))
    report["scenarios"]["1 client"]["stock"]["figures"]["ttft_ms"]["p50"] = None
    found = serving_report.charts(report)[1]["series"]
    assert found["stock"] == [["load 0.5", 1000.0]] == found["kernseal"][1:]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A small model in float32 on the host, which passes for device 0."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    from cpu import reference_bundle, test_transformers

    from kernseal.integrations import cached_attention, gated_delta, variants

    monkeypatch.setattr(variants, "ordinal", lambda device: 0)
    for module in (cached_attention, gated_delta):
        monkeypatch.setattr(module, "launching", reference_bundle.launching)
    monkeypatch.setitem(variants.DTYPES, torch.float32, "f32")
    return test_transformers.make()


class Ticking(Clock):
    """Half a second passes whenever somebody looks, so that the same happens every time."""

    def __init__(self) -> None:
        self.looked = 0

    def now(self) -> float:
        self.looked += 1
        return self.looked / 2

    def wait_until(self, at: float) -> None:
        self.looked = max(self.looked, math.ceil(at * 2))


LINEAR, FULL = 2, 2
"""Layers of each kind of the small model."""

MIXED = asked(
    (5, 9, 0.0), (70, 4, 0.0), (17, 30, 1.5, 7.5), (90, 12, 3.0), (64, 1, 3.0), (3, 5, 99.0), (90, 2, 99.0)
)
"""Shorter prompts join longer ones and longer ones shorter ones; the longest leaves, and all do before the last two come."""


@pytest.mark.parametrize("side", ["stock", "kernseal"])
def test_every_token_of_a_batch_is_as_if_its_request_were_alone(tiny: Any, side: str) -> None:
    from cpu.reference_bundle import ReferenceBundle
    from cpu.test_transformers import generate
    from gpu.bench_serving import Batch
    from gpu.hybrid_model import prompts
    from torch import no_grad

    from kernseal.integrations.transformers import enable

    batch = Batch(tiny)
    with no_grad(), enable(ReferenceBundle(), tiny) if side == "kernseal" else nullcontext() as ours:
        answers = serve(batch, Open(MIXED), slots=3, clock=Ticking())
    assert [a.cancelled for a in answers] == [a.request.seed == 2 for a in answers]
    assert 1 < len(answers[2].tokens) < 30
    for found in answers:
        ids = prompts(tiny, 1, found.request.prompt, seed=found.request.seed)
        alone, _ = generate(tiny, ids, tokens=len(found.tokens))
        assert found.tokens == alone[0, ids.shape[1] :].tolist(), found.request
    assert batch.prefills == len(MIXED)
    assert batch.steps < sum(len(a.tokens) - 1 for a in answers)  # some of them were together
    if ours is not None:
        assert ours.stats() == {
            "gdn_prefill": {"served": LINEAR * batch.prefills, "left": {}},
            "xqa_decode": {"served": FULL * batch.steps, "left": {}},
        }


def small_plan() -> Any:
    from gpu.bench_serving import Plan

    return Plan((1, 2, 3), (0.5, 0.9), warm_up=2.0, seconds=8.0, rounds=1, prompt=(4, 20), tokens=(2, 4))


def sides_of(model: Any, bundle: Any) -> dict[str, Any]:
    from kernseal.integrations.transformers import enable

    return {"stock": nullcontext, "kernseal": lambda: enable(bundle, model, missing="stock")}


@pytest.fixture
def on_host(tiny: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the program find a small model, a bundle and a GPU, and the time go by looks at the clock."""
    import torch
    from cpu.reference_bundle import ReferenceBundle
    from gpu import bench_serving

    stamp = {name: value for name, value in reported().items() if name in PROVENANCE}
    for name, value in {
        "provenance": lambda: dict(stamp),
        "linear_attention": lambda: "fla-core 1",
        "folder": lambda name: tmp_path,
        "open_by_name": lambda name: nullcontext(ReferenceBundle()),
        "build": lambda geometry: tiny,
        "QUICK": small_plan(),
        "Bench": functools.partial(bench_serving.Bench, new_clock=Ticking),
    }.items():
        monkeypatch.setattr(bench_serving, name, value)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.usefixtures("on_host")
def test_every_scenario_is_measured_on_both_sides_with_the_same_requests(tmp_path: Path) -> None:
    pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    from gpu import bench_serving

    target, document = tmp_path / "report.json", tmp_path / "document.json"
    assert bench_serving.main(["--quick", "--json", str(target), "--document", str(document)]) == 0
    report = json.loads(target.read_text())
    assert list(report["scenarios"]) == ["1 client", "2 clients", "3 clients", "load 0.5", "load 0.9"]
    for sides in report["scenarios"].values():
        stock, ours = sides["stock"], sides["kernseal"]
        assert ours["figures"] == stock["figures"] and ours["turns"] == stock["turns"]  # on this clock
        counts = ours["counts"]
        assert counts["sent"] and counts["finished"] + counts["cancelled"] == counts["sent"]
        assert counts["graph_replays"] == 0
        assert counts["calls"] == {
            "gdn_prefill": {"served": LINEAR * counts["prefills"], "left": {}},
            "xqa_decode": {"served": FULL * counts["steps"], "left": {}},
        }
        assert stock["counts"] == counts | {"calls": {}}
    closed = report["scenarios"]["3 clients"]["stock"]["figures"]
    assert report["open"]["capacity_requests_per_s"] == closed["requests_per_s"]
    usual = report["scenarios"]["2 clients"]["stock"]["figures"]["request_ms"]["p50"]
    assert report["open"]["patience_s"] == usual / 1e3
    assert len(json.loads(document.read_text())["charts"]) == 7
    assert "--quick" in report["command"]


def test_the_warm_up_has_every_size_of_a_batch_and_the_longest_prompt(tiny: Any) -> None:
    from cpu.reference_bundle import ReferenceBundle
    from gpu.bench_serving import Bench
    from torch import no_grad

    bundle = ReferenceBundle()
    with no_grad():
        Bench(tiny, sides_of(tiny, bundle), small_plan(), Ticking).warm_up()
    assert {values["batch_size"] for _, values in bundle.calls("xqa_decode")} == {1, 2, 3}
    assert max(values["total_tokens"] for _, values in bundle.calls("gdn_prefill")) == 20


def test_calls_that_the_bundle_lacks_are_counted_by_reason(tiny: Any) -> None:
    from cpu.reference_bundle import ReferenceBundle
    from gpu.bench_serving import Bench
    from torch import no_grad

    bench = Bench(tiny, sides_of(tiny, ReferenceBundle({"gdn_prefill": {}})), small_plan(), Ticking)
    with no_grad():
        counts = bench.closed(2)["kernseal"]["counts"]
    ((reason, times),) = counts["calls"]["gdn_prefill"]["left"].items()
    assert reason.startswith("gdn_prefill: no variant") and times == LINEAR * counts["prefills"]
    assert serving_report.left(counts) == times


def test_a_replay_of_a_graph_is_counted_whoever_makes_it(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from gpu import bench_serving

    class Graph:
        def replay(self) -> None:
            pass

    class Replaying(bench_serving.Batch):
        def step(self) -> list[int]:
            torch.cuda.CUDAGraph().replay()
            return super().step()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(bench_serving, "Batch", Replaying)
    with torch.no_grad():
        bench = bench_serving.Bench(tiny, {"stock": nullcontext}, small_plan(), Ticking)
        counts = bench.closed(1)["stock"]["counts"]
    assert counts["graph_replays"] == counts["steps"] > 0


@pytest.fixture
def refused(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., str]:
    """What the program says, of a clean commit with fla-core unless told otherwise, when it refuses."""
    from gpu import bench_serving

    def run(*more: str, dirty: bool | None = False, linear: str = "fla-core 1") -> str:
        stamp = {"commit": "0" * 40, "dirty": dirty, "device": None}
        monkeypatch.setattr(bench_serving, "provenance", lambda: stamp)
        monkeypatch.setattr(bench_serving, "linear_attention", lambda: linear)
        monkeypatch.setattr(bench_serving, "folder", lambda name: tmp_path / "none")
        assert bench_serving.main(["--json", str(tmp_path / "report.json"), *more]) == 2
        assert not (tmp_path / "report.json").exists()
        return str(capsys.readouterr().out)

    return run


def test_what_is_measured_has_to_be_a_clean_commit_with_fla(refused: Callable[..., str]) -> None:
    assert "not a clean commit" in refused(dirty=True)
    assert "not a clean commit" in refused(dirty=None)
    assert "fla-core is not installed" in refused(linear="torch")
    assert "no bundle" in refused()
    assert "no bundle" in refused("--trial", dirty=True, linear="torch")


def test_a_document_has_to_say_what_it_was_measured_on(refused: Callable[..., str]) -> None:
    pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    assert "--document has to name a device" in refused("--document", "document.json")
