"""The schedule kernel, run from its PTX on the CPU, gives the schedules of FlashInfer's own host code."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest

np = pytest.importorskip("numpy", reason="numpy is not installed")
ptx = pytest.importorskip("cpu.fake_driver.ptx", reason="nothing here runs PTX")
torch = pytest.importorskip("torch", reason="torch is not installed")

from cpu.fake_driver.host_objects import HostObject  # noqa: E402
from cpu.fake_driver.paged_mqa import SCHEDULE  # noqa: E402
from cpu.fake_driver.paged_mqa_upstream import upstream  # noqa: E402

from kernseal.kernels.paged_mqa_schedule import reference  # noqa: E402

pytestmark = pytest.mark.slow

SMEM = 32768
LENGTHS, STARTS = 0x10000, 0x8000000
I32 = np.dtype(np.int32)


class Warp(ptx.Grid):  # type: ignore[misc, name-defined]
    """One warp, with the instructions of a scan and a search."""

    def __init__(self, program: Any, memory: Any, params: Sequence[bytes]) -> None:
        super().__init__(program, memory, params, 1, 32, SMEM)
        self.special["%laneid"] = self.special["%tid.x"]

    def _shfl(self, i: Any, kinds: list[str], active: Any) -> None:
        if kinds[1] != "up":
            super()._shfl(i, kinds, active)
            return
        target, source, offset, clamp, members = i.operands
        assert (clamp, members, active.all()) == ("0", "-1", True)
        lanes = np.arange(32)
        self._set(
            target, self._bits(source)[np.where(lanes < int(offset), lanes, lanes - int(offset))], active
        )

    def _rem(self, i: Any, kinds: list[str], active: Any) -> None:
        x, y = (self._int(s, I32).astype(np.int64) for s in i.operands[1:])
        self._set(i.operands[0], np.fmod(x, np.where(y == 0, 1, y)).astype(np.int32), active)

    def _not(self, i: Any, kinds: list[str], active: Any) -> None:
        if kinds == ["b32"]:
            self._set(i.operands[0], ~self._int(i.operands[1], I32), active)
        else:
            super()._not(i, kinds, active)

    def _neg(self, i: Any, kinds: list[str], active: Any) -> None:
        self._set(i.operands[0], -self._int(i.operands[1], I32), active)

    def _min(self, i: Any, kinds: list[str], active: Any) -> None:
        self._set(i.operands[0], np.minimum(*(self._int(s, I32) for s in i.operands[1:])), active)


@pytest.fixture(scope="module", params=[1, 2])
def program(request: pytest.FixtureRequest, built_variant: Callable[..., HostObject]) -> tuple[int, Any]:
    made = built_variant("sm_100a", op_name=SCHEDULE, atoms=request.param)
    assert made.answer.kernels[0][1] == SMEM
    return request.param, ptx.parse(made.ptx)


def run(program: Any, given: Sequence[int], ctas: int, atoms: int, stride: int = 1) -> list[tuple[int, int]]:
    """A launch over lengths ``stride`` apart, garbage between them, and no memory around them."""
    lengths = np.full((len(given) - 1) * stride + 1, -123456789, dtype=np.int32)
    lengths[::stride] = given
    starts = np.full((ctas + 1, 2), 0x5A5A5A5A, dtype=np.int32)
    memory = ptx.Memory()
    memory.map(LENGTHS, lengths)
    memory.map(STARTS, starts)
    params = [
        struct.pack("<QiiQ", LENGTHS, len(given), 0, stride),
        struct.pack("<Qii", STARTS, ctas + 1, 0),
        struct.pack("<i", len(given) * atoms),
    ]
    Warp(program, memory, params).run()
    return [(int(row), int(part)) for row, part in starts]


def expected(given: Sequence[int], ctas: int, atoms: int) -> list[tuple[int, int]]:
    theirs = upstream()
    rows = theirs._expand_seq_lens(torch.tensor(given, dtype=torch.int32), atoms, 2)
    return [tuple(row) for row in theirs._compute_schedule_metadata(rows, ctas).tolist()]


EDGES = [0, 0, 1, 2, 3, 254, 255, 256, 257, 258, 259, 511, 512, 513, 100_000, 2**20 + 1]


@pytest.mark.parametrize("ctas", [1, 2, 31, 32, 33, 132, 148, 160, 188])
@pytest.mark.parametrize("batch", [1, 2, 31, 32, 33, 127, 128, 129, 257])
def test_every_start_is_upstreams(program: tuple[int, Any], batch: int, ctas: int) -> None:
    atoms, code = program
    rng = random.Random(f"{batch} {ctas} {atoms}")
    given = [rng.choice([*EDGES, rng.randrange(10_000)]) for _ in range(batch)]
    assert run(code, given, ctas, atoms, stride=rng.choice([1, 3])) == expected(given, ctas, atoms)


@pytest.mark.parametrize("length", [0, 1, 256, 257, 2**31 - 256])
def test_equal_lengths(program: tuple[int, Any], length: int) -> None:
    atoms, code = program
    given = [length] * 5
    assert run(code, given, 148, atoms) == expected(given, 148, atoms)


def test_the_largest_batch(program: tuple[int, Any]) -> None:
    atoms, code = program
    rng = random.Random(9)
    given = [rng.choice(EDGES) for _ in range(8192 // atoms)]
    found = run(code, given, 148, atoms)
    assert found == expected(given, 148, atoms) == reference.schedule(given, 148, atoms)


def test_more_ctas_than_any_device_has(program: tuple[int, Any]) -> None:
    atoms, code = program
    given = [1000, 0, 300, 5]
    assert run(code, given, 1000, atoms) == expected(given, 1000, atoms)
