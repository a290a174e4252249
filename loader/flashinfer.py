"""Puts kernseal's functions where FlashInfer has its own, so that code written for FlashInfer runs on a sealed bundle.

::

    with open_bundle("dist/sm_90a-linux-x86_64") as bundle, installed(bundle):
        import engine                                   # from flashinfer import ...: nothing is compiled at run time

What kernseal replaces runs a kernel of the bundle. Any other function of FlashInfer is FlashInfer's: it runs where its code
was compiled ahead of time, and raises JitRefused where it would have to be compiled now (``jit``).

Every op names its functions and their places in ``REPLACES`` of its ``torch_api.py``; nothing here knows an op.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from . import flashinfer_jit, serving
from .bundle import Bundle
from .errors import InvalidArgument, Missing, Unsupported
from .flashinfer_jit import JIT, PACKAGE
from .statement import Statement

Function = Callable[..., Any]

MISSING = ("raise", "fall_through")
COMPILERS = ("cutlass",)
"""CuTe DSL: modules of FlashInfer import it at their top, and a bundle needs none of it."""
_PIN = re.compile(r"pkg:pypi/flashinfer-python@([^#]+)")

_lock = threading.RLock()
_installations: list[_Installation] = []


@contextmanager
def installed(
    bundle: Bundle,
    *,
    device: int | None = None,
    at_least: str | None = None,
    missing: str = "raise",
    jit: str | None = None,
    any_version: bool = False,
    **keywords: Any,
) -> Iterator[None]:
    """``install`` on entry, ``uninstall`` on exit. May be nested: the innermost counts."""
    install(
        bundle,
        device=device,
        at_least=at_least,
        missing=missing,
        jit=jit,
        any_version=any_version,
        **keywords,
    )
    try:
        yield
    finally:
        uninstall()


def install(
    bundle: Bundle,
    *,
    device: int | None = None,
    at_least: str | None = None,
    missing: str = "raise",
    jit: str | None = None,
    any_version: bool = False,
    **keywords: Any,
) -> None:
    """Let ``bundle`` serve a device, and replace FlashInfer's functions under every name that FlashInfer has for them.

    Install before the code that uses FlashInfer is imported: a name that this code has taken already is its own.
    Where a module of FlashInfer cannot be imported because CuTe DSL is not there, one with kernseal's functions alone
    stands in for it, and for the packages above it that need CuTe DSL as well.

    Args:
        bundle: an open bundle; the caller closes it, after ``uninstall``.
        device: the ordinal; None is torch's current device. Other devices: ``serving.use_bundle``.
        at_least: weakest evidence of a variant that may serve; see ``serving.use_bundle``.
        missing: what a call that the bundle has no kernel for does: ``raise`` Unsupported, or ``fall_through`` to
            FlashInfer's own function.
        jit: what FlashInfer's own code does that is not compiled yet, whoever calls it and in every thread: ``refuse``
            raises JitRefused, which names it; ``allow`` lets it compile. None is ``refuse`` with ``missing="raise"``
            and ``allow`` with ``missing="fall_through"``, whose functions mostly have to be compiled.
        any_version: accept another FlashInfer than the one that the bundle's kernels are from.
        keywords: arguments of kernseal's functions that FlashInfer's do not have, for every call of those that take
            them: ``kv_splits=-1``.

    Raises:
        Missing: FlashInfer is not installed, or lacks something else that it needs.
        Unsupported: it is another version, lacks a function that is to be replaced, or compiles where ``jit`` knows
            nothing of.
        InvalidArgument: ``missing`` or ``jit`` is something else, or no function takes a keyword.
    """
    if missing not in MISSING:
        raise InvalidArgument(f"missing is {missing!r}; it must be {' or '.join(MISSING)}")
    if jit not in (*JIT, None):
        raise InvalidArgument(f"jit is {jit!r}; it must be {' or '.join(JIT)}")
    found = _replacements()
    _check_keywords(found, keywords)
    _check_version(bundle.statement, any_version)
    with _lock:
        installation = _Installation(serving.serve(bundle, device, at_least), missing, keywords)
        _installations.append(installation)
        try:
            # Where functions are defined first: a package only exports what is in its modules.
            for name in sorted(found, key=lambda name: name.count("."), reverse=True):
                for attribute, function in found[name].items():
                    installation.replace(name, attribute, function)
            installation.set_jit(jit or ("allow" if missing == "fall_through" else "refuse"))
        except BaseException:
            uninstall()
            raise


def uninstall() -> None:
    """Undo the last ``install``: every name means again what it meant before, and the device is served as before.

    Raises:
        InvalidArgument: nothing is installed.
    """
    with _lock:
        if not _installations:
            raise InvalidArgument("nothing is installed")
        _installations.pop().undo()


class _Installation:
    """What one ``install`` has changed, and how to change it back."""

    def __init__(self, stop_serving: Callable[[], None], missing: str, keywords: Mapping[str, Any]) -> None:
        self._undo: list[Callable[[], None]] = [stop_serving]
        self._missing = missing
        self._keywords = keywords
        self._made: dict[Function, list[Function]] = {}
        self._stand_ins: list[ModuleType] = []

    def replace(self, name: str, attribute: str, function: Function) -> None:
        module = self._module(name)
        theirs = getattr(module, attribute, None)
        made = self._made.setdefault(function, [])
        if theirs is None and not made and module not in self._stand_ins:
            raise Unsupported(f"{name} has no {attribute}; this FlashInfer is not one that kernseal replaces")
        if theirs is None:
            if not made:
                made.append(self._with_keywords(function))
            self._undo.append(_put(module, attribute, made[-1]))
        elif all(theirs is not ours for ours in made):
            ours = self._with_keywords(function)
            if self._missing == "fall_through":
                ours = _fall_through(ours, theirs)
            elif made:  # what takes the place of two is two: each name finds its own way back
                ours = functools.partial(ours)
            made.append(ours)
            rename(theirs, ours)
            self._undo.append(lambda: rename(ours, theirs))

    def set_jit(self, jit: str) -> None:
        self._undo.append(flashinfer_jit.enter(jit))

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
        if self._stand_ins:
            # What was imported from one meanwhile has no function of FlashInfer's to go back to.
            _forget([function for made in self._made.values() for function in made])

    def _module(self, name: str) -> ModuleType:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            lacking = (error.name or PACKAGE).partition(".")[0]
            if lacking == PACKAGE:
                expected = "this FlashInfer is not one that kernseal replaces"
                raise Unsupported(f"{name}: {error}; {expected}") from None
            if lacking not in COMPILERS or not isinstance(error, ModuleNotFoundError):
                raise Missing(f"{name}: cannot be imported ({error})") from error
        package, _, last = name.rpartition(".")
        parent = self._module(package)
        made = ModuleType(name, "Stands in for a module of FlashInfer whose compilers are not installed.")
        self._stand_ins.append(made)
        sys.modules[name] = made
        self._undo.append(lambda: sys.modules.__delitem__(name))
        self._undo.append(_put(parent, last, made))
        return made

    def _with_keywords(self, function: Function) -> Function:
        taken = inspect.signature(function).parameters
        own = {name: value for name, value in self._keywords.items() if name in taken}
        return functools.partial(function, **own) if own else function


def _replacements() -> dict[str, dict[str, Function]]:
    """The functions of every op, by module and name in FlashInfer."""
    import kernseal.kernels as kernels

    found: dict[str, dict[str, Function]] = {}
    for op in pkgutil.iter_modules(kernels.__path__):
        name = f"kernseal.kernels.{op.name}.torch_api"
        if op.ispkg and importlib.util.find_spec(name) is not None:
            for module, functions in importlib.import_module(name).REPLACES.items():
                found.setdefault(module, {}).update(functions)
    return found


def _check_keywords(found: Mapping[str, Mapping[str, Function]], keywords: Mapping[str, Any]) -> None:
    functions = [function for group in found.values() for function in group.values()]
    taken = {name for function in functions for name in inspect.signature(function).parameters}
    unknown = sorted(keywords.keys() - taken)
    if unknown:
        raise InvalidArgument(f"{', '.join(unknown)}: no function that is installed takes it")


def _check_version(statement: Statement, any_version: bool) -> None:
    try:
        version = getattr(importlib.import_module(PACKAGE), "__version__", "of no version")
    except ModuleNotFoundError as error:
        raise Missing(f"{PACKAGE}: cannot be imported ({error})") from None
    wanted = _pinned_version(statement)
    if version != wanted and not any_version:
        expected = f"the bundle's kernels are from {wanted}; any_version=True accepts it"
        raise Unsupported(f"{PACKAGE} is {version}; {expected}")


def _pinned_version(statement: Statement) -> str:
    dependencies = statement.document["predicate"]["buildDefinition"]["resolvedDependencies"]
    pins = [_PIN.fullmatch(str(entry.get("uri"))) for entry in dependencies]
    return next((pin[1] for pin in pins if pin), "no FlashInfer")


def _fall_through(ours: Function, theirs: Function) -> Function:
    @functools.wraps(ours)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return ours(*args, **kwargs)
        except Unsupported:
            return theirs(*args, **kwargs)

    return call


def rename(old: object, new: object) -> None:
    """Give every name that ``old`` has in FlashInfer's modules to ``new``."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == PACKAGE and isinstance(module, ModuleType):
            for attribute, value in list(vars(module).items()):
                if value is old:
                    setattr(module, attribute, new)


def _put(module: ModuleType, attribute: str, value: object) -> Callable[[], None]:
    """Set an attribute, and return what takes that back."""
    if attribute in vars(module):
        undo = functools.partial(setattr, module, attribute, vars(module)[attribute])
    else:
        undo = functools.partial(delattr, module, attribute)
    setattr(module, attribute, value)
    return undo


def _forget(functions: Sequence[Function]) -> None:
    """Let modules of FlashInfer that have one of the functions be imported anew."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != PACKAGE or not isinstance(module, ModuleType):
            continue
        if any(value is function for value in vars(module).values() for function in functions):
            package, _, last = name.rpartition(".")
            del sys.modules[name]
            if vars(sys.modules.get(package, module)).get(last) is module:
                delattr(sys.modules[package], last)
