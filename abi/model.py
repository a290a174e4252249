"""The C interface as values: read from the YAML of ``abi/`` and each ``kernel.yaml``, laid out as C does."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernseal.abi import yaml_text

ABI_DIR = Path(__file__).resolve().parent
KERNELS_DIR = ABI_DIR.parent / "kernels"


@dataclass(frozen=True)
class CType:
    """How one type is spelled in C and Rust, and its size (also its alignment) on a 64-bit target."""

    c: str
    rust: str
    size: int

    def declare(self, name: str) -> str:
        return f"{self.c}{name}" if self.c.endswith("*") else f"{self.c} {name}"


SCALARS: Mapping[str, CType] = {
    "i32": CType("int32_t", "i32", 4),
    "u32": CType("uint32_t", "u32", 4),
    "i64": CType("int64_t", "i64", 8),
    "u64": CType("uint64_t", "u64", 8),
    "f32": CType("float", "f32", 4),
    "status": CType("kseal_status", "kseal_status", 4),
    "str": CType("const char *", "*const c_char", 8),
    "ptr_in": CType("const void *", "*const c_void", 8),
    "ptr_out": CType("void *", "*mut c_void", 8),
    "stream": CType("void *", "*mut c_void", 8),
    "void": CType("void", "()", 0),
}


@dataclass(frozen=True)
class Constant:
    """One named number of an enum."""

    name: str
    c_name: str
    value: int
    doc: str


@dataclass(frozen=True)
class Enum:
    name: str
    doc: str
    constants: tuple[Constant, ...]

    def constant(self, name: str) -> Constant:
        """The constant called ``name``. Raises KeyError where the enum has none."""
        for constant in self.constants:
            if constant.name == name:
                return constant
        raise KeyError(f"{self.name} has no value {name!r}")


@dataclass(frozen=True)
class Field:
    name: str
    type: CType
    offset: int
    doc: str
    unit: str | None
    since: str | None


@dataclass(frozen=True)
class Struct:
    """A public struct. ``min_size`` is its size in its first release: the least a caller may pass."""

    name: str
    doc: str
    access: str
    fields: tuple[Field, ...]
    size: int
    min_size: int

    def has(self, name: str) -> bool:
        return any(field.name == name for field in self.fields)


@dataclass(frozen=True)
class Param:
    name: str
    type: CType


@dataclass(frozen=True)
class Function:
    """A public function and its rules: ``errors`` has every status but ok that it can return."""

    name: str
    returns: CType
    params: tuple[Param, ...]
    doc: str
    lifetimes: str
    threads: str
    streams: str
    errors: tuple[Constant, ...]


@dataclass(frozen=True)
class Axis:
    """A config field that selects a variant: its allowed values in C, by name."""

    name: str
    enum: str | None
    values: Mapping[str, int]


@dataclass(frozen=True)
class Exclude:
    class_name: str | None
    when: tuple[tuple[int, int], ...]
    why: str


@dataclass(frozen=True)
class OpClass:
    """An upstream class: its builder, which fixes its arguments, and its numbers by key_path."""

    name: str
    builder: str
    numbers: Mapping[str, int]


@dataclass(frozen=True)
class Op:
    name: str
    summary: str
    semantics: tuple[str, ...]
    axes: tuple[Axis, ...]
    config: Struct
    args: Struct
    config_fields: tuple[tuple[str, str | None], ...]
    classes: tuple[OpClass, ...]
    chosen: tuple[str, ...]
    excludes: tuple[Exclude, ...]
    limits: Mapping[str, int]
    functions: tuple[Function, ...]

    @property
    def scratch(self) -> tuple[str, ...]:
        """What a caller allocates for a run: each has a function that says how large."""
        return tuple(
            what
            for what in ("workspace", "semaphores", "plan")
            if what == "workspace" or self.args.has(f"{what}_bytes")
        )

    @property
    def byte_counts(self) -> tuple[tuple[str, str], ...]:
        """The functions that take args and give a number of bytes, each with the name of what the op writes for it."""
        sizes = tuple((f"{what}_size", what) for what in self.scratch)
        return (*sizes, ("plan", "make_plan")) if "plan" in self.scratch else sizes

    @property
    def class_keys(self) -> tuple[str, ...]:
        return tuple(sorted({key for c in self.classes for key in c.numbers}))

    @property
    def builders(self) -> tuple[str, ...]:
        return tuple(sorted({c.builder for c in self.classes}))

    def axis_values(self, axes: Mapping[str, str | bool | int]) -> tuple[int, ...]:
        """A variant's axes as C values, as in ``kernel.yaml``. Raises KeyError for one not there."""
        if set(axes) != {axis.name for axis in self.axes}:
            raise KeyError(f"{self.name}: axes {sorted(axes)}, expected {sorted(a.name for a in self.axes)}")
        return tuple(axis.values[axis_key(axes[axis.name])] for axis in self.axes)


@dataclass(frozen=True)
class Abi:
    major: int
    minor: int
    statuses: Enum
    enums: tuple[Enum, ...]
    structs: tuple[Struct, ...]
    functions: tuple[Function, ...]
    ops: tuple[Op, ...]

    @property
    def version(self) -> int:
        return self.major << 16 | self.minor

    @property
    def all_enums(self) -> tuple[Enum, ...]:
        return (self.statuses, *self.enums)

    @property
    def all_structs(self) -> tuple[Struct, ...]:
        return (*self.structs, *(s for op in self.ops for s in (op.config, op.args)))

    @property
    def all_functions(self) -> tuple[Function, ...]:
        return (*self.functions, *(f for op in self.ops for f in op.functions))

    @property
    def handles(self) -> tuple[str, ...]:
        return ("kseal_bundle", *(f"kseal_{op.name}" for op in self.ops))

    def op(self, name: str) -> Op:
        """The op called ``name``. Raises KeyError where there is none."""
        for op in self.ops:
            if op.name == name:
                return op
        raise KeyError(f"no op {name!r}")


def axis_key(value: str | bool | int) -> str:
    """The name of an axis value: booleans are ``0`` and ``1``, numbers their digits."""
    return value if isinstance(value, str) else str(int(value))


def load(abi_dir: Path = ABI_DIR, kernels_dir: Path = KERNELS_DIR) -> Abi:
    """Reads the whole interface. Raises KeyError or ValueError where the YAML does not fit together."""
    types = yaml_text.load((abi_dir / "types.yaml").read_text())
    statuses = yaml_text.load((abi_dir / "status.yaml").read_text())["statuses"]
    enums = tuple(_enum(name, spec["doc"], spec["values"]) for name, spec in types["enums"].items())
    by_name = {enum.name: enum for enum in enums}
    status = _enum("kseal_status", "How a call ended.", statuses, prefix="KSEAL")
    ops = tuple(
        _op(yaml_text.load(path.read_text()), types["op_functions"], by_name, status)
        for path in sorted(kernels_dir.glob("*/kernel.yaml"))
    )
    return Abi(
        major=types["abi"]["major"],
        minor=types["abi"]["minor"],
        statuses=status,
        enums=enums,
        structs=tuple(
            _struct(name, spec["doc"], spec["access"], spec["fields"])
            for name, spec in types["structs"].items()
        ),
        functions=tuple(_function(spec, {}, status) for spec in types["functions"]),
        ops=ops,
    )


def _enum(name: str, doc: str, values: Iterable[Mapping[str, Any]], prefix: str | None = None) -> Enum:
    stem = prefix or name.upper()
    constants = tuple(
        Constant(v["name"], f"{stem}_{v['name'].upper()}", v["value"], v["doc"]) for v in values
    )
    numbers, names = {c.value for c in constants}, {c.name for c in constants}
    if len(numbers) < len(constants) or len(names) < len(constants):
        raise ValueError(f"{name}: a name or number is used twice")
    return Enum(name, doc, constants)


def _struct(name: str, doc: str, access: str, fields: Iterable[Mapping[str, Any]]) -> Struct:
    size_doc = "sizeof of this struct as the caller was compiled."
    offset, align = 0, 1
    laid_out: list[Field] = []
    sizes: dict[str | None, int] = {}
    for spec in ({"name": "struct_size", "type": "u32", "doc": size_doc}, *fields):
        ctype, since = SCALARS[spec["type"]], spec.get("since")
        if sizes and since not in sizes and offset % align:
            # A caller of that release has whatever it likes there, and says with struct_size that it has the field.
            raise ValueError(
                f"{name}.{spec['name']}: lies in the padding that ends the release before {since}"
            )
        offset += -offset % ctype.size
        align = max(align, ctype.size)
        laid_out.append(Field(spec["name"], ctype, offset, spec["doc"], spec.get("unit"), since))
        offset += ctype.size
        sizes[since] = offset + -offset % align
    return Struct(name, doc, access, tuple(laid_out), offset + -offset % align, sizes[None])


def _param_type(text: str, names: Mapping[str, str]) -> CType:
    kind, _, target = text.format(**names).partition(" ")
    if not target:
        return SCALARS[kind]
    base = SCALARS.get(target, CType(target, target, 0))
    return {
        "in": CType(f"const {base.c} *", f"*const {base.rust}", 8),
        "out": CType(f"{base.c} *", f"*mut {base.rust}", 8),
        "handle": CType(f"{base.c} *", f"*mut {base.rust}", 8),
        "new": CType(f"{base.c} **", f"*mut *mut {base.rust}", 8),
    }[kind]


def _function(spec: Mapping[str, Any], names: Mapping[str, str], status: Enum) -> Function:
    return Function(
        name=spec["name"].format(**names),
        returns=SCALARS[spec["returns"]],
        params=tuple(Param(p["name"], _param_type(p["type"], names)) for p in spec["params"]),
        doc=spec["doc"].format(**names) if "needs" in spec else spec["doc"],
        lifetimes=spec["lifetimes"].format(**names),
        threads=spec["threads"],
        streams=spec["streams"],
        errors=tuple(status.constant(error) for error in spec["errors"]),
    )


def _axis(name: str, spec: Mapping[str, Any], enums: Mapping[str, Enum]) -> Axis:
    if spec["type"] == "bool":
        return Axis(name, None, {"0": 0, "1": 1})
    if spec["type"] == "int":
        return Axis(name, None, {str(value): value for value in spec["values"]})
    enum = enums[spec["type"]]
    return Axis(name, enum.name, {value: enum.constant(value).value for value in spec["values"]})


def _axis_doc(axis: Axis, doc: str) -> str:
    if axis.enum is None:
        return doc
    return f"{doc} {axis.enum}: {', '.join(axis.values)}."


def _flatten(spec: Mapping[str, Any], prefix: str = "") -> dict[str, int]:
    numbers: dict[str, int] = {}
    for key, value in spec.items():
        if isinstance(value, Mapping):
            numbers |= _flatten(value, f"{prefix}{key}_")
        elif isinstance(value, int):
            numbers[prefix + key] = int(value)
    return numbers


def _excludes(spec: Mapping[str, Any], axes: tuple[Axis, ...]) -> Iterator[Exclude]:
    """One for each point of a rule."""
    index = {axis.name: i for i, axis in enumerate(axes)}
    choices = [
        [(index[name], axes[index[name]].values[axis_key(value)]) for value in values]
        for name, values in spec["when"].items()
    ]
    for when in itertools.product(*choices):
        yield Exclude(spec.get("class"), when, spec["why"])


def _check_axes(op: str, axes: Mapping[str, Axis], fields: Iterable[Mapping[str, Any]]) -> None:
    """The library hands a config's axes on in the order of its fields, and an old caller's config lacks the new ones."""
    of_fields = [field for field in fields if "axis" in field]
    if [field["axis"] for field in of_fields] != list(axes):
        raise ValueError(f"{op}: config has its axes in another order than axes, or not each once")
    for field in of_fields:
        if "since" in field and 0 not in axes[field["axis"]].values.values():
            raise ValueError(
                f"{op}: axis {field['axis']} came later; callers before it pass 0, which it lacks"
            )


def _op(
    spec: Mapping[str, Any], functions: Iterable[Mapping[str, Any]], enums: Mapping[str, Enum], status: Enum
) -> Op:
    name = spec["op"]
    axes = tuple(_axis(axis, value, enums) for axis, value in spec["axes"].items())
    by_name = {axis.name: axis for axis in axes}
    _check_axes(name, by_name, spec["abi"]["config"])
    config = [
        {**f, "type": "u32", "doc": _axis_doc(by_name[f["axis"]], spec["axes"][f["axis"]]["doc"])}
        if "axis" in f
        else f
        for f in spec["abi"]["config"]
    ]
    chosen = tuple(spec["abi"].get("choose", ()))
    if unknown := [axis for axis in chosen if axis not in by_name]:
        raise ValueError(
            f"{name}: abi.choose: {', '.join(unknown)}: no such axis; there are {', '.join(by_name)}"
        )
    has = [*(f["name"] for f in spec["abi"]["args"]), *(["choose"] if chosen else [])]
    names = {"op": name, "chosen": ", ".join(chosen)}
    return Op(
        name=name,
        summary=spec["summary"],
        semantics=tuple(spec["semantics"]),
        axes=axes,
        config=_struct(f"kseal_{name}_config", f"What is fixed when {name} is prepared.", "in", config),
        args=_struct(f"kseal_{name}_args", f"What one run of {name} gets.", "in", spec["abi"]["args"]),
        config_fields=tuple((f["name"], f.get("axis")) for f in spec["abi"]["config"]),
        classes=tuple(OpClass(c, v["builder"], _flatten(v)) for c, v in spec["classes"].items()),
        chosen=chosen,
        excludes=tuple(e for rule in spec.get("excludes", ()) for e in _excludes(rule, axes)),
        limits=_flatten(spec["limits"]),
        functions=tuple(_function(f, names, status) for f in functions if f.get("needs") in (None, *has)),
    )
