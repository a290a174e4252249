"""GDN decode on the fake driver: calls in the words of ``kernel.yaml``, and a library of compiled variants."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cpu.fake_driver.kernseal_library import Kernseal, stub
from cpu.fake_driver.xqa import address

from kernseal.abi.library import VariantRecord
from kernseal.export import paths, spec
from kernseal.export.spec import Target

OP = "gdn_decode"
D = 128

STEPS: dict[str, Any] = {
    "tokens": 3,
    "wide": True,
    "tile_v": 32,
    "index_dtype": "i64",
    "output_indices": True,
    "intermediate_states": True,
}
VERIFY: dict[str, Any] = {
    "tokens": 2,
    "qk_l2norm": False,
    "intermediate_states": True,
    "update_state": False,
}
VARIANTS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "narrow": ("sm_90a", None, {}),
    "wide": ("sm_90a", None, STEPS),
    "wide_t1": ("sm_100a", None, {"wide": True, "tile_v": 64}),
    "narrow_sm120": ("sm_120a", None, VERIFY),
    "wide_sm120": ("sm_120a", "sm_90a", {"wide": True, "tokens": 2, "tile_v": 64}),
}
"""One of each kernel, for each of its ways to be compiled, by class: what the tests build."""

ALIGN = {
    **dict.fromkeys(("q", "k", "v", "o", "state"), 16),
    **dict.fromkeys(("a", "b"), 2),
    **dict.fromkeys(("a_log", "dt_bias"), 4),
}
TOKEN_TENSORS = ("q", "k", "v", "o", "a", "b")


def op() -> spec.Op:
    return spec.load_op(paths.kernels() / OP)


def axes_of(**changes: Any) -> dict[str, Any]:
    return {**op().data["defaults"], **changes}


def index_bytes(axes: Mapping[str, Any]) -> int:
    return 8 if axes["index_dtype"] == "i64" else 4


def alignments(axes: Mapping[str, Any]) -> dict[str, int]:
    """Every pointer of a call with these axes."""
    optional = {"intermediate_states": 16} if axes["intermediate_states"] else {}
    indices = ("state_indices", "output_state_indices") if axes["output_indices"] else ("state_indices",)
    return {**ALIGN, **dict.fromkeys(indices, index_bytes(axes)), **optional}


def record(axes: Mapping[str, Any], image: bytes) -> VariantRecord:
    return stub(op(), axes, Target("sm_90a"), image)


@dataclass(frozen=True)
class Call:
    """Fields of ``kseal_gdn_decode_args``."""

    axes: Mapping[str, Any]
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    @property
    def dense(self) -> dict[str, int]:
        """Elements of a token, by tensor."""
        hq, hv = self["num_q_heads"], self["num_v_heads"]
        return {"q": hq * D, "k": hq * D, "v": hv * D, "o": hv * D, "a": hv, "b": hv}

    def args(self, library: Kernseal) -> Any:
        pointers = (*alignments(self.axes), "output_state_indices", "intermediate_states", "stream")
        return library.args(OP, self.fields, pointers)


def random_call(rng: random.Random, axes: Mapping[str, Any]) -> Call:
    """A valid call."""
    hq = rng.choice([1, 2, 4, 16])
    hv = hq * rng.choice([1, 2, 3, 4])
    steps = axes["tokens"] + rng.choice([0, 0, 1, 5]) if axes["intermediate_states"] else 0
    most = 2**31 // (hv * max(steps, D // axes["tile_v"]))
    units = {"q": 8, "k": 8, "v": 8, "o": 8, "a": 1, "b": 1}
    sizes = {"num_q_heads": hq, "num_v_heads": hv}
    dense = Call(axes, sizes).dense
    fields: dict[str, Any] = {
        **sizes,
        "head_dim": D,
        "scale": rng.choice([D**-0.5, 1.0, -0.25, rng.uniform(0.01, 3)]),
        "batch_size": rng.choice([1, 2, 3, 7, 64, 4096, rng.randrange(1, most)]),
        "pool_rows": rng.choice([1, 4097, rng.randrange(1, 2**31)]),
        "intermediate_steps": steps,
        "state_row_stride": rng.choice([0, hv * D * D, hv * D * D + 8 * rng.randrange(1, 999)]),
        "stream": rng.choice([0, 1, 2, address(rng, 8)]),
        **{
            f"{n}_token_stride": rng.choice([0, dense[n], dense[n] + units[n] * rng.randrange(1, 999)])
            for n in TOKEN_TENSORS
        },
        **{name: address(rng, align) for name, align in alignments(axes).items()},
    }
    return Call(axes, fields)
