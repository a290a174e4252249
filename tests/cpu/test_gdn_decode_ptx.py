"""GDN decode's kernels, run from their PTX on the CPU with the parameters of our launch: the numbers, and every address.

Memory is mapped where the call says there is some and nowhere else, so what is read or written elsewhere is an error. The
pool is far larger than int32 can address; only the rows in use are there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu.fake_driver import ptx
from cpu.fake_driver.gdn_decode import VARIANTS
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.host_objects import HostObject
from cpu.fake_driver.kernseal_library import compiled_library

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu.gdn_decode_problems import OP, D, Outcome, Problem, axes_of, blank, check, make, padded  # noqa: E402

pytestmark = pytest.mark.slow

HEADS = 2, 4
POOL_ROWS = 70_000
ROW_STRIDE = HEADS[1] * D * D + 8
"""Elements: row 32768 and those after it begin past 2^31."""
READ = [4097, 69_999, -1, 0, 70_000, 32_768]
WRITTEN = [5, 1, 2, 69_998, 3, -7]
SPARE = {"q": 8, "k": 16, "v": 24, "o": 8, "a": 3, "b": 1}
"""Elements between tokens, so that no two tensors have one stride."""


class Sparse:
    """The pool: the rows that a call may use, each where it would be in the whole one."""

    def __init__(self, p: Problem, memory: ptx.Memory, base: int) -> None:
        self.rows = [row for row in sorted({*READ, *WRITTEN}) if 0 <= row < POOL_ROWS]
        self.data = p.pool.contiguous().view(torch.int16).numpy()
        for place, row in enumerate(self.rows):
            memory.map(base + 2 * row * ROW_STRIDE, self.data[place])

    @classmethod
    def places(cls, rows: list[int]) -> list[int]:
        """The rows' numbers in a pool of just these."""
        kept = [row for row in sorted({*READ, *WRITTEN}) if 0 <= row < POOL_ROWS]
        return [kept.index(row) if row in kept else -1 for row in rows]


def problem(axes: dict[str, Any], chosen: list[int] | None = None) -> Problem:
    """The call as the reference sees it: the pool has the rows in use, padding is full of NaN."""
    written = Sparse.places(WRITTEN) if axes["output_indices"] else None
    rows = Sparse.places(READ)
    p = make(
        axes,
        rows,
        written,
        heads=HEADS,
        pool_rows=len(set(rows + Sparse.places(WRITTEN)) - {-1}),
        device="cpu",
    )
    for name in ("q", "k", "v", "a", "b"):
        getattr(p, name)[~p.alive] = torch.nan
    return p if chosen is None else p.sequences(chosen)


class Machine:
    """One variant: our library over the recording driver, and the kernel's PTX."""

    def __init__(self, made: HostObject, gpu: FakeGpu, folder: Path) -> None:
        self.made, self.gpu, self.axes = made, gpu, made.variant.axes
        self.library = compiled_library([made], folder)
        self.handle = self.library.prepare(OP, self.axes)
        self.program = ptx.parse(made.ptx)
        gpu.params(made.param_sizes())

    def run(self, p: Problem, chosen: list[int] | None = None) -> tuple[Outcome, ptx.Grid]:
        chosen = list(range(len(READ))) if chosen is None else chosen
        memory, fields, tokens = ptx.Memory(), {}, self.axes["tokens"]
        tensors: dict[str, Any] = {n: getattr(p, n).flatten(0, 1) for n in ("q", "k", "v", "a", "b")}
        tensors["o"] = blank(*tensors["v"].shape, device="cpu")
        tensors = {name: padded(x, SPARE[name]) for name, x in tensors.items()}
        fields |= {f"{name}_token_stride": x.stride(0) for name, x in tensors.items()}
        rows, index = np.array(READ)[chosen], np.int64 if self.axes["index_dtype"] == "i64" else np.int32
        arrays = {name: _whole(x) for name, x in tensors.items()}
        arrays |= {
            "a_log": p.a_log.numpy(),
            "dt_bias": p.dt_bias.numpy(),
            "state_indices": rows.astype(index),
        }
        if p.written is not None:
            arrays["output_state_indices"] = np.array(WRITTEN)[chosen].astype(index)
        steps = None
        if self.axes["intermediate_states"]:
            steps = blank(p.batch, tokens + 1, p.hv, D, D, device="cpu")
            arrays["intermediate_states"] = steps.view(torch.int16).numpy()
            fields["intermediate_steps"] = tokens + 1
        for number, (name, array) in enumerate(arrays.items()):
            fields[name] = (number + 1) << 36
            memory.map(fields[name], array)
        fields["state"] = 1 << 44
        pool = Sparse(p, memory, fields["state"])
        launch = self._launch(p, fields)
        params = [bytes.fromhex(text) for text in launch["params"]]
        grid = ptx.Grid(self.program, memory, params, launch["grid"][0], launch["block"][0], launch["smem"])
        grid.run()
        self._nothing_between(tensors["o"], arrays["o"])
        output = tensors["o"].contiguous().unflatten(0, (p.batch, tokens))
        return Outcome(output, torch.from_numpy(pool.data).view(torch.bfloat16), steps), grid

    def _launch(self, p: Problem, fields: dict[str, int]) -> dict[str, Any]:
        cast = self.library.ffi.cast
        pointers = {n: cast("void *", v) for n, v in fields.items() if v >= 1 << 36}
        numbers = {n: v for n, v in fields.items() if v < 1 << 36}
        sizes = {"num_q_heads": HEADS[0], "num_v_heads": HEADS[1], "head_dim": D, "scale": p.scale}
        sizes |= {"batch_size": p.batch, "pool_rows": POOL_ROWS, "state_row_stride": ROW_STRIDE}
        args = self.library.struct(f"kseal_{OP}_args", **sizes, **numbers, **pointers)
        assert self.library.c.kseal_gdn_decode_run(self.handle, args) == 0, self.library.error()
        return self.gpu.log("launch")[-1]

    @staticmethod
    def _nothing_between(view: torch.Tensor, whole: np.ndarray[Any, Any]) -> None:
        columns = view[0].numel()
        assert (torch.from_numpy(whole).view(torch.bfloat16)[:, columns:].isnan()).all()


def _whole(view: torch.Tensor) -> np.ndarray[Any, Any]:
    """The memory of what ``padded`` made, gaps and all."""
    found = view.as_strided((view.shape[0], view.stride(0)), (view.stride(0), 1)).view(torch.int16).numpy()
    assert isinstance(found, np.ndarray)
    return found


@pytest.fixture(params=list(VARIANTS))
def machine(
    request: pytest.FixtureRequest,
    built_variant: Callable[..., HostObject],
    gpu: FakeGpu,
    tmp_path: Path,
) -> Machine:
    sm, retarget, changes = VARIANTS[request.param]
    made = built_variant(sm, retarget, op_name=OP, **changes)
    gpu.device(divmod(int(made.target.arch.removeprefix("sm_").removesuffix("a")), 10))
    return Machine(made, gpu, tmp_path / "ours")


def test_the_numbers_are_the_oracles_and_no_other_memory_is_touched(machine: Machine) -> None:
    p = problem(axes_of(**machine.axes))
    before = p.pool.clone()
    got, grid = machine.run(p)
    after, p.pool = p.pool, before
    assert torch.equal(got.pool, after)
    check(p, got)
    missed = [i for n, i in enumerate(machine.program.code) if n not in grid.executed]
    assert missed == [], "this call leaves instructions unproven"


def test_a_request_has_the_same_bits_in_any_batch(machine: Machine) -> None:
    axes = axes_of(**machine.axes)
    whole, _ = machine.run(problem(axes))
    for chosen in ([0], [3, 1], [5, 2, 0]):
        part, _ = machine.run(problem(axes, chosen), chosen)
        assert torch.equal(part.output, whole.output[chosen])
