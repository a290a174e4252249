"""Calls one prepared op: Python arguments in, one C call out.

Nothing here knows an op: fields and enums come from the C declarations, shapes from the op's ``operands``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from operator import itemgetter
from types import ModuleType
from typing import Any

from .binder import Binder, Order
from .errors import InvalidArgument, InvalidArgumentType, Unsupported
from .layout import Layout
from .library import Library
from .operands import OpSpec
from .tensors import current_stream


def load_spec(op: str) -> OpSpec:
    """Return the calling conventions of ``op``.

    Raises:
        Unsupported: kernseal has no op of that name.
    """
    name = f"kernseal.kernels.{op}.operands"
    try:
        module: ModuleType = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise Unsupported(f"op {op!r}: kernseal has no such op") from error
    spec: OpSpec = module.SPEC
    return spec


class Op:
    """One prepared variant on one device. Made by ``Bundle.prepare``; may be shared by threads.

    Attributes:
        name: the op.
        config: the config it was prepared with.
    """

    def __init__(self, library: Library, bundle: Any, name: str, config: Mapping[str, Any]) -> None:
        """Prepare; see ``Bundle.prepare``."""
        ffi, c = library.ffi, library.c
        spec = load_spec(name)
        if not hasattr(c, f"kseal_{name}_prepare"):
            raise Unsupported(f"op {name!r}: this bundle's library does not have it")
        self.name = name
        self.config = _full_config(Layout(ffi, f"kseal_{name}_config"), spec, library, config)
        self._library = library
        self._handle: Any = _prepare(library, bundle, name, spec, self.config)
        self._run = getattr(c, f"kseal_{name}_run")
        self._workspace_size = getattr(c, f"kseal_{name}_workspace_size")
        self._semaphores_size = getattr(c, f"kseal_{name}_semaphores_size", None)
        self._layout = layout = Layout(ffi, f"kseal_{name}_args")
        self._fields = itemgetter(*layout.names)
        self._plan_size = getattr(c, f"kseal_{name}_plan_size", None)
        self._plan = getattr(c, f"kseal_{name}_plan", None)
        self._binder = Binder(layout, spec, self.config)

    def run(self, **args: Any) -> None:
        """Launch on ``stream``. Allocates no device memory, takes no lock, does not synchronise; capturable.

        A pointer field takes an address (trusted), a torch tensor, or an object with ``__dlpack__`` or
        ``__cuda_array_interface__``. Of the latter device, element type, shape and strides are checked, and
        sizes and strides that are not passed follow from them. ``stream`` is a CUstream address, a torch
        stream or an object with ``__cuda_stream__``; without it, torch tensors are used on torch's current
        stream, and anything else is refused. The caller keeps the memory until the work is done.

        Raises:
            InvalidArgument: a field contradicts another, or its value is not allowed.
            InvalidArgumentType: a field is unknown, missing or not of its type.
            KernsealError: what the C library says; see ``kseal_<op>_run``.
        """
        handle = self._open()
        if args.get("stream") is None:
            args["stream"] = current_stream(args.values())
        status = self._run(handle, self._layout.pack(self._binder.row(args)))
        if status:
            raise self._library.error(status)

    def launch(self, **fields: Any) -> None:
        """``run`` for a caller that has looked at its tensors itself: every field of args, pointers as addresses.

        A fraction of the host time of ``run``; what the C library checks is still checked.

        Raises:
            InvalidArgument: a field is missing or unknown, or its value does not fit it.
            KernsealError: what the C library says; see ``kseal_<op>_run``.
        """
        handle = self._open()
        names = self._layout.names
        try:
            values = self._fields(fields)
        except KeyError:
            raise InvalidArgument(f"missing: {', '.join(n for n in names if n not in fields)}") from None
        if len(fields) != len(names):
            unknown = ", ".join(name for name in fields if name not in names)
            raise InvalidArgument(f"{unknown}: no such field; there are {', '.join(names)}")
        status = self._run(handle, self._layout.pack(values))
        if status:
            raise self._library.error(status)

    __call__ = run

    def settle(self, changing: Sequence[str], **args: Any) -> Settled:
        """Check a call, and return what launches it for other values of the fields ``changing``, time and again.

        Args:
            changing: names of fields that no check looks at: addresses, factors and the stream.
            args: what ``run`` takes.

        Raises:
            InvalidArgument: as ``run``.
        """
        self._open()
        order = Order(self._layout.names, changing)
        return Settled(self, order, order.numbers(self._binder.values(args)))

    def workspace_size(self, **args: Any) -> int:
        """Return the bytes of workspace that ``run`` needs with these sizes; takes what ``run`` takes.

        Raises:
            InvalidArgument: as ``run``; fields that are left out count as 0.
            KernsealError: what the C library says.
        """
        return self._scratch_size(self._workspace_size, args)

    def semaphores_size(self, **args: Any) -> int:
        """Return the bytes of semaphores that ``run`` needs; see ``workspace_size``. 0 for an op that has none."""
        return 0 if self._semaphores_size is None else self._scratch_size(self._semaphores_size, args)

    def plan_size(self, **args: Any) -> int:
        """Return the bytes that a plan for these sizes may take; see ``workspace_size``. 0 for an op that plans nothing."""
        return 0 if self._plan_size is None else self._scratch_size(self._plan_size, args)

    def plan(self, **args: Any) -> int:
        """Plan a run with these arguments on the host; takes what ``run`` takes.

        Returns the bytes of the plan that are to be copied to the device before ``run``, in the order of its stream.

        Raises:
            Unsupported: this op plans nothing.
            InvalidArgument: as ``run``; fields that are left out count as 0.
            KernsealError: what the C library says; see ``kseal_<op>_plan``.
        """
        if self._plan is None:
            raise Unsupported(f"op {self.name!r}: plans nothing")
        return self._scratch_size(self._plan, args)

    def _scratch_size(self, function: Any, args: Mapping[str, Any]) -> int:
        handle = self._open()
        record = self._layout.pack([0 if value is None else value for value in self._binder.row(args)])
        size = self._library.ffi.new("uint64_t *")
        self._library.check(function(handle, record, size))
        return int(size[0])

    def let_go(self) -> None:
        """Drop the prepared variant, for ``Bundle.close``; later calls raise InvalidArgument."""
        # Whoever is inside run() on another thread holds the handle too; the last reference releases it.
        self._handle = None

    def _open(self) -> Any:
        """The handle, held for as long as a call uses it."""
        handle = self._handle
        if handle is None:
            raise InvalidArgument(f"op {self.name} belongs to a bundle that was closed")
        return handle


class Settled:
    """A call whose numbers are settled; see ``Op.settle``. May be shared by threads."""

    def __init__(self, op: Op, order: Order, numbers: tuple[Any, ...]) -> None:
        self._op = op
        self._order = order
        self._numbers = numbers

    def launch(self, changing: Sequence[Any]) -> None:
        """Launch with these values of the fields that change, in their order.

        Raises:
            InvalidArgument: a value does not fit its field, or the bundle was closed.
            KernsealError: what the C library says; see ``kseal_<op>_run``.
        """
        op = self._op
        handle = op._open()
        status = op._run(handle, op._layout.pack(self._order.row(changing, self._numbers)))
        if status:
            raise op._library.error(status)


def choose(
    library: Library, name: str, sizes: Mapping[str, Any], sm_count: int, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the config with the axes that the op's policy sets; see ``Bundle.choose``."""
    ffi, spec = library.ffi, load_spec(name)
    function = getattr(library.c, f"kseal_{name}_choose", None)
    if function is None:
        raise Unsupported(f"op {name!r}: has no policy; say its config yourself")
    layout, args = Layout(ffi, f"kseal_{name}_config"), Layout(ffi, f"kseal_{name}_args")
    if unknown := [size for size in sizes if size not in args.names]:
        raise InvalidArgumentType(f"{', '.join(unknown)}: no such field; there are {', '.join(args.names)}")
    full = _full_config(layout, spec, library, config)
    enums = {field: library.enum(enum) for field, enum in spec.config_enums.items()}
    values = {**full, **{field: numbers[full[field]] for field, numbers in enums.items()}}
    record = ffi.new(f"kseal_{name}_config *")
    packed = layout.pack([values[field] for field in layout.names])
    ffi.memmove(record, packed, ffi.sizeof(f"kseal_{name}_config"))
    given = {**dict.fromkeys(args.names, 0), **spec.args_defaults, **sizes}
    library.check(function(args.pack([given[field] for field in args.names]), sm_count, record))
    words = {field: {number: word for word, number in numbers.items()} for field, numbers in enums.items()}
    found: dict[str, Any] = {}
    for field in layout.names:
        if field != "device" and field not in layout.pointers:
            number = int(getattr(record, field))
            switch = isinstance(spec.config_defaults.get(field), bool)
            found[field] = words[field][number] if field in words else bool(number) if switch else number
    return found


def _full_config(layout: Layout, spec: OpSpec, library: Library, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return every config field with its value in words."""
    for name in config:
        if name not in layout.names:
            raise InvalidArgumentType(f"{name}: no such axis; there are {', '.join(layout.names)}")
    full = {name: spec.config_defaults.get(name) for name in layout.names} | dict(config)
    for name, value in full.items():
        if value is None:
            raise InvalidArgumentType(f"{name}: missing")
        if name in spec.config_enums:
            known = library.enum(spec.config_enums[name])
            if value not in known:
                raise InvalidArgument(f"{name}: {value!r}; known: {', '.join(known)}")
    return full


def _prepare(library: Library, bundle: Any, name: str, spec: OpSpec, config: Mapping[str, Any]) -> Any:
    ffi, c = library.ffi, library.c
    enums = {field: library.enum(enum) for field, enum in spec.config_enums.items()}
    layout = Layout(ffi, f"kseal_{name}_config")
    record = layout.pack([enums[f][config[f]] if f in enums else config[f] for f in layout.names])
    out = ffi.new(f"kseal_{name} **")
    library.check(getattr(c, f"kseal_{name}_prepare")(bundle, record, out))
    return ffi.gc(out[0], getattr(c, f"kseal_{name}_release"))
