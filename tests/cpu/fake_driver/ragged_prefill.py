"""Ragged prefill on the fake driver: variants without a compiler, calls in the words of ``kernel.yaml``, plans read back."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpu.fake_driver.kernseal_library import IMAGE, Kernseal, stub, stub_library
from cpu.fake_driver.xqa import address

from kernseal.abi.library import KernelRecord, VariantRecord
from kernseal.export import paths, spec
from kernseal.export.spec import Target

OP = "ragged_prefill"
DIMS = ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256))
ALIGN = {"q": 16, "k": 16, "v": 16, "o": 16, "plan_device": 16, "workspace": 16}
HOST = ("qo_indptr", "kv_indptr", "plan")
TILE_PARAMS, MERGE_PARAMS = [200], [8, 8, 8, 8, 8, 4, 8, 4]
"""Bytes of every parameter of a tile's kernel, and of the merge."""
SMEM = {16: 16016, 64: 64064, 128: 128128, "merge": 1111}

HEAD = struct.Struct("<Q4q2i2I2I2I10Q3Q")
HEAD_FIELDS = (
    *("magic", "batch_size", "total_q", "total_kv", "kv_chunk", "num_q_heads", "num_kv_heads", "fixed_grid"),
    *("tile", "grid", "rows", "split", "reserved"),
    *(
        "q_indptr",
        "kv_indptr",
        "requests",
        "q_tiles",
        "kv_tiles",
        "o_indptr",
        "chunk",
        "all_rows",
        "merge_indptr",
    ),
    *("valid", "bytes", "part_lse_at", "workspace_bytes"),
)
"""What a plan begins with; from ``q_indptr`` to ``valid``, where each array begins, or 0."""


def op() -> spec.Op:
    return spec.load_op(paths.kernels() / OP)


def axes_of(**changes: Any) -> dict[str, Any]:
    return {**op().data["defaults"], **changes}


def tiles(axes: Mapping[str, Any]) -> tuple[int, ...]:
    return (16, 64, 128) if axes["v_dim"] <= 128 else (16, 64)


def record(
    axes: Mapping[str, Any],
    image: bytes = IMAGE,
    kernels: Sequence[KernelRecord] | None = None,
    sm: str = "sm_90a",
) -> VariantRecord:
    made_up = (
        *(KernelRecord(f"prefill_{tile}", 0, 0, 0, SMEM[tile]) for tile in tiles(axes)),
        KernelRecord("merge", 0, 0, 0, SMEM["merge"]),
    )
    return stub(op(), axes, Target(sm), image, made_up if kernels is None else kernels)


def library_of(all_axes: Sequence[Mapping[str, Any]], folder: Path) -> Kernseal:
    return Kernseal(stub_library((record(axes) for axes in all_axes), "sm_90a", folder))


@dataclass(frozen=True)
class Call:
    """Fields of ``kseal_ragged_prefill_args``; ``qo`` and ``kv`` are the sequences' ends."""

    axes: Mapping[str, Any]
    qo: Sequence[int]
    kv: Sequence[int]
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    @property
    def group(self) -> int:
        return int(self["num_q_heads"]) // int(self["num_kv_heads"])


@dataclass(frozen=True)
class Plan:
    """A plan as it was written: its bytes, and what its head says."""

    data: bytes
    head: Mapping[str, int]

    @property
    def tile(self) -> int:
        return (16, 64, 128)[self.head["tile"]]

    def ints(self, array: str, count: int) -> list[int]:
        assert self.head[array], array
        return list(struct.unpack_from(f"<{count}i", self.data, self.head[array]))


class Session:
    """A prepared handle and the calls on it."""

    def __init__(self, library: Kernseal, axes: Mapping[str, Any]) -> None:
        self.library, self.axes = library, axes
        self.handle = library.prepare(OP, axes)
        self.status: dict[str, int] = {
            name.removeprefix("KSEAL_"): getattr(library.c, name)
            for name in dir(library.c)
            if name.startswith("KSEAL_")
        }

    def close(self) -> None:
        assert self.library.c.kseal_ragged_prefill_release(self.handle) == 0

    def args(self, call: Call, **host: Any) -> Any:
        """The C struct; what ``host`` names is cdata that the caller keeps."""
        cast = self.library.ffi.cast
        values = dict(call.fields)
        for name in (*ALIGN, "lse", "stream", *HOST):
            value = host.get(name, values.get(name, 0))
            values[name] = cast("void *", value)
        return self.library.struct(f"kseal_{OP}_args", **values)

    def size(self, call: Call, what: str = "plan") -> int:
        size = self.library.ffi.new("uint64_t *", 77)
        function = getattr(self.library.c, f"kseal_{OP}_{what}_size")
        assert function(self.handle, self.args(call), size) == 0, self.library.error()
        return int(size[0])

    def ends(self, values: Sequence[int]) -> Any:
        return self.library.ffi.new("int32_t[]", list(values))

    def try_plan(self, call: Call, memory: Any) -> tuple[int, int]:
        """Status and bytes; ``memory`` is where the plan goes."""
        qo, kv, size = self.ends(call.qo), self.ends(call.kv), self.library.ffi.new("uint64_t *", 77)
        args = self.args(call, qo_indptr=qo, kv_indptr=kv, plan=memory)
        return int(self.library.c.kseal_ragged_prefill_plan(self.handle, args, size)), int(size[0])

    def plan(self, call: Call) -> Plan:
        """Plan in just as much memory as plan_size says, which must be left as it was past the plan's end."""
        room = self.size(call)
        memory = self.library.ffi.new("char[]", b"\xa5" * (room + 64))
        made = Call(call.axes, call.qo, call.kv, {**call.fields, "plan_bytes": room})
        status, size = self.try_plan(made, memory)
        assert status == 0, self.library.error()
        data = bytes(self.library.ffi.buffer(memory, room + 64))
        assert size <= room and data[size:] == b"\xa5" * (room + 64 - size)
        if size == 0:
            return Plan(b"", {})
        head = dict(zip(HEAD_FIELDS, HEAD.unpack_from(data), strict=True))
        assert head["bytes"] == size
        return Plan(data[:size], head)

    def run(self, call: Call, plan: Plan) -> int:
        memory = self.library.ffi.new("char[]", plan.data or b"\0")
        host = {"plan": memory, "qo_indptr": 0, "kv_indptr": 0}
        made = Call(call.axes, call.qo, call.kv, {"plan_bytes": len(plan.data), **call.fields})
        return int(self.library.c.kseal_ragged_prefill_run(self.handle, self.args(made, **host)))


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


def random_call(rng: random.Random, axes: Mapping[str, Any]) -> Call:
    """A valid call. Scratch is as large as it ever needs to be: what it must be is another test's."""
    batch = rng.choice([1, 1, 2, 3, 7, 16, 64, rng.randint(1, 200)])
    kv_heads, group = rng.choice([1, 2, 3, 4, 8]), rng.choice([1, 1, 2, 3, 4, 5, 7, 8, 12, 16])
    qo, kv = ends_of(random_lengths(rng, batch)), ends_of(random_lengths(rng, batch))
    fixed = rng.random() < 0.4
    spare = rng.choice([0, 0, 1, rng.randint(0, 500)])
    head, v = axes["head_dim"], axes["v_dim"]
    lengths = [(qo[i + 1] - qo[i], kv[i + 1] - kv[i]) for i in range(batch)]
    chunks = [  # those whose parts are not too many
        chunk
        for chunk in (64, 128, 1000, 9000)
        if sum(rows * -(-keys // chunk) for rows, keys in lengths) * kv_heads * group * v < 2**32
    ]
    strides = {
        "q_row_stride": rng.choice([0, kv_heads * group * head + 8 * rng.randint(0, 9)]),
        "q_head_stride": rng.choice([0, head]),
        "k_row_stride": rng.choice([0, kv_heads * (head + v)]),
        "k_head_stride": rng.choice([0, head + v]),
        "v_row_stride": rng.choice([0, kv_heads * (head + v) + 8]),
        "v_head_stride": rng.choice([0, v + 8]),
    }
    fields: dict[str, Any] = {
        **strides,
        "num_q_heads": kv_heads * group,
        "num_kv_heads": kv_heads,
        "tile_q": rng.choice([0, 0, rng.choice(tiles(axes))]),
        "fixed_grid": int(fixed),
        "pdl": rng.randrange(2),
        "sm_scale": rng.choice([0.125, rng.uniform(0.01, 2)]),
        "batch_size": batch,
        "total_q": qo[-1] + spare,
        "total_kv": kv[-1] + rng.choice([0, 3]),
        "kv_chunk": rng.choice([0, -1] if fixed else [0, -1, -1, rng.choice(chunks)]),
        "workspace_bytes": 2**50,
        "stream": rng.choice([0, 1, 2, address(rng, 8)]),
        "lse": rng.choice([0, address(rng, 4)]),
        **{name: address(rng, align) for name, align in ALIGN.items()},
    }
    return Call(axes, qo, kv, fields)
