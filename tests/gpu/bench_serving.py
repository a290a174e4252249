"""Latencies of a small server over a transformers model, with and without kernseal, in turns A B B A.

``PYTHONPATH=tests python -m gpu.bench_serving --json FILE``. Closed loops of so many clients, then open loops: arrivals at
shares of what stock did in the largest closed loop, the same for both sides, with clients that go away. Prompts of mixed
length. Both sides run ``gpu.serving_loop`` on the same requests; stock is transformers with fla-core.

The engine is a batch that requests join and leave at any token: rows of one dynamic cache that end together and are padded
on the left, which is what transformers' caches can do for a hybrid model (its own continuous batching has no linear
attention). A token counts when the host has it. With kernseal, prompts' linear attention and a step's full attention are
ours; a step's linear attention and a prompt's full attention are stock's on both sides.

No graphs are captured: a dynamic cache is another tensor at each token, and a static cache's mask, which kernseal reads on
the host once a step, can't be read in a capture. Replays are counted all the same, whoever makes them. Refuses a tree that
is not a clean commit and an environment without fla-core, unless told that it is a ``--trial``. Both sides attend without
cuDNN, unless ``--cudnn-attention``: see ``gpu.bench_transformers``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu import bench_document, serving_report
from gpu.bundles import BUNDLES, folder, open_by_name
from gpu.hybrid_model import CUDNN_HELP, GEOMETRIES, LAYERS, build, linear_attention, prompts
from gpu.provenance import not_clean, provenance
from gpu.serving_loop import (
    IMPATIENT,
    PROMPT,
    TOKENS,
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
from transformers import DynamicCache

from kernseal.integrations.transformers import enable

Implementations = Mapping[str, Callable[[], AbstractContextManager[Any]]]

STOCK, OURS = "stock", "kernseal"


@dataclass(frozen=True)
class Plan:
    """How long, and of what.

    Attributes:
        clients: of each closed loop, ascending; the most are the slots of the server in the open ones.
        loads: of each open loop, as shares of stock's requests a second with the most clients.
        warm_up: seconds of each turn that do not count.
        seconds: of each turn that do.
        rounds: of A B B A.
        prompt, tokens: fewest and most.
    """

    clients: tuple[int, ...] = (1, 8, 32)
    loads: tuple[float, ...] = (0.5, 0.9)
    warm_up: float = 0.8
    seconds: float = 3.0
    rounds: int = 2
    prompt: tuple[int, int] = PROMPT
    tokens: tuple[int, int] = TOKENS

    @property
    def slots(self) -> int:
        return self.clients[-1]

    @property
    def until(self) -> float:
        return self.warm_up + self.seconds

    def stream(self, seed: int) -> Iterator[Request]:
        return stream(seed, self.prompt, self.tokens)


QUICK = Plan(warm_up=0.4, seconds=1.2, rounds=1)


class Batch:
    """What runs, as rows of one cache. All rows end in its last column; the longest begins in the first."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache: Any = None
        self._last: Any = None
        self._lengths: list[int] = []
        self.prefills = self.steps = 0

    def start(self, request: Request) -> int:
        """Take the prompt in by itself, then add it to the others as a row."""
        self.prefills += 1
        cache = DynamicCache(config=self._model.config)
        ids = prompts(self._model, 1, request.prompt, seed=request.seed)
        last = self._model(ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
        token = int(last)
        self._lengths.append(request.prompt)
        if len(self._lengths) == 1:
            self._cache, self._last = cache, last
        else:
            join(self._cache, cache, max(self._lengths))
            self._last = torch.cat([self._last, last])
        return token

    def step(self) -> list[int]:
        self.steps += 1
        logits = self._model(self._last, past_key_values=self._cache, **self._padding()).logits
        self._last = logits.argmax(-1)
        self._lengths = [length + 1 for length in self._lengths]
        return [int(token) for token in self._last[:, 0].tolist()]

    def keep(self, rows: list[int]) -> None:
        self._lengths = [self._lengths[row] for row in rows]
        if not rows:
            self._cache = self._last = None
            return
        index = torch.tensor(rows, device=self._last.device)
        self._cache.reorder_cache(index)
        self._last = self._last[index]
        for layer in full_layers(self._cache):
            layer.keys, layer.values = (fitted(x, max(self._lengths)) for x in (layer.keys, layer.values))

    def _padding(self) -> dict[str, torch.Tensor]:
        """Which columns count for a row, the new one with them, and the row's position in its text; nothing if all do."""
        width, device = max(self._lengths), self._last.device
        if min(self._lengths) == width:
            return {}
        lengths = torch.tensor(self._lengths, device=device)[:, None]
        columns = torch.arange(width + 1, device=device)
        return {"attention_mask": columns >= width - lengths, "position_ids": lengths}


def full_layers(cache: Any) -> list[Any]:
    return [layer for layer in cache.layers if hasattr(layer, "keys")]


def fitted(x: torch.Tensor, width: int) -> torch.Tensor:
    """[B, H, T, D] with ``width`` tokens: zeros before the first, or without the first ones."""
    missing = width - x.shape[2]
    return torch.nn.functional.pad(x, (0, 0, missing, 0)) if missing else x


def join(cache: Any, other: Any, width: int) -> None:
    """Put the rows of another cache after those of this one."""
    for layer, more in zip(cache.layers, other.layers, strict=True):
        if hasattr(layer, "keys"):
            layer.keys = torch.cat([fitted(layer.keys, width), fitted(more.keys, width)])
            layer.values = torch.cat([fitted(layer.values, width), fitted(more.values, width)])
        else:
            for states, added in (
                (layer.conv_states, more.conv_states),
                (layer.recurrent_states, more.recurrent_states),
            ):
                states[0] = torch.cat([states[0], added[0]])


class Bench:
    """One model's scenarios."""

    def __init__(
        self, model: Any, sides: Implementations, plan: Plan, new_clock: Callable[[], Clock] = Clock
    ) -> None:
        self._model, self._sides, self._plan, self._new_clock = model, sides, plan, new_clock

    def warm_up(self) -> None:
        """Compile and load whatever comes later: every size of a batch, prompts of every kind of length."""
        plan = self._plan
        lengths = (*plan.prompt, plan.prompt[1] // 2)
        extremes = [Request(0, length, 1) for length in lengths]
        some = itertools.islice(itertools.chain(extremes, plan.stream(0)), plan.slots)
        requests = [
            replace(request, tokens=plan.slots + 1) for request in some
        ]  # all run when the last one starts
        for implementation in self._sides.values():
            with implementation():
                serve(Batch(self._model), Open(requests), plan.slots, self._new_clock())

    def closed(self, clients: int) -> dict[str, Any]:
        plan = self._plan
        return self._turns(lambda turn: Closed(plan.stream(turn), clients, plan.until), clients)

    def open(self, rate: float, patience: float) -> dict[str, Any]:
        plan = self._plan

        def source(turn: int) -> Source:
            return Open(poisson(plan.stream(turn), turn, rate, plan.until, patience))

        return self._turns(source, plan.slots)

    def _turns(self, source: Callable[[int], Source], slots: int) -> dict[str, Any]:
        """Both sides' results. ``source`` makes the requests of a side's turn, the same for both sides."""

        def side(name: str) -> Callable[[int], dict[str, Any]]:
            return lambda turn: self._turn(name, source(turn), slots)

        taken = alternate({name: side(name) for name in self._sides}, self._plan.rounds)
        return {name: serving_report.over_turns(turns) for name, turns in taken.items()}

    def _turn(self, name: str, source: Source, slots: int) -> dict[str, Any]:
        batch, graph = Batch(self._model), torch.cuda.CUDAGraph
        replays = mock.patch.object(graph, "replay", autospec=True, side_effect=graph.replay)
        with self._sides[name]() as served, replays as replay:
            answers = serve(batch, source, slots, self._new_clock())
        found = serving_report.seen(answers, self._plan.warm_up, self._plan.until)
        found["counts"] |= {
            "prefills": batch.prefills,
            "steps": batch.steps,
            "graph_replays": replay.call_count,
            "calls": {} if served is None else served.stats(),
        }
        return found


@torch.no_grad()
def measured(bench: Bench, plan: Plan) -> Iterator[dict[str, Any]]:
    """What to add to the report, scenario by scenario."""
    print("warming up ...", flush=True)
    bench.warm_up()
    scenarios: dict[str, Any] = {}
    for clients in plan.clients:
        scenarios[f"{clients} client{'s' if clients > 1 else ''}"] = closed = bench.closed(clients)
        if clients == plan.clients[len(plan.clients) // 2]:
            patience = closed[STOCK]["figures"]["request_ms"]["p50"] / 1e3
        yield {"scenarios": scenarios}
    capacity = closed[STOCK]["figures"]["requests_per_s"]
    for load in plan.loads:
        scenarios[f"load {load}"] = bench.open(load * capacity, patience)
        yield {
            "scenarios": scenarios,
            "open": {"capacity_requests_per_s": capacity, "patience_s": patience, "impatient": IMPATIENT},
        }


def show(scenarios: Mapping[str, Any]) -> None:
    """The last one."""
    label, sides = list(scenarios.items())[-1]
    for name, side in sides.items():
        print(f"{label}, {name}: {serving_report.line(side)}", flush=True)


def refusal(options: argparse.Namespace, stamp: Mapping[str, Any]) -> str:
    """Why nothing is measured; nothing where all is well."""
    if not options.trial and (why := not_clean(stamp)):
        return why
    if not options.trial and linear_attention() == "torch":
        return "fla-core is not installed, which the stock path is to run on; --trial"
    if options.document and not bench_document.can_write():
        return (
            "--document needs jsonschema; without it --json alone, and gpu.serving_report where there is one"
        )
    if options.document and not (stamp["device"] and stamp["commit"]):
        return "--document has to name a device and a commit"
    if not folder(options.bundle).is_dir():
        return f"no bundle {BUNDLES[options.bundle]}"
    return ""


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--document", type=Path, help="a benchmark document as well; needs jsonschema")
    parser.add_argument("--bundle", choices=list(BUNDLES), default="sm90")
    parser.add_argument("--geometry", choices=list(GEOMETRIES), default="qwen3_5")
    parser.add_argument("--quick", action="store_true", help="shorter turns, and two of each side")
    parser.add_argument("--cudnn-attention", action="store_true", help=CUDNN_HELP)
    parser.add_argument("--trial", action="store_true", help="measure whatever is there; the report says so")
    options = parser.parse_args(given)
    torch.backends.cuda.enable_cudnn_sdp(options.cudnn_attention)
    plan = QUICK if options.quick else Plan()
    report = provenance() | {"trial": options.trial, "bundle": options.bundle, "geometry": options.geometry}
    report["cudnn_attention"] = options.cudnn_attention
    if why := refusal(options, report):
        print(f"refused: {why}")
        return 2
    words = sys.argv[1:] if given is None else given
    report["command"] = shlex.join(["python", "-m", "gpu.bench_serving", *words])
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    report["versions"] = versions | {"linear attention of stock": linear_attention()}
    report |= {"layers": LAYERS, "plan": asdict(plan)}
    with open_by_name(options.bundle) as bundle:
        print("building the model ...", flush=True)
        model = build(options.geometry)
        sides: Implementations = {STOCK: nullcontext, OURS: lambda: enable(bundle, model, missing="stock")}
        for found in measured(Bench(model, sides, plan), plan):
            report |= found
            options.json.write_text(json.dumps(report, indent=1) + "\n")
            show(report["scenarios"])
        torch.cuda.synchronize()
    if options.document:
        serving_report.write(options.document, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
