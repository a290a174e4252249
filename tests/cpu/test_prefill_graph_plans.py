"""What FlashInfer's wrappers plan for a CUDA graph, beside what upstream's scheduler makes of the same calls.

Thread blocks do the same work, in the same order, with the same tile and the same parts. Ours may be followed by more that
do nothing: upstream counts tiles by the rows that every sequence has, ours by what any lengths with as many rows can make.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cpu.fake_driver import paged_prefill, ragged_prefill
from cpu.fake_driver.fa2 import Call, Plan, ends_of
from cpu.fake_driver.fa2_scheduler import Scheduler, compare, compare_work
from cpu.fake_driver.gpu import FakeGpu
from nvcc import toolkit

torch = pytest.importorskip("torch", reason="torch is not installed")

from cpu.test_xqa_torch_api import HOST, no_gpu  # noqa: E402, F401

from kernseal.kernels.paged_prefill.torch_api import (  # noqa: E402
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
)
from kernseal.kernels.ragged_prefill.torch_api import BatchPrefillWithRaggedKVCacheWrapper  # noqa: E402
from kernseal.loader import addresses, serving  # noqa: E402
from kernseal.loader.bundle import Bundle  # noqa: E402
from kernseal.loader.library import Library  # noqa: E402

CASES = 400
SMS = (1, 20, 132, 188)
DIMS = {"paged": [(64, 64), (128, 128), (256, 256)], "ragged": [(128, 128), (192, 128), (256, 256)]}
bf16 = torch.bfloat16


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Scheduler:
    if reason := toolkit.unavailable():
        pytest.skip(reason)
    return Scheduler(tmp_path_factory.mktemp("scheduler"))


@pytest.fixture(scope="module")
def folders(fake_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A bundle's folder for each op."""
    fake_gpu.reset()
    made = {op: tmp_path_factory.mktemp(op) for op in DIMS}
    paged = [paged_prefill.axes_of(head_dim=d, causal=c) for d, _ in DIMS["paged"] for c in (True, False)]
    paged_prefill.library_of(paged, made["paged"]).close()
    ragged = [ragged_prefill.axes_of(head_dim=d, v_dim=v) for d, v in DIMS["ragged"]]
    ragged_prefill.library_of(ragged, made["ragged"]).close()
    return made


@pytest.fixture
def served(
    folders: dict[str, Path],
    gpu: FakeGpu,
    no_gpu: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[str, int], Any]:
    """What serves an op on a device with so many SMs."""

    @contextmanager
    def serve(op: str, sms: int) -> Iterator[None]:
        gpu.reset()
        gpu.device((9, 0), sms=sms)
        monkeypatch.setattr(addresses, "sm_count", lambda device: sms)
        statement: Any = SimpleNamespace(sm="sm_90a", retarget=None)
        path = folders[op]
        with Bundle(
            Library(str(path / "libkernseal.so")), str(path), statement, allow_validation=False, device=HOST
        ) as bundle:
            serving.use_bundle(bundle, HOST)
            yield

    return serve


def ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def room(*counts: int) -> list[torch.Tensor]:
    return [torch.zeros(count, dtype=torch.int32) for count in counts]


def planned(made: Any, fake: Any, host: dict[str, list[int]]) -> tuple[Call, Plan]:
    """The last plan of a wrapper, and the call that it is for."""
    data = bytes(made._planned.host.numpy())
    head = dict(zip(fake.HEAD_FIELDS, fake.HEAD.unpack_from(data), strict=True))
    return Call({}, host, made._planned.fields), Plan(data[: head["bytes"]], head)


def check(
    call: Call, plan: Plan, found: tuple[dict[str, int], bytes], sms: int, rows: int
) -> tuple[int, int, bool]:
    """Fails unless the plan is upstream's up to blocks that do nothing. ``rows`` of every sequence, or 0.

    Returns the tile, whether there are parts, and whether there are more blocks than upstream's.
    """
    info, _ = found
    batch, budget = call["batch_size"], 2 * sms // call["num_kv_heads"]
    most = -(-call["total_q"] * call.group // plan.tile) + batch - 1
    tiles = batch * -(-rows * call.group // plan.tile) if rows else most
    assert info["padded_batch_size"] == max(tiles, budget) and plan.head["grid"] == max(most, budget)
    more = plan.head["grid"] > info["padded_batch_size"]
    (compare_work if more else compare)(call, plan, *found)
    assert plan.head["workspace_bytes"] >= info["float_bytes"]
    return plan.tile, plan.head["split"], more


def heads_of(rng: random.Random) -> tuple[int, int]:
    kv_heads = rng.choice([1, 2, 8])
    return kv_heads * rng.choice([1, 2, 4, 5, 8, 16]), kv_heads


def batch_of(rng: random.Random) -> int:
    return rng.choice([1, 2, 7, 31, 64, 130, 256, rng.randint(1, 300)])


def scratch() -> torch.Tensor:
    return torch.empty(1 << 31, dtype=torch.uint8)  # never touched, so never there


def table(rng: random.Random, batch: int, page: int) -> tuple[list[int], list[int], list[int]]:
    """Where the pages of each sequence begin, the keys of its last one, and its keys."""
    lens = [rng.choice([0, 1, page, rng.randint(1, 400), rng.randint(1, 9000)]) for _ in range(batch)]
    return ends_of([-(-n // page) for n in lens]), [(n - 1) % page + 1 if n else 0 for n in lens], lens


def test_steps_and_drafts(upstream: Scheduler, served: Callable[[str, int], Any]) -> None:
    """Upstream's decode wrapper promises its scheduler that all sequences of all plans have q_len_per_req rows."""
    rng, seen = random.Random(1), set()
    for _ in range(CASES):
        sms, page, rows = rng.choice(SMS), rng.choice([1, 16, 64]), rng.choice([1, 1, 2, 4, 5, 40])
        batch, heads, dims = batch_of(rng), heads_of(rng), rng.choice(DIMS["paged"])
        pages, last, lens = table(rng, batch, page)
        whole = rng.random() < 0.2
        with served("paged", sms):
            kept = room(batch + 1, pages[-1] + 9, batch)
            made = BatchDecodeWithPagedKVCacheWrapper(scratch(), "NHD", True, True, *kept)
            args = (ints(pages), ints([0] * pages[-1]), ints(last), *heads, dims[0], page)
            made.plan(*args, q_data_type=bf16, q_len_per_req=rows, disable_split_kv=whole)
            host = {"qo_indptr": ends_of([rows] * batch), "page_indptr": pages, "kv_lens": lens}
            call, plan = planned(made, paged_prefill, host)
            wish = call.but(kv_chunk=0 if whole else -1)
            found = upstream.plan(wish, pages, page, (sms, 9), dims, (rows, True))
            seen.add((*check(call, plan, found, sms, rows), whole))
    assert {tile for tile, *_ in seen} == {16, 64, 128}
    assert {tuple(what) for _, *what in seen} == {
        (split, more, whole) for more in (False, True) for split, whole in ((0, False), (1, False), (0, True))
    }


@pytest.mark.parametrize("op", ["paged", "ragged"])
def test_prefill_with_and_without_a_promise(
    upstream: Scheduler, served: Callable[[str, int], Any], op: str
) -> None:
    """Without one, the plan is upstream's in every byte that has a meaning."""
    rng, seen = random.Random(op), set()
    for _ in range(CASES):
        sms, page = rng.choice(SMS), rng.choice([1, 16, 64]) if op == "paged" else 1
        batch, heads, (head_dim, v_dim) = min(batch_of(rng), 130), heads_of(rng), rng.choice(DIMS[op])
        rows = rng.choice([0, 1, 4, 33, 150])
        qo = ends_of([rows or rng.randint(1, 60) for _ in range(batch)])
        pages, last, lens = table(rng, batch, page)
        how: dict[str, Any] = {"causal": True, "q_data_type": bf16, "uniform_q_len": rows or None}
        with served(op, sms):
            if op == "paged":
                kept = room(batch + 1, batch + 1, pages[-1] + 9, batch)
                most = rng.choice([None, qo[-1] + 50])
                prefill = BatchPrefillWithPagedKVCacheWrapper(
                    scratch(), "NHD", True, *kept, max_total_num_rows=most
                )
                indices = ints([0] * pages[-1])
                prefill.plan(ints(qo), ints(pages), indices, ints(last), *heads, head_dim, page, **how)
                host = {"qo_indptr": qo, "page_indptr": pages, "kv_lens": lens}
                call, plan = planned(prefill, paged_prefill, host)
            else:
                packed = BatchPrefillWithRaggedKVCacheWrapper(
                    scratch(), "NHD", True, *room(batch + 1, batch + 1)
                )
                packed.plan(ints(qo), ints(pages), *heads, head_dim, v_dim, **how)
                call, plan = planned(packed, ragged_prefill, {"qo_indptr": qo, "kv_indptr": pages})
            found = upstream.plan(call, pages, page, (sms, 9), (head_dim, v_dim), (rows, False))
            tile, split, more = check(call, plan, found, sms, rows)
            seen.add((tile, more, rows > 0))
            assert split == 1
    assert {tile for tile, *_ in seen} == {16, 64, 128}
    assert {tuple(what) for _, *what in seen} == {(False, False), (False, True), (True, True)}
