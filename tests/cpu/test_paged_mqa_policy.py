"""What FlashInfer decides on the host about paged MQA logits is what the recipe, the limits and the excludes say."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import yaml

from kernseal.export import paths, spec
from kernseal.export.recipe import load_recipe
from kernseal.kernels.paged_mqa_schedule import reference

torch = pytest.importorskip("torch", reason="torch is not installed")
cutlass = pytest.importorskip("cutlass", reason="CUTLASS DSL is not installed")

from cpu.fake_driver.paged_mqa_upstream import OnGpu, upstream  # noqa: E402

FOLDER = paths.kernels() / "paged_mqa_logits"
OP = spec.load_op(FOLDER)
LIMITS = OP.data["limits"]
RECIPE = load_recipe(str(FOLDER / "recipe.py"))
AXES: dict[str, Any] = OP.data["axes"]
TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
SCHEDULE_LIMITS = yaml.safe_load((paths.kernels() / "paged_mqa_schedule" / "kernel.yaml").read_text())[
    "limits"
]
BLACKWELL = {"sm_100a": 0, "sm_103a": 3}


def test_the_epilogue_of_every_shape_is_upstreams() -> None:
    theirs = upstream(cutlass)
    for heads, next_n, epi in itertools.product(range(4, 257, 4), range(1, 65), ("f32", "f16")):
        expected = theirs._fp8_epilogue_policy(heads, next_n, RECIPE.CUTLASS[epi])
        assert RECIPE.epilogue(heads, next_n, epi) == expected, (heads, next_n, epi)


@pytest.mark.parametrize("minor", BLACKWELL.values())
def test_passes_over_the_cache_are_upstreams(minor: int) -> None:
    theirs = upstream(cutlass, minor)
    assert theirs._fp4_max_atom_for_device(None) == RECIPE.MAX_ATOM == LIMITS["max_fp4_atom"]
    for next_n in range(1, 33):
        atom, count = theirs._fp4_atom_decomposition(next_n, None)
        assert (RECIPE.atoms(next_n), next_n // RECIPE.atoms(next_n)) == (count, atom)


def test_only_next_n_4_of_fp4_has_two_rows_a_sequence() -> None:
    most = upstream(cutlass)._FP4_MAX_NEXT_N
    assert [RECIPE.atoms(next_n) for next_n in range(1, most + 1)] == [1, 1, 1, 2]
    schedule = load_recipe(str(paths.kernels() / "paged_mqa_schedule" / "recipe.py"))
    assert {count: most // count for count in (2,)} == {2: schedule.ATOM[2]}


def test_tiles_and_padding_are_upstreams() -> None:
    theirs = upstream(cutlass)
    assert theirs._COMPUTE_BLOCK_KV == RECIPE.TILE
    assert theirs._SPLIT_KV == LIMITS["segment"] == SCHEDULE_LIMITS["segment"] == reference.SEGMENT
    for length in (1, 255, 256, 257, 8000, 2**31 - 256):
        assert theirs.padded_seq_len(length) == -(-length // LIMITS["segment"]) * LIMITS["segment"]


def axes_in_question(kv_dtype: str) -> list[dict[str, Any]]:
    """Every geometry with the default types, and every type with the default geometry."""
    defaults = {**OP.data["defaults"], "kv_dtype": kv_dtype}
    geometry = ("num_heads", "head_dim", "next_n", "page_size")
    types = ("out_dtype", "epi_dtype", "acc_dtype")
    found = []
    for names in (geometry, types, ("page_size",)):
        for values in itertools.product(*(AXES[name]["values"] for name in names)):
            for interleaved in (False, True):
                found.append(
                    {**defaults, **dict(zip(names, values, strict=True)), "interleaved": interleaved}
                )
    return found


def upstream_takes(axes: dict[str, Any]) -> bool:
    """What ``fp8_paged_mqa_logits`` or ``fp4_paged_mqa_logits`` does with such a call."""
    theirs, batch = upstream(cutlass), 2
    next_n, heads, dim, page = (axes[n] for n in ("next_n", "num_heads", "head_dim", "page_size"))
    fp4 = axes["kv_dtype"] == "fp4"
    row = dim // 2 if fp4 else dim
    q = OnGpu((batch, next_n, heads, row), torch.uint8 if fp4 else torch.float8_e4m3fn)
    rest = {
        "kv_fused": OnGpu((7, page, 1, row + 4), torch.uint8),
        "weights": OnGpu((batch * next_n, heads), torch.float32),
        "block_tables": OnGpu((batch, 5), torch.int32),
        "seq_lens": OnGpu((batch,), torch.int32),
        "max_seq_len": 100,
        "output_dtype": TORCH[axes["out_dtype"]],
        "epi_dtype": TORCH[axes["epi_dtype"]],
    }
    try:
        if fp4:
            q_sf = OnGpu((batch, next_n, heads), torch.int32)
            theirs._check_fp4_paged_mqa_logits_supported(
                q, q_sf, **rest, is_kv_sf_interleaved=axes["interleaved"]
            )
        else:
            acc = TORCH[axes["acc_dtype"]]
            theirs._check_fp8_paged_mqa_logits_supported(q, **rest, acc_dtype=acc)
    except ValueError:
        return False
    # What the functions have no argument for, only the other one has.
    return axes["acc_dtype"] == "f32" if fp4 else not axes["interleaved"]


@pytest.mark.parametrize("kv_dtype", AXES["kv_dtype"]["values"])
@pytest.mark.parametrize("sm", BLACKWELL)
def test_there_is_a_kernel_for_what_upstream_takes_and_for_nothing_else(sm: str, kv_dtype: str) -> None:
    target = spec.Target(sm)
    wrong, taken = [], 0
    for axes in axes_in_question(kv_dtype):
        expected = upstream_takes(axes)
        taken += expected
        served_by = OP.class_for(target, axes)
        assert served_by is not None
        if (OP.excluded(served_by, axes) is None) != expected:
            wrong.append((expected, axes))
    assert wrong == []
    # Geometries, then types, then pages again.
    assert taken == {"e4m3": 3 * (63 + 63 + 32 + 8) + 8 + 3, "fp4": 4 * 4 + 9 + 4}[kv_dtype]


def lengths(rng: random.Random) -> list[int]:
    batch = rng.choice([1, 2, 31, 32, 33, 255, 256, 257, 700])
    some = [0, 0, 1, 2, 3, 255, 256, 257, 511, 512, 513, rng.randrange(5000), rng.randrange(200_000)]
    return [rng.choice(some) for _ in range(batch)]


@pytest.mark.parametrize("case", range(60))
def test_the_reference_of_schedules_is_upstreams_own_host_code(case: int) -> None:
    theirs, rng = upstream(cutlass), random.Random(case)
    given, ctas, atoms = lengths(rng), rng.choice([1, 2, 132, 148, 160, 188]), rng.choice([1, 2])
    rows = theirs._expand_seq_lens(torch.tensor(given, dtype=torch.int32), atoms, 2)
    expected = theirs._compute_schedule_metadata(rows, ctas)
    assert [tuple(row) for row in expected.tolist()] == reference.schedule(given, ctas, atoms)


def test_a_schedule_gives_every_segment_to_one_cta() -> None:
    """From the words of kernel.yaml alone: walk from each CTA's start to the next one's."""
    rng = random.Random(5)
    for _ in range(30):
        given, ctas, atoms = lengths(rng), rng.choice([1, 3, 148]), rng.choice([1, 2])
        counts = [-(-max(n, 0) // 256) for n in reference.rows_of(given, atoms)]
        starts = reference.schedule(given, ctas, atoms)
        assert starts[-1] == (len(counts), 0)
        walked = []
        for (row, part), end in itertools.pairwise(starts):
            before = len(walked)
            while (row, part) != end:
                if part < counts[row]:
                    walked.append((row, part))
                    part += 1
                if part >= counts[row] and (row, part) != end:
                    row, part = row + 1, 0
            assert len(walked) - before in (sum(counts) // ctas, sum(counts) // ctas + 1)
        assert walked == [(row, part) for row, count in enumerate(counts) for part in range(count)]
