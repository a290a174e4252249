"""A bundle whose ops are the references in the ops' folders, run on host memory that says it is on a device.

Arguments go through the loader's own binder first, and memory that is given by address is read there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from cpu.test_loader_arguments import OnDevice

from kernseal.kernels.gdn_prefill import reference as gdn_reference
from kernseal.kernels.xqa_decode import reference as xqa_reference
from kernseal.loader.binder import Binder
from kernseal.loader.errors import Unsupported
from kernseal.loader.layout import Layout
from kernseal.loader.library import declarations
from kernseal.loader.op import load_spec

WORKSPACE, SEMAPHORES = 256, 64


@dataclass
class ReferenceOp:
    """One prepared op.

    Attributes:
        calls: of each run the arguments and, bound, every field.
    """

    name: str
    config: dict[str, Any]
    calls: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._layout = Layout(declarations(), f"kseal_{self.name}_args")
        self._binder = Binder(self._layout, load_spec(self.name), self.config)

    def workspace_size(self, **args: Any) -> int:
        self._bound(args)
        return WORKSPACE

    def semaphores_size(self, **args: Any) -> int:
        self._bound(args)
        return SEMAPHORES

    def run(self, **args: Any) -> None:
        values = self._bound(args)
        self._layout.pack([values[name] for name in self._layout.names])
        assert values["workspace_bytes"] >= WORKSPACE
        self.calls.append((args, values))
        RUNS[self.name](self.config, args, values)

    def _bound(self, args: Mapping[str, Any]) -> dict[str, Any]:
        wrapped = {name: OnDevice(v) if isinstance(v, torch.Tensor) else v for name, v in args.items()}
        return self._binder.values(wrapped)


def _run_gdn(config: Mapping[str, Any], args: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    assert config["state_layout"] == "hkv"
    found = gdn_reference.gated_delta_rule(
        args["q"],
        args["k"],
        args["v"],
        args["cu_seqlens"].diff().tolist(),
        scale=args["scale"],
        alpha=args["alpha"],
        beta=args["beta"],
        initial_state=args["initial_state"].transpose(-1, -2),
    )
    args["o"].copy_(found.output)
    args["final_state"].copy_(found.final_state.transpose(-1, -2))


def _run_xqa(config: Mapping[str, Any], args: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    assert values["semaphores_bytes"] >= SEMAPHORES
    assert not args["semaphores"].any()
    shape = (values["num_pages"], config["page_size"], values["num_kv_heads"], config["head_dim"])
    strides = (values["kv_page_stride"], values["kv_token_stride"], values["kv_head_stride"], 1)
    k, v = (_memory(values[name], args["q"].dtype, shape, strides) for name in ("k", "v"))
    found = xqa_reference.decode(
        args["q"], k, v, args["page_table"], args["seq_lens"], q_scale=values["q_scale"]
    )
    args["o"].copy_(found)


RUNS = {"gdn_prefill": _run_gdn, "xqa_decode": _run_xqa}


def _memory(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """What lies at an address. A last page may reach past the allocation; those rows are not read, here or on a device."""
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).as_strided(shape, strides)


@dataclass(frozen=True)
class _Variant:
    sm: str


class ReferenceBundle:
    """What the integrations use of a ``Bundle``.

    Args:
        lacks: op to the axes of the variants that are not there; no axes for all of them.
    """

    def __init__(self, lacks: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.ops: dict[tuple[Any, ...], ReferenceOp] = {}
        self._lacks = lacks or {}

    def variants(self) -> list[_Variant]:
        return [_Variant("sm_90a")]

    def prepare(self, op: str, *, device: int, **axes: Any) -> ReferenceOp:
        known = Layout(declarations(), f"kseal_{op}_config").names
        assert set(axes) | {"device", "stream"} == set(known)
        if op in self._lacks and self._lacks[op].items() <= axes.items():
            raise Unsupported(f"{op}: no variant")
        key = (op, device, *sorted(axes.items()))
        if key not in self.ops:
            self.ops[key] = ReferenceOp(op, {"device": device, **axes})
        return self.ops[key]

    def calls(self, op: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        return [call for made in self.ops.values() if made.name == op for call in made.calls]


@contextmanager
def launching(device: torch.device) -> Iterator[int]:
    """The legacy default stream of a device that is not there."""
    yield 0
