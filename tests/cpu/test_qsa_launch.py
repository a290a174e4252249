"""QSA attention's launch code: what is refused in which words, how much scratch a run takes, and the choice of a variant."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from cpu.fake_driver import qsa
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.kernseal_library import Kernseal
from cpu.fake_driver.qsa import OP, Call, axes_of, library_of, op, random_call

from kernseal.export.spec import Target
from kernseal.kernels.qsa_attention.operands import SPEC, page_capacity, query_major

Axes = dict[str, Any]
INVALID, UNALIGNED, OVERFLOW = "invalid_argument", "misaligned", "overflow"
TOO_SMALL, UNSUPPORTED = "workspace_too_small", "unsupported"

SINGLE = axes_of(splits=4)
GROUPED = axes_of(grouped=True, tile_q=64, splits=3)
FLAT = axes_of(dtype="e4m3", grouped=True, tile_q=128, flat_kv_heads=2)
INT32 = axes_of(position_dtype="i32", block_size=128, page_size=16)
KINDS = [SINGLE, GROUPED, FLAT, INT32]


@pytest.fixture(scope="module")
def library(fake_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory) -> Kernseal:
    fake_gpu.reset()
    return library_of(KINDS, tmp_path_factory.mktemp("library"))


def call(axes: Axes = SINGLE, **changes: Any) -> Call:
    """A valid call of moderate size, with ``changes``."""
    made = random_call(random.Random(1), axes)
    heads = axes["flat_kv_heads"] or 2
    sizes = {
        "num_kv_heads": heads,
        "num_q_heads": heads * axes["heads_per_kv"],
        "group": 3 if axes["grouped"] else 1,
        "block_topk": 512,
        "num_routes": 5,
        "total_q": 9 if axes["grouped"] else 5,
        "num_pages": 1000,
        "max_seq_len": 4096,
        "max_pages_per_request": 0 if axes["grouped"] else 4096 // axes["page_size"],
        **dict.fromkeys(("kv_page_stride", "kv_head_stride", "kv_token_stride"), 0),
        **dict.fromkeys(("block_indices_stride", "block_table_stride"), 0),
    }
    return Call(axes, {**made.fields, **sizes, **changes})


def status_of(library: Kernseal, status: int) -> str:
    name: bytes = library.ffi.string(library.c.kseal_status_name(status))
    return name.decode()


def run(library: Kernseal, gpu: FakeGpu, made: Call) -> tuple[str, str]:
    gpu.device((10, 0), sms=148)
    handle = library.prepare(OP, made.axes)
    status = library.c.kseal_qsa_attention_run(handle, made.args(library))
    message = library.error() if status else ""
    assert library.c.kseal_qsa_attention_release(handle) == 0
    assert gpu.log("launch") == []
    return status_of(library, status), message


def workspace(library: Kernseal, gpu: FakeGpu, made: Call) -> int:
    gpu.device((10, 0), sms=148)
    handle = library.prepare(OP, made.axes)
    size = library.ffi.new("uint64_t *", 77)
    status = library.c.kseal_qsa_attention_workspace_size(handle, made.args(library), size)
    assert status == 0, library.error()
    assert library.c.kseal_qsa_attention_release(handle) == 0
    return int(size[0])


REFUSED: list[tuple[str, Axes, dict[str, Any], list[str]]] = [
    (INVALID, SINGLE, {"num_routes": -1}, ["num_routes is -1", "not be negative"]),
    (INVALID, SINGLE, {"num_kv_heads": 0}, ["num_kv_heads is 0", "from 1 to 65535"]),
    (
        INVALID,
        SINGLE,
        {"num_q_heads": 23},
        ["num_q_heads is 23", "12 times num_kv_heads (2)", "heads_per_kv"],
    ),
    (
        INVALID,
        FLAT,
        {"num_kv_heads": 1, "num_q_heads": 12},
        ["num_kv_heads is 1", "must be 2", "flat_kv_heads"],
    ),
    (INVALID, SINGLE, {"group": 2}, ["group is 2", "must be 1", "grouped is 0"]),
    (INVALID, GROUPED, {"group": 1}, ["group is 1", "from 2 to 5", "tile_q is 64", "heads_per_kv 12"]),
    (INVALID, GROUPED, {"group": 6, "total_q": 30}, ["group is 6", "from 2 to 5"]),
    (INVALID, FLAT, {"group": 9}, ["group is 9", "from 2 to 8"]),
    (INVALID, SINGLE, {"block_topk": 0}, ["block_topk is 0", "1 to 512"]),
    (INVALID, SINGLE, {"block_topk": 513}, ["block_topk is 513", "1 to 512"]),
    (INVALID, SINGLE, {"max_seq_len": 0}, ["max_seq_len is 0", "1 to 2147483392"]),
    (OVERFLOW, SINGLE, {"num_routes": 65536, "total_q": 65536}, ["num_routes is 65536", "65535"]),
    (INVALID, SINGLE, {"total_q": 4}, ["total_q is 4", "from 5 to 5", "1 to 1 tokens"]),
    (INVALID, GROUPED, {"total_q": 16}, ["total_q is 16", "from 5 to 15", "1 to 3 tokens"]),
    (
        OVERFLOW,
        FLAT,
        {"num_routes": 65535, "group": 8, "total_q": 65535},
        ["num_routes is 65535", "R * group"],
    ),
    (INVALID, SINGLE, {"scale": 0.0}, ["scale is 0", "finite"]),
    (INVALID, SINGLE, {"out_scale": float("inf")}, ["out_scale is inf", "finite"]),
    (INVALID, SINGLE, {"num_pages": 0}, ["num_pages is 0", "positive"]),
    (OVERFLOW, SINGLE, {"num_pages": 2**27}, ["num_pages is 134217728", "16 fragments", "2^31"]),
    (OVERFLOW, FLAT, {"num_pages": 2**24}, ["num_pages is 16777216", "page_size * Hkv", "flat_kv_heads"]),
    (INVALID, SINGLE, {"kv_page_stride": -1}, ["kv_page_stride is -1", "positive", "dense HND"]),
    (INVALID, SINGLE, {"kv_token_stride": 2**39}, ["kv_token_stride is 549755813888", "2^40 bytes"]),
    (UNALIGNED, SINGLE, {"kv_head_stride": 16388}, ["kv_head_stride is 16388", "multiple of 16 bytes"]),
    (UNALIGNED, FLAT, {"kv_head_stride": 16392}, ["kv_head_stride is 16392", "multiple of 16 bytes"]),
    (INVALID, SINGLE, {"kv_token_stride": 248}, ["kv_token_stride is 248", "at least 256", "overlap"]),
    (INVALID, SINGLE, {"kv_head_stride": 256}, ["is 256", "at least 16384", "overlap"]),
    (INVALID, SINGLE, {"kv_page_stride": 16384}, ["is 16384", "at least", "overlap"]),
    (OVERFLOW, SINGLE, {"kv_page_stride": 2**38, "num_pages": 2**24}, ["kv_page_stride is", "2^61"]),
    (INVALID, FLAT, {"kv_page_stride": 65536}, ["65536, 16384, 256", "32768, 16384, 256", "flat_kv_heads"]),
    *(
        (INVALID, GROUPED, {name: 8}, [f"{name} is 8", "must be 0", "grouped is 1"])
        for name in ("num_requests", "max_pages_per_request", "block_indices_stride", "block_table_stride")
    ),
    (INVALID, SINGLE, {"num_requests": 0}, ["num_requests is 0", "positive"]),
    (INVALID, SINGLE, {"max_pages_per_request": 63}, ["max_pages_per_request is 63", "at least 64"]),
    (INVALID, SINGLE, {"block_indices_stride": 511}, ["block_indices_stride is 511", "at least 512"]),
    (INVALID, SINGLE, {"block_table_stride": 63}, ["block_table_stride is 63", "at least 64"]),
    *((INVALID, SINGLE, {name: 0}, [f"{name} is null", "needed"]) for name in (*qsa.ALWAYS, *qsa.SINGLE)),
    *((INVALID, GROUPED, {name: 0}, [f"{name} is null", "grouped is 1"]) for name in qsa.GROUPED),
    *((INVALID, GROUPED, {name: 64}, [f"{name} is 0x40", "must be null", "is 1"]) for name in qsa.SINGLE),
    *((INVALID, SINGLE, {name: 64}, [f"{name} is 0x40", "must be null", "is 0"]) for name in qsa.GROUPED),
    *(
        (UNALIGNED, axes, {name: 4096 + align // 2}, [f"{name} is 0x", f"aligned to {align} bytes"])
        for axes, known in ((SINGLE, qsa.SINGLE), (GROUPED, qsa.GROUPED))
        for name, align in {**qsa.ALWAYS, **known, "workspace": 256}.items()
    ),
    (UNALIGNED, INT32, {"query_positions": 4098}, ["query_positions is 0x1002", "aligned to 4 bytes"]),
    (TOO_SMALL, SINGLE, {"workspace_bytes": 7}, ["workspace_bytes is 7", "are needed"]),
    (INVALID, SINGLE, {"workspace": 0}, ["workspace is null", "needed"]),
    (
        OVERFLOW,
        SINGLE,
        {"num_routes": 65535, "total_q": 65535, "num_kv_heads": 5, "num_q_heads": 60},
        ["num_routes is 65535; R * Hkv * splits * group * heads_per_kv * D", "splits 4"],
    ),
]
CHOICES: list[tuple[str, dict[str, Any], dict[str, Any], list[str]]] = [
    (UNSUPPORTED, {"heads_per_kv": 129}, {}, ["config.heads_per_kv is 129", "1 to 128"]),
    (UNSUPPORTED, {"heads_per_kv": 0}, {}, ["config.heads_per_kv is 0", "1 to 128"]),
    (UNSUPPORTED, {"block_size": 0}, {}, ["config.block_size and page_size are 0 and 64"]),
    (UNSUPPORTED, {"page_size": 256}, {}, ["config.block_size and page_size are 4 and 256"]),
    (INVALID, {"splits": 2}, {}, ["config.splits is 2", "1 for none", "0 for as many"]),
    (INVALID, {}, {"group": 9}, ["group is 9", "1 to 8"]),
    (INVALID, {"heads_per_kv": 64}, {"group": 3}, ["group is 3", "1 to 2", "heads_per_kv is 64"]),
    (INVALID, {}, {"num_kv_heads": 0}, ["num_kv_heads is 0", "1 to 65535"]),
    (INVALID, {}, {"num_routes": 65536}, ["num_routes is 65536", "0 to 65535"]),
    (INVALID, {}, {"num_pages": -1}, ["num_pages is -1", "not be negative"]),
    (INVALID, {}, {"block_topk": 513}, ["block_topk is 513", "1 to 512"]),
]


@pytest.mark.parametrize(
    ("status", "axes", "changes", "words"),
    REFUSED,
    ids=[f"{i}-{next(iter(changes))}" for i, (_, _, changes, _) in enumerate(REFUSED)],
)
def test_a_refusal_is_a_sentence(
    library: Kernseal, gpu: FakeGpu, status: str, axes: Axes, changes: dict[str, Any], words: list[str]
) -> None:
    found, message = run(library, gpu, call(axes, **changes))
    assert found == status, message
    assert message.startswith("qsa_attention: ")
    assert [word for word in words if word not in message] == [], message


def choose(library: Kernseal, config: dict[str, Any], **changes: Any) -> tuple[str, str, Any]:
    asked = library.config(OP, SINGLE)
    for name, value in {"splits": 0, **config}.items():
        setattr(asked, name, value)
    before = bytes(library.ffi.buffer(asked))
    status = library.c.kseal_qsa_attention_choose(call(**changes).args(library), 148, asked)
    if status:
        assert bytes(library.ffi.buffer(asked)) == before
    return status_of(library, status), library.error() if status else "", asked


@pytest.mark.parametrize(("status", "config", "changes", "words"), CHOICES)
def test_a_choice_is_refused_with_a_sentence(
    library: Kernseal, status: str, config: dict[str, Any], changes: dict[str, Any], words: list[str]
) -> None:
    found, message, _ = choose(library, config, **changes)
    assert found == status, message
    assert [word for word in words if word not in message] == [], message


def test_a_choice_without_sms_or_structs_is_refused(library: Kernseal) -> None:
    config, args = library.config(OP, SINGLE), call().args(library)
    assert library.c.kseal_qsa_attention_choose(args, 0, config) == library.c.KSEAL_INVALID_ARGUMENT
    assert "sm_count is 0" in library.error()
    for given in ((library.ffi.NULL, 148, config), (args, 148, library.ffi.NULL)):
        assert library.c.kseal_qsa_attention_choose(*given) == library.c.KSEAL_INVALID_ARGUMENT
        assert "is null" in library.error()


def sentences() -> list[str]:
    """A pattern for each sentence of the op's own."""
    text = "".join((op().folder / name).read_text() for name in ("launch.c", "tables.h"))
    quoted = re.findall(r'REFUSE\(KSEAL_\w+,\s*((?:"[^"]*"\s*)+)', text)
    formats = ["".join(re.findall(r'"([^"]*)"', part)) for part in quoted]
    assert len(formats) == text.count("REFUSE(KSEAL_")
    return [re.sub(r"%(?:d|u|lld|llu|g|p|s)", ".*", re.escape(found)) for found in formats]


def test_every_sentence_of_the_launch_code_is_reached(library: Kernseal, gpu: FakeGpu) -> None:
    said = [run(library, gpu, call(axes, **changes))[1] for _, axes, changes, _ in REFUSED]
    said += [choose(library, config, **changes)[1] for _, config, changes, _ in CHOICES]
    silent = [s for s in sentences() if not any(re.fullmatch(f"qsa_attention: {s}", text) for text in said)]
    assert silent == []


def test_no_routes_are_nothing_to_do(library: Kernseal, gpu: FakeGpu) -> None:
    empty = Call(SINGLE, {"num_routes": 0})
    assert run(library, gpu, empty) == ("ok", "")
    assert workspace(library, gpu, empty) == 0


@pytest.mark.parametrize("axes", KINDS, ids=["single", "grouped", "flat", "int32"])
def test_scratch_is_what_the_splits_write(library: Kernseal, gpu: FakeGpu, axes: Axes) -> None:
    rng = random.Random(5)
    for _ in range(50):
        made = random_call(rng, axes)
        rows = made.split_rows if axes["splits"] > 1 else 0
        partial = -(-rows * axes["head_dim"] * 2 // 256) * 256
        assert workspace(library, gpu, made) == partial + rows * 4


def test_a_flat_cache_is_chosen_where_there_is_one(library: Kernseal) -> None:
    def flat(**changes: Any) -> int:
        status, message, config = choose(library, {"dtype": library.c.KSEAL_DTYPE_E4M3}, **changes)
        assert status == "ok", message
        return int(config.flat_kv_heads)

    one = {"num_kv_heads": 1}
    assert flat(**one) == 1
    assert flat(**one, kv_page_stride=16384) == 1
    assert flat(**one, kv_page_stride=16400) == 0
    assert flat(num_kv_heads=2) == 0
    assert flat(num_kv_heads=2, group=4) == 2
    assert flat(num_kv_heads=3, group=4) == 0
    assert flat(**one, num_pages=2**25) == 0


def test_the_full_profile_has_every_variant_of_a_serving_engine(library: Kernseal) -> None:
    """Decode and drafts of every batch up to 4,096, and prefill: nothing that the policy asks for is missing."""
    fields = {"block_topk": 512, "max_seq_len": 2**17, "num_pages": 10000}
    need = set()
    for dtype in ("bf16", "e4m3"):
        for heads in (1, 2):
            for group in range(1, 9):
                for routes in [*range(1, 300), 512, 1000, 4096]:
                    for splits in (0, 1):
                        sizes = {"num_kv_heads": heads, "group": group, "num_routes": routes, **fields}
                        config = library.config(OP, axes_of(dtype=dtype))
                        config.splits = splits
                        args = Call({}, sizes).args(library)
                        assert library.c.kseal_qsa_attention_choose(args, 148, config) == 0
                        chosen = (config.grouped, config.tile_q, config.splits, config.persistent)
                        need.add((dtype, *chosen, config.flat_kv_heads))
    have = {
        (
            v.axes["dtype"],
            *(int(v.axes[n]) for n in ("grouped", "tile_q", "splits", "persistent", "flat_kv_heads")),
        )
        for v in op().variants(Target("sm_100a"), "full")
    }
    assert need - have == set()
    assert len(need) > 200


def test_the_operands_are_those_of_the_op() -> None:
    data = op().data
    fields = {f["name"] for f in data["abi"]["args"]}
    pointers = {f["name"] for f in data["abi"]["args"] if f["type"].startswith("ptr")}
    assert set(SPEC.operands(SPEC.config_defaults)) == pointers
    assert set(SPEC.args_defaults) <= fields
    assert {k: v for k, v in SPEC.config_defaults.items() if k in data["axes"]} == data["defaults"]
    sizes = {"group": 2, "block_topk": 3, "max_seq_len": 99, "block_size": 4, "page_size": 64}
    known = fields | set(SPEC.config_defaults) | set(SPEC.derive(sizes))
    for axes in KINDS:
        shapes = {s.removesuffix("+1") for o in SPEC.operands(axes).values() for s in o.shape}
        assert shapes <= known


@pytest.mark.parametrize("axes", KINDS, ids=["single", "grouped", "flat", "int32"])
def test_the_loader_knows_the_width_of_the_tables(axes: Axes) -> None:
    rng = random.Random(6)
    for _ in range(50):
        made = random_call(rng, axes)
        assert page_capacity({**axes, **made.fields}, query_major(axes)) == made.page_capacity


def test_the_names_of_the_variants_are_those_of_the_build() -> None:
    for variant in op().variants(Target("sm_100a"), "full"):
        assert SPEC.variant(variant.axes) == variant.id


@pytest.mark.parametrize("rule", op().data["excludes"], ids=lambda rule: str(rule["why"])[:40])
def test_a_combination_that_no_class_has_says_why(
    library: Kernseal, gpu: FakeGpu, rule: dict[str, Any]
) -> None:
    gpu.device((10, 0), sms=148)
    axes = {**SINGLE, "splits": 1, **{name: values[0] for name, values in rule["when"].items()}}
    out = library.ffi.new(f"kseal_{OP} **")
    status = library.c.kseal_qsa_attention_prepare(library.bundle, library.config(OP, axes), out)
    assert status == library.c.KSEAL_UNSUPPORTED
    first = op().excluded("prims_ts", axes)
    assert first is not None
    assert f"; {first}; this bundle (sm_100a) has: " in library.error()
