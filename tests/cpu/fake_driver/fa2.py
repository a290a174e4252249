"""What the ops of upstream's FA2 prefill have in common on the fake driver: plans read back, and the calls on a handle."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from cpu.fake_driver.kernseal_library import Kernseal

TILES = (16, 64, 128)
MERGE_PARAMS = [8, 8, 8, 8, 8, 4, 8, 4]
"""Bytes of every parameter of the merge."""
SMEM = {16: 16016, 64: 64064, 128: 128128, "merge": 1111}
SHARED = (
    *("requests", "q_tiles", "kv_tiles", "o_indptr", "chunk", "all_rows", "merge_indptr", "valid"),
    *("bytes", "part_lse_at", "workspace_bytes"),
)
"""The end of a plan's head; up to ``valid``, where each array begins, or 0."""


@dataclass(frozen=True)
class Call:
    """Fields of an op's args, and the arrays on the host that its plan reads."""

    axes: Mapping[str, Any]
    host: Mapping[str, Sequence[int]]
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    @property
    def qo(self) -> Sequence[int]:
        return self.host["qo_indptr"]

    @property
    def group(self) -> int:
        return int(self["num_q_heads"]) // int(self["num_kv_heads"])

    def but(self, **fields: Any) -> Self:
        """The same call with other fields."""
        return type(self)(self.axes, self.host, {**self.fields, **fields})


@dataclass(frozen=True)
class Plan:
    """A plan as it was written: its bytes, and what its head says."""

    data: bytes
    head: Mapping[str, int]

    @property
    def tile(self) -> int:
        return TILES[self.head["tile"]]

    def ints(self, array: str, count: int) -> list[int]:
        assert self.head[array], array
        return list(struct.unpack_from(f"<{count}i", self.data, self.head[array]))


class Session:
    """A prepared handle and the calls on it; a subclass says of which op."""

    OP: ClassVar[str]
    POINTERS: ClassVar[Sequence[str]]
    """All pointers of the args, those of the host too."""
    HOST: ClassVar[Sequence[str]]
    """The arrays that a plan reads."""
    HEAD: ClassVar[struct.Struct]
    HEAD_FIELDS: ClassVar[Sequence[str]]

    def __init__(self, library: Kernseal, axes: Mapping[str, Any]) -> None:
        self.library, self.axes = library, axes
        self.handle = library.prepare(self.OP, axes)
        self.status: dict[str, int] = {
            name.removeprefix("KSEAL_"): getattr(library.c, name)
            for name in dir(library.c)
            if name.startswith("KSEAL_")
        }

    def call(self, what: str, *args: Any) -> int:
        """The status of ``kseal_<op>_<what>``."""
        return int(getattr(self.library.c, f"kseal_{self.OP}_{what}")(self.handle, *args))

    def close(self) -> None:
        assert self.call("release") == 0

    def args(self, call: Call, **host: Any) -> Any:
        """The C struct; what ``host`` names is cdata that the caller keeps."""
        cast = self.library.ffi.cast
        values = dict(call.fields)
        for name in (*self.POINTERS, "stream"):
            values[name] = cast("void *", host.get(name, values.get(name, 0)))
        return self.library.struct(f"kseal_{self.OP}_args", **values)

    def size(self, call: Call, what: str = "plan") -> int:
        size = self.library.ffi.new("uint64_t *", 77)
        assert self.call(f"{what}_size", self.args(call), size) == 0, self.library.error()
        return int(size[0])

    def arrays(self, call: Call) -> dict[str, Any]:
        """What a plan reads, as cdata."""
        return {name: self.library.ffi.new("int32_t[]", list(call.host[name])) for name in self.HOST}

    def try_plan(self, call: Call, memory: Any) -> tuple[int, int]:
        """Status and bytes; ``memory`` is where the plan goes."""
        arrays, size = self.arrays(call), self.library.ffi.new("uint64_t *", 77)
        status = self.call("plan", self.args(call, **arrays, plan=memory), size)
        return status, int(size[0])

    def plan(self, call: Call) -> Plan:
        """Plan in just as much memory as plan_size says, which must be left as it was past the plan's end."""
        room = self.size(call)
        memory = self.library.ffi.new("char[]", b"\xa5" * (room + 64))
        status, size = self.try_plan(call.but(plan_bytes=room), memory)
        assert status == 0, self.library.error()
        data = bytes(self.library.ffi.buffer(memory, room + 64))
        assert size <= room and data[size:] == b"\xa5" * (room + 64 - size)
        if size == 0:
            return Plan(b"", {})
        head = dict(zip(self.HEAD_FIELDS, self.HEAD.unpack_from(data), strict=True))
        assert head["bytes"] == size
        return Plan(data[:size], head)

    def run(self, call: Call, plan: Plan) -> int:
        memory = self.library.ffi.new("char[]", plan.data or b"\0")
        fields = {"plan_bytes": len(plan.data), **call.fields}
        host = {"plan": memory, **dict.fromkeys(self.HOST, 0)}
        return self.call("run", self.args(call.but(**fields), **host))


def ends_of(lengths: Sequence[int]) -> list[int]:
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return ends


def random_lengths(rng: random.Random, batch: int) -> list[int]:
    """Chunks of a prefill, decode steps, or a mix; some empty."""
    kind = rng.choice(["ones", "short", "long", "mixed", "mixed"])
    longest = min({"ones": 1, "short": 40, "long": 9000, "mixed": 2500}[kind], 30000 // batch)
    return [
        rng.choice([0, 1, longest, rng.randint(0, longest), rng.randint(0, longest)]) for _ in range(batch)
    ]
