"""What the loader makes of the arguments of qsa_selected, and that description, operands and profiles agree."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from kernseal.export import paths, spec
from kernseal.kernels.qsa_selected.operands import SPEC
from kernseal.loader.binder import Binder
from kernseal.loader.errors import InvalidArgument
from kernseal.loader.layout import Layout
from kernseal.loader.library import declarations

torch = pytest.importorskip("torch", reason="torch is not installed")

from cpu.test_loader_arguments import OnDevice  # noqa: E402

OP = "qsa_selected"
KERNEL = yaml.safe_load((paths.kernels() / OP / "kernel.yaml").read_text())
ARGS = Layout(declarations(), f"kseal_{OP}_args")
BF16 = {**SPEC.config_defaults, "device": 0}
E4M3 = {**BF16, "kv_dtype": "e4m3", "request_dtype": "i64", "lse": True}
T, HQ, HKV, D, PAGES, PAGE, W, B, COLUMNS = 5, 24, 2, 256, 9, 16, 2051, 3, 7


def bind(config: dict[str, Any] = BF16, **changes: Any) -> dict[str, Any]:
    fp8 = config["kv_dtype"] == "e4m3"
    cache = torch.zeros(PAGES, PAGE, HKV, D).to(torch.float8_e4m3fn if fp8 else torch.bfloat16)
    given = {
        "q": torch.zeros(T, HQ, D, dtype=torch.bfloat16),
        "k": cache,
        "v": cache.clone(),
        "k_descale": torch.ones(1) if fp8 else None,
        "v_descale": torch.ones(1) if fp8 else None,
        "block_table": torch.zeros(B, COLUMNS, dtype=torch.int32),
        "token_to_request": torch.zeros(T, dtype=torch.int64 if fp8 else torch.int32),
        "selected_positions": torch.zeros(T, W, dtype=torch.int32),
        "query_positions": torch.zeros(T, dtype=torch.int64),
        "o": torch.zeros(T, HQ, D, dtype=torch.bfloat16),
        "lse": torch.zeros(T, HQ) if fp8 else None,
        "scale": 0.0625,
        "workspace": None,
        "workspace_bytes": 0,
        **changes,
    }
    wrapped = {n: OnDevice(t) if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    return Binder(ARGS, SPEC, config).values({**wrapped, "stream": 0})


@pytest.mark.parametrize("config", [BF16, E4M3])
def test_operands_are_the_pointers_of_the_op_and_the_rest_its_fields(config: dict[str, Any]) -> None:
    fields = {f["name"]: f["type"] for f in KERNEL["abi"]["args"]}
    operands = SPEC.operands(config)
    assert set(operands) == {name for name, kind in fields.items() if kind.startswith("ptr")}
    assert set(SPEC.args_defaults) <= set(fields)
    assert ARGS.names == tuple(fields)
    symbols = {s for o in operands.values() for s in (*o.shape, *o.strides)}
    assert symbols <= {*fields, *SPEC.derive({})}


def test_config_defaults_are_those_of_the_builds() -> None:
    assert KERNEL["defaults"].items() <= SPEC.config_defaults.items()
    enums = {name: axis["type"] for name, axis in KERNEL["axes"].items() if axis["type"].startswith("kseal_")}
    assert SPEC.config_enums == enums
    assert SPEC.variant({}) == spec.variant_id(KERNEL, KERNEL["defaults"])
    assert SPEC.variant(E4M3) == spec.variant_id(KERNEL, {k: E4M3[k] for k in KERNEL["axes"]})


def test_the_default_profile_is_small_and_full_has_every_combination() -> None:
    op = spec.load_op(paths.kernels() / OP)
    for sm in ("sm_120a", "sm_121a"):
        default, full = (list(op.variants(spec.Target(sm), p)) for p in ("default", "full"))
        assert len(default) == 4 and len(full) == 16
        assert {v.id for v in default} <= {v.id for v in full}


@pytest.mark.parametrize("config", [BF16, E4M3])
def test_sizes_and_strides_follow_from_tensors(config: dict[str, Any]) -> None:
    found = bind(config)
    sizes = {
        "num_q_heads": HQ,
        "num_kv_heads": HKV,
        "head_dim": D,
        "page_size": PAGE,
        "selection_width": W,
        "splits": 0,
        "num_rows": T,
        "num_requests": B,
        "max_pages_per_request": COLUMNS,
        "num_pages": PAGES,
        "kv_page_stride": PAGE * HKV * D,
        "kv_token_stride": HKV * D,
        "kv_head_stride": D,
    }
    assert {name: found[name] for name in sizes} == sizes


def test_a_layer_of_an_interleaved_cache_is_its_strides() -> None:
    layers = torch.zeros(PAGES, 3, PAGE, HKV, D, dtype=torch.bfloat16)
    found = bind(k=layers[:, 1], v=layers[:, 2])
    assert found["kv_page_stride"] == 3 * PAGE * HKV * D
    assert found["v"] - found["k"] == PAGE * HKV * D * 2
    heads_first = torch.zeros(PAGES, HKV, PAGE, D, dtype=torch.bfloat16).transpose(1, 2)
    found = bind(k=heads_first, v=heads_first.clone())
    assert (found["kv_token_stride"], found["kv_head_stride"]) == (D, PAGE * D)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("q", torch.zeros(T, HQ, D)),
        ("q", torch.zeros(T, HQ, 2 * D, dtype=torch.bfloat16)[..., :D]),
        ("v", torch.zeros(PAGES, PAGE, HKV + 1, D, dtype=torch.bfloat16)),
        ("v", torch.zeros(PAGES, 2 * PAGE, HKV, D, dtype=torch.bfloat16)[:, :PAGE]),
        ("token_to_request", torch.zeros(T, dtype=torch.int64)),
        ("query_positions", torch.zeros(T, dtype=torch.int32)),
        ("selected_positions", torch.zeros(T + 1, W, dtype=torch.int32)),
        ("selected_positions", torch.zeros(T, 2 * W, dtype=torch.int32)[:, ::2]),
        ("block_table", torch.zeros(B, 2 * COLUMNS, dtype=torch.int32)[:, :COLUMNS]),
        ("o", torch.zeros(T, HQ + 2, D, dtype=torch.bfloat16)),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(name: str, tensor: Any) -> None:
    with pytest.raises(InvalidArgument, match=name if name != "v" else "k|v"):
        bind(**{name: tensor})
