"""QSA on hardware: metadata against its oracle, entry by entry; attention, where there is a Blackwell, against float64.

Metadata runs on Hopper too, from the kernels of SM 10.0 rebuilt for it, which ``tests/gpu/pack.sh`` makes.
Attention needs tcgen05.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu.bundles import DIST, policy  # noqa: E402
from gpu.variants import variants_of  # noqa: E402

from kernseal.kernels.qsa_attention.reference import attention  # noqa: E402
from kernseal.kernels.qsa_metadata.reference import routes  # noqa: E402
from kernseal.loader.bundle import open_bundle  # noqa: E402

FOLDERS = {
    (9, 0): "validation/sm_100a-on-sm_90a-linux-x86_64",
    (10, 0): "sm_100a-linux-x86_64",
    (10, 3): "sm_103a-linux-x86_64",
}
LENGTHS = [1, 3, 4, 5, 64, 127, 128, 129, 1000, 4096]
MAX_SEQ_LEN = 5000
UNWRITTEN = -123456789
LIMIT = {"bf16": 8e-3, "f16": 2e-3, "e4m3": 5e-2}
"""Largest ||error|| / ||reference|| of one head of one token: o is bf16 or f16, and e4m3 rounds the weights to 3 bits."""

Axes = dict[str, Any]
Measure = Callable[..., None]


@pytest.fixture(scope="module")
def bundle() -> Iterator[Any]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    capability = torch.cuda.get_device_capability(0)
    name = FOLDERS.get(capability, "none")
    path = DIST / name
    if not path.is_dir():
        pytest.skip(f"GPU 0 is SM {capability[0]}.{capability[1]}, and there is no bundle {path} for it")
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    with open_bundle(path, policy=policy(name), allow_validation="-on-" in name) as opened:
        yield opened
        torch.cuda.synchronize()


def variants(bundle: Any, op: str) -> list[Axes]:
    words = {"0": False, "1": True}
    switches = ("query_major", "grouped", "count_current", "persistent")

    def value(name: str, text: str) -> Any:
        return words[text] if name in switches else int(text) if text.isdigit() else text

    return [{n: value(n, t) for n, t in v.axes.items()} for v in variants_of(bundle, op)]


@dataclass
class Problem:
    """Requests whose last ``group`` tokens ask, fewer where they have fewer: each is a route."""

    group: int
    block_size: int
    page_size: int
    topk: int
    count_current: bool
    qo_indptr: Any
    block_indices: Any
    block_table: Any
    token_to_request: Any
    query_positions: Any

    @property
    def shape(self) -> dict[str, Any]:
        return {"block_size": self.block_size, "page_size": self.page_size, "max_seq_len": MAX_SEQ_LEN}

    @property
    def tables(self) -> dict[str, Any]:
        names = ("qo_indptr", "block_indices", "block_table", "token_to_request", "query_positions")
        return {name: getattr(self, name) for name in names}

    def capacity(self, masks: bool) -> int:
        blocks = min(self.group * (self.topk + 1), -(-MAX_SEQ_LEN // self.block_size))
        fragments = blocks * max(1, self.block_size // self.page_size)
        return -(-fragments // 32) * 32 if masks else fragments


def make(
    group: int,
    *,
    block_size: int = 4,
    page_size: int = 64,
    topk: int = 40,
    count_current: bool = True,
    position_dtype: str = "i64",
    seed: int = 0,
) -> Problem:
    """Unread entries of block_indices are out of range; half of the pages that nobody needs are negative."""
    torch.manual_seed(seed)
    positions, requests, ends, rows = [], [], [0], []
    for request, length in enumerate(LENGTHS):
        for position in range(max(0, length - group), length):
            bound = (position + count_current) // block_size
            chosen = torch.randperm(bound)[:topk]
            rows.append(torch.cat([chosen, torch.full((topk - len(chosen),), 2**31 - 1)]))
            positions.append(position)
            requests.append(request)
        ends.append(len(positions))
    pages = -(-MAX_SEQ_LEN // page_size)
    table = torch.randperm(pages * len(LENGTHS)).view(len(LENGTHS), pages)
    for request, length in enumerate(LENGTHS):
        table[request, -(-length // page_size) :: 2] = -1
    kind = torch.int64 if position_dtype == "i64" else torch.int32
    return Problem(
        group,
        block_size,
        page_size,
        topk,
        count_current,
        torch.tensor(ends, dtype=torch.int32, device="cuda"),
        torch.stack(rows).to(torch.int32).cuda(),
        table.to(torch.int32).cuda(),
        torch.tensor(requests, dtype=torch.int32, device="cuda"),
        torch.tensor(positions, dtype=kind, device="cuda"),
    )


def metadata(bundle: Any, axes: Mapping[str, Any], p: Problem, flat: int = 0) -> dict[str, Any]:
    capacity, count = p.capacity(axes["query_major"]), len(LENGTHS)
    out = {
        "page_indices": torch.full((count, capacity), UNWRITTEN, dtype=torch.int32, device="cuda"),
        "memberships": torch.full((count, -(-capacity // 4)), UNWRITTEN, dtype=torch.int32, device="cuda"),
        "kv_lens": torch.full((count,), UNWRITTEN, dtype=torch.int32, device="cuda"),
    }
    op = bundle.prepare("qsa_metadata", **axes)
    op(**p.tables, **p.shape, **out, count_current=int(p.count_current), flat_kv_heads=flat, pdl=1)
    torch.cuda.synchronize()
    return out


def bits(axes: Mapping[str, Any], words: Any, entries: int, group: int) -> list[int]:
    """The tokens that see each entry, from one row of memberships."""
    if not axes["query_major"]:
        return words.contiguous().view(torch.uint8)[:entries].tolist()
    masks = (words.cpu().long() & 0xFFFFFFFF).view(-1, 8).tolist()
    return [sum((masks[i // 32][g] >> i % 32 & 1) << g for g in range(group)) for i in range(entries)]


def check_tables(axes: Mapping[str, Any], p: Problem, out: Mapping[str, Any], flat: int = 0) -> None:
    tables = {name: tensor.cpu() for name, tensor in p.tables.items()}
    expected = routes(**tables, **p.shape, group=p.group, count_current=p.count_current, flat_kv_heads=flat)
    for row, want in enumerate(expected):
        count = len(want.entries)
        assert out["page_indices"][row, :count].tolist() == want.entries, LENGTHS[row]
        assert (out["page_indices"][row, count:] == UNWRITTEN).all(), "written past the union"
        assert bits(axes, out["memberships"][row], count, p.group) == want.members, LENGTHS[row]
        assert int(out["kv_lens"][row]) == want.kv_len, LENGTHS[row]


def test_the_tables_are_those_of_the_oracle(bundle: Any) -> None:
    for axes in variants(bundle, "qsa_metadata"):
        sizes = [(4, 64)] if axes["query_major"] else [(4, 64), (16, 16), (64, 32), (128, 16), (8, 128)]
        for block, page in sizes:
            for count_current in (True, False):
                p = make(
                    axes["group"],
                    block_size=block,
                    page_size=page,
                    count_current=count_current,
                    position_dtype=axes["position_dtype"],
                )
                check_tables(axes, p, metadata(bundle, axes, p))
                check_tables(axes, p, metadata(bundle, axes, p, flat=2), flat=2)


def test_routes_that_are_none_see_nothing(bundle: Any) -> None:
    for axes in variants(bundle, "qsa_metadata"):
        p = make(axes["group"], position_dtype=axes["position_dtype"])
        p.token_to_request[-1] = len(LENGTHS)
        p.query_positions[0] = MAX_SEQ_LEN
        check_tables(axes, p, metadata(bundle, axes, p))


def test_tables_captured_are_tables_run(bundle: Any) -> None:
    for axes in variants(bundle, "qsa_metadata"):
        p = make(axes["group"], position_dtype=axes["position_dtype"])
        eager = metadata(bundle, axes, p)
        captured = {name: torch.full_like(t, UNWRITTEN) for name, t in eager.items()}
        op = bundle.prepare("qsa_metadata", **axes)
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            op(**p.tables, **p.shape, **captured, count_current=1, flat_kv_heads=0, pdl=0)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(eager[name], captured[name]) for name in eager)


# ---- attention ----


@dataclass
class Run:
    """A problem with queries and a cache, and the run of one variant on it."""

    bundle: Any
    axes: Axes
    p: Problem
    heads: int

    def __post_init__(self) -> None:
        ratio, dim = self.axes["heads_per_kv"], self.axes["head_dim"]
        kind = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn}[self.axes["dtype"]]
        pages = self.p.block_table.numel()
        rows = len(self.p.token_to_request)
        self.q = torch.randn(rows, ratio * self.heads, dim, device="cuda").to(kind)
        shape = (pages, self.heads, self.p.page_size, dim)
        self.k, self.v = (torch.randn(shape, device="cuda").to(kind) for _ in range(2))
        self.out_kind = {"bf16": torch.bfloat16, "f16": torch.float16}[self.axes["out_dtype"]]
        self.scale = dim**-0.5

    def tables(self) -> dict[str, Any]:
        if not self.axes["grouped"]:
            names = ("block_indices", "block_table", "token_to_request", "query_positions")
            return {name: getattr(self.p, name) for name in names}
        masks = self.axes["dtype"] == "e4m3" and self.axes["block_size"] == 4 and self.axes["tile_q"] >= 64
        axes = {"group": self.p.group, "position_dtype": "i64", "query_major": masks}
        return metadata(self.bundle, axes, self.p, self.axes["flat_kv_heads"])

    def arguments(self, out: Any) -> dict[str, Any]:
        return {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "o": out,
            "qo_indptr": self.p.qo_indptr,
            "group": self.p.group,
            "block_topk": self.p.topk,
            "scale": self.scale,
            "out_scale": 1.0,
            "max_seq_len": MAX_SEQ_LEN,
            **self.tables(),
        }

    def empty(self) -> Any:
        return torch.full(self.q.shape, torch.nan, dtype=self.out_kind, device="cuda")

    def __call__(self) -> Any:
        out = self.empty()
        op = self.bundle.prepare("qsa_attention", **self.axes)
        given = self.arguments(out)
        size = op.workspace_size(**given, stream=0)
        op(**given, workspace=torch.empty(max(size, 256), dtype=torch.uint8, device="cuda"))
        torch.cuda.synchronize()
        return out

    def worst(self, out: Any) -> float:
        wanted = attention(
            self.q.float(),
            self.k.float(),
            self.v.float(),
            *(self.p.block_indices, self.p.block_table, self.p.token_to_request, self.p.query_positions),
            block_size=self.p.block_size,
            max_seq_len=MAX_SEQ_LEN,
            scale=self.scale,
            count_current=self.p.count_current,
        )
        return float(((out.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


def runs(bundle: Any) -> Iterator[Run]:
    if torch.cuda.get_device_capability(0)[0] != 10:
        pytest.skip("the attention kernels are tcgen05: SM 10.0 and 10.3 only")
    for axes in variants(bundle, "qsa_attention"):
        group = min(8, axes["tile_q"] // axes["heads_per_kv"]) if axes["grouped"] else 1
        sizes = {name: axes[name] for name in ("block_size", "page_size", "count_current", "position_dtype")}
        yield Run(bundle, axes, make(group, **sizes), axes["flat_kv_heads"] or 2)


def test_attention_agrees_with_the_oracle(bundle: Any, measure: Measure) -> None:
    wrong = {}
    for run in runs(bundle):
        name = "-".join(str(v) for v in run.axes.values())
        error = run.worst(run())
        measure(**{name: error})
        if not error <= LIMIT[run.axes["dtype"]]:
            wrong[name] = error
    assert wrong == {}


def test_attention_twice_is_the_same_to_the_bit(bundle: Any) -> None:
    for run in runs(bundle):
        assert torch.equal(run(), run()), run.axes


def test_pages_past_a_request_are_never_read(bundle: Any) -> None:
    """What no token sees may be anything, but for the rows that share a block with its last token."""
    for run in runs(bundle):
        before = run()
        used = torch.zeros(run.k.shape[0], dtype=torch.bool, device="cuda")
        for request, length in enumerate(LENGTHS):
            used[run.p.block_table[request, : -(-length // run.p.page_size)].long()] = True
        for cache in (run.k, run.v):
            cache[~used] = torch.nan
        assert torch.equal(run(), before), run.axes


def test_attention_captured_is_attention_run(bundle: Any) -> None:
    for run in runs(bundle):
        eager, out = run(), run.empty()
        op = bundle.prepare("qsa_attention", **run.axes)
        given = run.arguments(out)
        workspace = torch.empty(
            max(op.workspace_size(**given, stream=0), 256), dtype=torch.uint8, device="cuda"
        )
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            op(**given, workspace=workspace)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, eager), run.axes
