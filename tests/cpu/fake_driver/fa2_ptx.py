"""The kernels of upstream's FA2 prefill for ``ptx``: thread blocks of three dimensions, and more instructions.

What no instruction has written to shared memory is NaN.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from cpu.fake_driver.ptx import Array, Instruction, Memory, Program
from cpu.fake_driver.tensor_cores import COMPARE_UNORDERED, PAIR, ROW, Warps
from cpu.fake_driver.tensor_cores import kernel_of as plain_kernel_of

PARAM_SPACE = 4096
"""Bytes between parameters, where the address of one is taken."""

U32 = np.dtype(np.uint32)
COMPARE_UNORDERED["leu"] = np.less_equal


def kernel_of(ptx_text: str, entry: str) -> Program:
    """One kernel of a module; a predicate that a block of inline assembly has for itself gets a name as the others have."""
    start = ptx_text.index(f".entry {entry}(")
    text = re.sub(
        r"\{\s*\.reg \.pred p;\s*(setp\S*) p,([^;]*);\s*@p\s+([^;]*);\s*\}",
        r"\1 %p999999,\2;\n@%p999999 \3;",
        ptx_text[start:],
    )
    return plain_kernel_of(re.sub(r"\{\s*([^{};]*;)\s*\}", r"\1", text), entry)


class Blocks(Warps):
    """The threads of a launch, as the recording driver has it."""

    def __init__(
        self,
        program: Program,
        memory: Memory,
        params: Sequence[bytes],
        grid: Sequence[int],
        block: Sequence[int],
        smem: int,
    ) -> None:
        threads = int(np.prod(block))
        super().__init__(program, memory, params, grid, threads, smem)
        self.shared[:] = 0xFF
        self.alone = np.tile(np.arange(threads), int(np.prod(grid)))
        x, y, z = block
        places = (self.alone % x, self.alone // x % y, self.alone // (x * y))
        for axis, index, blocks, size in zip("xyz", places, grid, (x, y, z), strict=True):
            self.special[f"%tid.{axis}"] = index.astype(np.uint64)
            self.special[f"%nctaid.{axis}"] = np.full_like(self.special["%tid.x"], blocks)
            self.special[f"%ntid.{axis}"] = np.full_like(self.special["%tid.x"], size)

    def _bits(self, operand: str) -> Array:
        if operand == "0." or operand.startswith("_Z"):  # the latter is dynamic shared memory
            return np.zeros(len(self.pc), np.uint64)
        if param := re.fullmatch(r"\w+_param_(\d+)", operand):
            return np.full(len(self.pc), int(param[1]) * PARAM_SPACE, np.uint64)
        return super()._bits(operand)

    def _ld(self, i: Instruction, kinds: list[str], active: Array) -> None:
        if kinds[0] == "param":
            (at,) = {int(at) for at in self._at(i.operands[1])[active]}
            place = f"[_param_{at // PARAM_SPACE}+{at % PARAM_SPACE}]"
            i = Instruction(i.guard, i.negated, i.op, (i.operands[0], place))
        super()._ld(i, kinds, active)

    def _cvta(self, i: Instruction, kinds: list[str], active: Array) -> None:
        self._set(i.operands[0], self._bits(i.operands[1]), active)

    def _griddepcontrol(self, i: Instruction, kinds: list[str], active: Array) -> None:
        pass

    def _mul(self, i: Instruction, kinds: list[str], active: Array) -> None:
        if kinds == ["hi", "u32"]:
            x, y = (self._int(s, U32).astype(np.uint64) for s in i.operands[1:])
            self._set(i.operands[0], (x * y >> np.uint64(32)).astype(U32), active)
        else:
            self._plain(i, kinds, active)

    def _min(self, i: Instruction, kinds: list[str], active: Array) -> None:
        assert kinds == ["u32"]
        self._set(i.operands[0], np.minimum(*(self._int(s, U32) for s in i.operands[1:])), active)

    def _max(self, i: Instruction, kinds: list[str], active: Array) -> None:
        if kinds == ["u32"]:
            self._set(i.operands[0], np.maximum(*(self._int(s, U32) for s in i.operands[1:])), active)
        else:
            super()._max(i, kinds, active)

    def _div(self, i: Instruction, kinds: list[str], active: Array) -> None:
        if kinds[-1] == "f32":
            x, y = (self._float(s) for s in i.operands[1:])
            self._set(i.operands[0], x / y, active)
        else:
            super()._div(i, kinds, active)

    def _bfi(self, i: Instruction, kinds: list[str], active: Array) -> None:
        target, field, base, at, width = i.operands
        mask = (1 << int(width)) - 1 << int(at)
        placed = self._bits(field) << np.uint64(int(at)) & np.uint64(mask)
        self._set(target, placed | self._bits(base) & np.uint64(2**32 - 1 ^ mask), active)

    def _shfl(self, i: Instruction, kinds: list[str], active: Array) -> None:
        target, source, lanes, clamp, members = i.operands
        assert kinds == ["sync", "bfly", "b32"] and (int(clamp, 0), int(members, 0)) == (31, 2**32 - 1)
        self._whole_warps(active)
        mine = self.alone % 32
        other = mine ^ self._bits(lanes).astype(np.int64)
        self._set(target, self._bits(source)[np.arange(len(mine)) - mine + other], active)

    def _cp(self, i: Instruction, kinds: list[str], active: Array) -> None:
        whole = (*i.operands, "16") if len(i.operands) == 3 else i.operands
        super()._cp(Instruction(i.guard, i.negated, i.op, whole), kinds, active)

    def _ldmatrix(self, i: Instruction, kinds: list[str], active: Array) -> None:
        order = ["trans", "shared", "b16"]  # upstream writes trans before the shape
        super()._ldmatrix(
            i, [*(k for k in kinds if k not in order), *(k for k in order if k in kinds)], active
        )

    def _stmatrix(self, i: Instruction, kinds: list[str], active: Array) -> None:
        assert kinds == ["sync", "aligned", "m8n8", "x4", "shared", "b16"]
        warps = self._whole_warps(active)
        matrices = np.empty((warps.sum(), 4, 8, 8), dtype=np.uint16)
        for number, part in enumerate(self._parts(i.operands[1])):
            both = self._bits(part).reshape(-1, 32)[warps]
            for n in range(2):
                matrices[:, number, ROW, PAIR + n] = both >> np.uint64(16 * n) & np.uint64(0xFFFF)
        rows = matrices.reshape(-1, 8).view(np.uint8)
        self.shared[self.cta[active][:, None], self._in_shared(self._at(i.operands[0])[active], 16)] = rows
