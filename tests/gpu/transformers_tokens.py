"""Greedy tokens of transformers models with and without kernseal, and what decided where they part.

``PYTHONPATH=tests python -m gpu.transformers_tokens --json FILE``. Each case runs three times: stock (transformers with
fla-core, whose kernels round as ours do), references (its rules in torch, in float32, and eager attention) and kernseal. How
much the first two differ is the measure for the third; see ``gpu.greedy``. Refuses a tree that is not a clean commit and an
environment without fla-core, unless told that it is a ``--trial``.
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
from gpu import greedy
from gpu.bundles import BUNDLES, folder, open_by_name
from gpu.greedy import Run
from gpu.hybrid_model import GEOMETRIES, build, layers, linear_attention, prompts, references
from gpu.provenance import not_clean, provenance
from transformers import DynamicCache, StaticCache

from kernseal.integrations.transformers import FULL_LAYERS, LINEAR_LAYERS, Served, enable

TOKENS = 128
LENGTHS = (1, 17, 64, 65, 200, 513, 1024, 2048)
EQUAL = 256
"""Prompt length of the batches without padding."""

Generate = Callable[[Any], Run]
Implementation = Callable[[], AbstractContextManager[Any]]


def generated(model: Any, ids: torch.Tensor, tokens: int, **how: Any) -> Run:
    found = model.generate(
        ids,
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **{"attention_mask": torch.ones_like(ids), "disable_compile": True, **how},
    )
    return Run(found.sequences[:, ids.shape[1] :], torch.stack(found.logits))


def left_padded(model: Any, lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = prompts(model, len(lengths), max(lengths))
    at = torch.arange(max(lengths), device=ids.device)
    mask = (at >= max(lengths) - torch.tensor(lengths, device=ids.device)[:, None]).long()
    return ids * mask, mask


def cases(model: Any, lengths: tuple[int, ...], equal: int, tokens: int) -> dict[str, Generate]:
    """Prompts alone, side by side, and with padding on the left."""
    found: dict[str, Generate] = {}
    for length in lengths:
        ids = prompts(model, 1, length, seed=length)
        found[f"one prompt of {length}"] = lambda m, ids=ids: generated(m, ids, tokens)
    rows = len(lengths)
    same = prompts(model, rows, equal)
    room = equal + tokens + 5  # of no whole number of pages
    found[f"{rows} prompts of {equal}"] = lambda m: generated(m, same, tokens)
    found[f"{rows} prompts of {equal}, static cache"] = lambda m: generated(
        m, same, tokens, past_key_values=StaticCache(m.config, max_cache_len=room)
    )
    ids, mask = left_padded(model, lengths)
    found[f"{rows} prompts of {min(lengths)} to {max(lengths)}, padded on the left"] = lambda m: generated(
        m, ids, tokens, attention_mask=mask
    )
    return found


@torch.no_grad()
def forced_logits(model: Any, ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [steps, rows, vocab] when ``tokens`` [rows, steps] follow ``ids``, one forward pass a token."""
    cache = DynamicCache(config=model.config)
    found = []
    for part in (ids, *tokens[:, :-1].split(1, dim=1)):
        found.append(model(part, past_key_values=cache, logits_to_keep=1).logits[:, -1])
    return torch.stack(found)


def measured(
    model: Any,
    implementations: Mapping[str, Implementation],
    lengths: tuple[int, ...] = LENGTHS,
    equal: int = EQUAL,
    tokens: int = TOKENS,
) -> dict[str, dict[str, Any]]:
    """For each implementation but stock and each case, the comparison with stock."""
    found: dict[str, dict[str, Any]] = {name: {} for name in implementations if name != "stock"}
    for label, generate in cases(model, lengths, equal, tokens).items():
        with implementations["stock"]():
            stock = generate(model)
        for name, comparisons in found.items():
            with implementations[name]():
                comparisons[label] = greedy.compared(stock, generate(model))
    ids = prompts(model, len(lengths), equal, seed=1)
    with implementations["stock"]():
        picked = generated(model, ids, tokens).tokens
        stock = Run(picked, forced_logits(model, ids, picked))
    for name, comparisons in found.items():
        with implementations[name]():
            comparisons["stock's tokens given"] = greedy.forced(stock, forced_logits(model, ids, picked))
    return found


class Enabled:
    """``enable`` again and again, with the counts of all times."""

    def __init__(self, bundle: Any, model: Any) -> None:
        self._bundle, self._model = bundle, model
        self._times: list[Served] = []

    def __call__(self) -> Served:
        self._times.append(enable(self._bundle, self._model))
        return self._times[-1]

    def stats(self) -> dict[str, dict[str, int]]:
        every = [served.stats() for served in self._times]
        return {
            op: {
                "served": sum(stats[op]["served"] for stats in every),
                "left": sum(sum(stats[op]["left"].values()) for stats in every),
            }
            for op in every[0]
        }


def expected_calls(model: Any, lengths: tuple[int, ...], tokens: int) -> dict[str, dict[str, int]]:
    """One prefill for each case, and as many decodes as tokens but the first, which only a prompt of one decodes, too."""
    runs = len(lengths) + 4
    decodes = runs * (tokens - 1) + lengths.count(1)
    counts = {
        "gdn_prefill": runs * len(layers(model, LINEAR_LAYERS)),
        "xqa_decode": decodes * len(layers(model, FULL_LAYERS)),
    }
    return {op: {"served": count, "left": 0} for op, count in counts.items()}


def report_of(
    model: Any,
    enabled: Enabled,
    lengths: tuple[int, ...] = LENGTHS,
    equal: int = EQUAL,
    tokens: int = TOKENS,
) -> dict[str, Any]:
    """Everything of one model, and what failed."""
    implementations: dict[str, Implementation] = {
        "stock": nullcontext,
        "references": lambda: references(model),
        "kernseal": enabled,
    }
    found = measured(model, implementations, lengths, equal, tokens)
    noise = greedy.typical(found["references"].values())
    failures = greedy.failures(noise, found["kernseal"])
    calls, wanted = enabled.stats(), expected_calls(model, lengths, tokens)
    if calls != wanted:
        failures.append(f"calls are {calls}; expected {wanted}")
    summary = {name: summed(comparisons) for name, comparisons in found.items()}
    return {"typical_stock_difference": noise, "calls": calls, "failures": failures, "against_stock": summary}


def summed(comparisons: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Comparisons with their differences summed up."""
    return {
        label: {key: value for key, value in case.items() if key != "differences"}
        | {"typical_difference": greedy.typical([case]), "largest_difference": max(case["differences"])}
        for label, case in comparisons.items()
    }


def show(geometry: str, report: Mapping[str, Any]) -> None:
    print(f"\n{geometry}: stock paths usually differ by {report['typical_stock_difference']:.4g}")
    for name, comparisons in report["against_stock"].items():
        for label, case in comparisons.items():
            gaps = [round(d["stock_gap"], 4) for d in case["divergences"]]
            print(
                f"{name:>10}, {label}: of {case['rows']} x {case['steps']} tokens parted {len(gaps)}, gaps {gaps}, "
                f"logits {case['typical_difference']:.4g}, at most {case['largest_difference']:.4g}",
                flush=True,
            )
    for line in report["failures"]:
        print(f"FAILED: {line}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--bundle", choices=list(BUNDLES), default="sm90")
    parser.add_argument("--geometry", choices=list(GEOMETRIES), action="append")
    parser.add_argument("--trial", action="store_true", help="run whatever is there; the report says so")
    options = parser.parse_args()
    report = provenance() | {
        "trial": options.trial,
        "bundle": options.bundle,
        "transformers": metadata.version("transformers"),
        "linear_attention": linear_attention(),
    }
    if not options.trial and (why := not_clean(report)):
        print(f"refused: {why}")
        return 2
    if not options.trial and report["linear_attention"] == "torch":
        print(
            "refused: fla-core is not installed, so that the stock paths share their linear attention; --trial"
        )
        return 2
    if not folder(options.bundle).is_dir():
        print(f"refused: no bundle {BUNDLES[options.bundle]}")
        return 2
    with open_by_name(options.bundle) as bundle:
        for geometry in options.geometry or GEOMETRIES:
            model = build(geometry)
            report[geometry] = report_of(model, Enabled(bundle, model))
            show(geometry, report[geometry])
            del model
            torch.cuda.empty_cache()
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(report[geometry]["failures"] for geometry in options.geometry or GEOMETRIES))


if __name__ == "__main__":
    sys.exit(main())
