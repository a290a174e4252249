"""FlashInfer's tests on a machine without a GPU, as far as the call: to learn which variants they ask for.

Tensors are made on the host, a bundle that has every variant takes the calls and launches nothing, and a test ends
where it would compare numbers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu import flashinfer_references
from torch.overrides import TorchFunctionMode

from kernseal.loader.op import Op

DEVICE = -1  # what torch calls the device of a host tensor
SMS = 132
LARGE = 1 << 24  # bytes of scratch that nothing reads here
COMPARES = ("ref_attention", "blockwise_delta_rule")
COMPUTES = ("sink_attention_unified",)


class Nothing(Op):
    """An op that takes every call and launches nothing."""

    def __init__(self) -> None: ...

    def run(self, **args: Any) -> None: ...

    launch = __call__ = run

    def settle(self, changing: Sequence[str], **args: Any) -> Any:
        return SimpleNamespace(launch=lambda values: None)

    def workspace_size(self, **args: Any) -> int:
        return 0

    semaphores_size = plan_size = plan = workspace_size

    def let_go(self) -> None: ...


class Bundle:
    """Has every variant."""

    def __init__(self, sm: str) -> None:
        pin = {"uri": f"pkg:pypi/flashinfer-python@{sys.modules['flashinfer'].__version__}"}
        definition = {"resolvedDependencies": [pin]}
        document = {"predicate": {"buildDefinition": definition}}
        self.statement = SimpleNamespace(sm=sm, retarget=None, document=document)

    def prepare(self, op: str, device: int, at_least: str | None, **axes: Any) -> Any:
        return Nothing()


class Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, _host(device))


class OnHost(TorchFunctionMode):
    """Makes what is asked for on a CUDA device on the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.zeros and isinstance(args[0], int) and args[0] >= LARGE:
            func = torch.empty
        return func(*map(_host, args), **{name: _host(value) for name, value in (kwargs or {}).items()})


def _host(value: Any) -> Any:
    cuda = isinstance(value, torch.device) and value.type == "cuda"
    return "cpu" if cuda or (isinstance(value, str) and value.startswith("cuda")) else value


def pretend(sm: str) -> Bundle:
    """Enter ``OnHost`` for good, give torch a device to describe, and return the bundle."""
    digits = sm.removeprefix("sm_").rstrip("af")
    properties = SimpleNamespace(
        name="none",
        major=int(digits[:-1]),
        minor=int(digits[-1]),
        multi_processor_count=SMS,
        total_memory=1 << 40,
    )
    for name, value in {
        "get_device_properties": lambda *device: properties,
        "get_device_capability": lambda *device: (properties.major, properties.minor),
        "current_device": lambda: DEVICE,
        "current_stream": lambda *device: SimpleNamespace(cuda_stream=0),
        "device": lambda *device: contextlib.nullcontext(),
        "synchronize": lambda *device: None,
    }.items():
        setattr(torch.cuda, name, value)
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # type: ignore[attr-defined]
    torch.Generator = Generator  # type: ignore[misc]
    torch.version.cuda = "13.0"
    for wrapper in (flashinfer_references.PagedAttention, flashinfer_references.PagedLatentAttention):
        wrapper.plan, wrapper.run = _no_plan, _zeros  # type: ignore[attr-defined, method-assign]
    OnHost().__enter__()
    return Bundle(sm)


def end_before_comparing(module: Any) -> None:
    """Replace the references that a test module imported or has."""
    for names, function in ((COMPARES, _end), (COMPUTES, _zeros_like)):
        for name in names:
            if hasattr(module, name):
                setattr(module, name, function)


def _end(*args: Any, **kwargs: Any) -> None:
    pytest.skip("called what it tests")


def _zeros_like(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.zeros_like(q)


def _no_plan(self: Any, *args: Any, **kwargs: Any) -> None: ...


def _zeros(self: Any, q: torch.Tensor, *args: Any, return_lse: bool = False, **kwargs: Any) -> Any:
    return (torch.zeros_like(q), None) if return_lse else torch.zeros_like(q)
