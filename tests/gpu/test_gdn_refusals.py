"""Calls that must be refused, with the status and a message that names the field."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu.bundles import DIST, open_by_name, policy  # noqa: E402
from gpu.problems import Case, call_args, make_inputs, prepare, run, workspace  # noqa: E402

from kernseal.loader.bundle import open_bundle  # noqa: E402
from kernseal.loader.errors import (  # noqa: E402
    InvalidArgument,
    KernsealError,
    Misaligned,
    Unsupported,
    WorkspaceTooSmall,
    WrongSm,
)

CASE = Case(lengths=(65, 10), heads=(4, 4, 8), pooled=True)


def shifted(tensor: torch.Tensor) -> int:
    return int(tensor.data_ptr()) + tensor.element_size()


CHANGES: dict[str, tuple[Any, type[KernsealError], str]] = {
    "q is not aligned": (lambda a: {"q": shifted(a["q"]), "num_q_heads": 4}, Misaligned, "q"),
    "o is not aligned": (lambda a: {"o": shifted(a["o"])}, Misaligned, "o"),
    "the state is not aligned": (
        lambda a: {"final_state": shifted(a["final_state"])},
        Misaligned,
        "final_state",
    ),
    "the workspace is too small": (
        lambda a: {"workspace_bytes": a["workspace"].numel() - 1},
        WorkspaceTooSmall,
        "workspace_bytes",
    ),
    "the workspace is null": (
        lambda a: {"workspace": 0, "workspace_bytes": 1 << 20},
        InvalidArgument,
        "workspace",
    ),
    "a stride that is no multiple of 128": (
        lambda a: {"q": a["q"].data_ptr(), "num_q_heads": 4, "q_token_stride": 520},
        Misaligned,
        "q_",
    ),
    "a stride below a row": (
        lambda a: {"k": a["k"].data_ptr(), "num_k_heads": 4, "k_token_stride": 128},
        InvalidArgument,
        "k_token",
    ),
    "alpha is missing": (lambda a: {"alpha": None}, InvalidArgument, "alpha"),
    "checkpoints that were not prepared for": (
        lambda a: {"checkpoints": a["final_state"], "checkpoint_every": 64},
        InvalidArgument,
        "checkpoint",
    ),
    "scale is zero": (lambda a: {"scale": 0.0}, InvalidArgument, "scale"),
    "scale is not finite": (lambda a: {"scale": float("nan")}, InvalidArgument, "scale"),
    "heads that do not divide": (
        lambda a: (
            {"v": a["v"][:, :6].contiguous(), "alpha": a["alpha"].data_ptr(), "beta": a["beta"].data_ptr()}
            | {"o": a["o"].data_ptr(), "initial_state": a["initial_state"].data_ptr()}
            | {"final_state": a["final_state"].data_ptr(), "pool_rows": 5}
        ),
        InvalidArgument,
        "num_v_heads",
    ),
    "more tokens than the index arithmetic has": (
        lambda a: (
            {k: v.data_ptr() for k, v in a.items() if k in ("q", "k", "v", "o", "alpha", "beta")}
            | {"num_q_heads": 4, "num_k_heads": 4, "num_v_heads": 8, "head_dim": 128, "total_tokens": 1 << 40}
        ),
        KernsealError,
        "total_tokens",
    ),
    "a tensor on the host": (lambda a: {"q": a["q"].cpu()}, InvalidArgument, "q: is on the host"),
    "q of another type": (lambda a: {"q": a["q"].half()}, InvalidArgument, "q: element type f16"),
    "alpha of another type": (
        lambda a: {"alpha": a["alpha"].double()},
        InvalidArgument,
        "alpha: element type",
    ),
    "alpha of another shape": (
        lambda a: {"alpha": a["alpha"][:, :4].contiguous()},
        InvalidArgument,
        "alpha: shape",
    ),
    "offsets of another type": (
        lambda a: {"cu_seqlens": a["cu_seqlens"].int()},
        InvalidArgument,
        "cu_seqlens: element",
    ),
    "an array of indices too short": (
        lambda a: {"state_indices": a["state_indices"][:1]},
        InvalidArgument,
        "state_ind",
    ),
    "alpha with strides": (
        lambda a: {"alpha": a["alpha"].t().contiguous().t()},
        InvalidArgument,
        "alpha: strides",
    ),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_refused(bundle: Any, name: str) -> None:
    change, error, words = CHANGES[name]
    op = prepare(bundle, CASE)
    args = call_args(CASE, make_inputs(CASE))
    args |= {"workspace": workspace(op, **args), "stream": torch.cuda.current_stream()}
    marker = args["o"].clone()
    with pytest.raises(error, match=words):
        op.run(**{**args, **change(args)})
    torch.cuda.synchronize()
    assert torch.equal(args["o"].isnan(), marker.isnan())


def test_a_variant_that_is_not_there_is_refused_with_what_is_there(bundle: Any) -> None:
    with pytest.raises(Unsupported, match="bf16"):
        prepare(bundle, Case(dtype="f16", index_dtype="i32", alpha=False))


def test_a_combination_that_no_class_has_says_why(bundle: Any) -> None:
    with pytest.raises(Unsupported, match="negative state_indices row"):
        prepare(bundle, Case(pooled=True, initial_state=False))


@pytest.mark.parametrize("folder", ["sm_120a-linux-x86_64", "sm_100a-linux-x86_64"])
def test_a_bundle_for_another_sm_is_refused(gpu: Any, folder: str) -> None:
    path = DIST / folder
    if not path.is_dir():
        pytest.skip(f"no bundle {folder}")
    with open_bundle(path, policy=policy()) as other, pytest.raises(WrongSm, match="sm_90"):
        other.prepare("gdn_prefill", device=0)


def test_a_retargeted_bundle_needs_to_be_asked_for(gpu: Any) -> None:
    path = DIST / "sm_120a-on-sm_90a-linux-x86_64"
    if not path.is_dir():
        pytest.skip(f"no bundle {path.name}")
    with pytest.raises(WrongSm, match=r"(?i)validation"):
        open_bundle(path, policy=policy())


def test_a_closed_bundle_is_refused_and_opens_again(bundle: Any, bundle_name: str) -> None:
    first = open_by_name(bundle_name)
    op = prepare(first, CASE)
    first.close()
    first.close()
    with pytest.raises(InvalidArgument, match="closed"):
        op.run(stream=0)
    with pytest.raises(InvalidArgument, match="closed"):
        prepare(first, CASE)
    with open_by_name(bundle_name) as again:
        assert run(again, CASE).state.isfinite().all()


def test_the_other_bundles_are_not_disturbed_by_closing_one(bundle: Any, bundle_name: str) -> None:
    want = run(bundle, CASE)
    with open_by_name(bundle_name) as other:
        run(other, CASE)
    again = run(bundle, CASE)
    assert torch.equal(want.output, again.output)
