"""What must not change a bit: state layout, batch composition, token strides; and what must hardly change: chunking."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu.problems import (  # noqa: E402
    RAGGED,
    Case,
    Inputs,
    call_args,
    launch,
    make_inputs,
    prepare,
    relative_error,
    results,
    run,
)

CARRY_LIMIT = 6e-3
"""Carrying a float32 state between calls must cost less than the rounding of one bfloat16 output."""


@pytest.mark.parametrize("pooled", [False, True], ids=["packed", "pooled"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("lengths", [RAGGED, (2048,)], ids=["ragged", "2048"])
def test_hkv_is_hvk_transposed_bit_for_bit(
    bundle: Any, dtype: str, pooled: bool, lengths: tuple[int, ...]
) -> None:
    hvk = run(bundle, Case(lengths=lengths, dtype=dtype, pooled=pooled))
    hkv = run(bundle, Case(lengths=lengths, dtype=dtype, pooled=pooled, state_layout="hkv"))
    assert torch.equal(hvk.output, hkv.output)
    assert torch.equal(hvk.state, hkv.state)


def test_hkv_is_hvk_transposed_without_an_initial_state(bundle: Any) -> None:
    hvk = run(bundle, Case(initial_state=False))
    hkv = run(bundle, Case(initial_state=False, state_layout="hkv"))
    assert torch.equal(hvk.output, hkv.output)
    assert torch.equal(hvk.state, hkv.state)


def test_hkv_is_hvk_transposed_for_bfloat16_pools(bundle: Any) -> None:
    hvk = run(bundle, Case(state_dtype="bf16", pooled=True))
    hkv = run(bundle, Case(state_dtype="bf16", pooled=True, state_layout="hkv"))
    assert torch.equal(hvk.output, hkv.output)
    assert torch.equal(hvk.state, hkv.state)


@pytest.mark.parametrize("layout", ["hvk", "hkv"])
def test_pooled_is_packed_bit_for_bit(bundle: Any, layout: str) -> None:
    packed = run(bundle, Case(state_layout=layout))
    pooled = run(bundle, Case(state_layout=layout, pooled=True))
    assert torch.equal(packed.output, pooled.output)
    assert torch.equal(packed.state, pooled.state)


def test_int32_offsets_are_int64_offsets_bit_for_bit(bundle: Any) -> None:
    narrow, wide = run(bundle, Case(index_dtype="i32", pooled=True)), run(bundle, Case(pooled=True))
    assert torch.equal(narrow.output, wide.output)
    assert torch.equal(narrow.state, wide.state)


def test_checkpointing_changes_no_bit_of_output_and_state(bundle: Any) -> None:
    plain, checkpointed = run(bundle, Case()), run(bundle, Case(checkpoint_every=64))
    assert torch.equal(plain.output, checkpointed.output)
    assert torch.equal(plain.state, checkpointed.state)


def sequence(x: Inputs, case: Case, index: int) -> tuple[Case, Inputs]:
    """Sequence ``index`` of a pack as a problem of its own."""
    start = sum(case.lengths[:index])
    part = slice(start, start + case.lengths[index])
    alone = dataclasses.replace(case, lengths=(case.lengths[index],))
    tensors = {name: getattr(x, name)[part].clone() for name in ("q", "k", "v", "alpha", "beta")}
    return alone, Inputs(**tensors, state=x.state[index : index + 1].clone())


@pytest.mark.parametrize("pooled", [False, True], ids=["packed", "pooled"])
def test_batch_composition_does_not_change_a_sequence(bundle: Any, pooled: bool) -> None:
    case = Case(lengths=(100, 33, 0, 200, 64), heads=(16, 16, 32), pooled=pooled)
    x = make_inputs(case)
    together = run(bundle, case, x)
    start = 0
    for index, length in enumerate(case.lengths):
        alone = run(bundle, *sequence(x, case, index))
        assert torch.equal(together.output[start : start + length], alone.output), index
        assert torch.equal(together.state[index], alone.state[0]), index
        start += length


def halves(case: Case, x: Inputs, cut: int) -> tuple[Inputs, Inputs]:
    names = ("q", "k", "v", "alpha", "beta")
    first = Inputs(**{n: getattr(x, n)[:cut].clone() for n in names}, state=x.state)
    second = Inputs(**{n: getattr(x, n)[cut:].clone() for n in names}, state=x.state)
    return first, second


@pytest.mark.parametrize("layout", ["hvk", "hkv"])
@pytest.mark.parametrize("cut", [1024, 64, 1000], ids=str)
def test_two_calls_with_the_state_carried_are_one_call(
    bundle: Any, layout: str, cut: int, measure: Any
) -> None:
    whole = Case(lengths=(2048,), state_layout=layout)
    x = make_inputs(whole)
    want = run(bundle, whole, x)
    first, second = halves(whole, x, cut)
    one = run(bundle, dataclasses.replace(whole, lengths=(cut,)), first)
    second.state = one.state
    two = run(bundle, dataclasses.replace(whole, lengths=(2048 - cut,)), second)
    output = torch.cat([one.output, two.output])
    same = torch.equal(output, want.output) and torch.equal(two.state, want.state)
    measure(
        bitwise=same,
        output=relative_error(output, want.output),
        state=relative_error(two.state, want.state),
    )
    if cut % 64 == 0:  # then both ways see the same chunks, and the state between them is float32 either way
        assert same
    assert relative_error(output, want.output) <= CARRY_LIMIT
    assert relative_error(two.state, want.state) <= CARRY_LIMIT


@pytest.mark.parametrize("lengths", [RAGGED, (2048,)], ids=["ragged", "2048"])
def test_slices_of_a_fused_projection_are_used_in_place(bundle: Any, lengths: tuple[int, ...]) -> None:
    case = Case(lengths=lengths)
    x = make_inputs(case)
    want = run(bundle, case, x)
    sizes = [t.shape[1] for t in (x.q, x.k, x.v)]
    fused = torch.cat([x.q, x.k, x.v], dim=1)
    args = call_args(case, x)
    args["q"], args["k"], args["v"] = fused.split(sizes, dim=1)
    wide = torch.full((case.tokens, case.out_heads + 1, 128), 7.0, dtype=torch.bfloat16, device="cuda")
    args["o"] = wide[:, :-1]
    assert not args["q"].is_contiguous() and not args["o"].is_contiguous()
    launch(prepare(bundle, case), args)
    got = results(case, args)
    assert torch.equal(got.output, want.output)
    assert torch.equal(got.state, want.state)
    assert bool((wide[:, -1] == 7.0).all())


def test_the_same_call_again_gives_the_same_bits(bundle: Any) -> None:
    case = Case(lengths=(777, 3, 512), heads=(32, 32, 32))
    x = make_inputs(case)
    first = run(bundle, case, x)
    for _ in range(5):
        again = run(bundle, case, x)
        assert torch.equal(first.output, again.output)
        assert torch.equal(first.state, again.state)
