"""Runs a kernel's PTX on the CPU: all threads of a grid in lockstep, each access to memory checked.

What is not mapped, misaligned or out of bounds is an error, and so is an instruction that no test needed so far. Float32
arithmetic rounds as PTX says; the approximate functions are numpy's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_INTEGERS = {
    f"{kind}{bits}": np.dtype(f"{'int' if kind == 's' else 'uint'}{bits}")
    for kind in "sub"
    for bits in (16, 32, 64)
}
_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rsqrt": lambda x: np.float32(1) / np.sqrt(x),
    "rcp": lambda x: np.float32(1) / x,
    "neg": np.negative,
}
_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@dataclass(frozen=True)
class Instruction:
    guard: str | None
    negated: bool
    op: tuple[str, ...]
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    code: Sequence[Instruction]
    labels: Mapping[str, int]


def parse(ptx: str) -> Program:
    """The one kernel of a module."""
    body = re.sub(r"//[^\n]*", "", ptx[ptx.index(".entry") :])
    body = body[body.index("{") + 1 : body.rindex("}")]
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in re.split(
        r"[;\n]", re.sub(r"\{([^{}]*)\}", lambda m: "{" + m[1].replace(",", "|") + "}", body)
    ):
        text = line.strip()
        while label := re.match(r"(\$\w+):\s*", text):
            labels[label[1]] = len(code)
            text = text[label.end() :]
        found = re.match(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)", text)
        if text.startswith(".") or found is None:
            continue
        operands = tuple(part.strip() for part in found[4].split(",")) if found[4] else ()
        code.append(Instruction(found[2], found[1] == "!", tuple(found[3].split(".")), operands))
    return Program(code, labels)


class Memory:
    """Global memory: arrays at addresses, and nothing between them."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._bytes: list[Array] = []

    def map(self, address: int, array: Array) -> None:
        """Let the (contiguous, writable) array be what is at ``address``."""
        at = int(np.searchsorted(np.array(self._bases, dtype=np.uint64), address))
        self._bases.insert(at, address)
        self._bytes.insert(at, array.reshape(-1).view(np.uint8))

    def load(self, addresses: Array, size: int) -> Array:
        """[n, size] bytes."""
        out = np.empty((len(addresses), size), dtype=np.uint8)
        for data, chosen, places in self._places(addresses, size):
            out[chosen] = data[places]
        return out

    def store(self, addresses: Array, values: Array) -> None:
        for data, chosen, places in self._places(addresses, values.shape[1]):
            data[places] = values[chosen]

    def _places(self, addresses: Array, size: int) -> Any:
        assert not (addresses % np.uint64(size)).any(), "misaligned access"
        bases = np.array(self._bases, dtype=np.uint64)
        owner = np.searchsorted(bases, addresses, side="right") - 1
        assert (owner >= 0).all(), f"access below all memory: {addresses.min():#x}"
        for index in np.unique(owner):
            chosen = owner == index
            start = (addresses[chosen] - bases[index]).astype(np.int64)
            data = self._bytes[index]
            assert (start + size <= len(data)).all(), f"access outside memory: {addresses[chosen].max():#x}"
            yield data, chosen, start[:, None] + np.arange(size)


class Grid:
    """The threads of a launch. ``run`` executes them all."""

    def __init__(
        self, program: Program, memory: Memory, params: Sequence[bytes], ctas: int, threads: int, smem: int
    ) -> None:
        self.program, self.memory, self.params = program, memory, params
        count = ctas * threads
        self.threads = threads
        self.cta = np.repeat(np.arange(ctas), threads)
        self.special = {
            "%tid.x": np.tile(np.arange(threads, dtype=np.uint64), ctas),
            "%ctaid.x": self.cta.astype(np.uint64),
        }
        self.shared = np.zeros((ctas, smem), dtype=np.uint8)
        self.registers: dict[str, Array] = {}
        self.pc = np.zeros(count, dtype=np.int64)
        self.executed: set[int] = set()

    def run(self) -> None:
        """Those that are furthest behind go first, so that threads meet again where their paths do."""
        end = len(self.program.code)
        with np.errstate(all="ignore"):
            while (at := int(self.pc.min())) < end:
                self._step(at, self.pc == at)

    def _step(self, at: int, here: Array) -> None:
        instruction = self.program.code[at]
        self.executed.add(at)
        if instruction.guard is not None:
            wanted = self.registers[instruction.guard].astype(bool) != instruction.negated
            active = here & wanted
        else:
            active = here
        self.pc[here] = at + 1
        name, *kinds = instruction.op
        if name == "bra":
            self.pc[active] = self.program.labels[instruction.operands[0]]
        elif name == "ret":
            self.pc[active] = len(self.program.code)
        elif name == "bar":
            alive = self.pc < len(self.program.code)
            assert (here | ~alive | ~np.isin(self.cta, self.cta[here])).all(), (
                "a barrier that some never reach"
            )
        else:
            with_one = active if active.any() else None
            if with_one is not None:
                getattr(self, f"_{name}", self._plain)(instruction, kinds, active)

    # ---- operands ----

    def _bits(self, operand: str) -> Array:
        """The operand's bits, in 64."""
        if operand in self.special:
            return self.special[operand]
        if operand.startswith("%"):
            return self.registers[operand]
        if operand.startswith(("0f", "0F")):
            value = int(operand[2:], 16)
        elif operand.startswith("__dynamic_shmem"):
            value = 0
        else:
            value = int(operand, 0) & (2**64 - 1)
        return np.full(len(self.pc), value, dtype=np.uint64)

    def _int(self, operand: str, dtype: np.dtype[Any]) -> Array:
        return self._bits(operand).astype(np.dtype(f"uint{8 * dtype.itemsize}")).view(dtype)

    def _float(self, operand: str, kind: str = "f32") -> Array:
        bits = self._bits(operand).astype(np.uint32)
        return (bits << np.uint32(16) if kind == "bf16" else bits).view(np.float32)

    def _set(self, register: str, value: Array, active: Array) -> None:
        unsigned = value if value.dtype == bool else value.view(np.dtype(f"uint{8 * value.dtype.itemsize}"))
        old = self.registers.get(register)
        new = unsigned.astype(np.uint64)
        self.registers[register] = new if old is None else np.where(active, new, old)

    @staticmethod
    def _parts(operand: str) -> list[str]:
        return [part.strip() for part in operand.strip("{} ").split("|")]

    # ---- instructions ----

    def _plain(self, i: Instruction, kinds: list[str], active: Array) -> None:
        name, kind = i.op[0], i.op[-1]
        target, *sources = i.operands
        if name in _FUNCTIONS and kind == "f32":
            self._set(target, _FUNCTIONS[name](self._float(sources[0])).astype(np.float32), active)
        elif name in _ARITHMETIC and "f32" in kinds:
            x, y = self._float(sources[0], kind), self._float(sources[1])
            self._set(target, _ARITHMETIC[name](x, y), active)
        elif name in _ARITHMETIC and "wide" not in kinds:
            dtype = _INTEGERS[kind]
            self._set(target, _ARITHMETIC[name](*(self._int(s, dtype) for s in sources)), active)
        elif name == "mul":
            dtype = _INTEGERS[kind]
            wide = np.dtype(f"{'int' if kind[0] == 's' else 'uint'}{16 * dtype.itemsize}")
            x, y = (self._int(s, dtype).astype(wide) for s in sources)
            self._set(target, x * y, active)
        elif name in _BITWISE:
            self._set(target, _BITWISE[name](*(self._bits(s) for s in sources)), active)
        else:
            raise NotImplementedError(f"{'.'.join(i.op)} {i.operands}")

    def _not(self, i: Instruction, kinds: list[str], active: Array) -> None:
        assert kinds == ["pred"]
        self._set(i.operands[0], self._bits(i.operands[1]) == 0, active)

    def _fma(self, i: Instruction, kinds: list[str], active: Array) -> None:
        target, *sources = i.operands
        if kinds[-1] == "f32x2":
            pairs = [np.ascontiguousarray(self._bits(s)).view(np.float32).reshape(-1, 2) for s in sources]
            self._set(target, np.ascontiguousarray(_fused(*pairs)).view(np.uint64).reshape(-1), active)
            return
        x, y = (self._float(s, kinds[-1]) for s in sources[:2])
        self._set(target, _fused(x, y, self._float(sources[2])), active)

    def _mad(self, i: Instruction, kinds: list[str], active: Array) -> None:
        assert kinds[0] == "lo"
        x, y, z = (self._int(s, _INTEGERS[kinds[-1]]) for s in i.operands[1:])
        self._set(i.operands[0], x * y + z, active)

    def _div(self, i: Instruction, kinds: list[str], active: Array) -> None:
        assert kinds == ["s32"]
        x, y = (self._int(s, _INTEGERS["s32"]).astype(np.int64) for s in i.operands[1:])
        quotient = np.where(y == 0, -1, np.abs(x) // np.maximum(np.abs(y), 1) * np.sign(x) * np.sign(y))
        self._set(i.operands[0], quotient.astype(np.int32), active)

    def _shl(self, i: Instruction, kinds: list[str], active: Array) -> None:
        dtype = _INTEGERS[kinds[-1]]
        self._set(i.operands[0], self._int(i.operands[1], dtype) << self._int(i.operands[2], dtype), active)

    def _shr(self, i: Instruction, kinds: list[str], active: Array) -> None:
        dtype = _INTEGERS[kinds[-1]]
        self._set(i.operands[0], self._int(i.operands[1], dtype) >> self._int(i.operands[2], dtype), active)

    def _setp(self, i: Instruction, kinds: list[str], active: Array) -> None:
        compare, kind = kinds
        read = self._float if kind == "f32" else lambda s: self._int(s, _INTEGERS[kind])
        self._set(i.operands[0], _COMPARE[compare](read(i.operands[1]), read(i.operands[2])), active)

    def _selp(self, i: Instruction, kinds: list[str], active: Array) -> None:
        target, yes, no, which = i.operands
        self._set(target, np.where(self._bits(which) != 0, self._bits(yes), self._bits(no)), active)

    def _cvt(self, i: Instruction, kinds: list[str], active: Array) -> None:
        target, *sources = i.operands
        if kinds == ["f32", "bf16"]:
            self._set(target, self._float(sources[0], "bf16"), active)
        elif kinds == ["rn", "bf16", "f32"]:
            self._set(target, _bf16(self._float(sources[0])), active)
        elif kinds == ["rn", "bf16x2", "f32"]:
            high, low = (_bf16(self._float(s)) for s in sources)
            self._set(target, (high << np.uint32(16)) | low, active)
        else:
            to, source = (_INTEGERS[kind] for kind in kinds)
            self._set(target, self._int(sources[0], source).astype(to), active)

    def _mov(self, i: Instruction, kinds: list[str], active: Array) -> None:
        target, source = i.operands
        bits = 64 if kinds[-1] == "pred" else int(kinds[-1][1:])
        if target.startswith("{"):
            parts = self._parts(target)
            width = bits // len(parts)
            for at, part in enumerate(parts):
                value = (self._bits(source) >> np.uint64(at * width)) & np.uint64(2**width - 1)
                if part != "_":
                    self._set(part, value, active)
        elif source.startswith("{"):
            parts = self._parts(source)
            width = bits // len(parts)
            mask = np.uint64(2**width - 1)
            value = sum((self._bits(p) & mask) << np.uint64(n * width) for n, p in enumerate(parts))
            self._set(target, np.asarray(value, dtype=np.uint64), active)
        else:
            self._set(target, self._bits(source) & np.uint64(2**bits - 1), active)

    def _shfl(self, i: Instruction, kinds: list[str], active: Array) -> None:
        target, source, lane, clamp, members = i.operands
        assert kinds[0] == "sync" and (clamp, members) == ("31", "-1")
        mine = self.special["%tid.x"].astype(np.int64) % 32
        other = mine ^ int(lane) if kinds[1] == "bfly" else np.full_like(mine, int(lane))
        warps = active.reshape(-1, 32)
        assert (warps.all(axis=1) | ~warps.any(axis=1)).all(), "a shuffle that some of a warp never reach"
        self._set(target, self._bits(source)[np.arange(len(mine)) - mine + other], active)

    # ---- memory ----

    def _ld(self, i: Instruction, kinds: list[str], active: Array) -> None:
        space, targets, size = kinds[0], self._parts(i.operands[0]), _access(kinds)
        width = size // len(targets)
        if space == "param":
            name, offset = _address(i.operands[1])
            data = self.params[int(name.rsplit("_", 1)[1])][offset : offset + size]
            values = np.tile(np.frombuffer(data, dtype=np.uint8), (len(self.pc), 1))
        else:
            at = self._at(i.operands[1])
            values = np.zeros((len(self.pc), size), dtype=np.uint8)
            read = self.memory.load if space == "global" else self._load_shared(active)
            values[active] = read(at[active], size)
        for number, target in enumerate(targets):
            part = np.ascontiguousarray(values[:, number * width : (number + 1) * width])
            self._set(target, part.view(np.dtype(f"uint{8 * width}")).reshape(-1), active)

    def _st(self, i: Instruction, kinds: list[str], active: Array) -> None:
        space, sources, size = kinds[0], self._parts(i.operands[1]), _access(kinds)
        width = size // len(sources)
        dtype = np.dtype(f"uint{8 * width}")
        parts = [self._bits(s).astype(dtype).reshape(-1, 1).view(np.uint8) for s in sources]
        values, at = np.concatenate(parts, axis=1)[active], self._at(i.operands[0])[active]
        if space == "global":
            self.memory.store(at, values)
            return
        where = self._in_shared(at, size)
        self.shared[self.cta[active][:, None], where] = values

    def _load_shared(self, active: Array) -> Callable[[Array, int], Array]:
        ctas = self.cta[active]
        return lambda at, size: self.shared[ctas[:, None], self._in_shared(at, size)]

    def _in_shared(self, at: Array, size: int) -> Array:
        start: Array = at.astype(np.int64)[:, None]
        assert not (start % size).any(), "misaligned access to shared memory"
        assert (start >= 0).all() and (start + size <= self.shared.shape[1]).all(), "outside shared memory"
        return start + np.arange(size)

    def _at(self, operand: str) -> Array:
        register, offset = _address(operand)
        return self._bits(register) + np.uint64(offset % 2**64)


def _access(kinds: Sequence[str]) -> int:
    """Bytes of a load or store."""
    count = next((int(k[1:]) for k in kinds if re.fullmatch(r"v\d", k)), 1)
    return count * int(kinds[-1][1:]) // 8


def _address(operand: str) -> tuple[str, int]:
    name, _, offset = operand.strip("[]").partition("+")
    return name.strip(), int(offset or 0)


def _fused(x: Array, y: Array, z: Array) -> Array:
    """x * y + z, rounded once but for what float64 lacks."""
    exact: Array = x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)
    return exact.astype(np.float32)


def _bf16(x: Array) -> Array:
    """The nearest bfloat16, ties to even, as 16 bits in 32."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    made: Array = np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint32)
    return made
