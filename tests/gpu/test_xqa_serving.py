"""A serving loop on XQA decode: captured graphs, a batch that changes every step, slots and pages that are used again.

``KERNSEAL_STEPS`` says how many steps (1000 unless given).
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu.xqa_problems import DTYPES, Runner, axes_of, name_of, worst_row  # noqa: E402

STEPS = int(os.environ.get("KERNSEAL_STEPS", "1000"))
SLOTS, CAPACITY, KV_HEADS = 8, 512, 2
BATCHES = (1, 2, 4, 8)
LIMIT = 8e-3


class Server:
    """Slots with a request each or none, over one pool of pages; a graph for each batch size.

    What a finished request leaves behind stays there: pages with its tokens, entries in its row of the table.
    """

    def __init__(self, bundle: Any, axes: dict[str, Any], rng: random.Random) -> None:
        self.axes, self.rng, self.page = axes, rng, axes["page_size"]
        self.runner = Runner(bundle, axes)
        pages = SLOTS * CAPACITY // self.page * 3 // 4
        shape = (pages, self.page, KV_HEADS, axes["head_dim"])
        self.k, self.v = (
            torch.full(shape, math.nan, device="cuda").to(DTYPES[axes["kv_dtype"]]) for _ in "kv"
        )
        self.table = torch.full((SLOTS, CAPACITY // self.page), -1, dtype=torch.int32, device="cuda")
        self.lengths = [0] * SLOTS
        self.pages: list[list[int]] = [[] for _ in range(SLOTS)]
        self.free = list(range(pages))
        heads = KV_HEADS * axes["group_size"]
        self.q = torch.zeros(SLOTS, heads, axes["head_dim"], device="cuda").to(DTYPES[axes["dtype"]])
        self.out = torch.zeros_like(self.q)
        self.rows = torch.zeros(SLOTS, dtype=torch.int32, device="cuda")
        self.batch_table = torch.full_like(self.table, -1)
        self.graphs = {size: self.capture(size) for size in BATCHES}

    def arguments(self, size: int) -> dict[str, Any]:
        return {
            "q": self.q[:size],
            "k": self.k,
            "v": self.v,
            "o": self.out[:size],
            "page_table": self.batch_table[:size],
            "seq_lens": self.rows[:size],
            "num_kv_heads": KV_HEADS,
            "semaphores": self.runner.semaphores,
        }

    def capture(self, size: int) -> Any:
        args = self.arguments(size)
        needed = self.runner.op.workspace_size(**args, stream=0)
        args["workspace"] = torch.full((max(needed, 1),), 0xFF, dtype=torch.uint8, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.runner.op.run(**args, stream=torch.cuda.current_stream())
        self.__dict__.setdefault("kept", []).append(args)
        return graph

    def grow(self, slot: int, count: int) -> bool:
        """Append ``count`` tokens; False where the pool or the row is full."""
        end = self.lengths[slot] + count
        wanted = -(-end // self.page) - len(self.pages[slot])
        if end > CAPACITY or wanted > len(self.free):
            return False
        for _ in range(wanted):
            self.pages[slot].append(self.free.pop(self.rng.randrange(len(self.free))))
        held = torch.tensor(self.pages[slot], dtype=torch.int32, device="cuda")
        self.table[slot, : len(held)] = held
        positions = torch.arange(self.lengths[slot], end, device="cuda")
        where = held[positions // self.page].long(), positions % self.page
        for cache in (self.k, self.v):
            fresh = torch.randn(count, KV_HEADS, self.axes["head_dim"], device="cuda")
            cache[where] = fresh.to(cache.dtype)
        self.lengths[slot] = end
        return True

    def cancel(self, slot: int) -> None:
        self.free += self.pages[slot]
        self.pages[slot], self.lengths[slot] = [], 0

    def step(self) -> tuple[list[int], float]:
        """Change who is served, replay the graph of the batch; the slots and the largest error."""
        for slot in range(SLOTS):
            if self.lengths[slot] == 0:
                if self.rng.random() < 0.3:
                    self.grow(slot, self.rng.choice([1, 15, 16, 17, 100, 255, 256, 257, 400]))
            elif self.rng.random() < 0.05 or not self.grow(slot, 1):
                self.cancel(slot)
        live = [slot for slot in range(SLOTS) if self.lengths[slot]]
        self.rng.shuffle(live)
        size = next(size for size in BATCHES if size >= max(len(live), 1))
        order = torch.tensor(live + [0] * (size - len(live)), device="cuda")
        lengths = [self.lengths[slot] for slot in live] + [0] * (size - len(live))
        self.q[:size] = torch.randn(self.q[:size].shape, device="cuda").to(self.q.dtype)
        self.rows[:size] = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.batch_table[:size] = self.table[order]
        self.out.fill_(math.nan)
        self.graphs[size].replay()
        torch.cuda.synchronize()
        assert self.out[len(live) : size].count_nonzero() == 0, "an empty row is zeros"
        return live, worst_row(self.out[: len(live)], self.expected(live)) if live else 0.0

    def expected(self, live: list[int]) -> Any:
        """All rows of the batch at once, in float64."""
        dim, count = self.axes["head_dim"], len(live)
        positions = torch.arange(CAPACITY, device="cuda")
        lengths = torch.tensor([self.lengths[slot] for slot in live], device="cuda")
        valid = positions[None] < lengths[:, None]
        pages = self.batch_table[:count, positions // self.page].long().clamp_min(0)
        keys, values = (
            torch.where(valid[..., None, None], cache[pages, positions % self.page].double(), 0.0)
            for cache in (self.k, self.v)
        )
        q = self.q[:count].double().view(count, KV_HEADS, -1, dim)
        logits = torch.einsum("bhgd,bnhd->bhgn", q, keys) / math.sqrt(dim)
        weights = logits.masked_fill(~valid[:, None, None, :], -math.inf).softmax(-1)
        return torch.einsum("bhgn,bnhd->bhgd", weights, values).reshape(count, -1, dim)


def test_a_serving_loop_stays_correct(bundle: Any, measure: Callable[..., None]) -> None:
    variants = [axes_of(v) for v in bundle.variants() if v.op == "xqa_decode"]
    plain = [
        a
        for a in variants
        if (a["head_dim"], a["group_size"], a["kv_dtype"]) == (128, 8, "bf16")
        and not (a["sliding_window"] or a["spec_decode"])
    ]
    if not plain:
        pytest.skip("this bundle has no plain variant of xqa_decode")
    torch.manual_seed(0)
    server = Server(bundle, plain[0], random.Random(5))
    worst, served = 0.0, 0
    for step in range(STEPS):
        live, error = server.step()
        worst, served = max(worst, error), served + len(live)
        assert error <= LIMIT, (name_of(plain[0]), step, live)
    measure(steps=STEPS, rows=served, worst=worst)
    assert server.runner.semaphores.count_nonzero() == 0
