"""An engine that serves QSA: it asks for every size that it may meet, prepares what it gets, and then loads nothing more."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cpu.fake_driver import qsa
from cpu.fake_driver.gpu import FakeGpu

from kernseal.export.spec import Target
from kernseal.loader.bundle import Bundle
from kernseal.loader.errors import InvalidArgumentType, Unsupported
from kernseal.loader.library import Library
from kernseal.loader.serving import Served

OP = qsa.OP
SMS = 148
FIXED = {"num_kv_heads": 1, "num_q_heads": 12, "block_topk": 512, "max_seq_len": 131072, "num_pages": 40000}
DTYPES = ("bf16", "e4m3")
MAX_BATCH, MAX_GROUP, CHUNK = 256, 8, 8192


def bundle_of(all_axes: Sequence[Mapping[str, Any]], folder: Path) -> Bundle:
    path = qsa.build(all_axes, folder)
    statement: Any = SimpleNamespace(sm="sm_100a", retarget=None)
    return Bundle(Library(str(path)), str(folder), statement, allow_validation=False, device=0)


def full() -> list[Mapping[str, Any]]:
    return [v.axes for v in qsa.op().variants(Target("sm_100a"), "full")]


def config_of(
    bundle: Bundle, dtype: str, group: int, routes: int, *, prefill: bool = False
) -> dict[str, Any]:
    sizes = {**FIXED, "group": group, "num_routes": routes}
    return bundle.choose(OP, sizes, sm_count=SMS, dtype=dtype, splits=1 if prefill else 0)


def sizes_met(dtype: str) -> Iterator[tuple[str, int, int, bool]]:
    for group in range(1, MAX_GROUP + 1):
        for routes in range(1, MAX_BATCH + 1):
            yield dtype, group, routes, False
        yield dtype, group, -(-CHUNK // group), True


def steps(rng: random.Random) -> Iterator[tuple[str, int, int, bool]]:
    """A prefill whose chunks shrink, between decode steps of any batch and any number of drafts."""
    for dtype in DTYPES:
        left = 20000
        while left > 0:
            chunk = min(left, rng.randrange(1, CHUNK))
            left -= chunk
            yield dtype, MAX_GROUP, -(-chunk // MAX_GROUP), True
            for _ in range(20):
                yield dtype, rng.randrange(1, MAX_GROUP + 1), rng.randrange(1, MAX_BATCH + 1), False


@pytest.fixture
def device(gpu: FakeGpu) -> FakeGpu:
    gpu.device((10, 0), sms=SMS)
    return gpu


def test_nothing_loads_after_prepare(device: FakeGpu, tmp_path: Path) -> None:
    with bundle_of(full(), tmp_path) as bundle:
        for dtype in DTYPES:
            for _, group, routes, prefill in sizes_met(dtype):
                bundle.prepare(OP, **config_of(bundle, dtype, group, routes, prefill=prefill))
        loaded = len(device.log("load"))
        assert 80 < loaded < 160
        count = 0
        for dtype, group, routes, prefill in steps(random.Random(7)):
            config = config_of(bundle, dtype, group, routes, prefill=prefill)
            assert bundle.prepared(OP, **config) is not None, config
            count += 1
        assert count > 100
        assert len(device.log("load")) == loaded


def test_a_missing_variant_is_named_at_start_with_the_command_that_builds_it(
    device: FakeGpu, tmp_path: Path
) -> None:
    with bundle_of([axes for axes in full() if axes["splits"] != 7], tmp_path) as bundle:
        config = config_of(bundle, "bf16", 1, 20)
        assert config["splits"] == 7
        name = "bf16_obf16_d256_g12_b4_p64_single_posi64_t16_s7_flat0"
        with pytest.raises(Unsupported) as caught:
            Served(bundle, 0, None).prepare(OP, **config)
        assert " splits=7 " in str(caught.value)
        assert str(caught.value).endswith(f"kernseal build --sm 100 --variant {OP}/{name}")


def test_a_choice_says_what_it_lacks(device: FakeGpu, tmp_path: Path) -> None:
    with bundle_of([qsa.axes_of()], tmp_path) as bundle:
        with pytest.raises(InvalidArgumentType, match="batch: no such field; there are num_q_heads, "):
            bundle.choose(OP, {"batch": 1}, sm_count=SMS)
        with pytest.raises(InvalidArgumentType, match="tiles: no such axis"):
            bundle.choose(OP, FIXED, sm_count=SMS, tiles=1)
        with pytest.raises(Unsupported, match="op 'gdn_prefill': has no policy"):
            bundle.choose("gdn_prefill", {}, sm_count=SMS)
