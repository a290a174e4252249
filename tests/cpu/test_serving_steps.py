"""One engine with every op of a model: it prepares what its steps may ask for, and then loads nothing and lacks nothing.

The bundle has the variants of profile ``full`` that fit the model, as stubs. What the library launches by itself is planned
and run; the others end in a host object that a stub has none of, so they are looked up.
"""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cpu.fake_driver import paged_prefill, ragged_prefill, topk_regions, xqa
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.kernseal_library import stub, stub_library

from kernseal.abi.library import VariantRecord
from kernseal.export import paths, spec
from kernseal.export.spec import Target
from kernseal.kernels.qsa_attention.operands import query_major
from kernseal.loader.bundle import Bundle
from kernseal.loader.errors import Unsupported
from kernseal.loader.library import Library
from kernseal.loader.op import Op
from kernseal.loader.serving import Served

SM, SMS = "sm_100a", 148
HEADS, PAGE, MAX_LEN, PAGES, TOP_K = {"num_q_heads": 8, "num_kv_heads": 1}, 64, 131072, 40000, 512
QSA = {"num_q_heads": 12, "num_kv_heads": 1, "block_topk": TOP_K, "max_seq_len": MAX_LEN, "num_pages": PAGES}
GDN = {"num_q_heads": 16, "num_v_heads": 32, "head_dim": 128}
MAX_BATCH, MAX_GROUP, CHUNK = 256, 8, 8192

MODEL: dict[str, dict[str, Any]] = {
    "qsa_attention": {},
    "qsa_metadata": {"position_dtype": "i64"},
    "paged_mqa_schedule": {},
    "paged_mqa_logits": {"kv_dtype": "e4m3", "out_dtype": "f32", "acc_dtype": "f32", "num_heads": 32, "head_dim": 128},
    "topk_regions": {"dtype": "f32"},
    "topk_varlen": {"dtype": "f32"},
    "ragged_prefill": {"dtype": "bf16", "head_dim": 256},
    "paged_prefill": {"dtype": "bf16", "head_dim": 256},
    "gdn_prefill": {"dtype": "bf16", "state_dtype": "f32", "state_layout": "hvk", "index_dtype": "i64"},
    "gdn_decode": {"index_dtype": "i32", "output_indices": False},
    "xqa_decode": {"dtype": "bf16", "out_dtype": "bf16", "head_dim": 256, "group_size": 8, "page_size": PAGE},
}  # fmt: skip
"""The ops of the model, and the axes of each that follow from it and from the engine."""
LAUNCHED = ("topk_regions", "ragged_prefill", "paged_prefill", "xqa_decode")
"""Those without a host object."""

Wanted = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Step:
    """``batch`` sequences with ``tokens`` each: a chunk of a prompt, of which ``past`` went before, or decode and drafts."""

    dtype: str
    batch: int
    tokens: int
    past: int = 0
    prefill: bool = False


def wanted(bundle: Bundle, step: Step) -> Iterator[Wanted]:
    """The variants that a step asks for."""
    if step.prefill:
        yield from sparse(bundle, step.dtype, MAX_GROUP, -(-step.tokens // MAX_GROUP), splits=1)
        yield "topk_regions", {"dtype": "f32", "paged": False, "deterministic": True}
        first = step.past == 0
        if first:
            yield "ragged_prefill", {"dtype": "bf16", "head_dim": 256, "v_dim": 256, "causal": True}
        else:
            yield "paged_prefill", {"dtype": "bf16", "head_dim": 256, "causal": True}
        yield "gdn_prefill", {"dtype": "bf16", "initial_state": not first, "pooled": not first}
        return
    drafts = step.tokens > 1
    yield from sparse(bundle, step.dtype, step.tokens, step.batch, splits=0)
    yield "paged_mqa_schedule", {"atoms": 1}
    yield "paged_mqa_logits", {"num_heads": 32, "next_n": step.tokens}
    yield "topk_varlen", {"dtype": "f32", "values": False}
    yield "topk_regions", {"dtype": "f32", "paged": True, "deterministic": True}
    verify = {"tokens": step.tokens, "intermediate_states": drafts, "update_state": not drafts}
    yield "gdn_decode", bundle.choose("gdn_decode", {**GDN, "batch_size": step.batch}, sm_count=SMS, **verify)
    cache = {"kv_dtype": step.dtype, "head_dim": 256, "group_size": 8, "page_size": PAGE}
    yield "xqa_decode", {**cache, "spec_decode": drafts}


def sparse(bundle: Bundle, dtype: str, group: int, routes: int, splits: int) -> Iterator[Wanted]:
    """Attention over selected blocks, and what it reads where routes have several tokens."""
    sizes = {**QSA, "group": group, "num_routes": routes}
    config = bundle.choose("qsa_attention", sizes, sm_count=SMS, dtype=dtype, splits=splits)
    yield "qsa_attention", config
    if group > 1:
        yield "qsa_metadata", {"group": group, "query_major": query_major(config)}


def may_come() -> Iterator[Step]:
    """Every step but for lengths, which decide no variant."""
    for dtype in ("bf16", "e4m3"):
        for past in (0, 1):
            yield Step(dtype, 1, CHUNK, past, prefill=True)
        for tokens in range(1, MAX_GROUP + 1):
            for batch in range(1, MAX_BATCH + 1):
                yield Step(dtype, batch, tokens)


def script(rng: random.Random) -> Iterator[Step]:
    """Prompts whose chunks shrink, between decode steps of any batch and any number of drafts."""
    for dtype in ("bf16", "e4m3"):
        chunk, past = CHUNK, 0
        while chunk:
            yield Step(dtype, 1, chunk, past, prefill=True)
            past += chunk
            chunk = rng.randrange(chunk)
            for tokens in range(1, MAX_GROUP + 1):
                yield Step(dtype, rng.choice([1, MAX_BATCH, rng.randrange(1, MAX_BATCH + 1)]), tokens)


@functools.cache
def op_of(name: str) -> spec.Op:
    return spec.load_op(paths.kernels() / name)


def record(name: str, axes: Mapping[str, Any]) -> VariantRecord:
    if name in ("ragged_prefill", "paged_prefill"):
        made = ragged_prefill.record if name == "ragged_prefill" else paged_prefill.record
        return made(axes, sm=SM)
    if name in ("topk_regions", "xqa_decode"):
        return topk_regions.record(axes, SM) if name == "topk_regions" else xqa.record(axes, SM)
    return stub(op_of(name), axes, Target(SM))


@functools.cache
def of_the_model() -> list[VariantRecord]:
    found = []
    for name, fixed in MODEL.items():
        op = op_of(name)
        variants = op.variants(Target(SM), "full") or op.variants(Target(SM), "default")
        fitting = [v.axes for v in variants if all(v.axes[axis] == value for axis, value in fixed.items())]
        found += [record(name, axes) for axes in fitting]
    return found


def bundle_of(records: Iterable[VariantRecord], folder: Path) -> Bundle:
    path = stub_library(records, SM, folder)
    statement: Any = SimpleNamespace(sm=SM, retarget=None)
    return Bundle(Library(str(path)), str(folder), statement, allow_validation=False, device=0)


def name_of(name: str, axes: Mapping[str, Any]) -> str:
    op = op_of(name)
    own = {axis: value for axis, value in axes.items() if axis != "device"}
    return op.variant(Target(SM), {**op.data["defaults"], **own}).id


@pytest.fixture
def device(gpu: FakeGpu) -> FakeGpu:
    gpu.device((10, 0), sms=SMS)
    return gpu


@pytest.fixture(scope="module")
def needed(fake_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Wanted]:
    """What all steps ask for, by op and variant. Host only."""
    with bundle_of(of_the_model(), tmp_path_factory.mktemp("full")) as bundle:
        return {
            (op, name_of(op, axes)): (op, axes) for step in may_come() for op, axes in wanted(bundle, step)
        }


def plan_and_run(op: Op, step: Step) -> None:
    kv = step.past + step.tokens
    run: dict[str, Any] = {
        **HEADS,
        "sm_scale": 0.0625,
        "batch_size": 1,
        "total_q": step.tokens,
        "kv_chunk": -1,
    }
    run |= dict.fromkeys(("q", "k", "v", "o", "plan_device", "workspace"), 4096) | {"stream": 64}
    host = {"qo_indptr": [0, step.tokens]}
    if op.name == "paged_prefill":
        pages = -(-kv // PAGE)
        run |= {"page_size": PAGE, "total_pages": pages, "num_pages": PAGES, "page_indices": 4096}
        host |= {"page_indptr": [0, pages], "kv_lens": [kv]}
    else:
        run |= {"total_kv": kv}
        host |= {"kv_indptr": [0, kv]}
    arrays = {name: array("i", values) for name, values in host.items()}
    memory = array("q", bytes(-(-op.plan_size(**run) // 8) * 8))
    run |= {"plan": memory.buffer_info()[0], "plan_bytes": memory.itemsize * len(memory)}
    run["workspace_bytes"] = op.workspace_size(**run)
    assert op.plan(**run, **{name: values.buffer_info()[0] for name, values in arrays.items()}) > 0
    op.run(**run)


def launch(op: Op, step: Step) -> None:
    if op.name in ("ragged_prefill", "paged_prefill"):
        plan_and_run(op, step)
        return
    run: dict[str, Any] = {"stream": 64, "semaphores": 4096}
    if op.name == "topk_regions":
        run |= {"top_k": TOP_K, "num_rows": step.batch * step.tokens, "max_len": MAX_LEN // 4}
        run |= dict.fromkeys(("scores", "indices"), 4096)
        if op.config["paged"]:
            run |= {"page_size": 1, "num_requests": run["num_rows"], "max_pages": MAX_LEN // 4}
            run |= dict.fromkeys(("lengths", "page_table"), 4096)
    else:
        run |= {**HEADS, "batch_size": step.batch, "num_pages": PAGES, "max_pages_per_seq": MAX_LEN // PAGE}
        run |= {"q_scale": 1.0, "kv_scale": 1.0, "rcp_out_scale": 1.0}
        run |= dict.fromkeys(("q", "k", "v", "o", "page_table", "seq_lens", "workspace"), 4096)
        if op.config["spec_decode"]:
            run |= {"q_len": step.tokens, "mask": 4096}
        run["workspace_bytes"] = op.workspace_size(**run)
    op.run(**run, semaphores_bytes=op.semaphores_size(**run))


def test_a_prepared_engine_loads_nothing_and_lacks_nothing(
    device: FakeGpu, tmp_path: Path, needed: Mapping[tuple[str, str], Wanted]
) -> None:
    assert {op for op, _ in needed} == set(MODEL)
    with bundle_of(of_the_model(), tmp_path) as bundle:
        served = Served(bundle, 0, None)
        for op, axes in needed.values():
            served.prepare(op, **axes)
        loaded = len(device.log("load"))
        assert loaded == len(needed) > 150
        steps = list(script(random.Random(7)))
        met = set()
        for step in steps:
            for name, axes in wanted(bundle, step):
                found = bundle.prepared(name, **axes)
                assert found is not None, (step, name, axes)
                met.add(name)
                if name in LAUNCHED:
                    launch(found, step)
        assert met == set(MODEL) and len(steps) > 100
        chunks = [step.tokens for step in steps if step.prefill and step.dtype == "bf16"]
        assert chunks == sorted(chunks, reverse=True) and len(chunks) > 4
        assert len(device.log("load")) == loaded
        assert len(device.log("launch")) >= 2 * len(steps)  # attention and top-k, and merges of parts


@pytest.mark.parametrize("name", MODEL)
def test_without_one_variant_the_error_names_it_and_the_command_that_builds_it(
    device: FakeGpu, tmp_path: Path, needed: Mapping[tuple[str, str], Wanted], name: str
) -> None:
    own = sorted(variant for op, variant in needed if op == name)
    gone = own[len(own) // 2]
    kept = [one for one in of_the_model() if (one.op, one.variant) != (name, gone)]
    lacking = []
    with bundle_of(kept, tmp_path) as bundle:
        served = Served(bundle, 0, None)
        for key, (op, axes) in needed.items():
            try:
                served.prepare(op, **axes)
            except Unsupported as error:
                lacking.append(key)
                assert str(error).startswith(f"{op}: no variant for ")
                assert str(error).endswith(f": kernseal build --sm 100 --variant {name}/{gone}")
    assert lacking == [(name, gone)]


def test_the_default_profile_decodes_one_token_and_leaves_drafts_to_full(
    device: FakeGpu, tmp_path: Path
) -> None:
    """As docs/building.md has it."""
    default = {v.id for v in op_of("qsa_attention").variants(Target(SM), "default")}
    with bundle_of(of_the_model(), tmp_path) as bundle:

        def there(dtype: str, group: int, routes: int, splits: int) -> bool:
            ((_, config), *_) = sparse(bundle, dtype, group, routes, splits)
            return name_of("qsa_attention", config) in default

        for dtype in ("bf16", "e4m3"):
            for group in range(1, MAX_GROUP + 1):
                small = [there(dtype, group, routes, 0) for routes in range(1, SMS + 1)]
                assert set(small) == {group == 1}
                many = (dtype, group) != ("bf16", 2)
                assert there(dtype, group, SMS + 1, 0) == there(dtype, group, MAX_BATCH, 0) == many
                assert there(dtype, group, CHUNK // group, 1) == many
