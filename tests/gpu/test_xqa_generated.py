"""XQA decode over generated calls: hypothesis draws the variant, the shapes and the options; the oracle has the last word.

``KERNSEAL_EXAMPLES`` says how many calls each bundle gets (500 unless given).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")

from gpu.xqa_problems import Runner, axes_of, limit_of, make, name_of, oracle, worst_row  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

EXAMPLES = int(os.environ.get("KERNSEAL_EXAMPLES", "500"))
EDGES = [0, 1, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 768, 1023, 1024]

LENGTH = st.one_of(st.sampled_from(EDGES), st.integers(0, 1200))
CALL = st.fixed_dictionaries(
    {
        "number": st.integers(0, 10**6),
        "lengths": st.lists(LENGTH, min_size=1, max_size=5),
        "kv_heads": st.sampled_from([1, 2, 3, 4, 8]),
        "seed": st.integers(0, 2**31),
        "spare_pages": st.integers(0, 9),
        "splits": st.sampled_from([0, -1, 1, 2, 3, 5, 16, 100]),
        "window": st.one_of(st.sampled_from([1, 2, 64, 256, 257]), st.integers(1, 1300)),
        "drafts": st.lists(st.integers(0, 12), min_size=5, max_size=5),
        "uniform": st.one_of(st.just(0), st.integers(1, 40)),
        "tree": st.booleans(),
        "sinks": st.booleans(),
        "q_scale": st.sampled_from([1.0, 0.5, -0.75, 2.0]),
        "pdl": st.sampled_from([0, 1]),
        "longest_known": st.booleans(),
    }
)


def test_generated_calls_agree_with_the_oracle(any_bundle: Any, measure: Callable[..., None]) -> None:
    variants = [axes_of(v) for v in any_bundle.variants() if v.op == "xqa_decode"]
    if not variants:
        pytest.skip("this bundle has no variant of xqa_decode")
    runners: dict[str, Runner] = {}
    worst: dict[str, float] = {}

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(CALL)
    def check(call: dict[str, Any]) -> None:
        axes = variants[call["number"] % len(variants)]
        name, lengths = name_of(axes), call["lengths"]
        counts = [call["uniform"]] * len(lengths) if call["uniform"] else call["drafts"][: len(lengths)]
        if axes["spec_decode"] and not any(counts):
            counts[0] = 1
        made = runners.setdefault(name, Runner(any_bundle, axes))
        pages = max(-(-max(lengths) // axes["page_size"]), 1) + call["spare_pages"]
        p = make(axes, lengths, call["kv_heads"], call["seed"], pages, counts, call["tree"])
        if axes["sliding_window"]:
            p.call["window"] = call["window"]
        p.call |= {"q_scale": call["q_scale"], "pdl": call["pdl"]}
        if call["sinks"]:
            p.call["sinks"] = torch.linspace(-3, 5, p.q.shape[1], device="cuda")
        if call["longest_known"] and max(lengths) > 0:
            p.call["max_seq_len"] = max(lengths)
        error = worst_row(made.run(p, kv_splits=call["splits"]), oracle(p))
        worst[name] = max(worst.get(name, 0.0), error)
        assert error <= limit_of(axes), name
        assert made.semaphores.count_nonzero() == 0, name

    check()
    measure(examples=EXAMPLES, variants=len(worst), worst=max(worst.values()))
