"""How sequences are cut: our C against upstream's own Python, over generated domains; and what the cut must guarantee."""

from __future__ import annotations

import ast
import itertools
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cffi
import pytest
from cpu.fake_driver.gdn_cp import OP, op, upstream_rules, upstream_text
from cpu.fake_driver.native import ZIG, compile_c

from kernseal.abi import library
from kernseal.export import paths

DEVICES = [
    ("sm90", (9, 0), "NVIDIA H200"),
    ("sm90", (9, 0), "NVIDIA H100 80GB HBM3"),
    ("sm120", (12, 0), "NVIDIA GeForce RTX 5090"),
    ("sm120", (12, 0), "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
    ("sm121", (12, 1), "NVIDIA GB10"),
]
SMS = [1, 20, 48, 78, 84, 132, 148, 170, 188, 1024]
HEADS = [1, 2, 3, 4, 7, 8, 9, 12, 16, 17, 24, 32, 48, 64, 128, 200]

PROBE = """
#include "{launch}"
int64_t probe_chunk_len(uint32_t class, int64_t max_seqlen, int64_t tokens, int64_t seqs, int64_t heads, int64_t sms);
int64_t probe_slots(int64_t seqs, int64_t tokens, int64_t unit);
int64_t probe_root_up(int64_t value);
int64_t probe_chunk_len(uint32_t class, int64_t max_seqlen, int64_t tokens, int64_t seqs, int64_t heads, int64_t sms) {{
    struct cut c = {{max_seqlen, tokens, seqs, heads, sms}};
    return choose_chunk_len(&kseal_gdn_prefill_cp_classes[class], &c);
}}
int64_t probe_slots(int64_t seqs, int64_t tokens, int64_t unit) {{ return slots(seqs, tokens, unit); }}
int64_t probe_root_up(int64_t value) {{ return root_up(value); }}
"""
CDEF = """
int64_t probe_chunk_len(uint32_t, int64_t, int64_t, int64_t, int64_t, int64_t);
int64_t probe_slots(int64_t, int64_t, int64_t);
int64_t probe_root_up(int64_t);
"""


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The op's launch code with its static functions in reach; what it calls of the core is not there."""
    folder = tmp_path_factory.mktemp("probe")
    probe = folder / "probe.c"
    probe.write_text(PROBE.format(launch=paths.kernels() / OP / "launch.c"))
    tables = next(path for path in library.core_sources() if path.name == "kernseal_ops.c")
    flags = ["-std=c11", "-O1", "-shared", "-fPIC", "-lm", "-Wl,-z,lazy", "-Wl,-z,undefs"]
    flags += [f"-I{folder}" for folder in library.include_dirs()]
    ffi: Any = cffi.FFI()
    ffi.cdef(CDEF)
    return ffi.dlopen(str(compile_c(ZIG, [probe, tables], folder / "probe.so", *flags)), ffi.RTLD_LAZY)


@pytest.fixture(scope="module")
def theirs() -> SimpleNamespace:
    return upstream_rules()


def class_index(name: str) -> int:
    return list(op().data["classes"]).index(name)


def chooser(
    ours: Any, theirs: SimpleNamespace, device: tuple[str, tuple[int, int], str]
) -> Callable[..., None]:
    """Compares one choice."""
    name, capability, product = device
    index = class_index(name)

    def same(longest: int, tokens: int, seqs: int, heads: int, sms: int) -> None:
        want = theirs.choose_cp_chunk_len_host(
            longest,
            heads,
            sms,
            device_capability=capability,
            total_seqlen=tokens,
            num_seqs=seqs,
            device_name=product,
        )
        assert ours.probe_chunk_len(index, longest, tokens, seqs, heads, sms) == want, (
            longest,
            tokens,
            seqs,
            heads,
            sms,
        )

    return same


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d[2])
def test_the_length_of_a_chunk_is_upstreams_for_one_sequence(
    ours: Any, theirs: SimpleNamespace, device: Any
) -> None:
    same = chooser(ours, theirs, device)
    lengths = [
        *range(1, 130),
        511,
        512,
        513,
        1000,
        4095,
        4096,
        4097,
        8192,
        10**4,
        32768,
        10**5,
        131072,
        10**6,
    ]
    for length, heads, sms in itertools.product(lengths, HEADS, SMS):
        same(length, length, 1, heads, sms)


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d[2])
def test_the_length_of_a_chunk_is_upstreams_for_several(
    ours: Any, theirs: SimpleNamespace, device: Any
) -> None:
    same, rng = chooser(ours, theirs, device), random.Random(device[2])
    for _ in range(20000):
        seqs = rng.choice([1, 2, 3, rng.randrange(1, 100)])
        longest = int(2 ** rng.uniform(0, 20))
        tokens = min(longest + rng.randrange(0, longest * (seqs - 1) + 1), 2**24)
        same(min(longest, tokens), tokens, seqs, rng.choice(HEADS), rng.choice([*SMS, rng.randrange(1, 300)]))


def test_slots_are_upstreams(ours: Any, theirs: SimpleNamespace) -> None:
    for seqs, tokens, unit in itertools.product(range(12), range(0, 400, 7), (64, 128, 512)):
        assert ours.probe_slots(seqs, tokens, unit) == theirs.chunk_bound_host(seqs, tokens, unit)


def test_every_piece_of_any_sequences_has_a_slot_of_its_own(ours: Any) -> None:
    rng = random.Random(0)
    for _ in range(2000):
        lengths = [rng.choice([0, 1, 63, 64, 65, rng.randrange(300)]) for _ in range(rng.randrange(1, 9))]
        unit, taken, start = rng.choice([64, 128]), [], 0
        for index, length in enumerate(lengths):
            first = ours.probe_slots(index, start, unit)
            taken += [first + piece for piece in range(-(-length // unit))]
            start += length
        assert len(set(taken)) == len(taken)
        assert max(taken, default=-1) < ours.probe_slots(len(lengths), sum(lengths), unit)


def test_the_root_is_exact(ours: Any) -> None:
    values = [*range(5000), *((r * r + d) for r in (2**10, 2**15 - 1, 2**20, 2**25 + 3) for d in (-1, 0, 1))]
    for value in values:
        assert (
            ours.probe_root_up(value) == math.isqrt(max(value - 1, -1)) + 1
            if value
            else ours.probe_root_up(0) == 0
        )


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d[2])
def test_when_to_take_this_op_is_upstreams_rule(theirs: SimpleNamespace, device: Any) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from kernseal.kernels.gdn_prefill_cp.torch_api import should_use_cp

    _, capability, product = device
    for work, sms in itertools.product(range(1, 700), SMS):
        want = theirs.should_use_cp_host(work, sms, product, device_capability=capability)
        assert should_use_cp(work, sms, product) == want, (work, sms)


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d[2])
def test_the_rule_in_the_classes_is_the_same(theirs: SimpleNamespace, device: Any) -> None:
    name, _, product = device
    chunks = op().data["classes"][name]["chunks"]
    assert theirs.cp_parallelism_threshold_host(product) == (
        chunks["parallel"]["num"],
        chunks["parallel"]["den"],
    )


def test_the_fixup_kernel_is_picked_where_upstream_picks_it() -> None:
    """Upstream's thresholds are in the body of a function of each class's module."""
    from kernseal.export.recipe import load_recipe

    pytest.importorskip("cutlass", reason="CUTLASS DSL is not installed")
    recipe = load_recipe(str(paths.kernels() / OP / "recipe.py"))
    for sm in ("sm90", "sm120"):
        (function,) = (
            node
            for node in ast.parse(upstream_text(f"delta_rule_cp_{sm}")).body
            if isinstance(node, ast.FunctionDef) and node.name == f"cp_delta_rule_fixup_dsl_{sm}"
        )
        (branch,) = (
            n
            for n in ast.walk(function)
            if isinstance(n, ast.If) and "_kernel_kind is None" in ast.unparse(n.test)
        )
        for heads in range(1, 100):
            names: dict[str, Any] = {"num_heads": heads, "_kernel_kind": None}
            exec(compile(ast.Module([branch], []), sm, "exec"), names)
            ours = (heads > recipe.SIMT4_HEADS) + (heads > recipe.SIMT8_HEADS)
            assert names["_kernel_kind"] == ("simt_row4", "simt_row8", "hmma")[ours]
