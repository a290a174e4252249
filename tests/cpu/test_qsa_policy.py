"""The variant that the library chooses is the one that FlashInfer would compile, and what is compiled at it is the same."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from cpu.fake_driver import qsa, qsa_upstream
from cpu.fake_driver.host_objects import HostObject, unavailable
from cpu.fake_driver.kernseal_library import Kernseal
from cpu.fake_driver.qsa import OP, Call

from kernseal.abi.model import axis_key
from kernseal.export.spec import Target

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(unavailable() is not None, reason=f"{unavailable()}"),
]

CHOSEN = ("grouped", "tile_q", "splits", "persistent", "flat_kv_heads")
DTYPES = (("bf16", "bf16"), ("f16", "f16"), ("e4m3", "bf16"), ("e4m3", "f16"))
SMS = 148


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qsa_upstream.unpack(tmp_path_factory.mktemp("upstream"))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, fake_gpu: Any) -> Kernseal:
    return qsa.library_of([qsa.axes_of()], tmp_path_factory.mktemp("library"))


def ask(tree: Path, cases: list[dict[str, Any]], sms: int = SMS) -> list[dict[str, Any]]:
    return qsa_upstream.ask(tree, qsa.op().folder / "recipe.py", sms, cases)


def generated(rng: random.Random, points: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cases at ``points`` of what is finite, with sizes that are not."""
    cases = []
    for point in points:
        block = rng.choice([4, 4, 8, 16, 32, 64, 128])
        cases.append(
            {
                "block_size": block,
                "page_size": rng.choice([16, 32, 64, 128]),
                "count_current": point["group"] > 1 or rng.random() < 0.7,
                "num_kv_heads": rng.choice([1, 1, 2, 3, 4, 8]),
                "num_routes": rng.choice([1, 2, 3, 7, 16, 64, 148, 149, rng.randrange(1, 600)]),
                "block_topk": rng.choice([1, 16, 512, 2048 // block, rng.randrange(1, 513)]),
                "max_seq_len": rng.choice([1, 3, 100, 4096, 262144, rng.randrange(1, 2**22)]),
                "num_pages": rng.choice([1, 1000, 2**24]),
                "split": rng.random() < 0.8,
                **point,
            }
        )
    return cases


def every_point() -> Iterator[dict[str, Any]]:
    """Every geometry and group that the op has."""
    for dtype, out_dtype in DTYPES:
        for head_dim in qsa.op().values("head_dim"):
            for heads in qsa.op().values("heads_per_kv"):
                for group in range(1, min(8, 128 // int(heads)) + 1):
                    fixed = {"dtype": dtype, "out_dtype": out_dtype, "head_dim": head_dim}
                    yield {**fixed, "heads_per_kv": heads, "group": group}


def fields_of(case: Mapping[str, Any]) -> dict[str, Any]:
    names = ("group", "num_kv_heads", "num_routes", "block_topk", "max_seq_len", "num_pages")
    return {"num_q_heads": case["heads_per_kv"] * case["num_kv_heads"], **{n: case[n] for n in names}}


def chosen(library: Kernseal, case: Mapping[str, Any], sms: int = SMS) -> dict[str, Any]:
    """The axes that the library sets for a case, among those that the case gives."""
    given = {name: case[name] for name in qsa.op().data["axes"] if name in case}
    config = library.config(OP, qsa.axes_of(**given))
    config.splits = 0 if case["split"] else 1
    config.tile_q, config.persistent, config.flat_kv_heads = 99, 1, 77
    args = Call({}, fields_of(case)).args(library)
    assert library.c.kseal_qsa_attention_choose(args, sms, config) == 0, library.error()
    found = {name: int(getattr(config, name)) for name in CHOSEN}
    for name in set(qsa.op().data["axes"]) - set(CHOSEN):
        assert getattr(config, name) == getattr(library.config(OP, qsa.axes_of(**given)), name), name
    return found


def wrong(
    library: Kernseal, cases: list[dict[str, Any]], answers: list[dict[str, Any]], sms: int
) -> list[Any]:
    found = []
    for case, answer in zip(cases, answers, strict=True):
        axes = {name: int(axis_key(answer["axes"][name])) for name in CHOSEN}
        if axes["flat_kv_heads"] not in (0, 1, 2, 4, 8):
            axes["flat_kv_heads"] = 0  # upstream compiles for any number of heads
        if (mine := chosen(library, case, sms)) != axes:
            found.append((case, mine, axes))
    return found


def test_every_geometry_gets_what_flashinfer_compiles(library: Kernseal, tree: Path) -> None:
    cases = generated(random.Random(1), every_point())
    assert len(cases) > 2000
    answers = ask(tree, cases)
    assert wrong(library, cases, answers, SMS) == []
    assert [(c, a["differs"]) for c, a in zip(cases, answers, strict=True) if a["differs"]] == []
    for case, answer in zip(cases, answers, strict=True):
        check_sizes(case, answer)
        check_variant(answer["axes"])


@pytest.mark.parametrize("sms", [1, 132])
def test_another_device_gets_what_flashinfer_compiles(library: Kernseal, tree: Path, sms: int) -> None:
    rng = random.Random(sms)
    points = [p for p in every_point() if rng.random() < 0.1]
    cases = generated(rng, iter(points))
    assert wrong(library, cases, ask(tree, cases, sms), sms) == []


def check_sizes(case: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    """What the tests say of the tables is what FlashInfer says; launch.c is held against the tests."""
    call = Call(answer["axes"], fields_of(case))
    assert call.page_capacity == answer["page_capacity"], case
    assert call.kv_capacity == answer["kv_capacity"], case
    if case["group"] > 1:
        assert -(-call.page_capacity // 4) == answer["membership_words"]
    if answer["axes"]["splits"] > 1:
        assert call.split_rows == answer["partial_rows"], case


def check_variant(axes: Mapping[str, Any]) -> None:
    """No rule of kernel.yaml forbids what FlashInfer would compile."""
    if axes["flat_kv_heads"] in (0, 1, 2, 4, 8):
        qsa.op().variant(Target("sm_100a"), axes)


def test_the_step_decides_through_its_product_alone(library: Kernseal) -> None:
    """Routes and KV heads count as blocks: what was shown for some of them holds for all that have the same product."""
    rng = random.Random(3)
    for case in generated(rng, every_point()):
        routes, heads = rng.randrange(1, 60000), case["num_kv_heads"]
        if routes % heads or routes // heads == 0:
            continue
        one = chosen(library, {**case, "num_kv_heads": 1, "num_routes": routes})
        other = chosen(library, {**case, "num_routes": routes // heads})
        assert {**one, "flat_kv_heads": 0} == {**other, "flat_kv_heads": 0}


def kernels(ptx: str) -> dict[str, str]:
    """Body of each kernel, with its name and with the alignment that its pointer parameters claim left out: three that no
    variant reads have an address of another type here."""
    found = {}
    for match in re.finditer(r"\.entry\s+(\w+)\((.*?)\n\}\n", ptx, re.DOTALL):
        text = re.sub(r"\.ptr \.global \.align \d+", ".ptr", match[0].replace(match[1], "kernel"))
        text = re.sub(r"\$L__BB\d+_", "$L_", re.sub(r"//.*", "", text))
        found["reduction" if "reduction" in match[1] else "main"] = text
    return found


PTX_CASES: dict[str, dict[str, Any]] = {
    "single": {"group": 1, "head_dim": 128, "heads_per_kv": 8, "num_kv_heads": 1, "num_routes": 37},
    "grouped_fp8": {"dtype": "e4m3", "group": 4, "num_kv_heads": 2, "num_routes": 12},
}


@pytest.mark.parametrize("name", PTX_CASES)
def test_the_kernels_are_those_of_flashinfers_jit(
    built_variant: Callable[..., HostObject], tree: Path, name: str
) -> None:
    given = {"dtype": "bf16", "out_dtype": "bf16", "head_dim": 256, "heads_per_kv": 12, "block_size": 4}
    sizes = {"page_size": 64, "block_topk": 512, "max_seq_len": 131072, "num_pages": 1000}
    case = {**given, **sizes, "count_current": True, "split": True, "ptx": True, **PTX_CASES[name]}
    (answer,) = ask(tree, [case])
    assert answer["axes"]["splits"] > 1
    theirs = {k: v for text in answer["ptx"] for k, v in kernels(text).items()}
    made = built_variant("sm_100a", op_name=OP, **answer["axes"])
    ours = kernels(made.ptx)
    assert set(ours) == {"main", "reduction"}
    assert math.prod(len(text) for text in ours.values()) > 10**8
    assert ours == theirs
    assert re.search(r"tcgen05\.mma", ours["main"]) and "griddepcontrol.wait" in ours["main"]
    assert "griddepcontrol.wait" in ours["reduction"]
