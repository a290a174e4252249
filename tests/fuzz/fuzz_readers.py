"""Coverage-guided fuzzing of the readers of manifest, envelope, pins, keys and ELF files, with atheris.

    pip install atheris
    PYTHONPATH=tests python tests/fuzz/fuzz_readers.py statement build/fuzz/statement -max_total_time=600

The first argument is a reader (``json statement envelope pins key policy cubin object``), the second a corpus folder, which
is made and seeded when it is not there; the rest goes to libFuzzer. Ends with an error at the first input on which a reader
raises anything but a typed refusal, and leaves that input in a file.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import atheris  # type: ignore[import-untyped,import-not-found,unused-ignore]

with atheris.instrument_imports(include=["kernseal.loader", "kernseal.export.elf", "elftools"]):
    from fuzz import readers

    from kernseal.loader import canonical

STRANGE: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**64,
    "",
    "..",
    "/",
    "\ud800",
    "a" * 300,
    [],
    {},
    [[]],
    1.5,
    float("nan"),
)


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Half of the time a field of the document changes and it stays canonical; otherwise bytes change."""
    chance = random.Random(seed)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return bytes(atheris.Mutate(data, max_size))
    places = list(containers(document))
    if not places or chance.random() < 0.5:
        return bytes(atheris.Mutate(data, max_size))
    place = chance.choice(places)
    key = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
    if chance.random() < 0.2:
        del place[key]
    else:
        place[key] = chance.choice([*STRANGE, *places])
    try:
        changed = canonical.dumps(document)
    except (ValueError, RecursionError):  # not canonical, or a document that now contains itself
        return bytes(atheris.Mutate(data, max_size))
    return changed if len(changed) <= max_size else data


def containers(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list)) and value:
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from containers(item)


def main() -> None:
    reader, corpus, *options = sys.argv[1:]
    Path(corpus).mkdir(parents=True, exist_ok=True)
    (Path(corpus) / "seed").write_bytes(readers.seeds()[reader])
    arguments = [sys.argv[0], corpus, "-max_len=65536", *options]
    atheris.Setup(arguments, lambda data: void(readers.drive(reader, data)), custom_mutator=mutate)
    atheris.Fuzz()


def void(_: object) -> None:
    """libFuzzer reads a return value as an instruction."""


if __name__ == "__main__":
    main()
