"""A launch of ours is, byte for byte, the launch of CuTe's own host object through CuTe's own runtime."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.host_objects import HostObject
from cpu.fake_driver.kernseal_library import Kernseal, compiled_library
from cpu.fake_driver.reference import Reference, Scalar, Tensor, masked

pytestmark = pytest.mark.slow

D = 128
CASES = 60
Axes = Mapping[str, Any]

VARIANTS: list[tuple[str, str | None, dict[str, str | bool]]] = [
    ("sm_90a", None, {}),
    ("sm_90a", None, {"pooled": True, "index_dtype": "i32", "checkpoints": True}),
    ("sm_90a", None, {"alpha": False, "beta": False, "initial_state": False}),
    ("sm_90a", None, {"pooled": True, "state_layout": "hkv", "dtype": "f16"}),
    ("sm_120a", None, {"pooled": True, "state_dtype": "bf16", "checkpoints": True}),
    ("sm_120a", None, {"initial_state": False, "alpha": False, "state_layout": "hkv"}),
    ("sm_120a", "sm_90a", {}),
    ("sm_100a", None, {}),
    ("sm_100a", None, {"pooled": True, "index_dtype": "i32", "checkpoints": True, "state_dtype": "bf16"}),
    ("sm_100a", None, {"initial_state": False, "state_layout": "hkv"}),
]


@dataclass(frozen=True)
class Problem:
    """One call, in the words of ``kernel.yaml``."""

    tokens: int
    seqs: int
    heads: tuple[int, int, int]
    pool_rows: int
    total_checkpoints: int
    checkpoint_every: int
    scale: float
    strides: Mapping[str, int]
    pointers: Mapping[str, int]
    workspace_bytes: int
    stream: int

    @property
    def o_heads(self) -> int:
        return max(self.heads[0], self.heads[2])


def _address(rng: random.Random, align: int) -> int:
    return rng.randrange(1, 2**46 // align) * align


def random_problem(rng: random.Random, axes: Axes, gqa: bool, workspace_bytes: int) -> Problem:
    hq = rng.choice([1, 2, 4, 16])
    grouped_queries = gqa and rng.random() < 0.4
    group = rng.choice([1, 2, 4])
    heads = (hq * group, hq, hq) if grouped_queries else (hq, hq, hq * group)
    h = max(heads)
    tokens = rng.choice([0, 1, 2, 63, 64, 65, 200, 8192, rng.randrange(1, 2**31 // (h * D))])
    seqs = rng.choice([1, 2, 7, rng.randrange(1, 2**31 // (h * D * D))])
    pooled, checkpoints = axes["pooled"], axes["checkpoints"]
    dense = {"q": heads[0] * D, "k": heads[1] * D, "v": heads[2] * D, "o": h * D}
    strides = {
        f"{n}_token_stride": rng.choice([0, s, s + 128 * rng.randrange(1, 50)]) for n, s in dense.items()
    }
    if pooled:
        unit = (
            (4 if axes["state_dtype"] == "f32" else 8) if gqa else 128
        )  # the classes with gqa go by 16 bytes
        for name in ("initial_state_stride", "final_state_stride"):
            strides[name] = rng.choice([0, h * D * D, h * D * D + unit * rng.randrange(1, 999)])
    wanted = dict.fromkeys(("q", "k", "v", "o", "final_state"), 16) | {"cu_seqlens": 8, "workspace": 128}
    wanted |= {n: 16 for n in ("alpha", "beta", "initial_state", "checkpoints") if axes[n]}
    if pooled:
        wanted["state_indices"] = 8
        if rng.random() < 0.5:
            wanted["output_state_indices"] = 8
    if checkpoints:
        wanted["checkpoint_cu_starts"] = 8
    pointers = {name: _address(rng, align) for name, align in wanted.items()}
    if tokens == 0 and rng.random() < 0.7:
        for name in ("q", "k", "v", "o", "alpha", "beta"):
            pointers.pop(name, None)
    return Problem(
        tokens=tokens,
        seqs=seqs,
        heads=heads,
        pool_rows=rng.randrange(1, 2**20) if pooled else 0,
        total_checkpoints=rng.randrange(0, 2**31 // (h * D * D)) if checkpoints else 0,
        checkpoint_every=64 * rng.randrange(1, 100) if checkpoints else 0,
        scale=rng.choice([D**-0.5, 1.0, -0.25, rng.uniform(0.01, 3)]),
        strides=strides,
        pointers=pointers,
        workspace_bytes=workspace_bytes,
        stream=rng.choice([0, 1, 2, _address(rng, 8)]),
    )


def run_ours(library: Kernseal, handle: Any, p: Problem) -> None:
    ffi = library.ffi
    args = library.struct(
        "kseal_gdn_prefill_args",
        num_q_heads=p.heads[0],
        num_k_heads=p.heads[1],
        num_v_heads=p.heads[2],
        head_dim=D,
        checkpoint_every=p.checkpoint_every,
        scale=p.scale,
        total_tokens=p.tokens,
        num_seqs=p.seqs,
        pool_rows=p.pool_rows,
        total_checkpoints=p.total_checkpoints,
        workspace_bytes=p.workspace_bytes,
        stream=ffi.cast("void *", p.stream),
        **p.strides,
        **{name: ffi.cast("void *", address) for name, address in p.pointers.items()},
    )
    assert library.c.kseal_gdn_prefill_run(handle, args) == 0, library.error()


def _common(p: Problem, axes: Axes) -> dict[str, Tensor]:
    """What FlashInfer's callers pass, with a dummy base where there are no tokens."""
    at, strides, h = p.pointers, p.strides, p.o_heads
    t = max(p.tokens, 1)
    rows = p.pool_rows if axes["pooled"] else p.seqs
    dense = {"q": p.heads[0], "k": p.heads[1], "v": p.heads[2], "o": h}

    def tokens(name: str) -> Tensor:
        stride = strides[f"{name}_token_stride"] or dense[name] * D
        return Tensor(at.get(name, at["workspace"]), (t, dense[name]), (stride,))

    def state(name: str) -> Tensor:
        return Tensor(at.get(name, 0), (rows, h), (strides.get(f"{name}_stride", 0) or h * D * D,))

    indices = at.get("state_indices", 0)
    return {
        **{name: tokens(name) for name in dense},
        "state": state("final_state"),
        "init": state("initial_state"),
        "indices": Tensor(indices, (p.seqs,)),
        "output_indices": Tensor(at.get("output_state_indices", indices), (p.seqs,)),
        "cu_seqlens": Tensor(at["cu_seqlens"], (p.seqs + 1,)),
        "cu_starts": Tensor(at.get("checkpoint_cu_starts", 0), (p.seqs + 1,)),
        "workspace": Tensor(at["workspace"], (p.workspace_bytes,)),
    }


def delta_rule_arguments(p: Problem, axes: Axes) -> dict[str, Tensor | Scalar]:
    t, h, dummy = max(p.tokens, 1), p.o_heads, p.pointers["workspace"]
    common = _common(p, axes)
    checkpoints = p.total_checkpoints if axes["checkpoints"] else 1
    return {
        **{f"g_{name}": common[name] for name in ("q", "k", "v", "o", "state")},
        "g_init_state": common["init"],
        "g_alpha": Tensor(p.pointers.get("alpha", dummy), (t * h,)),
        "g_beta": Tensor(p.pointers.get("beta", dummy), (t * h,)),
        "g_state_indices": common["indices"],
        "g_output_state_indices": common["output_indices"],
        "g_state_checkpoints": Tensor(p.pointers.get("checkpoints", dummy), (checkpoints * h * D * D,)),
        "checkpoint_cu_starts": common["cu_starts"],
        "g_tensormaps": common["workspace"],
        "cu_seqlens": common["cu_seqlens"],
        "scale": Scalar("float", p.scale),
        "num_q_heads": Scalar("int32_t", p.heads[0]),
        "num_k_heads": Scalar("int32_t", p.heads[1]),
        "num_v_heads": Scalar("int32_t", p.heads[2]),
        "num_sab_heads": Scalar("int32_t", h),
        "num_seqs": Scalar("int32_t", p.seqs),
        "total_checkpoints": Scalar("int32_t", checkpoints),
        "checkpoint_every_n_tokens": Scalar("int32_t", p.checkpoint_every),
        "grid_x": Scalar("int32_t", p.seqs * h),
        "stream": Scalar("void *", p.stream),
    }


def blackwell_arguments(p: Problem, axes: Axes) -> dict[str, Tensor | Scalar]:
    t, h, dummy = max(p.tokens, 1), p.o_heads, p.pointers["workspace"]
    common = _common(p, axes)
    return {
        **{name: common[name] for name in ("q", "k", "v", "o", "cu_seqlens")},
        "gate": Tensor(p.pointers.get("alpha", dummy), (t, h), (h,)),
        "beta": Tensor(p.pointers.get("beta", dummy), (t, h), (h,)),
        "s_in": common["init"],
        "s_out": common["state"],
        "s_indices": common["indices"],
        "s_out_indices": common["output_indices"],
        "s_checkpoints": Tensor(p.pointers.get("checkpoints", dummy), (p.total_checkpoints, h), (h * D * D,)),
        "cu_checkpoints": common["cu_starts"],
        "checkpoint_every_n_tokens": Scalar("int32_t", p.checkpoint_every),
        "scale": Scalar("float", p.scale),
        "tensormap_workspace": common["workspace"],
        "stream": Scalar("void *", p.stream),
    }


def _is_padding(mask: bytes) -> bool:
    """Whether what is unset can be: the second half of a tensor map, words between fields, nothing of a number."""
    if len(mask) == 128:
        return all(mask[:64])
    return mask.count(0) <= (8 if len(mask) > 8 else 0)


ARGUMENTS = {"sm90": delta_rule_arguments, "sm120": delta_rule_arguments, "sm100": blackwell_arguments}


@pytest.mark.parametrize(("sm", "retarget", "changes"), VARIANTS, ids=lambda v: str(v))
def test_our_launch_is_cutes_launch(
    built_variant: Callable[..., HostObject],
    gpu: FakeGpu,
    tmp_path: Path,
    sm: str,
    retarget: str | None,
    changes: dict[str, str | bool],
) -> None:
    made = built_variant(sm, retarget, **changes)
    axes, class_name = made.variant.axes, made.variant.class_name
    reference = Reference(made, tmp_path / "reference")
    cc = int(made.target.arch.removeprefix("sm_").removesuffix("a"))
    gpu.device(divmod(cc, 10), sms=148)
    library = compiled_library([made], tmp_path / "ours")

    reference.load()
    theirs = gpu.log("set_attribute")
    handle = library.prepare("gdn_prefill", axes)
    assert gpu.log("set_attribute") == theirs * 2, "kernel attributes differ"
    assert len(theirs) > 0

    size = library.ffi.new("uint64_t *")
    args = library.struct("kseal_gdn_prefill_args")
    assert library.c.kseal_gdn_prefill_workspace_size(handle, args, size) == 0, library.error()

    gpu.params(made.param_sizes())
    rng = random.Random(f"{sm} {retarget} {changes}")
    for case in range(CASES):
        problem = random_problem(rng, axes, gqa=class_name != "sm100", workspace_bytes=size[0])
        run_ours(library, handle, problem)
        ours = gpu.log("launch")[-1]
        expected, masks = reference.launch(gpu, ARGUMENTS[class_name](problem, axes))
        assert all(_is_padding(m) for m in masks)
        assert masked(ours, masks) == masked(expected, masks), f"case {case}: {problem}"
        assert ours["kernel"] == made.answer.kernels[0][0]
        assert len(ours["params"]) == len(made.param_sizes())

    assert library.c.kseal_gdn_prefill_release(handle) == 0
    library.close()
