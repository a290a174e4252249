"""What a program built against one ABI dump would miss or read wrongly in a library of another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Dump = Mapping[str, Any]


def broken(old: Dump, new: Dump) -> list[str]:
    """Why ``new`` is no successor of ``old``: what is gone or changed, and what came without a new version."""
    problems = [*_enums(old, new), *_structs(old, new), *_functions(old, new)]
    before, now = (f"{dump['abi']['major']}.{dump['abi']['minor']}" for dump in (old, new))
    if old["abi"]["major"] != new["abi"]["major"] or new["abi"]["minor"] < old["abi"]["minor"]:
        problems.append(f"abi: was {before}, is {now}; a successor has the same major and no lower minor")
    added = sorted(_names(new) - _names(old))
    if added and before == now:
        problems.append(f"abi: is {now} as before, but has {', '.join(added)} besides; raise minor")
    return problems


def _enums(old: Dump, new: Dump) -> Iterator[str]:
    for name, values in old["enums"].items():
        for constant, value in values.items():
            now = new["enums"].get(name, {}).get(constant, "gone")
            if now != value:
                yield f"{name}.{constant}: was {value}, is {now}"


def _structs(old: Dump, new: Dump) -> Iterator[str]:
    for name, struct in old["structs"].items():
        now = new["structs"].get(name)
        if now is None:
            yield f"{name}: gone"
            continue
        for field, at in struct["fields"].items():
            if now["fields"].get(field) != at:
                yield f"{name}.{field}: was {at}, is {now['fields'].get(field, 'gone')}"
        for field in now["fields"].keys() - struct["fields"].keys():
            if now["fields"][field]["offset"] < struct["size"]:
                yield f"{name}.{field}: lies within the {struct['size']} bytes of callers that do not know it"
        if now["min_size"] != struct["min_size"]:
            yield f"{name}: took callers from {struct['min_size']} bytes, takes them from {now['min_size']}"


def _functions(old: Dump, new: Dump) -> Iterator[str]:
    for name, prototype in old["functions"].items():
        now = new["functions"].get(name, "gone")
        if now != prototype:
            yield f"{name}: was `{prototype}`, is `{now}`"


def _names(dump: Dump) -> set[str]:
    constants = {constant for values in dump["enums"].values() for constant in values}
    fields = {f"{name}.{field}" for name, struct in dump["structs"].items() for field in struct["fields"]}
    return {*constants, *fields, *dump["functions"]}
