"""What an op's folder tells the generic caller about the memory behind its pointers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Operand:
    """The tensor a pointer field of args points to.

    Attributes:
        dtype: element type (``f32``), several that will do (``i32|u32``), the config field that says it
            (``state_dtype``), or ``bytes`` for scratch.
        shape: per dimension the args field with its size, ``field+1``, the config field with it, or a size of
            ``OpSpec.derive``.
        row_stride: args field for the distance between rows, or None where rows must be dense.
        strides: instead, the args fields for the distances of every dimension but the last, which is dense. Operands that
            share them must agree.
        host: it is memory of the host, not of the device.
    """

    dtype: str
    shape: tuple[str, ...]
    row_stride: str | None = None
    strides: tuple[str, ...] = ()
    host: bool = False


@dataclass(frozen=True)
class OpSpec:
    """An op's calling conventions beyond its C structs.

    Attributes:
        operands: config to the operand of every pointer but the stream.
        config_enums: config fields whose values are names of a C enum.
        derive: config and size fields of args to the sizes that shapes name and args lack. It must not look at pointers.
        config_defaults: config fields a caller may leave out.
        args_defaults: sizes and strides a caller may leave out.
        tags: what each config field adds to a variant's name: a prefix of its value, or the words for False and True.
    """

    operands: Callable[[Mapping[str, Any]], Mapping[str, Operand]]
    config_enums: Mapping[str, str]
    derive: Callable[[Mapping[str, Any]], Mapping[str, int | None]]
    config_defaults: Mapping[str, Any] = field(default_factory=dict)
    args_defaults: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str | tuple[str, str]] = field(default_factory=dict)

    def variant(self, config: Mapping[str, Any]) -> str:
        """Name of the variant that ``config`` asks for."""
        full = {**self.config_defaults, **config}
        words = []
        for field_name, tag in self.tags.items():
            value = full[field_name]
            words.append(tag[1 if value else 0] if isinstance(tag, tuple) else f"{tag}{value}")
        return "_".join(word for word in words if word)
