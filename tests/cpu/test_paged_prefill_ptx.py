"""Paged prefill's kernels, run from their PTX on the CPU with the parameters of our launches: numbers and every address.

Memory is mapped where a key or a row lies and nowhere else: entries of the page table that no key needs, pages of nobody,
and the rows of a last page past the keys are not there, so reading one is an error.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cpu.fake_driver import ptx
from cpu.fake_driver.fa2 import MERGE_PARAMS, ends_of
from cpu.fake_driver.fa2_ptx import Blocks, kernel_of
from cpu.fake_driver.fa2_upstream import built
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.kernseal_library import Kernseal, build_library
from cpu.fake_driver.paged_prefill import TILE_PARAMS, Session, axes_of, call_of, op, record, tiles

torch = pytest.importorskip("torch", reason="torch is not installed")

import numpy as np  # noqa: E402

from kernseal.kernels.paged_prefill.reference import prefill  # noqa: E402

pytestmark = pytest.mark.slow

SM, HEADS, KV_HEADS, POOL = "sm_120a", 6, 2, 300
SCALE, LIMIT, LSE_LIMIT = 0.15, 2e-2, 4e-3
"""The last two are of o and lse: the weights that are summed are rounded to bf16."""
AT = {
    name: n + 1 << 36
    for n, name in enumerate(("q", "k", "v", "page_indices", "o", "lse", "plan_device", "workspace"))
}


@dataclass
class Problem:
    """Sequences of a batch over a pool of pages. An entry that no key needs is no page."""

    head_dim: int
    rows: list[int]
    lens: list[int]
    page_size: int
    spare: int = 0
    page_rows: int = 0  # of the pool's page, beyond page_size
    q: Any = field(init=False)
    k: Any = field(init=False)
    v: Any = field(init=False)

    def __post_init__(self) -> None:
        def made(*shape: int) -> Any:
            return torch.randn(*shape, generator=generator).to(torch.bfloat16)

        generator = torch.Generator().manual_seed(sum(self.lens))
        pool = (POOL, self.page_size + self.page_rows, KV_HEADS, self.head_dim)
        self.q, self.k, self.v = made(sum(self.rows), HEADS, self.head_dim), made(*pool), made(*pool)
        self.needed = [-(-n // self.page_size) for n in self.lens]
        self.qo, self.indptr = ends_of(self.rows), ends_of([n + self.spare for n in self.needed])
        pages = iter(random.Random(self.page_size).sample(range(POOL), sum(self.needed)))
        self.pages = [[next(pages) for _ in range(n)] for n in self.needed]

    @property
    def indices(self) -> list[int]:
        return [page for mine in self.pages for page in (*mine, *[-1] * self.spare)]

    def expected(self, causal: bool) -> tuple[Any, Any]:
        pools = (x[:, : self.page_size] for x in (self.k, self.v))
        ends = (self.qo, self.indptr, self.indices, self.lens)
        return prefill(self.q, *pools, *ends, sm_scale=SCALE, causal=causal)

    def map(self, memory: ptx.Memory) -> None:
        memory.map(AT["q"], self.q.view(torch.uint8).numpy())
        for b, pages in enumerate(self.pages):
            if pages:
                memory.map(AT["page_indices"] + 4 * self.indptr[b], np.array(pages, dtype=np.int32))
            for n, page in enumerate(pages):
                held = min(self.page_size, self.lens[b] - n * self.page_size)
                for name, pool in (("k", self.k), ("v", self.v)):
                    at = AT[name] + page * pool.stride(0) * 2
                    memory.map(at, pool[page, :held].contiguous().view(torch.uint8).numpy())


class Machine:
    """One variant: our library over the recording driver, and its kernels' PTX."""

    def __init__(self, axes: dict[str, Any], gpu: FakeGpu, folder: Path) -> None:
        self.gpu, self.axes = gpu, axes
        made = built(op(), self.axes, SM)
        text, image, kernels = (
            made.read("kernel.ptx").decode(),
            made.read("kernel.cubin"),
            tuple(made.kernels),
        )
        self.kernels = {kernel.entry: kernel_of(text, kernel.entry) for kernel in kernels}
        variant = record(self.axes, image, kernels, SM)
        library = Kernseal(build_library("sm_90a", None, [(variant, None, image)], folder))
        self.session = Session(library, self.axes)

    def problem(self, rows: list[int], lens: list[int], page_size: int, **more: int) -> Problem:
        return Problem(self.axes["head_dim"], rows, lens, page_size, **more)

    def run(self, p: Problem, **choices: int) -> tuple[Any, Any, int]:
        """o, lse, and how many kernels were launched."""
        self.gpu.reset()
        self.gpu.params(TILE_PARAMS)
        self.gpu.params(MERGE_PARAMS, "merge")
        zero = ("q_row_stride", "q_head_stride", "kv_row_stride", "kv_head_stride", "tile_q", "kv_chunk")
        fields = {
            **dict.fromkeys((*zero, "fixed_grid", "pdl", "stream"), 0),
            "num_q_heads": HEADS,
            "num_kv_heads": KV_HEADS,
            "page_size": p.page_size,
            "sm_scale": SCALE,
            "batch_size": len(p.rows),
            "total_q": p.qo[-1],
            "total_pages": p.indptr[-1],
            "num_pages": POOL,
            "kv_page_stride": p.k.stride(0),
            "workspace_bytes": 2**40,
            **AT,
            **choices,
        }
        call = call_of(self.axes, p.qo, p.indptr, p.lens, fields)
        plan, memory = self.session.plan(call), ptx.Memory()
        o, lse = (
            np.full((p.qo[-1], HEADS, p.head_dim), 0xFFFF, np.uint16),
            np.full((p.qo[-1], HEADS), np.nan, np.float32),
        )
        p.map(memory)
        memory.map(AT["o"], o)
        memory.map(AT["lse"], lse)
        memory.map(AT["plan_device"], np.frombuffer(bytearray(plan.data), np.uint8))
        if plan.head["split"]:
            memory.map(AT["workspace"], np.full(plan.head["workspace_bytes"], 0xFF, np.uint8))
        assert self.session.run(call, plan) == 0, self.session.library.error()
        launches = self.gpu.log("launch")
        for launch in launches:
            params = [bytes.fromhex(text) for text in launch["params"]]
            kernel = self.kernels[launch["kernel"]]
            Blocks(kernel, memory, params, launch["grid"], launch["block"], launch["smem"]).run()
        return torch.from_numpy(o).view(torch.bfloat16), torch.from_numpy(lse), len(launches)

    def check(self, p: Problem, **choices: int) -> int:
        """Fails unless every row is the oracle's; how many kernels were launched."""
        o, lse, launched = self.run(p, **choices)
        right_o, right_lse = p.expected(self.axes["causal"])
        nothing = right_lse == -torch.inf
        assert o[nothing].eq(0).all() and lse[nothing].eq(-torch.inf).all()
        assert (o.double() - right_o).abs().max() <= LIMIT
        assert (lse.double() - right_lse)[~nothing].abs().max() <= LSE_LIMIT
        return launched


@pytest.fixture(scope="module", params=[(64, True), (64, False), (128, False), (256, True)])
def machine(
    request: pytest.FixtureRequest, fake_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory
) -> Machine:
    fake_gpu.reset()
    fake_gpu.device((9, 0), sms=20)
    axes = axes_of(head_dim=request.param[0], causal=request.param[1])
    return Machine(axes, fake_gpu, tmp_path_factory.mktemp("machine"))


@pytest.fixture(params=[16, 64, 128])
def tile(request: pytest.FixtureRequest, machine: Machine) -> int:
    if request.param not in tiles(machine.axes):
        pytest.skip("heads of 256 have no tile of 128 rows")
    return int(request.param)


MIXED = [5, 0, 1, 40, 3], [150, 9, 70, 33, 0]


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_every_tile_gives_the_oracles_numbers(machine: Machine, tile: int, page_size: int) -> None:
    """Two tiles of keys, a part of one, fewer keys than rows, none; entries and pages that no key needs are not there."""
    assert machine.check(machine.problem(*MIXED, page_size, spare=2), tile_q=tile) == 1


@pytest.mark.parametrize("chunk", [48, -1])
def test_parts_are_merged(machine: Machine, chunk: int) -> None:
    assert machine.check(machine.problem(*MIXED, 16, spare=1), tile_q=16, kv_chunk=chunk) == 2


def test_a_fixed_grid_has_blocks_without_work(machine: Machine) -> None:
    assert machine.check(machine.problem(*MIXED, 5), fixed_grid=1, kv_chunk=-1) == 2


def test_decode_is_a_row_a_sequence(machine: Machine) -> None:
    assert machine.check(machine.problem([1] * 4, [17, 1, 0, 300], 16, spare=3, page_rows=2)) == 1


def test_rows_before_the_first_key_of_a_whole_tile_see_none(machine: Machine, tile: int) -> None:
    machine.check(machine.problem([140], [130], 16), tile_q=tile)


def test_a_sequence_has_the_same_bits_alone_and_among_others(machine: Machine) -> None:
    """With the tile fixed: alone, and among others whose work comes before and after."""
    many = machine.problem([4, 9, 30], [100, 140, 7], 16)
    together = machine.run(many, tile_q=16, kv_chunk=64)
    for b in range(3):
        alone = machine.problem([many.rows[b]], [many.lens[b]], 16)
        mine = slice(many.qo[b], many.qo[b + 1])
        alone.q, alone.k, alone.v, alone.pages = many.q[mine], many.k, many.v, [many.pages[b]]
        found = machine.run(alone, tile_q=16, kv_chunk=64)
        for one, other in zip(found[:2], together[:2], strict=True):
            assert torch.equal(one, other[mine])


def test_nothing_is_read_before_the_grid_before_is_done(machine: Machine) -> None:
    """Under a programmatic dependent launch. The merge may read the plan at once: it follows those that wait."""
    for entry, kernel in machine.kernels.items():
        names = [".".join(i.op) for i in kernel.code]
        first = next(n for n, name in enumerate(names) if name.startswith(("ld.global", "cp.async.c")))
        assert entry == "merge" or names.index("griddepcontrol.wait") < first
