"""Paged MQA logits and schedules on the fake driver: calls as ``kernel.yaml`` has them, and as CuTe's host code does."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cpu.fake_driver.kernseal_library import Kernseal
from cpu.fake_driver.paged_mqa_upstream import scorer_ctas as upstream_ctas
from cpu.fake_driver.reference import Scalar, Tensor
from cpu.fake_driver.xqa import address

SCHEDULE, LOGITS = "paged_mqa_schedule", "paged_mqa_logits"
SEGMENT = 256
SMS = 148
ALIGN: Mapping[str, Mapping[str, int]] = {
    SCHEDULE: {"seq_lens": 4, "schedule": 16},
    LOGITS: {
        **dict.fromkeys(("q", "kv", "weights", "schedule", "logits"), 16),
        **dict.fromkeys(("page_table", "seq_lens"), 4),
    },
}
Fields = dict[str, Any]


def atoms(axes: Mapping[str, Any]) -> int:
    """Rows of work of a sequence."""
    return 2 if axes["kv_dtype"] == "fp4" and axes["next_n"] == 4 else 1


def page_bytes(axes: Mapping[str, Any]) -> int:
    row = axes["head_dim"] // (2 if axes["kv_dtype"] == "fp4" else 1)
    return int(axes["page_size"] * (row + 4))


def padded(length: int) -> int:
    return -(-length // SEGMENT) * SEGMENT


@dataclass(frozen=True)
class Call:
    """Fields of the args of one of the two ops."""

    op: str
    axes: Mapping[str, Any]
    fields: Fields

    def changed(self, **changes: Any) -> Call:
        return replace(self, fields={**self.fields, **changes})

    def args(self, library: Kernseal) -> Any:
        return library.args(self.op, self.fields, {*ALIGN[self.op], "q_scales", "stream"})

    def run(self, library: Kernseal, handle: Any) -> int:
        return int(getattr(library.c, f"kseal_{self.op}_run")(handle, self.args(library)))


def _common(rng: random.Random, op: str) -> Fields:
    return {
        "num_ctas": rng.choice([0, 0, 1, 2, 132, 160, 16383]),
        "seq_len_stride": rng.choice([0, 1, 2, rng.randrange(1, 2**39)]),
        "stream": rng.choice([0, 1, 2, address(rng, 8)]),
        **{name: address(rng, align) for name, align in ALIGN[op].items()},
    }


def random_schedule(rng: random.Random, axes: Mapping[str, Any]) -> Call:
    most = 8192 // axes["atoms"]
    batch = rng.choice([1, 2, 31, 32, 33, most, rng.randrange(1, most)])
    return Call(SCHEDULE, axes, {**_common(rng, SCHEDULE), "batch_size": batch})


def random_logits(rng: random.Random, axes: Mapping[str, Any]) -> Call:
    next_n, dense = axes["next_n"], page_bytes(axes)
    batch = rng.choice([1, 2, 7, 64, rng.randrange(1, 4096)])
    columns = padded(rng.randrange(1, 2**31 // (batch * next_n) - SEGMENT))
    longest = rng.choice([1, columns, columns - 255, rng.randrange(1, columns + 1)])
    widest = (2**31 - 1) // (batch * next_n)
    pages = rng.choice([1, 2, rng.randrange(1, 2**24)])
    table = rng.choice([1, 17, rng.randrange(1, 2**20)])  # times the largest page is below 2^31
    fields = {
        **_common(rng, LOGITS),
        "batch_size": batch,
        "num_pages": pages,
        "max_pages_per_seq": table,
        "max_seq_len": longest,
        "kv_page_stride": rng.choice([0, dense, dense + 16 * rng.randrange(2**20)]),
        "page_table_stride": rng.choice([0, table, table + rng.randrange(2**30)]),
        "logits_stride": rng.choice([0, padded(longest), rng.randrange(padded(longest), widest + 1)]),
    }
    if axes["kv_dtype"] == "fp4":
        fields["q_scales"] = address(rng, 16)
    return Call(LOGITS, axes, fields)


def schedule_arguments(call: Call) -> dict[str, Tensor | Scalar]:
    f = call.fields
    return {
        "context_lens": Tensor(f["seq_lens"], (f["batch_size"],), (f["seq_len_stride"] or 1,)),
        "schedule_meta": Tensor(f["schedule"], ((f["num_ctas"] or SMS) + 1,)),
        "batch_size": Scalar("int32_t", f["batch_size"] * call.axes["atoms"]),
        "stream": Scalar("void *", f["stream"]),
    }


def logits_arguments(call: Call) -> dict[str, Tensor | Scalar]:
    """What FlashInfer passes: native tables and lengths, and as many rows of work as there are atoms."""
    f, axes = call.fields, call.axes
    batch, table = f["batch_size"], f["max_pages_per_seq"]
    work = batch * atoms(axes)
    stride = f["logits_stride"] or padded(f["max_seq_len"])
    return {
        "kv_fused": Tensor(f["kv"], (f["num_pages"],), (f["kv_page_stride"] or page_bytes(axes),)),
        "b": Tensor(f["q"], (work,)),
        "sf_q": Tensor(f.get("q_scales", 0), (work,)),
        "weights": Tensor(f["weights"], (work,)),
        "logits": Tensor(f["logits"], (batch * axes["next_n"], f["max_seq_len"]), (stride,)),
        "block_table": Tensor(f["page_table"], (batch, table), (f["page_table_stride"] or table,)),
        "context_lens": Tensor(f["seq_lens"], (batch,), (f["seq_len_stride"] or 1,)),
        "schedule_meta": Tensor(f["schedule"], ((f["num_ctas"] or SMS) + 1,)),
        "num_phys_blocks": Scalar("int32_t", f["num_pages"]),
        "batch_size": Scalar("int32_t", work),
        "stream": Scalar("void *", f["stream"]),
    }


def scorer_arguments(call: Call) -> dict[str, Tensor | Scalar]:
    """As ``run_paged_logits_kernel`` of b12x: two views of the pool, and CTAs by the rows there are."""
    f, given = call.fields, logits_arguments(call)
    rows = f["batch_size"] * call.axes["next_n"]
    stride = f["kv_page_stride"] or page_bytes(call.axes)
    return {
        "q_bytes": Tensor(f["q"], (rows,)),
        "weights": Tensor(f["weights"], (rows,)),
        "k_quant_bytes": Tensor(f["kv"], (f["num_pages"],), (stride,)),
        "k_scales": Tensor(f["kv"] + 64 * 128, (f["num_pages"],), (stride // 4,)),
        "real_page_table": given["block_table"],
        "seqlens_per_query": given["context_lens"],
        "active_width": Scalar("int32_t", f["max_seq_len"]),
        "ctas_per_row": Scalar("int32_t", scorer_ctas(call)),
        "logits_out": given["logits"],
        "stream": given["stream"],
    }


def scorer_ctas(call: Call) -> int:
    """What b12x's host code says for the rows of the call."""
    return upstream_ctas(call.fields["num_ctas"] or SMS, call.fields["batch_size"] * call.axes["next_n"])


def scorer_call(rng: random.Random, axes: Mapping[str, Any]) -> Call:
    return random_logits(rng, axes).changed(schedule=0)


RANDOM = {SCHEDULE: random_schedule, LOGITS: random_logits}
ARGUMENTS = {SCHEDULE: schedule_arguments, LOGITS: logits_arguments}
