"""What the loader makes of paged MQA's arguments, and that description, operands and profiles of both ops agree."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from kernseal.export import paths, spec
from kernseal.kernels.paged_mqa_logits.operands import SPEC as LOGITS
from kernseal.kernels.paged_mqa_schedule.operands import SPEC as SCHEDULE
from kernseal.loader.binder import Binder
from kernseal.loader.errors import InvalidArgument
from kernseal.loader.layout import Layout
from kernseal.loader.library import declarations

torch = pytest.importorskip("torch", reason="torch is not installed")

from cpu.test_loader_arguments import OnDevice  # noqa: E402

SPECS = {"paged_mqa_logits": LOGITS, "paged_mqa_schedule": SCHEDULE}
KERNELS = {op: yaml.safe_load((paths.kernels() / op / "kernel.yaml").read_text()) for op in SPECS}
ARGS = {op: Layout(declarations(), f"kseal_{op}_args") for op in SPECS}
FP8 = {**LOGITS.config_defaults, "device": 0, "next_n": 2}
FP4 = {**FP8, "kv_dtype": "fp4", "out_dtype": "bf16"}
B, PAGES, COLUMNS, H, CTAS = 3, 9, 5, 64, 148
i32, u8 = torch.int32, torch.uint8


def bind(op: str, config: dict[str, Any], **given: Any) -> dict[str, Any]:
    wrapped = {n: OnDevice(t) if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    return Binder(ARGS[op], SPECS[op], config).values({**wrapped, "stream": 0})


def logits(config: dict[str, Any] = FP8, **changes: Any) -> dict[str, Any]:
    fp4 = config["kv_dtype"] == "fp4"
    head = 64 if fp4 else 128
    q = torch.zeros(B, 2, H, head, dtype=u8)
    given = {
        "q": q if fp4 else q.to(torch.float8_e4m3fn),
        "q_scales": torch.zeros(B, 2, H, 4, dtype=u8) if fp4 else None,
        "kv": torch.zeros(PAGES, 64 * (head + 4), dtype=u8),
        "weights": torch.zeros(B * 2, H),
        "page_table": torch.zeros(B, COLUMNS, dtype=i32),
        "seq_lens": torch.zeros(B, dtype=i32),
        "schedule": torch.zeros(CTAS + 1, 2, dtype=i32),
        "logits": torch.zeros(B * 2, 512, dtype=torch.bfloat16 if fp4 else torch.float32),
        "max_seq_len": 300,
    }
    return bind("paged_mqa_logits", config, **given | changes)


@pytest.mark.parametrize("op", SPECS)
@pytest.mark.parametrize("config", [FP8, FP4])
def test_operands_are_the_pointers_of_the_op_and_the_rest_its_fields(op: str, config: dict[str, Any]) -> None:
    described, kernel = SPECS[op], KERNELS[op]
    fields = {f["name"]: f["type"] for f in kernel["abi"]["args"]}
    operands = described.operands(config)
    assert set(operands) == {name for name, kind in fields.items() if kind.startswith("ptr")}
    assert set(described.args_defaults) <= set(fields)
    assert ARGS[op].names == tuple(fields)
    nothing: dict[str, Any] = {"batch_size": None, "max_seq_len": None}
    known = set(fields) | set(config) | set(described.derive({**config, **nothing}))
    symbols = {s for o in operands.values() for s in (*o.shape, *o.strides)}
    assert {s.removesuffix("+1") for s in symbols} <= known


@pytest.mark.parametrize("op", SPECS)
def test_config_defaults_are_those_of_the_builds(op: str) -> None:
    described, kernel = SPECS[op], KERNELS[op]
    assert kernel["defaults"].items() <= described.config_defaults.items()
    enums = {name: axis["type"] for name, axis in kernel["axes"].items() if axis["type"].startswith("kseal_")}
    assert described.config_enums == enums
    defaults = spec.variant_id(kernel, kernel["defaults"])
    assert described.variant({}) == defaults


def test_sizes_and_strides_follow_from_tensors() -> None:
    expected = {
        "num_ctas": CTAS,
        "batch_size": B,
        "num_pages": PAGES,
        "max_pages_per_seq": COLUMNS,
        "kv_page_stride": 64 * 132,
        "page_table_stride": COLUMNS,
        "seq_len_stride": 0,
        "logits_stride": 512,
        "q_scales": 0,
    }
    found = logits()
    assert {name: found[name] for name in expected} == expected
    small = logits(FP4)
    assert (small["kv_page_stride"], small["q_scales"] != 0) == (64 * 68, True)


def test_a_layer_of_a_pool_and_a_slice_of_a_buffer_are_their_strides() -> None:
    layer = torch.zeros(PAGES, 4, 64 * 132, dtype=u8)[:, 1]
    wide = torch.zeros(B * 2, 2048)[:, :512]
    found = logits(kv=layer, logits=wide)
    assert (found["kv_page_stride"], found["logits_stride"]) == (4 * 64 * 132, 2048)


def test_a_schedule_and_its_lengths() -> None:
    config = {**SCHEDULE.config_defaults, "device": 0}
    given = {"seq_lens": torch.zeros(B, dtype=i32), "schedule": torch.zeros(CTAS + 1, 2, dtype=i32)}
    found = bind("paged_mqa_schedule", config, **given)
    assert (found["num_ctas"], found["batch_size"], found["seq_len_stride"]) == (CTAS, B, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": torch.zeros(B, 1, H, 128).to(torch.float8_e4m3fn)}, r"q: shape \(3, 1, 64, 128\)"),
        ({"kv": torch.zeros(PAGES, 64 * 128, dtype=u8)}, r"kv: shape \(9, 8192\); expected .* = \(9, 8448\)"),
        ({"weights": torch.zeros(B, H)}, r"weights: shape \(3, 64\); expected .* = \(6, 64\)"),
        ({"logits": torch.zeros(B * 2, 300)}, r"logits: shape \(6, 300\); expected .* = \(6, 512\)"),
        ({"logits": torch.zeros(B * 2, 512).half()}, "logits: element type f16"),
        ({"schedule": torch.zeros(CTAS + 1, 3, dtype=i32)}, "schedule: shape"),
        ({"page_table": torch.zeros(B + 1, COLUMNS, dtype=i32)}, "page_table: shape"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        logits(**changes)


def test_every_sm_that_is_served_has_the_same_variants() -> None:
    logits_op, schedule_op = (spec.load_op(paths.kernels() / op) for op in SPECS)
    blackwell = [spec.Target("sm_100a"), spec.Target("sm_103a")]
    found = [[v.id for v in logits_op.variants(t, "default")] for t in blackwell]
    assert found[0] == found[1]
    assert len(found[0]) == 12 + 24 + 5 + 5
    assert len(logits_op.variants(blackwell[0], "full")) == 498 + 252 + 144
    everywhere = [spec.Target(f"sm_{sm}a") for sm in (90, 100, 103, 120, 121)]
    assert [[v.id for v in schedule_op.variants(t, "default")] for t in everywhere] == [["a1", "a2"]] * 5


def test_the_geometry_of_8_heads_of_256_is_there_with_pages_of_32() -> None:
    op = spec.load_op(paths.kernels() / "paged_mqa_logits")
    ids = {v.id for v in op.variants(spec.Target("sm_100a"), "default")}
    assert {f"e4m3_of32_wf32_af32_h8_d256_n{n}_p32" for n in (1, 2, 3, 4, 5)} <= ids
