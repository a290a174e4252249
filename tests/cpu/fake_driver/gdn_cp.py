"""Context-parallel GDN prefill for the tests: libraries without kernels, valid calls, and upstream's own host functions."""

from __future__ import annotations

import ast
import functools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cpu.fake_driver.kernseal_library import Kernseal, stub, stub_library

from kernseal.export import paths, source, spec
from kernseal.export.spec import Target

OP = "gdn_prefill_cp"
D = 128
UPSTREAM = "flashinfer/gdn_kernels/delta_rule_dsl"
ALIGN = dict.fromkeys(
    ("q", "k", "v", "o", "alpha", "beta", "initial_state", "final_state", "checkpoints"), 16
) | {
    "cu_seqlens": 8,
    "state_indices": 8,
    "output_state_indices": 8,
    "checkpoint_cu_starts": 8,
    "workspace": 128,
}
"""Every pointer but the stream."""


def op() -> spec.Op:
    return spec.load_op(paths.kernels() / OP)


def axes_of(**changes: Any) -> dict[str, Any]:
    return {**op().data["defaults"], **changes}


def upstream_text(module: str) -> str:
    """One of the op's pinned upstream files."""
    path = f"{UPSTREAM}/{module}.py"
    opened, _ = source.open_source(None, source.upstream())
    wanted = source.source_set(paths.kernels() / OP)
    return source.read_set(opened, {path: wanted[path]})[path].decode()


@functools.cache
def upstream_rules() -> SimpleNamespace:
    """Upstream's host functions and their constants, taken out of a file that imports a compiler."""
    kept = [
        node
        for node in ast.parse(upstream_text("varlen_helper")).body
        if (
            isinstance(node, ast.FunctionDef)
            and not node.decorator_list
            and "torch" not in ast.unparse(node.args)
        )
        or (isinstance(node, ast.Assign | ast.AnnAssign) and "torch" not in ast.unparse(node))
    ]
    names: dict[str, Any] = {"math": math}
    exec(compile(ast.Module(kept, []), "varlen_helper.py", "exec"), names)
    return SimpleNamespace(**names)


def library_of(all_axes: Sequence[Mapping[str, Any]], sm: str, folder: Path) -> Kernseal:
    return Kernseal(stub_library((stub(op(), axes, Target(sm)) for axes in all_axes), sm, folder))


@dataclass(frozen=True)
class Call:
    """Fields of ``kseal_gdn_prefill_cp_args``; pointers as numbers."""

    axes: Mapping[str, Any]
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.fields.get(name, 0)

    @property
    def heads(self) -> int:
        return max(self["num_q_heads"], self["num_v_heads"])

    def but(self, **changes: Any) -> Call:
        return Call(self.axes, {**self.fields, **changes})

    def args(self, library: Kernseal) -> Any:
        return library.args(OP, self.fields, (*ALIGN, "stream"))


def address(rng: random.Random, align: int) -> int:
    return rng.randrange(1, 2**46 // align) * align


def random_call(rng: random.Random, axes: Mapping[str, Any]) -> Call:
    """A call that the op accepts, with room for a workspace of any size."""
    pooled, checkpoints = axes["pooled"], axes["checkpoints"]
    hq, group = rng.choice([1, 2, 4, 8, 16]), rng.choice([1, 2, 4])
    heads = rng.choice([(hq * group, hq, hq), (hq, hq, hq * group)])
    h = max(heads)
    tokens = rng.choice([0, 1, 2, 63, 64, 65, 200, 8192, rng.randrange(1, 2**31 // (h * D))])
    seqs = rng.choice([1, 2, 7, rng.randrange(1, min(2**16, 2**31 // (h * D * D)))])
    mean, chunk_len = -(-tokens // seqs), rng.choice([0, 0, 64, 512, 64 * rng.randrange(1, 200)])
    pieces = min(seqs, tokens) + tokens // max(chunk_len, 64)
    if chunk_len and pieces * h * D * D >= 2**31:
        chunk_len = 0
    fields = {
        "num_q_heads": heads[0],
        "num_k_heads": heads[1],
        "num_v_heads": heads[2],
        "head_dim": D,
        "checkpoint_every": 64 * rng.randrange(1, 100) if checkpoints else 0,
        "chunk_len": chunk_len,
        "scale": rng.choice([D**-0.5, 1.0, -0.25]),
        "total_tokens": tokens,
        "max_seqlen": rng.choice([0, tokens, mean, rng.randint(mean, tokens)]),
        "num_seqs": seqs,
        "pool_rows": rng.randrange(1, 2**20) if pooled else 0,
        "total_checkpoints": rng.randrange(0, 2**31 // (h * D * D)) if checkpoints else 0,
        "workspace_bytes": 2**62,
        "stream": rng.choice([0, 1, 2, address(rng, 8)]),
    }
    for name, count in (("q", heads[0]), ("k", heads[1]), ("v", heads[2]), ("o", h)):
        fields[f"{name}_token_stride"] = rng.choice([0, count * D, count * D + 128 * rng.randrange(1, 50)])
    if pooled:
        for name in ("initial_state_stride", "final_state_stride"):
            fields[name] = rng.choice([0, h * D * D, h * D * D + 128 * rng.randrange(1, 999)])
    wanted = ["q", "k", "v", "o", "alpha", "beta", "final_state", "cu_seqlens", "workspace"]
    wanted += ["initial_state"] if axes["initial_state"] else []
    wanted += ["state_indices", *(["output_state_indices"] if rng.random() < 0.5 else [])] if pooled else []
    wanted += ["checkpoints", "checkpoint_cu_starts"] if checkpoints else []
    fields |= {name: address(rng, ALIGN[name]) for name in wanted}
    if tokens == 0 and rng.random() < 0.7:
        fields |= dict.fromkeys(("q", "k", "v", "o", "alpha", "beta"), 0)
    return Call(axes, fields)
