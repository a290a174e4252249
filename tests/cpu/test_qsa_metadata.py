"""QSA metadata: what is launched for which sizes, what is refused in which words, and the oracle of its tables."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cpu.fake_driver import qsa
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.kernseal_library import Kernseal, stub, stub_library
from cpu.fake_driver.xqa import address

from kernseal.abi.library import KernelRecord
from kernseal.export import paths, spec
from kernseal.export.spec import Target
from kernseal.kernels.qsa_metadata.operands import SPEC

torch = pytest.importorskip("torch", reason="torch is not installed")

from kernseal.kernels.qsa_metadata.reference import NOTHING, Route, routes  # noqa: E402

OP = "qsa_metadata"
INVALID, UNALIGNED, OVERFLOW, UNSUPPORTED = "invalid_argument", "misaligned", "overflow", "unsupported"
KERNEL = spec.load_op(paths.kernels() / OP)
POINTERS = ("block_indices", "block_table", "token_to_request", "query_positions", "qo_indptr")
WRITTEN = ("page_indices", "memberships", "kv_lens")
BYTES = {"group": 4, "position_dtype": "i64", "query_major": False}
MASKS = {"group": 7, "position_dtype": "i32", "query_major": True}
PARAMS = struct.Struct("<8Q5q14i3Ii??2xi")
NAMES = (
    *POINTERS,
    *WRITTEN,
    *("indices_row", "indices_column", "indices_head", "table_row", "table_column"),
    *("rows", "routes", "requests", "table_width", "block_topk", "page_capacity", "membership_words"),
    *("max_seq_len", "model_blocks", "model_bits", "block_size", "block_shift", "fragment_size"),
    *("fragments_per_block", "candidates_per_query", "fragments_per_page", "pattern_heads"),
    *("locator_page_stride", "release", "count_current", "fixed_query_len"),
)


@pytest.fixture(scope="module")
def library(fake_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory) -> Kernseal:
    fake_gpu.reset()
    folder: Path = tmp_path_factory.mktemp("library")
    kernels = (KernelRecord("qsa_metadata", 0, 0, 0, 232448),)
    stubs = (stub(KERNEL, axes, Target("sm_100a"), kernels=kernels) for axes in (BYTES, MASKS))
    return Kernseal(stub_library(stubs, "sm_100a", folder))


def capacity(axes: Mapping[str, Any], fields: Mapping[str, Any]) -> int:
    sizes = {"dtype": "e4m3" if axes["query_major"] else "bf16", "grouped": True, "tile_q": 64}
    call = qsa.Call({**sizes, **fields}, {**fields, "group": axes["group"]})
    return call.page_capacity


def random_fields(rng: random.Random, axes: Mapping[str, Any]) -> dict[str, Any]:
    """A valid call."""
    group, page = axes["group"], rng.choice([16, 32, 64, 128])
    block = 4 if axes["query_major"] else rng.choice([4, 8, 16, 32, 64, 128])
    count = rng.choice([1, 2, 60, rng.randrange(1, 5000)])
    length = rng.choice([1, 5, 2048, 131072, 262144, rng.randrange(1, 2**22)])
    columns = -(-length // page) + rng.choice([0, 5])
    topk = rng.choice([1, 512, rng.randrange(1, 513)])
    fields = {
        "block_size": block,
        "page_size": page,
        "block_topk": topk,
        "count_current": rng.randrange(2),
        "flat_kv_heads": rng.choice([0, 1, 2]),
        "pdl": rng.randrange(2),
        "max_seq_len": length,
        "num_routes": count,
        "total_q": rng.randrange(count, count * group + 1),
        "num_requests": rng.randrange(1, 3000),
        "max_pages_per_request": columns,
        "block_indices_stride": rng.choice([0, topk + 3]),
        "block_table_stride": rng.choice([0, columns + 1]),
        **{name: address(rng, 8) for name in (*POINTERS, *WRITTEN)},
        "stream": rng.choice([0, 1, 2, address(rng, 8)]),
    }
    return {**fields, "page_capacity": capacity(axes, fields)}


def run(
    library: Kernseal, gpu: FakeGpu, axes: Mapping[str, Any], fields: Mapping[str, Any]
) -> tuple[str, str, list[dict[str, Any]]]:
    gpu.reset()
    gpu.device((10, 0), sms=148)
    handle = library.prepare(OP, axes)
    gpu.params([PARAMS.size])
    cast = library.ffi.cast
    values = {n: cast("void *", v) if n in (*POINTERS, *WRITTEN, "stream") else v for n, v in fields.items()}
    status = library.c.kseal_qsa_metadata_run(handle, library.struct(f"kseal_{OP}_args", **values))
    message = library.error() if status else ""
    launches = gpu.log("launch")
    assert library.c.kseal_qsa_metadata_release(handle) == 0
    return library.ffi.string(library.c.kseal_status_name(status)).decode(), message, launches


def smem_of(group: int, blocks: int) -> int:
    """As QTokenKvBlockSparseBitmapSmemBytes has it; the fixed part is upstream's struct, member by member."""
    fixed = 16 * 4 + 4 * group * 513 + 4 * 512
    fixed += -fixed % 8 + 4 * 4 + 2 * 8 + 4
    fixed += -fixed % 8
    fixed += -fixed % 16
    words = max(-(-blocks // 32), -(-min(blocks, 32768) // 4))
    each = -(-words // 512)
    stride = each + 1 if each % 2 == 0 else each
    return fixed + 512 * stride * 4 + (512 * 4 * 4 if blocks > 32768 else 0)


@pytest.mark.parametrize("axes", [BYTES, MASKS], ids=["bytes", "masks"])
def test_the_launch_is_what_upstreams_launcher_computes(
    library: Kernseal, gpu: FakeGpu, axes: dict[str, Any]
) -> None:
    rng = random.Random(axes["group"])
    for _ in range(60):
        f = random_fields(rng, axes)
        status, message, launches = run(library, gpu, axes, f)
        assert status == "ok", message
        (launch,) = launches
        blocks = -(-f["max_seq_len"] // f["block_size"])
        fragment = min(f["block_size"], f["page_size"])
        assert launch["grid"] == [f["num_routes"], 1, 1]
        assert launch["block"] == [512, 1, 1]
        assert launch["smem"] == smem_of(axes["group"], blocks)
        assert launch["stream"] == f["stream"]
        found = dict(zip(NAMES, PARAMS.unpack(bytes.fromhex(launch["params"][0])), strict=True))
        assert found == {
            **{name: f[name] for name in (*POINTERS, *WRITTEN)},
            "indices_row": f["block_indices_stride"] or f["block_topk"],
            "indices_column": 1,
            "indices_head": 0,
            "table_row": f["block_table_stride"] or f["max_pages_per_request"],
            "table_column": 1,
            "rows": f["total_q"],
            "routes": f["num_routes"],
            "requests": f["num_requests"],
            "table_width": f["max_pages_per_request"],
            "block_topk": f["block_topk"],
            "page_capacity": f["page_capacity"],
            "membership_words": -(-f["page_capacity"] // 4),
            "max_seq_len": f["max_seq_len"],
            "model_blocks": blocks,
            "model_bits": blocks.bit_length(),
            "block_size": f["block_size"],
            "block_shift": f["block_size"].bit_length() - 1,
            "fragment_size": fragment,
            "fragments_per_block": f["block_size"] // fragment,
            "candidates_per_query": f["block_topk"] + 1,
            "fragments_per_page": f["page_size"] // fragment,
            "pattern_heads": 1,
            "locator_page_stride": f["page_size"] // fragment * max(f["flat_kv_heads"], 1),
            "release": bool(f["pdl"]),
            "count_current": bool(f["count_current"]),
            "fixed_query_len": 0,
        }


def call(axes: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    fields = random_fields(random.Random(1), axes)
    sizes = {
        "block_size": 4,
        "page_size": 64,
        "block_topk": 512,
        "max_seq_len": 4096,
        "num_routes": 5,
        "total_q": 9,
        "max_pages_per_request": 64,
        "block_indices_stride": 0,
        "block_table_stride": 0,
    }
    return {**fields, **sizes, "page_capacity": 1024, **changes}


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], list[str]]] = [
    (INVALID, BYTES, {"num_routes": -1}, ["num_routes is -1"]),
    (INVALID, BYTES, {"block_size": 12}, ["block_size is 12", "64 or 128"]),
    (INVALID, MASKS, {"block_size": 8}, ["block_size is 8", "must be 4", "query_major is 1"]),
    (INVALID, BYTES, {"page_size": 8}, ["page_size is 8", "16, 32, 64 or 128"]),
    (INVALID, BYTES, {"block_topk": 513}, ["block_topk is 513", "1 to 512"]),
    (INVALID, BYTES, {"count_current": 2}, ["count_current and pdl are 2 and"]),
    (INVALID, BYTES, {"flat_kv_heads": -1}, ["flat_kv_heads is -1"]),
    (INVALID, BYTES, {"max_seq_len": 0}, ["max_seq_len is 0"]),
    (OVERFLOW, BYTES, {"num_routes": 65536, "total_q": 65536}, ["num_routes is 65536", "65535"]),
    (INVALID, BYTES, {"total_q": 21}, ["total_q is 21", "5 to 20", "1 to 4 tokens"]),
    (INVALID, BYTES, {"num_requests": 0}, ["num_requests is 0"]),
    (INVALID, BYTES, {"max_pages_per_request": 63}, ["max_pages_per_request is 63", "at least 64"]),
    (INVALID, BYTES, {"page_capacity": 1023}, ["page_capacity is 1023", "must be 1024"]),
    (INVALID, BYTES, {"block_indices_stride": 511}, ["block_indices_stride is 511", "at least 512"]),
    *((INVALID, BYTES, {name: 0}, [f"{name} is null"]) for name in (*POINTERS, *WRITTEN)),
    *((UNALIGNED, BYTES, {name: 4098}, [f"{name} is 0x1002"]) for name in (*POINTERS, *WRITTEN)),
    (UNALIGNED, BYTES, {"query_positions": 4100}, ["query_positions is 0x1004", "8 bytes"]),
    (
        UNSUPPORTED,
        BYTES,
        {"max_seq_len": 2**23, "max_pages_per_request": 2**17, "page_capacity": 2052},
        ["max_seq_len is 8388608", "2097152 blocks", "232448 are there"],
    ),
]


@pytest.mark.parametrize(
    ("status", "axes", "changes", "words"),
    REFUSED,
    ids=[f"{i}-{next(iter(changes))}" for i, (_, _, changes, _) in enumerate(REFUSED)],
)
def test_a_refusal_is_a_sentence(
    library: Kernseal,
    gpu: FakeGpu,
    status: str,
    axes: dict[str, Any],
    changes: dict[str, Any],
    words: list[str],
) -> None:
    found, message, launches = run(library, gpu, axes, call(axes, **changes))
    assert (found, launches) == (status, []), message
    assert [word for word in words if word not in message] == [], message


def test_every_sentence_of_the_launch_code_is_reached(library: Kernseal, gpu: FakeGpu) -> None:
    kernels = KERNEL.folder.parent
    text = "".join((kernels / name).read_text() for name in (f"{OP}/launch.c", "qsa_attention/tables.h"))
    quoted = re.findall(r'REFUSE\(KSEAL_\w+,\s*((?:"[^"]*"\s*)+)', text)
    formats = ["".join(re.findall(r'"([^"]*)"', part)) for part in quoted]
    assert len(formats) == text.count("REFUSE(KSEAL_")
    patterns = [re.sub(r"%(?:d|u|lld|p|s)", ".*", re.escape(found)) for found in formats]
    said = [run(library, gpu, axes, call(axes, **changes))[1] for _, axes, changes, _ in REFUSED]
    assert [s for s in patterns if not any(re.fullmatch(f"{OP}: {s}", x) for x in said)] == []


def test_no_routes_are_nothing_to_do(library: Kernseal, gpu: FakeGpu) -> None:
    assert run(library, gpu, BYTES, {"num_routes": 0}) == ("ok", "", [])


def test_the_operands_are_those_of_the_op() -> None:
    fields = {f["name"]: f["type"] for f in KERNEL.data["abi"]["args"]}
    assert set(SPEC.operands(SPEC.config_defaults)) == {n for n, kind in fields.items() if kind[:3] == "ptr"}
    assert set(SPEC.args_defaults) <= set(fields)
    for variant in KERNEL.variants(Target("sm_100a"), "full"):
        assert SPEC.variant(variant.axes) == variant.id


def oracle(**changes: Any) -> list[Route]:
    """Three routes over blocks of 8 in pages of 4, with pages 10, 11, 12, .. of request 0 and none of request 1 after 2."""
    table = torch.tensor([list(range(10, 20)), [5, 6, -1, -1, -1, -1, -1, -1, -1, -1]])
    given = {
        "qo_indptr": torch.tensor([0, 2, 2, 4]),
        "block_indices": torch.tensor([[0, 9], [1, 0], [0, 9], [0, 9]]),
        "block_table": table,
        "token_to_request": torch.tensor([0, 0, 1, 1]),
        "query_positions": torch.tensor([15, 16, 8, 9]),
        "group": 2,
        "block_size": 8,
        "page_size": 4,
        "max_seq_len": 40,
    }
    return routes(**{**given, **changes})


def test_the_oracle_by_hand() -> None:
    """Token 0 at 15 sees block 0 (9 is past its bound of 2) and no tail; token 1 at 16 blocks 1, 0 and its tail, block 2."""
    first, empty, second = oracle()
    assert first == Route([10, 11, 12, 13, 14, -1], [3, 3, 2, 2, 2, 0], 17)
    assert empty == NOTHING
    assert second == Route([5, 6, -1, -1], [3, 3, 0, 0], 10)
    assert oracle(flat_kv_heads=2)[0].entries == [20, 22, 24, 26, 28, -1]
    apart = oracle(count_current=False)[0]
    assert apart == Route([10, 11, 12, 13, 14, -1], [3, 3, 3, 3, 2, 0], 17)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_to_request": torch.tensor([0, 1, 1, 1])},
        {"token_to_request": torch.tensor([2, 2, 1, 1])},
        {"query_positions": torch.tensor([15, 17, 8, 9])},
        {"query_positions": torch.tensor([-1, 0, 8, 9])},
        {"max_seq_len": 16},
        {"group": 1},
    ],
)
def test_a_route_that_is_none_sees_nothing(changes: dict[str, Any]) -> None:
    assert oracle(**changes)[0] == NOTHING
