"""The kernels of qsa_selected, run from their PTX on the CPU with the parameters of our launches: numbers and every address.

Memory is mapped where the call says there is some and nowhere else, and what no row sees is NaN, so a read or a write
elsewhere is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu.fake_driver import ptx
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.host_objects import HostObject
from cpu.fake_driver.qsa_selected import library_of
from cpu.fake_driver.tensor_cores import Warps, kernel_of

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu.qsa_selected_problems import LIMIT, OP, SCALE, Problem, make, same_bits  # noqa: E402

from kernseal.export import elf  # noqa: E402

pytestmark = pytest.mark.slow

# Those that the tests of the launches compile, too.
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "e4m3": {"kv_dtype": "e4m3", "request_dtype": "i64", "tile_q": 32, "lse": True},
}
HEADS = {"bf16": (6, 2), "e4m3": (20, 1)}
WIDTH = 70  # two steps of 32 positions and a part of one
COUNTS = [70, 1, 0, 33]


class Machine:
    """One variant: our library over the recording driver, and its kernels' PTX."""

    def __init__(self, made: HostObject, gpu: FakeGpu, folder: Path) -> None:
        self.made, self.gpu, self.axes = made, gpu, dict(made.variant.axes)
        self.library = library_of([made], folder)
        self.handle = self.library.prepare(OP, self.axes)
        self.kernels = {entry: kernel_of(made.ptx, entry) for entry, _ in made.answer.kernels}
        for index, (entry, _) in enumerate(made.answer.kernels):
            gpu.params(made.param_sizes(index), entry)

    def run(self, p: Problem, splits: int = 0) -> dict[str, Any]:
        memory, out = ptx.Memory(), p.outputs()
        pages, page_size, kv_heads, dim = p.k.shape
        fields: dict[str, Any] = {
            "num_q_heads": p.q.shape[1],
            "num_kv_heads": kv_heads,
            "head_dim": dim,
            "page_size": page_size,
            "selection_width": p.selected_positions.shape[1],
            "splits": splits,
            "scale": SCALE,
            "num_rows": p.rows,
            "num_requests": p.block_table.shape[0],
            "max_pages_per_request": p.block_table.shape[1],
            "num_pages": pages,
            "kv_page_stride": p.k.stride(0),
            "kv_token_stride": p.k.stride(1),
            "kv_head_stride": p.k.stride(2),
        }
        for number, (name, tensor) in enumerate({**p.tensors(), **out}.items()):
            if tensor is not None:
                fields[name] = self.library.ffi.cast("void *", (number + 1) << 36)
                whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
                offset = tensor.storage_offset() * tensor.itemsize
                memory.map(((number + 1) << 36) - offset, whole.view(torch.uint8).numpy())
        size = self.library.ffi.new("uint64_t *")
        args = self.library.struct(f"kseal_{OP}_args", **fields)
        assert self.library.c.kseal_qsa_selected_workspace_size(self.handle, args, size) == 0
        scratch = np.full(size[0] // 4, np.nan, dtype=np.float32)
        if size[0]:
            memory.map(1 << 45, scratch)
            args.workspace, args.workspace_bytes = self.library.ffi.cast("void *", 1 << 45), size[0]
        before = len(self.gpu.log("launch"))
        assert self.library.c.kseal_qsa_selected_run(self.handle, args) == 0, self.library.error()
        for launch in self.gpu.log("launch")[before:]:
            params = [bytes.fromhex(text) for text in launch["params"]]
            kernel = self.kernels[launch["kernel"]]
            Warps(kernel, memory, params, launch["grid"], launch["block"][0], launch["smem"]).run()
        assert not np.isnan(scratch).any(), "a split that gave nothing"
        return out


@pytest.fixture(scope="module", params=VARIANTS)
def machine(
    request: pytest.FixtureRequest,
    built_variant: Callable[..., HostObject],
    fake_gpu: FakeGpu,
    tmp_path_factory: pytest.TempPathFactory,
) -> Machine:
    fake_gpu.reset()
    fake_gpu.device((12, 0))
    made = built_variant("sm_120a", op_name=OP, **VARIANTS[request.param])
    return Machine(made, fake_gpu, tmp_path_factory.mktemp(request.param))


def problem(machine: Machine, **changes: Any) -> Problem:
    heads = HEADS[machine.axes["kv_dtype"]]
    sizes: dict[str, Any] = {"counts": COUNTS, "width": WIDTH, "heads": heads, "page_size": 5, "length": 90}
    return make(machine.axes, device="cpu", **sizes | changes)


@pytest.mark.parametrize("splits", [0, 1, 2])
def test_every_way_gives_the_oracles_numbers(machine: Machine, splits: int) -> None:
    """Upstream's choice for four rows is 32 splits, of which all but three see nothing."""
    p = problem(machine)
    assert p.check(machine.run(p, splits)) <= LIMIT


@pytest.mark.parametrize("cooperative", [False, True])
def test_a_row_has_the_same_bits_alone_and_whichever_kernel_merges(
    machine: Machine, cooperative: bool
) -> None:
    p, splits = problem(machine), 4 if cooperative else 3
    together = machine.run(p, splits)
    launched = machine.gpu.log("launch")[-1]["kernel"]
    assert ("Cooperative" in launched) == cooperative
    for row in range(p.rows):
        alone = machine.run(p.chosen([row]), splits)
        assert "Cooperative" in machine.gpu.log("launch")[-1]["kernel"]
        mine = {name: None if t is None else t[row : row + 1].contiguous() for name, t in together.items()}
        assert same_bits(alone, mine), row


def test_a_layer_of_a_shared_cache_is_its_strides(machine: Machine) -> None:
    """K and V of one layer among others, heads before tokens: not contiguous in any dimension but the last."""
    p = problem(machine)
    plain = machine.run(p, 1)
    pages, size, heads, dim = p.k.shape
    whole = torch.full((pages, 3, 2, heads, size, dim), torch.nan).to(p.k.dtype)
    for index, cache in enumerate((p.k, p.v)):
        whole[:, 1, index] = cache.transpose(1, 2)
    p.k, p.v = (whole[:, 1, index].transpose(1, 2) for index in range(2))
    assert same_bits(machine.run(p, 1), plain)


@pytest.mark.parametrize("name", ["token_to_request", "query_positions"])
@pytest.mark.parametrize("value", [-1, 3, 2**31 - 1])
def test_a_row_that_no_request_has_reads_nothing(machine: Machine, name: str, value: int) -> None:
    """Of query positions only a negative one is none."""
    p = problem(machine)
    if name == "query_positions":
        value = -abs(value)
    getattr(p, name)[0] = value
    out = machine.run(p, 1)
    assert out["o"][0].eq(0).all()
    assert p.check(out) <= LIMIT


def test_nothing_spills_and_e4m3_is_widened_by_the_instruction(machine: Machine) -> None:
    made = machine.made
    attention, *merges, direct = (elf.read(made.cubin).entries[entry] for entry, _ in made.answer.kernels)
    assert [entry.frame for entry in (attention, *merges, direct)] == [0] * 4
    # Two CTAs of 128 threads, or one of 256, in the registers of an SM.
    assert max(attention.registers, direct.registers) * 256 <= 65536
    for entry in (made.answer.kernels[0][0], made.answer.kernels[3][0]):
        names = {".".join(i.op) for i in machine.kernels[entry].code}
        assert ("cvt.rn.bf16x2.e4m3x2" in names) == (machine.axes["kv_dtype"] == "e4m3")
        assert {name for name in names if name.startswith("mma")} == {
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
        }
