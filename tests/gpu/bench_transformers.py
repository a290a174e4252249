"""Tokens a second of transformers models with and without kernseal, prefill and decode apart, sides alternating A B B A.

``PYTHONPATH=tests python -m gpu.bench_transformers --json FILE``. Stock is transformers as it is installed; the report says
what that runs linear attention with. Both sides attend without cuDNN, unless ``--cudnn-attention``: it makes a plan for
each length that it has not seen, and a dynamic cache has a new one at each token. Refuses a tree that is not a clean
commit, unless told that it is a ``--trial``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from gpu.bundles import BUNDLES, folder, open_by_name
from gpu.hybrid_model import CUDNN_HELP, GEOMETRIES, LAYERS, build, linear_attention, prompts
from gpu.provenance import not_clean, provenance
from gpu.timing import Call, summary, wall_us
from transformers import DynamicCache, StaticCache

from kernseal.integrations.transformers import enable

Implementations = Mapping[str, Callable[[], AbstractContextManager[Any]]]

PREFILLS = ((1, 512), (1, 2048), (1, 8192), (1, 32768), (8, 1024))
DECODES = ((1, 1024), (1, 8192), (8, 8192), (32, 8192))
"""Sequences, and tokens of each."""

QUICK_PREFILLS, QUICK_DECODES = ((1, 512), (1, 8192), (8, 1024)), ((1, 1024), (32, 8192))

CACHES = ("dynamic", "static")
PART = 1024
"""Tokens of a sequence that are taken in at once where only what comes after is timed."""

STEPS = 32
"""Tokens of a sequence in one sample of decode."""

ROUNDS, SAMPLES = 3, 2


def alternating(implementations: Implementations, calls: Mapping[str, Call]) -> dict[str, list[float]]:
    """Wall microseconds of each side's call, 2 * ROUNDS * SAMPLES times, after two that do not count."""
    taken: dict[str, list[float]] = {name: [] for name in implementations}
    order = [*implementations, *reversed(list(implementations))]
    for name in order:
        with implementations[name]():
            calls[name]()
    for _ in range(ROUNDS):
        for name in order:
            with implementations[name]():
                taken[name] += [wall_us(calls[name]) for _ in range(SAMPLES)]
    return taken


def rates(taken: Mapping[str, list[float]], tokens: int) -> dict[str, Any]:
    """Tokens a second at the median, and the times themselves."""
    found: dict[str, Any] = {}
    for name, samples in taken.items():
        times = summary(samples)
        found[name] = {"tokens_per_s": round(tokens / times["median"] * 1e6, 1), "wall_us": times}
    return found


def prefill(model: Any, implementations: Implementations, rows: int, length: int) -> dict[str, Any]:
    ids = prompts(model, rows, length)

    def call() -> None:
        model(ids, use_cache=True, logits_to_keep=1)

    return rates(alternating(implementations, dict.fromkeys(implementations, call)), rows * length)


class Decoding:
    """A text that goes on: each call takes STEPS greedy tokens."""

    def __init__(self, model: Any, rows: int, length: int, cache: str) -> None:
        self.model = model
        room = length + STEPS * (2 * ROUNDS * SAMPLES + 2)
        static = cache == "static"
        self.cache = (
            StaticCache(model.config, max_cache_len=room) if static else DynamicCache(config=model.config)
        )
        for part in prompts(model, rows, length).split(PART, dim=1):
            logits = model(part, past_key_values=self.cache, logits_to_keep=1).logits
        self.last = logits.argmax(-1)

    def __call__(self) -> None:
        for _ in range(STEPS):
            self.last = self.model(self.last, past_key_values=self.cache).logits.argmax(-1)


def decode(
    model: Any, implementations: Implementations, rows: int, length: int, cache: str
) -> dict[str, Any]:
    calls = {name: Decoding(model, rows, length, cache) for name in implementations}
    return rates(alternating(implementations, calls), rows * STEPS)


@torch.no_grad()
def measured(model: Any, implementations: Implementations, quick: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rows, length in QUICK_PREFILLS if quick else PREFILLS:
        show(found, f"prefill {rows} x {length}", prefill(model, implementations, rows, length))
    for rows, length in QUICK_DECODES if quick else DECODES:
        for cache in CACHES:
            label = f"decode {rows} x {length}, {cache} cache"
            show(found, label, decode(model, implementations, rows, length, cache))
    return found


def show(found: dict[str, Any], label: str, sides: dict[str, Any]) -> None:
    found[label] = sides
    print(label, {name: side["tokens_per_s"] for name, side in sides.items()}, "tokens/s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--bundle", choices=list(BUNDLES), default="sm90")
    parser.add_argument("--geometry", choices=list(GEOMETRIES), action="append")
    parser.add_argument("--quick", action="store_true", help="a representative part")
    parser.add_argument("--cudnn-attention", action="store_true", help=CUDNN_HELP)
    parser.add_argument("--trial", action="store_true", help="measure whatever is there; the report says so")
    options = parser.parse_args()
    torch.backends.cuda.enable_cudnn_sdp(options.cudnn_attention)
    report = provenance() | {
        "trial": options.trial,
        "quick": options.quick,
        "cudnn_attention": options.cudnn_attention,
        "bundle": options.bundle,
        "transformers": metadata.version("transformers"),
        "linear_attention": linear_attention(),
        "layers": LAYERS,
    }
    if not options.trial and (why := not_clean(report)):
        print(f"refused: {why}")
        return 2
    if not folder(options.bundle).is_dir():
        print(f"refused: no bundle {BUNDLES[options.bundle]}")
        return 2
    with open_by_name(options.bundle) as bundle:
        for geometry in options.geometry or GEOMETRIES:
            print(geometry)
            model = build(geometry)
            sides: Implementations = {"stock": nullcontext, "kernseal": lambda m=model: enable(bundle, m)}
            report[geometry] = measured(model, sides, options.quick)
            options.json.write_text(json.dumps(report, indent=1) + "\n")
            del model, sides
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
