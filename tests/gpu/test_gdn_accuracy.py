"""Output and state against the float64 oracle, and against the reference inside transformers."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu.problems import (  # noqa: E402
    KINDS,
    RAGGED,
    SCALE,
    Case,
    Inputs,
    Outputs,
    make_inputs,
    oracle,
    relative_error,
    run,
)

LIMITS = {"bf16": 6e-3, "f16": 2e-3}
"""Largest ||error|| / ||reference|| allowed, by element type; measured values are in docs/results-gdn-prefill.md."""
BF16_STATE_LIMIT = 8e-3

LENGTHS = [1, 2, 63, 64, 65, 127, 128, 2048]
HEADS = [(16, 16, 32), (4, 4, 8), (32, 32, 32), (8, 2, 2)]
VARIANTS = list(
    dict.fromkeys([*KINDS, *(Case(alpha=a, beta=b) for a in (True, False) for b in (True, False))])
)
TAILS = Path(__file__).with_name("expected_tails.json")


def label(case: Case) -> str:
    default = Case()
    return "-".join(f"{k}={v}" for k, v in vars(case).items() if v != getattr(default, k)) or "default"


def check(case: Case, got: Outputs, measure: Any) -> None:
    want = oracle(case)
    state_limit = BF16_STATE_LIMIT if case.state_dtype == "bf16" else LIMITS[case.dtype]
    output = relative_error(got.output, want.output)
    state = relative_error(got.state, want.final_state)
    measure(output=output, state=state)
    assert output <= LIMITS[case.dtype]
    assert state <= state_limit
    if case.checkpoint_every:
        assert got.checkpoints is not None
        checkpoints = relative_error(got.checkpoints, want.checkpoints)
        measure(checkpoints=checkpoints)
        assert got.checkpoints.shape == want.checkpoints.shape
        assert checkpoints <= state_limit


@pytest.mark.parametrize("tokens", LENGTHS)
def test_one_sequence(bundle: Any, tokens: int, measure: Any) -> None:
    case = Case(lengths=(tokens,))
    check(case, run(bundle, case), measure)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("lengths", [RAGGED, (2048,)], ids=["ragged", "2048"])
def test_head_counts(
    bundle: Any, heads: tuple[int, int, int], lengths: tuple[int, ...], measure: Any
) -> None:
    case = Case(lengths=lengths, heads=heads)
    check(case, run(bundle, case), measure)


@pytest.mark.parametrize("case", VARIANTS, ids=label)
def test_every_variant(bundle: Any, case: Case, measure: Any) -> None:
    check(case, run(bundle, case), measure)


def test_the_cases_above_are_all_the_variants_of_the_bundle(bundle: Any) -> None:
    def words(axes: dict[str, Any]) -> tuple[tuple[str, str], ...]:
        return tuple(sorted((k, str(int(v)) if isinstance(v, bool) else str(v)) for k, v in axes.items()))

    assert {words(case.axes) for case in VARIANTS} == {
        words(dict(v.axes)) for v in bundle.variants() if v.op == "gdn_prefill"
    }


@pytest.mark.parametrize("every", [64, 128, 192])
def test_checkpoints_at_several_distances(bundle: Any, every: int, measure: Any) -> None:
    case = Case(lengths=(500, 64, 63, 0, 192), heads=(4, 4, 8), checkpoint_every=every)
    check(case, run(bundle, case), measure)


def hugging_face(name: str, case: Case, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The function ``name`` of Qwen3-Next, sequence by sequence; it keeps its state as [K, V] and takes the log gate."""
    module = pytest.importorskip(
        "transformers.models.qwen3_next.modeling_qwen3_next", reason="transformers is not installed"
    )
    # Where fla is installed the name stands for its Triton kernel; what it wraps is the reference.
    reference = inspect.unwrap(getattr(module, name))
    assert reference.__code__.co_filename == module.__file__
    spread = lambda t: t.repeat_interleave(case.out_heads // t.shape[1], dim=1)  # noqa: E731
    q, k, v = spread(x.q), spread(x.k), spread(x.v)
    outputs, states, start = [], [], 0
    for index, length in enumerate(case.lengths):
        part = slice(start, start + length)
        start += length
        output, state = reference(
            q[None, part].float(),
            k[None, part].float(),
            v[None, part].float(),
            g=x.alpha[None, part].log(),
            beta=x.beta[None, part],
            initial_state=x.state[None, index].transpose(-1, -2).contiguous(),
            output_final_state=True,
        )
        outputs.append(output[0])
        states.append(state[0].transpose(-1, -2))
    return torch.cat(outputs), torch.stack(states)


@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
@pytest.mark.parametrize("lengths", [(1,), (64,), (65, 200, 128)], ids=str)
def test_agrees_with_transformers(bundle: Any, name: str, lengths: tuple[int, ...], measure: Any) -> None:
    case = Case(lengths=lengths)
    x = make_inputs(case)
    got = run(bundle, case, x)
    output, state = hugging_face(name, case, x)
    # The default scale of that model is the one the cases use.
    assert pytest.approx(128**-0.5) == SCALE
    measure(output=relative_error(got.output, output), state=relative_error(got.state, state))
    assert relative_error(got.output, output) <= LIMITS["bf16"]
    assert relative_error(got.state, state) <= LIMITS["bf16"]


def tail_count(got: torch.Tensor, want: torch.Tensor) -> int:
    """Elements whose error exceeds 2^-6 of their size plus 2^-6 of the tensor's root mean square."""
    bound = (want.abs() + want.square().mean().sqrt()) / 64
    return int(((got.double() - want).abs() > bound).sum())


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_tail_of_16_16_48_has_not_changed(bundle: Any, bundle_name: str, dtype: str, measure: Any) -> None:
    """Counts how many elements lie far out, for a diagnostic head count, and asks that the count stays what it was.

    Rule: within the larger of 8 elements and a tenth of the count in ``expected_tails.json``, either way. A compiler
    that moves the tail shows here first. ``KERNSEAL_RECORD_TAILS=FILE`` writes the counts there instead.
    """
    case = Case(lengths=(2048,), heads=(16, 16, 48), dtype=dtype)
    got, want = run(bundle, case), oracle(case)
    counts = {
        "output": tail_count(got.output, want.output),
        "state": tail_count(got.state, want.final_state),
        "of_output": want.output.numel(),
        "of_state": want.final_state.numel(),
    }
    measure(**counts)
    key = f"{bundle_name} {dtype}"
    record = os.environ.get("KERNSEAL_RECORD_TAILS")
    if record:
        path = Path(record)
        known = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({**known, key: counts}, indent=1, sort_keys=True) + "\n")
        pytest.skip(f"recorded {counts} in {record}")
    expected = json.loads(TAILS.read_text())[key]
    for name in ("output", "state"):
        assert abs(counts[name] - expected[name]) <= max(8, expected[name] // 10), (name, counts, expected)
