"""Warps with matrix instructions, for ``ptx``: copies to shared memory, ldmatrix, and products of 16x8x16 in bf16.

Copies are done where they are asked for: what waits for them finds them there. Products are summed in float64.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cpu.fake_driver import ptx
from cpu.fake_driver.ptx import Array, Instruction, Memory, Program

LANE = np.arange(32)
ROW, PAIR = LANE // 4, 2 * (LANE % 4)
COMPARE_UNORDERED = {"equ": np.equal, "neu": np.not_equal}


def kernel_of(ptx_text: str, entry: str) -> Program:
    """One kernel of a module with several, instructions of several lines on one."""
    start = ptx_text.index(f".entry {entry}(")
    end = ptx_text.find(".entry ", start + 1)
    text = ptx_text[start : end if end >= 0 else len(ptx_text)]
    return ptx.parse(re.sub(r"(,|\bmma\.\S+)\s*\n\s*", r"\1 ", text))


class Warps(ptx.Grid):
    """The threads of a launch in up to three dimensions of CTAs."""

    def __init__(
        self,
        program: Program,
        memory: Memory,
        params: Sequence[bytes],
        grid: Sequence[int],
        threads: int,
        smem: int,
    ) -> None:
        super().__init__(program, memory, params, int(np.prod(grid)), threads, smem)
        x, y, z = grid
        for axis, index in zip("xyz", (self.cta % x, self.cta // x % y, self.cta // (x * y)), strict=True):
            self.special[f"%ctaid.{axis}"] = index.astype(np.uint64)
        assert z * y * x == self.shared.shape[0]

    def _bits(self, operand: str) -> Array:
        return self.registers[operand] if operand in self.registers else super()._bits(operand)

    # ---- numbers ----

    def _pairs(self, operand: str) -> Array:
        return np.ascontiguousarray(self._bits(operand)).view(np.float32).reshape(-1, 2)

    def _plain(self, i: Instruction, kinds: list[str], active: Array) -> None:
        if kinds and kinds[-1] == "f32x2":
            made = _PAIRS[i.op[0]](*(self._pairs(s) for s in i.operands[1:]))
            self._set(i.operands[0], np.ascontiguousarray(made).view(np.uint64).reshape(-1), active)
        else:
            super()._plain(i, kinds, active)

    def _max(self, i: Instruction, kinds: list[str], active: Array) -> None:
        assert kinds == ["f32"]
        made = functools.reduce(np.fmax, (self._float(s) for s in i.operands[1:]))  # of two or three
        self._set(i.operands[0], made, active)

    def _neg(self, i: Instruction, kinds: list[str], active: Array) -> None:
        assert kinds == ["s32"]
        self._set(i.operands[0], -self._int(i.operands[1], np.dtype(np.int32)), active)

    def _not(self, i: Instruction, kinds: list[str], active: Array) -> None:
        if kinds == ["b32"]:
            self._set(i.operands[0], ~self._int(i.operands[1], np.dtype(np.uint32)), active)
        else:
            super()._not(i, kinds, active)

    def _div(self, i: Instruction, kinds: list[str], active: Array) -> None:
        if kinds == ["u32"]:
            x, y = (self._int(s, np.dtype(np.uint32)) for s in i.operands[1:])
            assert y[active].all(), "division by zero"
            self._set(i.operands[0], x // np.maximum(y, 1), active)
        else:
            super()._div(i, kinds, active)

    def _rem(self, i: Instruction, kinds: list[str], active: Array) -> None:
        assert kinds == ["u32"]
        x, y = (self._int(s, np.dtype(np.uint32)) for s in i.operands[1:])
        self._set(i.operands[0], x % np.maximum(y, 1), active)

    def _setp(self, i: Instruction, kinds: list[str], active: Array) -> None:
        if kinds[0] in COMPARE_UNORDERED and kinds[1] == "f32":
            x, y = (self._float(s) for s in i.operands[1:])
            either = np.isnan(x) | np.isnan(y)
            self._set(i.operands[0], COMPARE_UNORDERED[kinds[0]](x, y) | either, active)
        else:
            super()._setp(i, kinds, active)

    def _cvt(self, i: Instruction, kinds: list[str], active: Array) -> None:
        if kinds == ["rn", "bf16x2", "e4m3x2"]:
            both = self._bits(i.operands[1])
            low, high = (_E4M3_AS_BF16[(both >> np.uint64(8 * n)) & np.uint64(255)] for n in range(2))
            self._set(i.operands[0], low | high << np.uint32(16), active)
        else:
            super()._cvt(i, kinds, active)

    # ---- memory and matrices ----

    def _cp(self, i: Instruction, kinds: list[str], active: Array) -> None:
        if kinds[1] in ("commit_group", "wait_group"):
            return
        assert kinds[:4] == ["async", "cg", "shared", "global"] and i.operands[2] == "16"
        target, source = (self._at(o) for o in i.operands[:2])
        size = self._int(i.operands[3], np.dtype(np.int32))
        assert np.isin(size[active], (0, 16)).all()
        values = np.zeros((len(self.pc), 16), dtype=np.uint8)
        read = active & (size == 16)
        if read.any():
            values[read] = self.memory.load(source[read], 16)
        self.shared[self.cta[active][:, None], self._in_shared(target[active], 16)] = values[active]

    def _ldmatrix(self, i: Instruction, kinds: list[str], active: Array) -> None:
        assert kinds[:4] == ["sync", "aligned", "m8n8", "x4"] and kinds[-1] == "b16"
        rows = np.zeros((len(self.pc), 16), dtype=np.uint8)
        rows[active] = self._load_shared(active)(self._at(i.operands[1])[active], 16)
        matrices = rows.view(np.uint16).reshape(-1, 4, 8, 8)[self._whole_warps(active)]
        if "trans" in kinds:
            matrices = matrices.swapaxes(2, 3)
        for number, target in enumerate(self._parts(i.operands[0])):
            low, high = (matrices[:, number, ROW, PAIR + n].astype(np.uint32) for n in range(2))
            self._set(target, self._everyone(low | high << np.uint32(16), active), active)

    def _mma(self, i: Instruction, kinds: list[str], active: Array) -> None:
        assert kinds == ["sync", "aligned", "m16n8k16", "row", "col", "f32", "bf16", "bf16", "f32"]
        warps = self._whole_warps(active)
        a = np.empty((warps.sum(), 16, 16))
        b = np.empty((warps.sum(), 16, 8))
        sums = np.empty((warps.sum(), 16, 8))
        for number, part in enumerate(self._parts(i.operands[1])):
            for n in range(2):
                a[:, ROW + 8 * (number % 2), PAIR + 8 * (number // 2) + n] = self._half(part, n, warps)
        for number, part in enumerate(self._parts(i.operands[2])):
            for n in range(2):
                b[:, PAIR + 8 * number + n, ROW] = self._half(part, n, warps)
        for number, part in enumerate(self._parts(i.operands[3])):
            sums[:, ROW + 8 * (number // 2), PAIR + number % 2] = self._float(part).reshape(-1, 32)[warps]
        made = (a @ b + sums).astype(np.float32)
        for number, target in enumerate(self._parts(i.operands[0])):
            mine = made[:, ROW + 8 * (number // 2), PAIR + number % 2]
            self._set(target, self._everyone(mine, active), active)

    def _half(self, register: str, number: int, warps: Array) -> Array:
        """One of the two bf16 of a register, [warps, 32]."""
        bits = (self._bits(register) >> np.uint64(16 * number)).astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32).reshape(-1, 32)[warps].astype(np.float64)

    @staticmethod
    def _whole_warps(active: Array) -> Array:
        warps = active.reshape(-1, 32)
        assert (warps.all(axis=1) | ~warps.any(axis=1)).all(), (
            "a matrix instruction that some of a warp never reach"
        )
        whole: Array = warps.any(axis=1)
        return whole

    def _everyone(self, values: Array, active: Array) -> Array:
        """[warps that are there, 32] as a value for each thread."""
        made = np.zeros((len(self.pc) // 32, 32), dtype=values.dtype)
        made[self._whole_warps(active)] = values
        return made.reshape(-1)


def _e4m3_as_bf16() -> Array:
    """Bits of a bf16 for each byte, from the format's definition."""
    byte = np.arange(256)
    exponent, fraction = byte >> 3 & 15, byte & 7
    size = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    value = np.where(byte & 127 == 127, np.nan, np.where(byte >> 7, -size, size)).astype(np.float32)
    return value.view(np.uint32) >> np.uint32(16)


_E4M3_AS_BF16 = _e4m3_as_bf16()
_PAIRS: dict[str, Callable[..., Any]] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
