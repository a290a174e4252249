"""What the loader makes of XQA decode's arguments, and that its description, profiles and models agree."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from cpu.fake_driver import xqa
from cpu.fake_driver.gpu import FakeGpu

from kernseal.export import paths, spec
from kernseal.kernels.xqa_decode.operands import SPEC
from kernseal.loader.binder import Binder
from kernseal.loader.errors import InvalidArgument
from kernseal.loader.layout import Layout
from kernseal.loader.library import Library, declarations
from kernseal.loader.op import Op

torch = pytest.importorskip("torch", reason="torch is not installed")

from cpu.test_loader_arguments import OnDevice  # noqa: E402

FOLDER = paths.kernels() / "xqa_decode"
KERNEL = yaml.safe_load((FOLDER / "kernel.yaml").read_text())
ARGS = Layout(declarations(), "kseal_xqa_decode_args")
CONFIG = {**SPEC.config_defaults, "device": 0, "head_dim": 64, "group_size": 4}
DRAFTS = {**CONFIG, "spec_decode": True}
FP4 = {**CONFIG, "kv_dtype": "nvfp4"}
B, PAGES, HKV, SIZE, D = 3, 9, 2, 16, 64
ROWS, Q_LEN = 7, 3


def tensors(config: Mapping[str, Any] = CONFIG, **changes: Any) -> dict[str, Any]:
    """What a run takes; tensors say that they are CUDA memory."""
    fp4, rows = config["kv_dtype"] == "nvfp4", ROWS if config["spec_decode"] else B
    pool = (
        torch.zeros(PAGES, SIZE, HKV, D // 2, dtype=torch.uint8)
        if fp4
        else torch.zeros(PAGES, SIZE, HKV, D, dtype=torch.bfloat16)
    )
    made = {
        "q": torch.zeros(rows, 4 * HKV, D, dtype=torch.bfloat16),
        "k": pool,
        "v": pool.clone(),
        "o": torch.zeros(rows, 4 * HKV, D, dtype=torch.bfloat16),
        "page_table": torch.zeros(B, 5, dtype=torch.int32),
        "seq_lens": torch.zeros(B, dtype=torch.int32),
        "semaphores": torch.zeros(100, dtype=torch.int32),
    }
    if fp4:
        scales = torch.zeros(PAGES, SIZE, HKV, D // 16, dtype=torch.float8_e4m3fn)
        # As bytes, which is what DLPack has for them everywhere.
        made |= {"k_scales": scales.view(torch.uint8), "v_scales": scales.view(torch.uint8).clone()}
    if config["spec_decode"]:
        lengths = torch.zeros(B + 1, dtype=torch.int32)
        made |= {"mask": torch.zeros(ROWS, 1, dtype=torch.uint32), "q_cu_lens": lengths, "q_len": Q_LEN}
    made |= changes
    wrapped = {name: OnDevice(t) if isinstance(t, torch.Tensor) else t for name, t in made.items()}
    return {**wrapped, "stream": 0}


def values(config: Mapping[str, Any] = CONFIG, **changes: Any) -> dict[str, Any]:
    return Binder(ARGS, SPEC, config).values(tensors(config, **changes))


def test_operands_are_the_pointers_of_the_op_and_the_rest_its_fields() -> None:
    fields = {f["name"]: f["type"] for f in KERNEL["abi"]["args"]}
    assert set(SPEC.args_defaults) <= set(fields)
    assert ARGS.names == tuple(fields)
    known = set(fields) | set(CONFIG) | set(SPEC.derive({"q_len": 1, "head_dim": D}))
    for config in (CONFIG, DRAFTS, FP4):
        operands = SPEC.operands(config)
        assert set(operands) == {name for name, kind in fields.items() if kind.startswith("ptr")}
        named = {s.removesuffix("+1") for o in operands.values() for s in (*o.shape, *o.strides)}
        assert named <= known


def test_sizes_and_strides_follow_from_tensors() -> None:
    found = values()
    expected = {
        "batch_size": B,
        "num_q_heads": 8,
        "num_kv_heads": HKV,
        "num_pages": PAGES,
        "max_pages_per_seq": 5,
        "kv_page_stride": SIZE * HKV * D,
        "kv_token_stride": HKV * D,
        "kv_head_stride": D,
        "semaphores_bytes": 400,
    }
    assert {name: found[name] for name in expected} == expected


def test_an_hnd_cache_is_its_transposed_view() -> None:
    pools = {
        name: torch.zeros(PAGES, HKV, SIZE, D, dtype=torch.bfloat16).transpose(1, 2) for name in ("k", "v")
    }
    found = values(**pools)
    strides = [found[name] for name in ("kv_page_stride", "kv_token_stride", "kv_head_stride")]
    assert strides == [SIZE * HKV * D, D, SIZE * D]


def test_k_and_v_of_different_strides_are_refused() -> None:
    layers = torch.zeros(PAGES, 2, SIZE, HKV, D, dtype=torch.bfloat16)[:, 0]
    with pytest.raises(InvalidArgument, match=r"kv_page_stride: 2048, but v has 4096"):
        values(v=layers)


def test_a_head_that_is_not_dense_is_refused() -> None:
    wide = torch.zeros(PAGES, SIZE, HKV, 2 * D, dtype=torch.bfloat16)[..., ::2]
    with pytest.raises(InvalidArgument, match=r"k: strides .*; the last must be 1"):
        values(k=wide)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        (
            "q",
            (B, 8, 128),
            r"q: shape \(3, 8, 128\); expected \[batch_size, num_q_heads, head_dim\] = \(3, 8, 64\)",
        ),
        ("k", (PAGES, 32, HKV, D), r"k: shape \(9, 32, 2, 64\); expected .* = \(9, 16, 2, 64\)"),
        ("o", (B, 4, D), r"o: shape \(3, 4, 64\)"),
    ],
)
def test_a_shape_that_the_config_does_not_have_is_refused(
    name: str, shape: tuple[int, ...], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        values(**{name: torch.zeros(shape, dtype=torch.bfloat16)})


def test_drafts_show_their_rows_and_keep_their_sequences() -> None:
    found = values(DRAFTS)
    expected = {"q_rows": ROWS, "batch_size": B, "q_len": Q_LEN, "num_q_heads": 8, "max_pages_per_seq": 5}
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("kind", ["int32", "uint32"])
@pytest.mark.parametrize("name", ["seq_lens", "q_cu_lens", "mask"])
def test_lengths_and_masks_may_be_signed_or_not(name: str, kind: str) -> None:
    shape = {"seq_lens": (B,), "q_cu_lens": (B + 1,), "mask": (ROWS, 1)}[name]
    made = torch.zeros(shape, dtype=getattr(torch, kind))
    assert values(DRAFTS, **{name: made})[name] == made.data_ptr()


@pytest.mark.parametrize(
    ("config", "name", "dtype", "words"),
    [
        (DRAFTS, "seq_lens", "int64", r"seq_lens: element type i64; this op was prepared for i32\|u32"),
        (DRAFTS, "q_cu_lens", "int64", r"q_cu_lens: element type i64; this op was prepared for i32\|u32"),
        (DRAFTS, "mask", "bool", r"mask: element type .*; this op was prepared for i32\|u32"),
        (FP4, "k_scales", "bfloat16", r"k_scales: element type bf16; this op was prepared for e4m3\|u8"),
        (FP4, "k", "bfloat16", r"k: element type bf16; this op was prepared for u8"),
        (CONFIG, "page_table", "uint32", r"page_table: element type u32; this op was prepared for i32$"),
    ],
)
def test_another_element_type_is_refused_with_those_that_will_do(
    config: dict[str, Any], name: str, dtype: str, words: str
) -> None:
    shown = tensors(config)[name].tensor
    with pytest.raises(InvalidArgument, match=words):
        values(config, **{name: torch.zeros(shown.shape, dtype=getattr(torch, dtype))})


@pytest.mark.parametrize(
    ("q_len", "words_a_row"), [(1, 1), (32, 1), (33, 2), (64, 2), (65, 3)], ids=lambda value: str(value)
)
def test_a_mask_row_has_a_bit_for_each_draft(q_len: int, words_a_row: int) -> None:
    mask = torch.zeros(ROWS, words_a_row, dtype=torch.uint32)
    assert values(DRAFTS, q_len=q_len, mask=mask)["mask"] == mask.data_ptr()
    with pytest.raises(
        InvalidArgument, match=re.escape(f"mask: shape (7, {words_a_row + 1}); expected [q_rows")
    ):
        values(DRAFTS, q_len=q_len, mask=torch.zeros(ROWS, words_a_row + 1, dtype=torch.uint32))


def test_drafts_without_their_number_are_left_to_the_library() -> None:
    assert values(DRAFTS, q_len=0)["q_len"] == 0


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("mask", (ROWS + 1, 1), r"mask: shape \(8, 1\); expected \[q_rows, mask_words\] = \(7, 1\)"),
        ("q_cu_lens", (B,), r"q_cu_lens: shape \(3,\); expected \[batch_size\+1\] = \(4,\)"),
        ("o", (B, 8, D), r"o: shape \(3, 8, 64\); expected \[q_rows, num_q_heads, head_dim\] = \(7, 8, 64\)"),
    ],
)
def test_drafts_of_another_shape_are_refused(name: str, shape: tuple[int, ...], words: str) -> None:
    dtype = torch.bfloat16 if name == "o" else torch.int32
    with pytest.raises(InvalidArgument, match=words):
        values(DRAFTS, **{name: torch.zeros(shape, dtype=dtype)})


def test_a_4_bit_cache_counts_bytes_and_its_scales_their_own_elements() -> None:
    found = values(FP4)
    expected = {
        "kv_page_stride": SIZE * HKV * 32,
        "kv_token_stride": HKV * 32,
        "kv_head_stride": 32,
        "scale_page_stride": SIZE * HKV * 4,
        "scale_token_stride": HKV * 4,
        "scale_head_stride": 4,
        "num_pages": PAGES,
    }
    assert {name: found[name] for name in expected} == expected


def test_scales_of_heads_outside_have_strides_of_their_own() -> None:
    scales = {
        name: torch.zeros(PAGES, HKV, SIZE, 4, dtype=torch.uint8).transpose(1, 2)
        for name in ("k_scales", "v_scales")
    }
    found = values(FP4, **scales)
    strides = [found[f"scale_{name}_stride"] for name in ("page", "token", "head")]
    assert strides == [SIZE * HKV * 4, 4, SIZE * 4]
    assert found["kv_token_stride"] == HKV * 32


def test_scales_may_say_what_they_are() -> None:
    """On CUDA a torch tensor needs no DLPack; here its reader is asked on its own."""
    from kernseal.loader.tensors import reader_of

    scales = torch.zeros(2, 3, dtype=torch.float8_e4m3fn)
    assert reader_of("k_scales", scales)("k_scales", scales, 0)[2] in SPEC.operands(FP4)[
        "k_scales"
    ].dtype.split("|")


@pytest.mark.parametrize(
    ("config", "name", "shape", "words"),
    [
        (FP4, "k", (PAGES, SIZE, HKV, D), r"k: shape .* half_head\] = \(9, 16, 2, 32\)"),
        (FP4, "v_scales", (PAGES, SIZE, HKV, 8), r"v_scales: shape .* head_scales\] = \(9, 16, 2, 4\)"),
    ],
)
def test_a_4_bit_cache_of_another_shape_is_refused(
    config: dict[str, Any], name: str, shape: tuple[int, ...], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        values(config, **{name: torch.zeros(shape, dtype=torch.uint8)})


def prepared(path: Any, config: Mapping[str, Any]) -> Op:
    library = Library(str(path))
    ffi = library.ffi
    folder = ffi.new("char[]", str(path.parent).encode())
    size = ffi.sizeof("kseal_open_args")
    fields = {"struct_size": size, "abi_version": library.c.KSEAL_ABI_VERSION, "bundle_path": folder}
    out = ffi.new("kseal_bundle **")
    library.check(library.c.kseal_open(ffi.new("kseal_open_args *", fields), out))
    return Op(library, out[0], "xqa_decode", config)


def test_a_run_from_python_has_the_scratch_that_it_asked_for(
    gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory
) -> None:
    axes = xqa.axes_of(head_dim=64, group_size=4, spec_decode=True)
    path = xqa.build([axes], "sm_90a", tmp_path_factory.mktemp("loader"))
    op = prepared(path, DRAFTS)
    # 3 tokens of 4 heads are one block of rows for each sequence and KV head.
    assert op.semaphores_size(**tensors(DRAFTS), kv_splits=2) == 4 * B * HKV
    workspace = op.workspace_size(**tensors(DRAFTS), kv_splits=2)
    assert workspace == 4096 + 2 * B * HKV * 32 * 64 * 2
    scratch = {
        "kv_splits": 2,
        "semaphores": OnDevice(torch.zeros(B * HKV, dtype=torch.int32)),
        "workspace": 128,
        "workspace_bytes": workspace,
    }
    op.run(**{**tensors(DRAFTS), **scratch})
    assert [line["grid"] for line in gpu.log("launch")] == [[2, HKV, B]]
    assert op.semaphores_size(**tensors(DRAFTS), kv_splits=1) == 0
    op.let_go()


def test_config_defaults_are_those_of_the_builds() -> None:
    named = {n: v for n, v in SPEC.config_defaults.items() if n in KERNEL["axes"]}
    assert named.items() <= KERNEL["defaults"].items()
    enums = {name: axis["type"] for name, axis in KERNEL["axes"].items() if axis["type"].startswith("kseal_")}
    assert SPEC.config_enums == enums


def geometry(axes: Mapping[str, Any]) -> tuple[int, int, bool]:
    return axes["head_dim"], axes["group_size"], axes["sliding_window"]


def test_the_default_profile_has_what_the_models_need_and_no_more() -> None:
    models = yaml.safe_load((FOLDER / "models.yaml").read_text())
    needed = {
        (m["head_dim"], m["group_size"], window)
        for m in models
        for window in ((False, True) if "window" in m else (False,))
    }
    assert all(m["checked"] in ("aiconfigurator", "litgpt", "slime", "hub", "mlx-lm") for m in models)
    for sm in ("sm_90a", "sm_120a"):
        built = [v.axes for v in spec.load_op(FOLDER).variants(spec.Target(sm), "default")]
        plain = [a for a in built if a["kv_dtype"] == a["dtype"] and not a["spec_decode"]]
        assert sorted(map(geometry, plain)) == sorted(needed)
        assert {geometry(a) for a in built} == needed, "drafts and small caches only where a model is"
        assert len(built) <= 30


def test_every_sm_has_the_same_variants_but_those_that_it_alone_can_have() -> None:
    op = spec.load_op(FOLDER)
    ids = {
        sm: {v.id for v in op.variants(spec.Target(sm), "default")}
        for sm in ("sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a")
    }
    everywhere = ids["sm_100a"]
    assert ids["sm_103a"] == everywhere
    assert {name for name in ids["sm_90a"] - everywhere if not name.endswith("_fp8math")} == set()
    assert {name for name in ids["sm_120a"] - everywhere if "_kvnvfp4_" not in name} == set()
    assert all(everywhere < ids[sm] for sm in ("sm_90a", "sm_120a"))
    assert ids["sm_121a"] == ids["sm_120a"]


def test_what_a_retargeted_bundle_can_have() -> None:
    op = spec.load_op(FOLDER)
    retargeted = op.variants(spec.Target("sm_120a", "sm_90a"), "default")
    assert [v.id for v in retargeted] == [v.id for v in op.variants(spec.Target("sm_120a"), "default")]
    assert {v.class_name for v in retargeted} == {"mha_sm12x"}


def test_the_validation_profile_has_every_value_of_every_axis() -> None:
    op = spec.load_op(FOLDER)
    targets = (spec.Target("sm_90a"), spec.Target("sm_120a"))
    profiles = ("default", "validation")
    built = [v.axes for target in targets for name in profiles for v in op.variants(target, name)]
    values_of = {axis: described.get("values", [False, True]) for axis, described in KERNEL["axes"].items()}
    # head_dim is padded to 64, 128, 256 or 512: the values of a range differ in nothing but where they end.
    padded = {"head_dim": lambda value: next(size for size in (64, 128, 256, 512) if value <= size)}
    for axis, known in values_of.items():
        meant = padded.get(axis, lambda value: value)
        lacking = {meant(value) for value in known} - {meant(axes[axis]) for axes in built}
        assert lacking <= ({10, 11, 14} if axis == "group_size" else set()), axis
