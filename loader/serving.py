"""Which bundle serves which CUDA device, for functions that are called with tensors and nothing else."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from .bundle import Bundle
from .errors import NotPrepared, Unsupported
from .op import Op, load_spec

Wanted = TypeVar("Wanted", bound=Hashable)

Call = tuple[str, tuple[Any, ...], tuple[Any, ...]]
"""All that decides what becomes of a call but addresses and factors: the function, its numbers, flags and words, and what
its tensors show (``addresses.look``)."""

_MOST_CALLS = 1024
_PLAIN = frozenset({int, bool, str, type(None)})  # what never becomes another value


class Served:
    """A bundle that serves one CUDA device.

    Attributes:
        bundle: the open bundle.
        device: the ordinal.
        at_least: weakest evidence of a variant that may serve, or None for any; see ``Bundle.prepare``.
        ops: for each op what its callers have prepared, under keys of their own; see ``ready``.
        calls: what calls like those before need not work out again; see ``known``.
    """

    def __init__(self, bundle: Bundle, device: int, at_least: str | None = None) -> None:
        self.bundle = bundle
        self.device = device
        self.at_least = at_least
        self.ops: defaultdict[str, dict[Hashable, Op]] = defaultdict(dict)
        self.calls: dict[Hashable, Any] = {}

    @property
    def sm(self) -> str:
        """The SM whose kernels these are, also where they were rebuilt for another one."""
        return self.bundle.statement.sm

    def ready(self, op: str, wanted: Wanted, prepare: Callable[[Served, Wanted], Op]) -> Op:
        """The variant for what a call wants: ``prepare`` makes it at its first use, and then a call pays for this look-up.

        Args:
            op: its name.
            wanted: what decides the variant, in the op's own words.
            prepare: calls ``Served.prepare`` with the axes that ``wanted`` stands for.
        """
        found = self.ops[op].get(wanted)
        if found is None:
            found = self.ops[op][wanted] = prepare(self, wanted)
        return found

    def remember(self, key: Call, what: Any) -> None:
        """Let ``known`` find ``what`` at the next call that looks the same."""
        if _PLAIN.issuperset(map(type, key[1])):
            if len(self.calls) >= _MOST_CALLS:
                self.calls.clear()
            self.calls[key] = what

    def prepare(self, op: str, **axes: Any) -> Op:
        """As ``Bundle.prepare`` on this device; what the bundle lacks is reported with the command that builds it.

        Raises:
            KernsealError: see ``Bundle.prepare``.
        """
        try:
            return self.bundle.prepare(op, device=self.device, at_least=self.at_least, **axes)
        except Unsupported as error:
            command = build_command(self.bundle, op, axes)
            raise Unsupported(f"{error}; to build it, or to read why nothing does it: {command}") from None


_served: dict[int, Served] = {}
_lock = threading.Lock()


def use_bundle(bundle: Bundle, device: int | None = None, at_least: str | None = None) -> None:
    """Let ``bundle`` serve a CUDA device, from now on.

    Args:
        bundle: an open bundle; the caller closes it.
        device: the ordinal; None is torch's current device.
        at_least: weakest evidence of a variant that may serve (``ran``, ``retargeted``, ``glue``); None is any.
    """
    serve(bundle, device, at_least)


def serve(bundle: Bundle, device: int | None = None, at_least: str | None = None) -> Callable[[], None]:
    """``use_bundle``, and what undoes it: the device is served as it was before."""
    ordinal = _ordinal(device)
    with _lock:
        before = _served.get(ordinal)
        _served[ordinal] = Served(bundle, ordinal, at_least)

    def undo() -> None:
        with _lock:
            _served.pop(ordinal)
            if before is not None:
                _served[ordinal] = before

    return undo


def served_by(device: int) -> Served:
    """Return what serves a CUDA device.

    Raises:
        NotPrepared: nothing does.
    """
    found = _served.get(device)
    if found is None:
        raise NotPrepared(
            f"no bundle serves {device_name(device)}; call kernseal.loader.serving.use_bundle first"
        )
    return found


def known(device: int, key: Call) -> Any | None:
    """What the bundle that serves ``device`` remembers of a call, or None."""
    found = _served.get(device)
    return found.calls.get(key) if found is not None and _PLAIN.issuperset(map(type, key[1])) else None


def device_name(device: int) -> str:
    return "the host" if device < 0 else f"cuda:{device}"


def prepare(op: str, device: int | None = None, **axes: Any) -> Op:
    """Prepare a variant ahead of the first call, for instance before a graph is captured.

    Args:
        op: its name.
        device: the ordinal; None is torch's current device.
        axes: as for ``Bundle.prepare``.

    Raises:
        NotPrepared: no bundle serves the device.
        KernsealError: see ``Bundle.prepare``.
    """
    return served_by(_ordinal(device)).prepare(op, **axes)


def build_command(bundle: Bundle, op: str, axes: dict[str, Any]) -> str:
    """The command that builds a variant for the target of ``bundle``."""
    statement = bundle.statement
    words = ["kernseal build --sm", _short(statement.sm)]
    if statement.retarget is not None:
        words += ["--retarget", _short(statement.retarget)]
    return " ".join([*words, "--variant", f"{op}/{load_spec(op).variant(axes)}"])


def _short(sm: str) -> str:
    return sm.removeprefix("sm_").removesuffix("a")


def _ordinal(device: int | None) -> int:
    if device is not None:
        return device
    import torch

    return int(torch.cuda.current_device())
