"""``cp_delta_rule`` up to the call: which memory and rows it hands on, its names in FlashInfer, and what it refuses."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cpu.fake_driver.gdn_cp import op, upstream_text  # noqa: E402

from kernseal.kernels.gdn_prefill_cp.operands import SPEC  # noqa: E402
from kernseal.kernels.gdn_prefill_cp.torch_api import REPLACES, _states, cp_delta_rule  # noqa: E402
from kernseal.loader.errors import InvalidArgument, Unsupported  # noqa: E402

SHAPE = (3, 2, 128, 128)
ENDS = torch.tensor([0, 1, 2, 3])
ROWS = torch.tensor([4, -1, 2], dtype=torch.int32)
POOL, OTHER = torch.zeros(5, 2, 128, 128), torch.ones(5, 2, 128, 128)


def hkv(*shape: int) -> torch.Tensor:
    """The [.., V, K] view of [.., K, V] memory."""
    return torch.zeros(shape).transpose(-1, -2)


@pytest.mark.parametrize("module", ["delta_rule_cp_sm90", "delta_rule_cp_sm120"])
def test_the_signature_is_upstreams(module: str) -> None:
    name = module.replace("delta_rule_cp", "cp_delta_rule_dsl")
    (theirs,) = (
        node
        for node in ast.parse(upstream_text(module)).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    ours = inspect.signature(cp_delta_rule).parameters.values()
    arguments = theirs.args
    assert [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD] == [a.arg for a in arguments.args]
    assert [p.name for p in ours if p.kind is p.KEYWORD_ONLY] == [a.arg for a in arguments.kwonlyargs]
    defaults = [ast.unparse(d) for d in arguments.kw_defaults if d is not None]
    assert defaults == ["None"] * 4 + ["0", "None", "None", "CP_CHUNK_LEN_GRANULARITY"]
    assert [p.default for p in ours if p.kind is p.KEYWORD_ONLY] == [None] * 4 + [0, None, None, 512]
    assert REPLACES[f"flashinfer.gdn_kernels.delta_rule_dsl.{module}"] == {name: cp_delta_rule}


def test_states_that_are_not_there_are_made() -> None:
    made = _states(None, None, None, SHAPE, ENDS)
    assert made.initial is None and not made.transposed and made.read_rows is None
    assert made.final.shape == SHAPE and made.final.dtype == torch.float32


def test_a_final_state_has_the_order_and_type_of_the_initial_one() -> None:
    initial = hkv(*SHAPE).to(torch.bfloat16)
    made = _states(initial, None, None, SHAPE, ENDS)
    assert made.transposed and made.final.dtype == torch.bfloat16 and made.final.is_contiguous()
    assert made.initial is not None and made.initial.data_ptr() == initial.data_ptr()
    assert made.initial.is_contiguous()


@pytest.mark.parametrize(
    ("initial", "final", "reads", "writes"),
    [
        (POOL, POOL, [4, -1, 2], [4, -1, 2]),
        (POOL, OTHER, [4, -1, 2], [4, -1, 2]),
        (POOL, None, [4, -1, 2], [-1, -1, -1]),
        (None, OTHER, [-1, -1, -1], [4, -1, 2]),
    ],
    ids=["in place", "other pool", "read only", "write only"],
)
def test_pools_and_rows(initial: Any, final: Any, reads: list[int], writes: list[int]) -> None:
    made = _states(initial, final, ROWS, SHAPE, ENDS)
    assert made.initial is (final if initial is None else initial)
    assert made.final is (initial if final is None else final)
    assert made.read_rows is not None and made.write_rows is not None
    assert made.read_rows.dtype == made.write_rows.dtype == torch.int64
    assert (made.read_rows.tolist(), made.write_rows.tolist()) == (reads, writes)


@pytest.mark.parametrize(
    ("initial", "final", "error", "words"),
    [
        (
            hkv(*SHAPE),
            torch.zeros(SHAPE),
            Unsupported,
            "state: its memory order must be that of initial_state",
        ),
        (torch.zeros(SHAPE), torch.zeros(SHAPE).bfloat16(), Unsupported, "state: its type must be that"),
        (torch.zeros(3, 2, 128, 256)[..., ::2], None, Unsupported, "initial_state: strides"),
        (None, torch.zeros(3, 128, 128), InvalidArgument, r"state: shape \(3, 128, 128\)"),
    ],
)
def test_states_that_do_not_fit_are_refused(initial: Any, final: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        _states(initial, final, None, SHAPE, ENDS)


def test_another_granularity_is_refused() -> None:
    x = torch.zeros(1)
    with pytest.raises(Unsupported, match="cp_chunk_len_granularity: 64; supported: 512"):
        cp_delta_rule(x, None, x, x, x, x, x, ENDS, 1.0, cp_chunk_len_granularity=64)


@pytest.mark.parametrize("pooled", [False, True])
def test_every_pointer_has_its_shape(pooled: bool) -> None:
    fields = op().data["abi"]
    pointers = {f["name"] for f in fields["args"] if str(f.get("type")).startswith("ptr")}
    assert set(SPEC.operands({"pooled": pooled})) == pointers
    assert set(SPEC.args_defaults) <= {f["name"] for f in fields["args"]} - pointers
    assert set(SPEC.args_defaults.values()) == {0}
    assert set(SPEC.config_defaults) == {f["name"] for f in fields["config"]}
    defaults = op().data["defaults"]
    assert {name: SPEC.config_defaults[name] for name in defaults} == defaults
