"""Top-k of a decode step on the fake driver: compiled variants, and calls in the words of ``kernel.yaml``."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cpu.fake_driver.kernseal_library import Kernseal
from cpu.fake_driver.reference import Scalar, Tensor
from cpu.fake_driver.xqa import address

OP = "topk_varlen"
STATE = 3080
"""Bytes that a group of thread blocks has in semaphores."""
POINTERS = ("scores", "seq_lens", "indices", "values", "semaphores")


@dataclass(frozen=True)
class Call:
    """Fields of ``kseal_topk_varlen_args``."""

    axes: Mapping[str, Any]
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def args(self, library: Kernseal) -> Any:
        return library.args(OP, self.fields, (*POINTERS, "stream"))

    @property
    def rows(self) -> int:
        return int(self["num_requests"] * self["next_n"])

    def cutes(self, chunk: int, ctas: int, groups: int) -> dict[str, Tensor | Scalar]:
        """By CuTe's names, with how rows are spread."""
        top_k, max_len = self["top_k"], self["max_len"]
        sizes = {"top_k": top_k, "next_n": self["next_n"], "compress_ratio": self["compress_ratio"]}
        sizes |= {"chunk_size": chunk, "ctas_per_group": ctas, "num_groups": groups}
        return {
            "input_data": Tensor(self["scores"], (self.rows, max_len), (self["row_stride"] or max_len,)),
            "row_states": Tensor(self["semaphores"], (groups,)),
            "seqlen": Tensor(self["seq_lens"], (self["num_requests"],)),
            "output_indices": Tensor(self["indices"], (self.rows, top_k), (top_k,)),
            "output_values": Tensor(self.fields.get("values", 0), (self.rows, top_k), (top_k,)),
            **{name: Scalar("int32_t", value) for name, value in sizes.items()},
            "stream": Scalar("void *", self["stream"]),
        }


def random_call(rng: random.Random, axes: Mapping[str, Any], sms: int) -> Call:
    """A valid call that ``sms`` multiprocessors can hold."""
    next_n = rng.choice([1, 1, 2, 3, 4])
    requests = rng.choice([1, 2, 3, sms // 4, sms // 2, sms // 2 + 1, sms, rng.randrange(1, 2000)])
    max_len = rng.choice(
        [
            1,
            7,
            8191,
            8192,
            8193,
            16384,
            16385,
            65536,
            131072,
            rng.randrange(1, 20000),
            rng.randrange(1, 2**20),
        ]
    )
    names = [name for name in POINTERS if name != "values" or axes["values"]]
    return Call(
        axes,
        {
            "top_k": rng.choice([1, 64, 512, 2048, rng.randrange(1, 5000)]),
            "next_n": next_n,
            "compress_ratio": rng.choice([1, 1, 4, 128]),
            "num_requests": requests,
            "max_len": max_len,
            "row_stride": rng.choice([0, max_len, max_len + rng.randrange(1000)]),
            "semaphores_bytes": 2**40,
            "stream": rng.choice([0, 1, 2, address(rng, 8)]),
            **{name: address(rng, 16) for name in names},
        },
    )
