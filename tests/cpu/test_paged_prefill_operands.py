"""What the loader makes of paged prefill's arguments, and that its description and profiles agree."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from kernseal.export import paths, spec
from kernseal.kernels.paged_prefill.operands import SPEC
from kernseal.loader.binder import Binder
from kernseal.loader.errors import InvalidArgument
from kernseal.loader.layout import Layout
from kernseal.loader.library import declarations

torch = pytest.importorskip("torch", reason="torch is not installed")

from cpu.test_loader_arguments import OnCuda, OnDevice  # noqa: E402

FOLDER = paths.kernels() / "paged_prefill"
KERNEL = yaml.safe_load((FOLDER / "kernel.yaml").read_text())
ARGS = Layout(declarations(), "kseal_paged_prefill_args")
CONFIG = {**SPEC.config_defaults, "device": 0, "head_dim": 64}
ON_HOST = ("qo_indptr", "page_indptr", "kv_lens", "plan")
ROWS, ENTRIES, PAGES, SIZE, HQ, HKV, B = 7, 11, 20, 16, 6, 2, 3


def tensors() -> dict[str, Any]:
    return {
        "q": torch.zeros(ROWS, HQ, 64, dtype=torch.bfloat16),
        "k": torch.zeros(PAGES, SIZE, HKV, 64, dtype=torch.bfloat16),
        "v": torch.zeros(PAGES, SIZE, HKV, 64, dtype=torch.bfloat16),
        "page_indices": torch.zeros(ENTRIES, dtype=torch.int32),
        "o": torch.zeros(ROWS, HQ, 64, dtype=torch.bfloat16),
        "lse": torch.zeros(ROWS, HQ),
        "qo_indptr": torch.zeros(B + 1, dtype=torch.int32),
        "page_indptr": torch.zeros(B + 1, dtype=torch.int32),
        "kv_lens": torch.zeros(B, dtype=torch.int32),
        "plan": torch.zeros(500, dtype=torch.uint8),
        "plan_device": torch.zeros(500, dtype=torch.uint8),
        "workspace": torch.zeros(100, dtype=torch.uint8),
    }


def bind(made: dict[str, Any], host: tuple[str, ...] = ON_HOST) -> dict[str, Any]:
    wrapped = {
        name: OnDevice(t) if isinstance(t, torch.Tensor) and name not in host else t
        for name, t in made.items()
    }
    return Binder(ARGS, SPEC, CONFIG).values({**wrapped, "stream": 0})


def test_operands_are_the_pointers_of_the_op_and_the_rest_its_fields() -> None:
    fields = {f["name"]: f["type"] for f in KERNEL["abi"]["args"]}
    operands = SPEC.operands(CONFIG)
    assert set(operands) == {name for name, kind in fields.items() if kind.startswith("ptr")}
    assert set(SPEC.args_defaults) <= set(fields)
    assert ARGS.names == tuple(fields)
    known = set(fields) | set(CONFIG) | {"batch_size+1"}
    assert {s for o in operands.values() for s in (*o.shape, *o.strides)} <= known
    assert tuple(name for name, operand in operands.items() if operand.host) == ON_HOST


def test_sizes_and_strides_follow_from_tensors() -> None:
    found = bind(tensors())
    expected = {
        "total_q": ROWS,
        "num_q_heads": HQ,
        "num_kv_heads": HKV,
        "batch_size": B,
        "total_pages": ENTRIES,
        "num_pages": PAGES,
        "page_size": SIZE,
        "q_row_stride": HQ * 64,
        "q_head_stride": 64,
        "kv_page_stride": SIZE * HKV * 64,
        "kv_row_stride": HKV * 64,
        "kv_head_stride": 64,
        "plan_bytes": 500,
        "workspace_bytes": 100,
        "kv_chunk": 0,
        "tile_q": 0,
        "fixed_grid": 0,
    }
    assert {name: found[name] for name in expected} == expected


def test_keys_and_values_of_one_cache_with_heads_before_rows_have_its_strides() -> None:
    """[num_pages, 2, Hkv, page_size, head_dim], the HND cache of one tensor."""
    both = torch.zeros(PAGES, 2, HKV, SIZE, 64, dtype=torch.bfloat16).transpose(2, 3)
    found = bind({**tensors(), "k": both[:, 0], "v": both[:, 1]})
    strides = [found[f"kv_{what}_stride"] for what in ("page", "row", "head")]
    assert strides == [2 * HKV * SIZE * 64, 64, SIZE * 64]
    assert found["v"] - found["k"] == HKV * SIZE * 64 * 2


@pytest.mark.parametrize("name", ON_HOST)
def test_memory_of_the_host_must_be_there(name: str) -> None:
    host = tuple(other for other in ON_HOST if other != name)
    with pytest.raises(InvalidArgument, match=rf"{name}: is on cuda:0; expected the host"):
        bind(tensors(), host)


@pytest.mark.parametrize("name", ["q", "k", "page_indices", "o", "plan_device", "workspace"])
def test_memory_of_the_device_must_be_there(name: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"{name}: is on the host; expected cuda:0"):
        bind(tensors(), (*ON_HOST, name))


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("plan_device", torch.zeros(499, dtype=torch.uint8), "holds 499 bytes, plan_bytes says 500"),
        (
            "page_indptr",
            torch.zeros(B, dtype=torch.int32),
            r"shape \(3,\); expected \[batch_size\+1\] = \(4,\)",
        ),
        ("kv_lens", torch.zeros(B + 1, dtype=torch.int32), r"shape \(4,\); expected \[batch_size\] = \(3,\)"),
        ("page_indices", torch.zeros(ENTRIES, dtype=torch.int64), "element type i64"),
        ("v", torch.zeros(PAGES, HKV, SIZE, 64, dtype=torch.bfloat16), "expected"),
        ("k", torch.zeros(PAGES, SIZE, HKV, 64, dtype=torch.float16), "element type f16"),
        ("o", torch.zeros(ROWS, HQ, 128, dtype=torch.bfloat16)[..., :64], "must be dense"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name: str, tensor: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}: .*{words}"):
        bind({**tensors(), name: tensor})


def test_keys_and_values_of_different_strides_are_refused() -> None:
    apart = torch.zeros(PAGES, 2, SIZE, HKV, 64, dtype=torch.bfloat16)[:, 0]
    with pytest.raises(InvalidArgument, match="kv_page_stride: 2048, but v has 4096"):
        bind({**tensors(), "v": apart})


SHARED = "the last must be 1 and none of the others 0"


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("q", (1, HQ, 64)),
        ("q", (ROWS, 1, 64)),
        ("q", (ROWS, HQ, 1)),
        ("k", (1, SIZE, HKV, 64)),
        ("k", (PAGES, 1, HKV, 64)),
        ("v", (PAGES, SIZE, 1, 64)),
    ],
)
def test_entries_that_share_memory_are_refused(name: str, shape: tuple[int, ...]) -> None:
    made = tensors()
    shared = torch.zeros(shape, dtype=torch.bfloat16).expand_as(made[name])
    with pytest.raises(InvalidArgument, match=rf"{name}: strides \(.*\b0\b.*\); {SHARED}"):
        bind({**made, name: shared})


def on_cuda(**changes: Any) -> dict[str, Any]:
    made = {name: tensor for name, tensor in tensors().items() if name not in ON_HOST}
    return {name: tensor.as_subclass(OnCuda) for name, tensor in {**made, **changes}.items()}


def test_entries_that_share_memory_are_refused_when_the_same_shape_was_seen_dense() -> None:
    known = Binder(ARGS, SPEC, CONFIG)
    shared = torch.zeros(1, HQ, 64, dtype=torch.bfloat16).expand(ROWS, HQ, 64)
    for _ in range(3):
        assert known.values({**on_cuda(), "stream": 0})["q_row_stride"] == HQ * 64
        with pytest.raises(InvalidArgument, match=rf"q: strides \(0, 64, 1\); {SHARED}"):
            known.values({**on_cuda(q=shared), "stream": 0})


def test_what_there_is_one_of_may_have_a_stride_of_0() -> None:
    both = torch.zeros(PAGES, 2, SIZE, 1, 64, dtype=torch.bfloat16)[:, 0]
    strides = (both.stride(0), both.stride(1), 0, 1)
    pool = both.as_strided(both.shape, strides)
    known = Binder(ARGS, SPEC, CONFIG)
    for _ in range(2):
        found = known.values({**on_cuda(k=pool, v=pool), "stream": 0})
        assert [found[f"kv_{what}_stride"] for what in ("page", "row", "head")] == [2 * SIZE * 64, 64, 64]


def test_no_pages_have_any_strides() -> None:
    nothing = torch.zeros(0, SIZE, 1, 64, dtype=torch.bfloat16).expand(0, SIZE, HKV, 64)
    found = bind({**tensors(), "k": nothing, "v": nothing})
    assert (found["num_pages"], found["kv_head_stride"]) == (0, 0)


def test_every_variant_of_a_profile_exists_and_full_has_them_all() -> None:
    op = spec.load_op(FOLDER)
    for sm in ("sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a"):
        target = spec.Target(sm)
        full = {variant.id for variant in op.variants(target, "full")}
        assert len(full) == 3 * 2 * 2
        for profile in ("default", "validation"):
            assert {variant.id for variant in op.variants(target, profile)} < full


def test_the_name_of_a_variant_is_that_of_its_axes() -> None:
    op = spec.load_op(FOLDER)
    for variant in op.variants(spec.Target("sm_90a"), "full"):
        assert SPEC.variant(dict(variant.axes)) == variant.id
