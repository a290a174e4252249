"""XQA decode on hardware: numbers against a float64 oracle, and what must never change a bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu.variants import variants_of  # noqa: E402
from gpu.xqa_problems import (  # noqa: E402
    KV_SCALE,
    LENGTHS,
    Axes,
    Problem,
    Runner,
    axes_of,
    limit_of,
    make,
    name_of,
    oracle,
    same,
    worst_row,
)

SPLITS = [0, -1, 1, 2, 3, 8]
RAGGED = [3, 0, 1, 8, 2, 5, 0, 4, 6, 7, 1, 2, 3, 8, 8, 0, 1, 2]

Measure = Callable[..., None]


@pytest.fixture(scope="module")
def bundle(any_bundle: Any) -> Any:
    """Every bundle that has variants of this op, and so every test here on all of them."""
    return any_bundle


@pytest.fixture(scope="module")
def variants(bundle: Any) -> list[Axes]:
    return [axes_of(variant) for variant in variants_of(bundle, "xqa_decode")]


@pytest.fixture(scope="module")
def plain(variants: list[Axes]) -> Axes:
    """The first variant without a window and drafts and with a 16-bit cache; head_dim 128 and group 8 where there."""
    ordinary = [
        a
        for a in variants
        if not a["sliding_window"] and not a["spec_decode"] and a["kv_dtype"] == a["dtype"]
    ]
    return next((a for a in ordinary if (a["head_dim"], a["group_size"]) == (128, 8)), ordinary[0])


@pytest.fixture(scope="module")
def runner(bundle: Any, plain: Axes) -> Runner:
    return Runner(bundle, plain)


def drafts_of(axes: Axes) -> list[dict[str, Any]]:
    """How the query tokens of LENGTHS may lie: one each, or uniform, tree-masked and ragged drafts."""
    if not axes["spec_decode"]:
        return [{}]
    return [
        {"q_lens": [1] * len(LENGTHS)},
        {"q_lens": [5] * len(LENGTHS), "tree": True},
        {"q_lens": [33] * len(LENGTHS)},
        {"q_lens": RAGGED},
    ]


def covered(p: Problem) -> list[int]:
    """Sequences that are long enough for their own drafts, and have any."""
    lengths = p.seq_lens.tolist()
    return [b for b, count in enumerate(p.q_lens) if 0 < count <= lengths[b]]


def test_every_variant_agrees_with_the_oracle(bundle: Any, variants: list[Axes], measure: Measure) -> None:
    errors, wrong = {}, {}
    for axes in variants:
        made = Runner(bundle, axes)
        for number, drafts in enumerate(drafts_of(axes)):
            p = make(axes, LENGTHS, seed=number, **drafts)
            expected, rows = oracle(p), p.rows_of(covered(p))
            for splits in SPLITS:
                name = f"{name_of(axes)} {number} {splits}"
                out = made.run(p, kv_splits=splits)
                errors[name] = worst_row(out[rows], expected[rows])
                if not errors[name] <= limit_of(axes):
                    wrong[name] = errors[name]
                assert made.semaphores.count_nonzero() == 0, name
    exact = [e for n, e in errors.items() if "e4m3 " not in n]
    measure(
        worst=max(errors.values()),
        checked=len(errors),
        median=sorted(exact or errors.values())[len(exact) // 2],
    )
    assert wrong == {}


@pytest.mark.parametrize("length", [8192, 32768])
def test_long_sequences(bundle: Any, variants: list[Axes], measure: Measure, length: int) -> None:
    worst = 0.0
    for axes in variants:
        p = make(axes, [length, length - 1, 40], kv_heads=1)
        error = worst_row(Runner(bundle, axes).run(p), oracle(p))
        worst = max(worst, error)
        assert error <= limit_of(axes), name_of(axes)
    measure(worst=worst)


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 255, 256, 257, 300, 5000])
def test_windows(bundle: Any, variants: list[Axes], measure: Measure, window: int) -> None:
    worst = 0.0
    for axes in [a for a in variants if a["sliding_window"]]:
        made = Runner(bundle, axes)
        for drafts in drafts_of(axes):
            p = make(axes, LENGTHS, **drafts)
            p.call["window"] = window
            expected, rows = oracle(p), p.rows_of(covered(p))
            for splits in (0, 1, 3):
                error = worst_row(made.run(p, kv_splits=splits)[rows], expected[rows])
                assert error <= limit_of(axes), (name_of(axes), splits, drafts)
                worst = max(worst, error)
    measure(worst=worst)


@pytest.mark.parametrize("splits", [0, 1, 3])
def test_sinks(bundle: Any, variants: list[Axes], measure: Measure, splits: int) -> None:
    worst = 0.0
    for axes in variants:
        for drafts in drafts_of(axes):
            p = make(axes, LENGTHS, **drafts)
            sinks = torch.linspace(-4, 6, p.q.shape[1], device="cuda")
            rows = p.rows_of(covered(p))
            out = Runner(bundle, axes).run(p, sinks=sinks, kv_splits=splits)
            error = worst_row(out[rows], oracle(p, sinks=sinks)[rows])
            assert error <= limit_of(axes), (name_of(axes), drafts)
            worst = max(worst, error)
    measure(worst=worst)


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_empty_rows_are_exact_zeros(bundle: Any, variants: list[Axes], splits: int, with_sinks: bool) -> None:
    for axes in variants:
        p, made = make(axes, [0, 300, 0, 5, 4, 0], pages=40), Runner(bundle, axes)
        sinks = {"sinks": torch.zeros(p.q.shape[1], device="cuda")} if with_sinks else {}
        out = made.run(p, kv_splits=splits, **sinks).to(torch.float32)
        live = covered(p)
        dead = p.rows_of([b for b in range(6) if b not in live])
        assert live == ([1, 3] if axes["spec_decode"] else [1, 3, 4])
        assert same(out[dead], torch.zeros_like(out[dead])), name_of(axes)
        assert worst_row(out, oracle(p, **sinks)) <= limit_of(axes)
        assert made.semaphores.count_nonzero() == 0


@pytest.mark.parametrize("length", [-1, -(2**31), 1025, 2**31 - 1])
@pytest.mark.parametrize("splits", [0, 1, 3])
def test_a_length_over_the_capacity_gives_zeros_and_reads_no_page(
    bundle: Any, variants: list[Axes], length: int, splits: int
) -> None:
    for axes in variants:
        p, made = make(axes, [500, 1024, 200]), Runner(bundle, axes)
        before = made.run(p, kv_splits=splits)
        p.seq_lens[1] = length
        p.page_table[1] = 2**31 - 1
        after = made.run(p, kv_splits=splits)
        assert p.page_table.shape[1] * axes["page_size"] == 1024
        assert after[p.rows_of([1])].to(torch.float32).count_nonzero() == 0
        others = p.rows_of([0, 2])
        assert same(after[others], before[others]), name_of(axes)


@pytest.mark.parametrize("padding", [-1, 0, 2**31 - 1, -(2**31), 7])
@pytest.mark.parametrize("splits", [1, 3])
def test_padding_of_the_page_table_changes_no_bit(
    bundle: Any, variants: list[Axes], padding: int, splits: int
) -> None:
    for axes in variants:
        p, made = make(axes, LENGTHS, pages=200), Runner(bundle, axes)
        before = made.run(p, kv_splits=splits)
        p.page_table[p.page_table == -1] = padding
        assert same(made.run(p, kv_splits=splits), before), name_of(axes)


def test_rows_past_a_length_may_hold_anything(bundle: Any, variants: list[Axes]) -> None:
    for axes in variants:
        p, made = make(axes, LENGTHS), Runner(bundle, axes)
        before = made.run(p)
        stale = 127 if axes["kv_dtype"] == "i8" else 0x7F if axes["kv_dtype"] == "nvfp4" else float("nan")
        for row, length in enumerate(LENGTHS):
            page, used = divmod(length, axes["page_size"])
            if used:
                number = int(p.page_table[row, page])
                for cache in (p.k, p.v):
                    cache[number, used:] = stale
                if axes["kv_dtype"] == "nvfp4":
                    for cache in (p.call["k_scales"], p.call["v_scales"]):
                        cache[number, used:] = float("nan")
        assert same(made.run(p), before), name_of(axes)


@pytest.mark.parametrize("splits", [0, 1, 2, 5])
def test_a_request_gets_the_same_bits_in_every_batch(bundle: Any, variants: list[Axes], splits: int) -> None:
    for axes in variants:
        made = Runner(bundle, axes)
        for drafts in drafts_of(axes)[-1:]:
            p = make(axes, LENGTHS, **drafts)
            together = made.run(p, kv_splits=splits)
            generator = torch.Generator().manual_seed(splits)
            for count in (1, 3, len(LENGTHS)):
                chosen = torch.randperm(len(LENGTHS), generator=generator)[:count].tolist()
                batch = p.rows(chosen)
                if batch.q.shape[0] == 0:
                    continue
                assert same(made.run(batch, kv_splits=splits), together[p.rows_of(chosen)]), name_of(axes)


def test_the_librarys_split_depends_on_nothing_beside_the_request(bundle: Any, variants: list[Axes]) -> None:
    for axes in variants:
        made, p = Runner(bundle, axes), make(axes, [3001, 500, 70])
        wide = make(axes, [3001, 500, 70], pages=4000)
        before = made.run(p)
        assert same(made.run(wide), before), f"{name_of(axes)}: a wider page table"
        assert same(made.run(p, max_seq_len=3001), before), f"{name_of(axes)}: a longest length that is known"
        alone = p.rows([2])
        assert same(made.run(alone, max_seq_len=70), before[p.rows_of([2])]), (
            f"{name_of(axes)}: a smaller grid"
        )


def test_the_same_call_gives_the_same_bits_again(bundle: Any, variants: list[Axes]) -> None:
    for axes in variants:
        p, made = make(axes, LENGTHS), Runner(bundle, axes)
        first = made.run(p)
        for _ in range(20):
            assert same(made.run(p), first), name_of(axes)


@pytest.mark.parametrize("layout", ["hnd", "layers", "interleaved"])
def test_layouts_are_strides(bundle: Any, variants: list[Axes], layout: str) -> None:
    for axes in variants:
        p, made = make(axes, LENGTHS, kv_heads=3), Runner(bundle, axes)
        before = made.run(p)
        pairs = [("k", "v"), ("k_scales", "v_scales")]
        for one, two in pairs[: 2 if axes["kv_dtype"] == "nvfp4" else 1]:
            k, v = (getattr(p, one), getattr(p, two)) if one == "k" else (p.call[one], p.call[two])
            if layout == "hnd":
                k, v = (c.transpose(1, 2).contiguous().transpose(1, 2) for c in (k, v))
            elif layout == "layers":
                k, v = (torch.stack([torch.zeros_like(c), c, torch.zeros_like(c)], 1)[:, 1] for c in (k, v))
            else:
                both = torch.stack([k, v], 1)
                k, v = both[:, 0], both[:, 1]
            assert not k.is_contiguous()
            if one == "k":
                p.k, p.v = k, v
            else:
                p.call |= {one: k, two: v}
        assert same(made.run(p), before), name_of(axes)


def test_scales_can_be_on_the_device(bundle: Any, variants: list[Axes]) -> None:
    for axes in variants:
        p, made = make(axes, LENGTHS), Runner(bundle, axes)
        p.call["q_scale"] = 0.75
        before = made.run(p)
        pointers: dict[str, Any] = {"q_scale_ptr": torch.tensor([0.75], device="cuda"), "q_scale": 0.0}
        if axes["kv_dtype"] in KV_SCALE:
            pointers["kv_scale_ptr"] = torch.tensor([p.call["kv_scale"]], device="cuda")
            pointers["kv_scale"] = 0.0
        assert same(made.run(p, **pointers), before), name_of(axes)


@pytest.mark.parametrize("pdl", [0, 1])
def test_a_graph_replays_with_rewritten_buffers(bundle: Any, variants: list[Axes], pdl: int) -> None:
    for axes in variants:
        made, p = Runner(bundle, axes), make(axes, [700, 30, 0, 1024], pages=64)
        out = made.run(p)
        args = made.arguments(p, out, pdl=pdl)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(3):
                made.op.run(**{**args, "stream": torch.cuda.current_stream()})
        for seed, lengths in enumerate(
            [[700, 30, 0, 1024], [0, 1024, 5, 16], [6, 0, 0, 257], [512, 513, 511, 0]]
        ):
            rewrite(p, make(axes, lengths, seed=seed + 1, pages=64))
            out.fill_(7.0)
            graph.replay()
            torch.cuda.synchronize()
            assert same(out, made.run(p)), name_of(axes)
            assert worst_row(out, oracle(p)) <= limit_of(axes), name_of(axes)
        assert made.semaphores.count_nonzero() == 0


def rewrite(p: Problem, other: Problem) -> None:
    """Give ``p`` the contents of ``other`` without moving a tensor."""
    p.q.copy_(other.q)
    p.seq_lens.copy_(other.seq_lens)
    count = min(p.k.shape[0], other.k.shape[0])
    pairs = [(p.k, other.k), (p.v, other.v)]
    if "k_scales" in p.call:
        pairs += [(p.call[name], other.call[name]) for name in ("k_scales", "v_scales")]
    for mine, theirs in pairs:
        mine[:count].copy_(theirs[:count])
    p.page_table.copy_(other.page_table.clamp_max(count - 1))


def test_an_empty_batch_does_nothing(bundle: Any, variants: list[Axes]) -> None:
    for axes in variants:
        p = make(axes, [5]).rows([])
        p.call.pop("q_cu_lens", None)
        assert Runner(bundle, axes).run(p).shape[0] == 0


def test_nothing_around_the_output_is_written(bundle: Any, variants: list[Axes]) -> None:
    for axes in variants:
        made = Runner(bundle, axes)
        for drafts in drafts_of(axes):
            p = make(axes, LENGTHS, **drafts)
            whole = torch.full((p.q.shape[0] + 2, *p.q.shape[1:]), 7.0, device="cuda").to(made.run(p).dtype)
            for splits in SPLITS:
                made.op.run(**made.arguments(p, whole[1:-1], kv_splits=splits))
                torch.cuda.synchronize()
                for edge in (whole[0], whole[-1]):
                    assert same(edge, torch.full(edge.shape, 7.0, device="cuda").to(edge.dtype)), name_of(
                        axes
                    )
