"""Which variants a model needs, from its Hugging Face ``config.json``.

What of the config decides an op's axes is said by the ``model.py`` in the op's folder. Here are reading the file, ``--set``,
and holding both against ``kernel.yaml``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernseal.export.recipe import load_recipe
from kernseal.export.spec import AxisValue, Op, Target, Variant
from kernseal.loader.errors import InvalidArgument, KernsealError, Malformed, Unsupported

Axes = Mapping[str, AxisValue]

TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Where the config of a multimodal model keeps that of its language model."""

OF_THE_WHOLE = ("dtype", "torch_dtype")
"""Fields that such a config may give once, for all of its parts."""

CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "gemma4_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": False,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "qwen3": {"head_dim": 128},
    "qwen3_next": {"head_dim": 256},
    "qwen3_5_text": {"head_dim": 256},
    "qwen3_5_moe_text": {"head_dim": 256},
}
"""By ``model_type``: what a config may leave out because it equals the default of its class in transformers."""

ELEMENTS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


class ModelConfig(Mapping[str, Any]):
    """The fields of a language model's config. A null counts as absent.

    Args:
        place: how messages call the config: its file and, where it is a part of that, which.
    """

    def __init__(self, fields: Mapping[str, Any], place: str = "config.json") -> None:
        every = {**CLASS_DEFAULTS.get(str(fields.get("model_type")), {}), **fields}
        self._fields = {name: value for name, value in every.items() if value is not None}
        self.place = place

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def integer(self, name: str, least: int = 1) -> int | None:
        """An integer from ``least`` on; None where the field is absent."""
        value = self.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise self._malformed(name, f"an integer, at least {least}")
        return value

    def needed(self, name: str) -> int:
        """A positive integer that has to be there."""
        value = self.integer(name)
        if value is None:
            raise Unsupported(f"{self.place}: {name} is missing; it must be an integer, at least 1")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self._malformed(name, "true or false")
        return value

    def words(self, name: str) -> list[str] | None:
        """A list of strings; None where the field is absent."""
        value = self.get(name)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(word, str) for word in value)
        ):
            raise self._malformed(name, "a list of strings")
        return value

    def element(self, *names: str) -> str | None:
        """The element type that the first of these fields gives, as axes call it; None where none is there."""
        for name in names:
            if name in self:
                found = ELEMENTS.get(str(self[name]).removeprefix("torch."))
                if found is None:
                    raise self.refused(name, f"supported: {', '.join(ELEMENTS)}")
                return found
        return None

    def refused(self, name: str, rule: str) -> KernsealError:
        """The error for a value that an op cannot serve; ``rule`` says what it can."""
        return Unsupported(f"{self.place}: {name} is {_brief(self[name])}; {rule}")

    def _malformed(self, name: str, expected: str) -> KernsealError:
        return Malformed(f"{self.place}: {name} is {_brief(self[name])}; it must be {expected}")


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_config(path: Path) -> ModelConfig:
    """The language model's part of a ``config.json``, which may be given by its folder.

    Raises:
        InvalidArgument: nothing there.
        Malformed: not a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise InvalidArgument(f"--model {str(path)!r}: not there; give a config.json or its folder") from None
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{file}: {error}") from None
    if not isinstance(fields, dict):
        raise Malformed(f"{file}: {_brief(fields)}; it must be an object")
    return _language_model(fields, str(file))


def _language_model(fields: Mapping[str, Any], place: str) -> ModelConfig:
    for name in TEXT_PARTS:
        part = fields.get(name)
        if isinstance(part, dict):
            whole = {key: fields[key] for key in OF_THE_WHOLE if key in fields}
            return ModelConfig({**whole, **part}, f"{place}: {name}")
    return ModelConfig(fields, place)


@dataclass(frozen=True)
class Model:
    """A model and what the caller chose beyond its config.

    Attributes:
        chosen: axis to its values, as they are written on the command line.
    """

    config: ModelConfig = field(hash=False)
    chosen: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)

    def variants(self, op: Op, target: Target) -> list[Variant]:
        """Every variant of ``op`` that the model needs, in order of id. Empty when it needs none, or no class serves the
        target.

        Where several values are chosen, a combination that no class has is left out, as in a profile, unless nothing else
        serves the same layers.

        Raises:
            Unsupported: the op cannot serve the model; the message names the field or axis, its value and what it can.
            Malformed: a field has no value of its type.
        """
        if not op.classes_for(target) or "model" not in op.data:
            return []
        rules = load_recipe(str(op.folder / op.data["model"]))
        found: dict[str, Variant] = {}
        served: set[frozenset[tuple[str, AxisValue]]] = set()
        missed: dict[frozenset[tuple[str, AxisValue]], KernsealError] = {}
        try:
            for point in self._points(op):
                own = {axis: value for axis, value in point.items() if axis in op.data["axes"]}
                for need in rules.variants(self.config, point):
                    axes = {**op.data["defaults"], **need, **own}
                    _check(op, axes, rules.FIELDS)
                    layers = frozenset(item for item in need.items() if item[0] not in point)
                    try:
                        made = op.variant(target, axes)
                    except Unsupported as error:
                        missed.setdefault(layers, error)
                    else:
                        found[made.id] = made
                        served.add(layers)
        except Unsupported as error:
            raise Unsupported(f"op {op.name}: {error}") from None
        for layers, why in missed.items():
            if layers not in served:
                raise why
        return [found[key] for key in sorted(found)]

    def _points(self, op: Op) -> Iterator[dict[str, AxisValue]]:
        """What was chosen, one value an axis; of other ops' axes as it was written."""
        choices = {axis: [_value(op, axis, text) for text in texts] for axis, texts in self.chosen.items()}
        for values in itertools.product(*choices.values()):
            yield dict(zip(choices, values, strict=True))

    def left_out(self, ops: Iterable[Op], target: Target) -> list[str]:
        """The ops of which the model gets nothing, a line for each reason."""
        found: dict[str, list[str]] = {}
        for op in ops:
            if not self.variants(op, target):
                found.setdefault(_why_none(op, target), []).append(op.name)
        return [f"{', '.join(names)}: no variant: {why}" for why, names in found.items()]


def _why_none(op: Op, target: Target) -> str:
    if not op.classes_for(target):
        return f"no class serves {target.name}"
    if "model" not in op.data:
        return "a config does not say which; build a profile, or name them with --variant"
    return f"the model has no {load_recipe(str(op.folder / op.data['model'])).SERVES}"


def _check(op: Op, axes: Axes, fields: Mapping[str, str]) -> None:
    unknown = axes.keys() - op.data["axes"].keys()
    if unknown:
        raise KeyError(f"kernels/{op.name}/{op.data['model']}: {sorted(unknown)}: no such axis")
    for axis in op.data["axes"]:
        supported = op.values(axis)
        if axes[axis] not in supported:
            source = f" ({fields[axis]})" if axis in fields else ""
            raise Unsupported(
                f"{axis} is {written(axes[axis])}{source}; supported: {', '.join(map(written, supported))};"
                f" --set {axis}=... overrides what follows from the config"
            )


def written(value: AxisValue) -> str:
    """An axis value as ``--set`` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(op: Op, axis: str, text: str) -> AxisValue:
    """``text`` as a value of the axis; as it is where the op has no such value, which is an error only if it is used."""
    values = op.values(axis) if axis in op.data["axes"] else ()
    return {written(value): value for value in values}.get(text, text)


def parse_chosen(texts: Sequence[str], ops: Sequence[Op]) -> dict[str, tuple[str, ...]]:
    """``page_size=16,32`` and the like, to axis and values; the same axis again adds values.

    Raises:
        InvalidArgument: not of that form, or no op has the axis or the value; the message lists those there are.
    """
    chosen: dict[str, tuple[str, ...]] = {}
    for text in texts:
        axis, _, values = text.partition("=")
        known = list(dict.fromkeys(name for op in ops for name in op.data["axes"]))
        if axis not in known:
            raise InvalidArgument(f"--set {text!r}: supported is AXIS=VALUE with one of {', '.join(known)}")
        for value in values.split(","):
            _check_known(text, axis, value, ops)
            chosen[axis] = tuple(dict.fromkeys([*chosen.get(axis, ()), value]))
    return chosen


def _check_known(text: str, axis: str, value: str, ops: Sequence[Op]) -> None:
    has = {op.name: [written(v) for v in op.values(axis)] for op in ops if axis in op.data["axes"]}
    if not any(value in values for values in has.values()):
        supported = "; ".join(f"{', '.join(values)} ({name})" for name, values in has.items())
        raise InvalidArgument(f"--set {text!r}: {axis} is {value!r}; supported: {supported}")
