"""What clients saw of a server's loop, as numbers, and as charts.

``PYTHONPATH=tests python -m gpu.serving_report REPORT DOCUMENT`` makes a benchmark document of a report of
``gpu.bench_serving``, where there is jsonschema.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu import bench_document
from gpu.serving_loop import Answer

PERCENTS = (50, 90, 99)
CHARTS: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    "tokens/s": [("Output tokens a second", ("tokens_per_s",))],
    "ms": [
        (f"{title}, p{percent}", (figure, f"p{percent}"))
        for title, figure in (
            ("Time to first token", "ttft_ms"),
            ("Time between tokens", "between_tokens_ms"),
        )
        for percent in PERCENTS
    ],
}
"""Title, and where a turn's figures have it, by unit."""


def percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """Milliseconds that so many percent do not exceed, each of them one that was measured."""
    ordered = sorted(seconds)
    return {
        f"p{percent}": round(ordered[math.ceil(percent / 100 * len(ordered)) - 1] * 1e3, 3)
        if ordered
        else None
        for percent in PERCENTS
    }


def seen(answers: Sequence[Answer], start: float, end: float) -> dict[str, dict[str, Any]]:
    """Figures and counts: of requests that were sent between the two times, and of tokens that came then.

    Who went away before the first token has no time to it; ``unanswered`` says how many did.
    """
    sent = [answer for answer in answers if start <= answer.arrival < end]
    finished = [answer for answer in sent if answer.ended is not None and not answer.cancelled]
    firsts = [answer.times[0] - answer.arrival for answer in sent if answer.times]
    whole = [answer.times[-1] - answer.arrival for answer in finished]
    pairs = [pair for answer in answers for pair in itertools.pairwise(answer.times)]
    gaps = [later - earlier for earlier, later in pairs if start <= later < end]
    tokens = sum(start <= at < end for answer in answers for at in answer.times)
    ends = [answer.ended for answer in answers if answer.ended is not None and not answer.cancelled]
    figures = {
        "ttft_ms": percentiles(firsts),
        "between_tokens_ms": percentiles(gaps),
        "request_ms": percentiles(whole),
        "tokens_per_s": round(tokens / (end - start), 2),
        "requests_per_s": round(sum(start <= at < end for at in ends) / (end - start), 3),
    }
    counts = {
        "sent": len(sent),
        "finished": len(finished),
        "cancelled": sum(answer.cancelled for answer in sent),
        "unanswered": sum(answer.cancelled and not answer.times for answer in sent),
        "tokens": tokens,
        "gaps": len(gaps),
    }
    return {"figures": figures, "counts": counts}


def folded(parts: Sequence[Mapping[str, Any]], how: Callable[[list[Any]], Any]) -> dict[str, Any]:
    """One for several of the same form, number by number. What a part lacks does not count; None where all lack it."""
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        values = [part[key] for part in parts if part.get(key) is not None]
        nested = bool(values) and isinstance(values[0], Mapping)
        found[key] = folded(values, how) if nested else how(values) if values else None
    return found


def over_turns(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of figures, sums of counts, and the figures of each turn."""
    figures = [turn["figures"] for turn in turns]
    counts = folded([turn["counts"] for turn in turns], sum)
    medians = folded(figures, lambda values: round(statistics.median(values), 3))
    return {"figures": medians, "counts": counts, "turns": figures}


def left(counts: Mapping[str, Any]) -> int:
    """Calls that kernseal left to transformers."""
    return sum(sum(op["left"].values()) for op in counts["calls"].values())


def line(side: Mapping[str, Any]) -> str:
    figures, counts = side["figures"], side["counts"]
    ttft, gap = figures["ttft_ms"], figures["between_tokens_ms"]
    return (
        f"{figures['tokens_per_s']} tokens/s; first token p50 {ttft['p50']} p99 {ttft['p99']} ms; "
        f"between tokens p50 {gap['p50']} p99 {gap['p99']} ms; {counts['sent']} sent, {counts['finished']} finished, "
        f"{counts['cancelled']} cancelled; left {left(counts)}; graph replays {counts['graph_replays']}"
    )


def charts(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A chart for each figure that there is, of all scenarios and sides."""
    made = [
        chart(report["scenarios"], title, figure, unit)
        for unit, figures in CHARTS.items()
        for title, figure in figures
    ]
    return [one for one in made if one["series"]]


def chart(scenarios: Mapping[str, Any], title: str, figure: tuple[str, ...], unit: str) -> dict[str, Any]:
    series: dict[str, list[list[Any]]] = {}
    for scenario, sides in scenarios.items():
        for name, side in sides.items():
            value = side["figures"]
            for key in figure:
                value = value[key]
            if value is not None:
                series.setdefault(name, []).append([scenario, value])
    turns = max(len(side["turns"]) for sides in scenarios.values() for side in sides.values())
    return {
        "title": title,
        "measures": f"Seen by clients of a server's loop over a transformers model; median of {turns} turns, A B B A.",
        "unit": unit,
        "better": "lower" if unit == "ms" else "higher",
        "x": {"label": "clients of a closed loop, or load of an open one"},
        "series": series,
    }


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Write the benchmark document.

    Raises:
        Malformed: see ``bench_document.write``.
    """
    versions = {name: str(value) for name, value in report["versions"].items()}
    bench_document.write(path, "Serving transformers", report, report["command"], charts(report), versions)


def main(report: str, document: str) -> int:
    write(Path(document), json.loads(Path(report).read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
