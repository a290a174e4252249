"""Reads ``kernels/<op>/kernel.yaml``: which classes serve an SM, and which variants a profile asks for."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kernseal.abi import yaml_text
from kernseal.export import files, paths
from kernseal.loader.errors import InvalidArgument, Malformed, Unsupported

AxisValue = str | bool | int


@dataclass(frozen=True)
class Target:
    """What a bundle is for.

    Attributes:
        sm: the product's SM, e.g. ``sm_120a``: it chooses the upstream class.
        retarget: None, or the SM the same source is compiled for to run it on other hardware (validation only).
        host: operating system and processor of the library.
    """

    sm: str
    retarget: str | None = None
    host: str = "linux-x86_64"

    @property
    def arch(self) -> str:
        """SM that the compilers are given."""
        return self.retarget or self.sm

    @property
    def name(self) -> str:
        return f"{self.sm}-on-{self.retarget}" if self.retarget else self.sm

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.host}"


@dataclass(frozen=True)
class Variant:
    """One compiled form of an op: a point on its axes, for one upstream class and one target."""

    op: str
    class_name: str
    axes: Mapping[str, AxisValue] = field(hash=False)
    id: str

    @property
    def key(self) -> str:
        return f"{self.op}/{self.id}"


@dataclass(frozen=True)
class Op:
    """A checked ``kernel.yaml`` and the folder it is in."""

    name: str
    folder: Path
    data: Mapping[str, Any] = field(hash=False)

    def values(self, axis: str) -> list[AxisValue]:
        """Every value of an axis."""
        return list(self.data["axes"][axis].get("values", [False, True]))

    def classes_for(self, target: Target) -> list[str]:
        """Upstream classes that serve ``target``, in order of ``kernel.yaml``."""
        return [
            str(name)
            for name, cls in self.data["classes"].items()
            if target.sm in cls["sms"]
            and (target.retarget is None or target.retarget in cls.get("retarget", []))
        ]

    def class_for(self, target: Target, axes: Mapping[str, AxisValue]) -> str | None:
        """The upstream class that serves ``axes`` on ``target``: the first whose ``serves`` has them. None without one."""
        for name in self.classes_for(target):
            if _has(self.data["classes"][name].get("serves", {}), axes):
                return name
        return None

    def excluded(self, class_name: str, axes: Mapping[str, AxisValue]) -> str | None:
        """Why no class has this combination, or None when it does."""
        for rule in self.data.get("excludes", []):
            if rule.get("class", class_name) == class_name and _has(rule["when"], axes):
                return str(rule["why"])
        return None

    def variant(self, target: Target, axes: Mapping[str, AxisValue]) -> Variant:
        """The variant at ``axes``.

        Raises:
            Unsupported: no class serves the target, or the combination is excluded.
        """
        classes = self.classes_for(target)
        if not classes:
            raise Unsupported(
                f"op {self.name}: target {target.name} has no class; supported: {', '.join(self.targets())}"
            )
        class_name = self.class_for(target, axes)
        if class_name is None:
            served = "; ".join(f"{name} serves {self.data['classes'][name]['serves']}" for name in classes)
            raise Unsupported(f"op {self.name}: no class of {target.name} has {dict(axes)}: {served}")
        if why := self.excluded(class_name, axes):
            raise Unsupported(f"op {self.name}, class {class_name}: {why}")
        return self._variant(class_name, axes)

    def _variant(self, class_name: str, axes: Mapping[str, AxisValue]) -> Variant:
        ordered = {axis: axes[axis] for axis in self.data["axes"]}
        return Variant(self.name, class_name, ordered, variant_id(self.data, ordered))

    def variants(self, target: Target, profile: str) -> list[Variant]:
        """Every variant of ``profile`` that the target's classes have, in order of id. Empty when no class serves it."""
        if not self.classes_for(target):
            return []
        if profile not in self.data["profiles"]:
            raise InvalidArgument(f"profile {profile!r}: supported: {', '.join(self.data['profiles'])}")
        found: dict[str, Variant] = {}
        for axes in self._points(profile):
            class_name = self.class_for(target, axes)
            if class_name is not None and self.excluded(class_name, axes) is None:
                made = self._variant(class_name, axes)
                found[made.id] = made
        return [found[key] for key in sorted(found)]

    def named(self, target: Target, name: str) -> Variant | None:
        """The variant called ``name``, in a profile or not. None where it is no name of this op's.

        Raises:
            Unsupported: as ``variant``.
        """
        axes = _axes_named([(axis, _tags(spec)) for axis, spec in self.data["axes"].items()], name)
        if axes is None or variant_id(self.data, axes) != name:
            return None
        return self.variant(target, axes)

    def _points(self, profile: str) -> Iterator[dict[str, AxisValue]]:
        defaults = self.data["defaults"]
        for group in self.data["profiles"][profile]:
            choices = {axis: group.get(axis, [defaults[axis]]) for axis in self.data["axes"]}
            for values in itertools.product(*choices.values()):
                yield dict(zip(choices, values, strict=True))

    def targets(self) -> list[str]:
        names: list[str] = []
        for cls in self.data["classes"].values():
            names += cls["sms"]
            names += [f"{sm}-on-{other}" for sm in cls["sms"] for other in cls.get("retarget", [])]
        return names


def _has(points: Mapping[str, Sequence[AxisValue]], axes: Mapping[str, AxisValue]) -> bool:
    """Whether ``axes`` is one of ``points``: those that have one of the values given for each axis named."""
    return all(axes[axis] in values for axis, values in points.items())


def variant_id(data: Mapping[str, Any], axes: Mapping[str, AxisValue]) -> str:
    """Name of a point on the axes: each axis's tag for its value, joined by ``_``; empty tags vanish."""
    tags = [_tag(spec, axes[axis]) for axis, spec in data["axes"].items()]
    return "_".join(tag for tag in tags if tag)


def _tag(axis: Mapping[str, Any], value: AxisValue) -> str:
    if isinstance(value, bool):
        return str(axis["tags"][1 if value else 0])
    return f"{axis.get('prefix', '')}{value}"


def _tags(axis: Mapping[str, Any]) -> dict[str, AxisValue]:
    """Each value of an axis, by its tag."""
    values = (False, True) if axis["type"] == "bool" else axis["values"]
    return {_tag(axis, value): value for value in values}


def _axes_named(
    axes: Sequence[tuple[str, Mapping[str, AxisValue]]], name: str
) -> dict[str, AxisValue] | None:
    """The point whose tags spell ``name``."""
    if not axes:
        return None if name else {}
    (axis, tags), *others = axes
    for tag, value in tags.items():
        if tag and name != tag and not name.startswith(f"{tag}_"):
            continue
        rest = _axes_named(others, name[len(tag) + 1 :] if tag else name)
        if rest is not None:
            return {axis: value, **rest}
    return None


def _check(path: Path, text: str, data: Any) -> None:
    """Hold ``kernel.yaml`` against the schema, once for each text: importing the validator costs more than a whole build
    that changes nothing."""
    schema = (Path(__file__).parent / "schemas" / "kernel.schema.json").read_text()
    stamp = paths.cache() / "checked" / files.sha256_bytes(f"{schema}\0{text}".encode())
    if stamp.is_file():
        return
    import jsonschema

    validator = jsonschema.Draft202012Validator(json.loads(schema))
    found = sorted(validator.iter_errors(data), key=lambda error: list(error.absolute_path))
    if found:
        where = ".".join(str(part) for part in found[0].absolute_path) or "top level"
        raise Malformed(f"kernels/{path.parent.name}/{path.name}: {where}: {found[0].message}")
    with contextlib.suppress(OSError):
        files.write_atomic(stamp, b"")


def _check_points(op: str, data: Mapping[str, Any]) -> None:
    """What a class serves, a rule excludes and a policy sets must be there: misspelt, it would silently match nothing."""
    found = {f"classes.{name}.serves": cls.get("serves", {}) for name, cls in data["classes"].items()}
    found |= {f"excludes.{i}.when": rule["when"] for i, rule in enumerate(data.get("excludes", []))}
    found["abi.choose"] = {axis: [] for axis in data["abi"].get("choose", [])}
    for key, points in found.items():
        where = f"kernels/{op}/kernel.yaml: {key}"
        for axis, values in points.items():
            if axis not in data["axes"]:
                raise Malformed(f"{where}: {axis!r} is no axis; there are {', '.join(data['axes'])}")
            known = data["axes"][axis].get("values", [False, True])
            for value in values:
                if value not in known:
                    raise Malformed(f"{where}.{axis}: {value!r} is not one of {', '.join(map(str, known))}")


def load_op(folder: Path) -> Op:
    """Read and check one op's ``kernel.yaml``.

    Raises:
        Malformed: not YAML, or not what the schema asks for; the message names the field.
    """
    path = folder / "kernel.yaml"
    try:
        text = path.read_text()
        data = yaml_text.load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Malformed(f"{path.name} of {folder.name}: {error}") from error
    _check(path, text, data)
    if data["op"] != folder.name:
        raise Malformed(f"kernels/{folder.name}/kernel.yaml: op: {data['op']!r} is not the folder's name")
    _check_points(folder.name, data)
    return Op(data["op"], folder, data)


def load_ops(root: Path | None = None) -> list[Op]:
    """Every op, in order of name."""
    folders = sorted(path.parent for path in (root or paths.kernels()).glob("*/kernel.yaml"))
    return [load_op(folder) for folder in folders]


def parse_target(sm: str, retarget: str | None, ops: Sequence[Op], host: str = "linux-x86_64") -> Target:
    """``120`` or ``sm_120a`` to a target that some op serves.

    Raises:
        Unsupported: no op has the SM; the message lists those that are there.
    """
    target = Target(_full_name(sm), _full_name(retarget) if retarget else None, host)
    known = sorted({name for op in ops for name in op.targets()}, key=_sm_order)
    if target.name not in known:
        raise Unsupported(f"SM {target.name!r}: supported: {', '.join(known)}")
    return target


def all_targets(ops: Sequence[Op]) -> list[str]:
    """The SMs that bundles are shipped for (no validation targets)."""
    return sorted(
        {sm for op in ops for cls in op.data["classes"].values() for sm in cls["sms"]}, key=_sm_order
    )


def _full_name(sm: str) -> str:
    text = sm.strip().lower().removeprefix("sm_").removeprefix("sm")
    return f"sm_{text}a" if text.isdigit() else f"sm_{text}"


def _sm_order(name: str) -> tuple[int, str]:
    digits = "".join(ch for ch in name.removeprefix("sm_").split("-")[0] if ch.isdigit())
    return int(digits or 0), name
