"""What can be wrong with a source: a closed set of small types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, order=True)
class Finding:
    """Something about a source that is not as pinned."""

    kind: ClassVar[str] = ""
    path: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.path}"

    def to_json(self) -> dict[str, str]:
        return {"kind": self.kind, **self.__dict__}


@dataclass(frozen=True, order=True)
class FileMissing(Finding):
    """A pinned file is not there."""

    kind = "missing"


@dataclass(frozen=True, order=True)
class FileAdded(Finding):
    """A file in a watched folder that the pins do not name."""

    kind = "unknown"


@dataclass(frozen=True, order=True)
class FileChanged(Finding):
    """A pinned file with other bytes."""

    kind = "mismatch"
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.path}: expected sha256 {self.expected}, found {self.found}"


@dataclass(frozen=True, order=True)
class WrongVersion(Finding):
    """A FlashInfer of another version."""

    kind = "wrong_version"
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.path} says {self.found}, the pin is {self.expected}"


@dataclass(frozen=True, order=True)
class NotThere(Finding):
    """Nothing at this path."""

    kind = "not_there"


@dataclass(frozen=True, order=True)
class EmptySource(Finding):
    """A folder with nothing in it."""

    kind = "empty"


@dataclass(frozen=True, order=True)
class NotASource(Finding):
    """A folder (perhaps inside some other repository) that holds no FlashInfer."""

    kind = "not_a_source"


@dataclass(frozen=True, order=True)
class SubmoduleMissing(Finding):
    """A checkout whose submodule was never initialised."""

    kind = "submodule_not_initialised"
