"""Turns the Python arguments of a call into the C struct's fields, and checks the tensors among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from .errors import InvalidArgument, InvalidArgumentType, KernsealError
from .layout import Layout
from .operands import Operand, OpSpec
from .tensors import (
    HOST,
    ITEM_BYTES,
    TORCH_TYPES,
    UNKNOWN,
    View,
    dense_strides,
    reader_of,
    row_stride,
    stream_handle,
)

_BYTES = "bytes"
_MOST_SHAPES = 1024
_PLAIN = frozenset({int, type(None)})


class Binder:
    """The argument rules of one prepared op.

    Whether tensors fit, and the sizes and strides they show, is remembered by what is known of them (all but their
    addresses): working it out costs several launches, and a runtime calls with the same few shapes again and again.
    """

    def __init__(self, layout: Layout, spec: OpSpec, config: Mapping[str, Any]) -> None:
        operands = spec.operands(config)
        defaults: dict[str, Any] = dict.fromkeys(layout.names)
        defaults |= dict.fromkeys(layout.pointers, 0) | dict(spec.args_defaults)
        self._defaults = defaults
        self._operands = {name: _Expected(name, operand, config) for name, operand in operands.items()}
        self._sources = _size_sources(operands, defaults)
        self._successors = sorted({s for o in operands.values() for s in o.shape if s.endswith("+1")})
        self._derive = spec.derive
        self._device = config["device"]
        self._config_sizes = {name: value for name, value in config.items() if type(value) is int}
        self._names = layout.names
        self._sizes = frozenset(layout.sizes)
        self._orders: dict[tuple[str, ...], Order] = {}
        self._shown: dict[Any, tuple[Any, ...]] = {}

    def values(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return every field's value by its name; see ``row``."""
        return dict(zip(self._names, self.row(args), strict=True))

    def row(self, args: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return every field's value in the struct's order, None where neither an argument, a tensor nor a default gives it.

        Raises:
            InvalidArgument: a field is unknown, or a tensor is not what the op reads there.
        """
        names = tuple(args)
        order = self._orders.get(names) or self._order(names)
        stream = stream_handle(args.get("stream", 0))
        operands, sizes = self._operands, self._sizes
        known: list[Any] = [names]  # decides all that is worked out: nothing here is an address or a factor
        changing: list[Any] = []  # the other arguments, in their order
        views: dict[str, View] = {}
        plain = True
        for name, value in args.items():
            if name in operands:
                kind = type(value)
                if kind in TORCH_TYPES:  # in torch's own words, which cost least
                    changing.append(value.data_ptr())
                    strides = value.is_contiguous() or value.stride()
                    known.append((value.dtype, value.is_cuda, value.get_device(), value.shape, strides))
                elif kind is int or value is None:
                    changing.append(value or 0)
                    known.append(None)
                else:
                    views[name] = view = reader_of(name, value)(name, value, stream)
                    changing.append(view[0])
                    known.append(view[1:])
            elif name in sizes:
                plain = plain and type(value) in _PLAIN
                known.append(value)
            else:
                changing.append(stream if name == "stream" else value)
        # What counts as a number need not stay the same number.
        key = tuple(known) if plain else None
        numbers = self._shown.get(key) if plain else None
        if numbers is None:
            numbers = order.numbers(self._look(args, stream, views))
            if plain:
                if len(self._shown) >= _MOST_SHAPES:
                    self._shown.clear()
                self._shown[key] = numbers
        return order.row(changing, numbers)

    def _order(self, names: tuple[str, ...]) -> Order:
        if unknown := [name for name in names if name not in self._defaults]:
            raise InvalidArgumentType(
                f"{', '.join(unknown)}: no such field; there are {', '.join(self._defaults)}"
            )
        if len(self._orders) >= _MOST_SHAPES:
            self._orders.clear()
        made = self._orders[names] = Order(self._names, [name for name in names if name not in self._sizes])
        return made

    def _look(self, args: Mapping[str, Any], stream: int, views: Mapping[str, View]) -> dict[str, Any]:
        """Return every field, once the tensors were found to fit. ``views``: those that have been read."""
        values = {**self._defaults, **args}
        found: dict[str, View] = {}
        for name in self._operands:
            value = values[name]
            if value is not None and type(value) is not int:
                found[name] = views[name] if name in views else reader_of(name, value)(name, value, stream)
        if found:
            self._fill_sizes(args, values, found)
            self._check(args, values, found)
        return values

    def _fill_sizes(self, args: Mapping[str, Any], values: dict[str, Any], views: Mapping[str, View]) -> None:
        for field, sources in self._sources:
            if field not in args:
                for operand, dimension, extra, rank in sources:
                    view = views.get(operand)
                    if view is not None:
                        if rank is None:
                            values[field] = _byte_count(operand, view)
                        elif len(view[3]) == rank:
                            values[field] = view[3][dimension] - extra
                        break

    def _check(self, args: Mapping[str, Any], values: dict[str, Any], views: Mapping[str, View]) -> None:
        sizes = {**self._config_sizes, **values}
        sizes.update(self._derive(sizes))
        for symbol in self._successors:
            count = values[symbol[:-2]]
            sizes[symbol] = None if count is None else count + 1
        device = self._device if self._device >= 0 else None
        for name, view in views.items():
            _, where, dtype, shape, strides = view
            expected = self._operands[name]
            if expected.host:
                if where != HOST:
                    raise _wrong_device(name, where, HOST)
            elif where != device and where != UNKNOWN:
                if device is not None or where == HOST:
                    raise _wrong_device(name, where, device)
                device = where
            if expected.dtype == _BYTES:
                expected.check_bytes(view, values)
                continue
            if dtype not in expected.dtypes:
                raise InvalidArgument(
                    f"{name}: element type {dtype}; this op was prepared for {expected.dtype}"
                )
            if shape != expected.sizes(sizes):
                expected.check_shape(shape, sizes)
            if expected.strides:
                expected.bind_strides(view, values)
            elif strides is not None:
                expected.bind_stride(view, args, values)


class Order:
    """Puts the values that change from call to call, and the numbers that stay, into the order of a struct."""

    def __init__(self, names: Sequence[str], changing: Sequence[str]) -> None:
        """``names``: of the struct's fields; ``changing``: of some of them, in an order of their own."""
        self._staying = [name for name in names if name not in changing]
        at = {name: index for index, name in enumerate([*changing, *self._staying])}
        self._pick = itemgetter(*[at[name] for name in names])

    def numbers(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """The fields that stay."""
        return tuple([values[name] for name in self._staying])

    def row(self, changing: Sequence[Any], numbers: Sequence[Any]) -> tuple[Any, ...]:
        """Every field, in the order of the struct."""
        row: tuple[Any, ...] = self._pick((*changing, *numbers))
        return row


class _Expected:
    """An operand under a given config."""

    __slots__ = ("dtype", "dtypes", "host", "name", "shape", "sizes", "stride", "strides")

    def __init__(self, name: str, operand: Operand, config: Mapping[str, Any]) -> None:
        self.name = name
        self.dtype = config.get(operand.dtype, operand.dtype)
        self.dtypes = self.dtype.split("|")
        self.shape = operand.shape
        self.stride = operand.row_stride
        self.strides = operand.strides
        self.host = operand.host
        getter = itemgetter(*operand.shape)
        self.sizes = getter if len(operand.shape) > 1 else lambda sizes: (getter(sizes),)

    def check_shape(self, shape: tuple[int, ...], sizes: Mapping[str, Any]) -> None:
        wanted = self.sizes(sizes)
        fits = len(shape) == len(wanted) and all(
            want is None or have == want for have, want in zip(shape, wanted, strict=True)
        )
        if not fits:
            names = ", ".join(self.shape)
            raise InvalidArgument(f"{self.name}: shape {tuple(shape)}; expected [{names}] = {wanted}")

    def check_bytes(self, view: View, values: Mapping[str, Any]) -> None:
        have, wanted = _byte_count(self.name, view), values[self.shape[0]]
        if wanted is not None and have < wanted:
            raise InvalidArgument(f"{self.name}: holds {have} bytes, {self.shape[0]} says {wanted}")

    def bind_strides(self, view: View, values: dict[str, Any]) -> None:
        """Fill every stride field, or compare with what an argument or an operand before this one says."""
        shape, dense = view[3], dense_strides(view[3])
        strides = view[4] or dense
        # A stride of 0 would say "dense"; what there is only one of may have any.
        shared = 0 not in shape and any(n == 0 and size > 1 for n, size in zip(strides, shape, strict=True))
        if (shape[-1] != 1 and strides[-1] != 1) or shared:
            raise InvalidArgument(
                f"{self.name}: strides {tuple(strides)}; the last must be 1 and none of the others 0"
            )
        for field, size, have, usual in zip(self.strides, shape, strides, dense, strict=False):
            stride = usual if size == 1 else have
            known = values[field]
            if known and known != stride and size != 1:
                raise InvalidArgument(f"{field}: {known}, but {self.name} has {stride}")
            values[field] = known or stride

    def bind_stride(self, view: View, args: Mapping[str, Any], values: dict[str, Any]) -> None:
        stride = row_stride(self.name, view[3], view[4] or ())
        if self.stride is None:
            if stride:
                raise InvalidArgument(f"{self.name}: strides {tuple(view[4] or ())}; must be dense")
        elif self.stride not in args:
            values[self.stride] = stride
        elif args[self.stride] != stride:
            raise InvalidArgument(
                f"{self.stride}: {args[self.stride]}, but {self.name} has rows {stride} apart"
            )


Source = tuple[str, int, int, "int | None"]
"""Where a size shows: operand, dimension, what to subtract, and the operand's rank (None: its bytes count)."""


def _size_sources(
    operands: Mapping[str, Operand], fields: Mapping[str, Any]
) -> list[tuple[str, tuple[Source, ...]]]:
    """For each size field the operands that show it, in the order in which they are asked."""
    found: dict[str, list[Source]] = {}
    for name, operand in operands.items():
        rank = None if operand.dtype == _BYTES else len(operand.shape)
        for dimension, symbol in enumerate(operand.shape):
            field, _, extra = symbol.partition("+")
            if field in fields:
                found.setdefault(field, []).append((name, dimension, int(extra or 0), rank))
    return [(field, tuple(sources)) for field, sources in found.items()]


def _byte_count(name: str, view: View) -> int:
    if view[4] is not None:
        raise InvalidArgument(f"{name}: strides {tuple(view[4])}; must be dense")
    count = ITEM_BYTES.get(view[2], 1)
    for size in view[3]:
        count *= size
    return count


def _wrong_device(name: str, device: int, wanted: int | None) -> KernsealError:
    have, want = (
        {HOST: "the host", UNKNOWN: "a CUDA device", None: "a CUDA device"}.get(where, f"cuda:{where}")
        for where in (device, wanted)
    )
    return InvalidArgument(f"{name}: is on {have}; expected {want}")
