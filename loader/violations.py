"""How a verification can fail: a closed set of small results, all reported at once.

The names are those of ``abi/status.yaml``; callers match on the class (or ``status``), nobody parses prose.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from . import errors


@dataclass(frozen=True, order=True)
class Violation:
    """One thing that is wrong.

    Attributes:
        path: the file, and after ``#`` the JSON pointer of the field.
        found: what is there.
        expected: what would have been accepted.
    """

    path: str
    found: str
    expected: str

    status: ClassVar[str] = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.status}: found {self.found}, expected {self.expected}"

    def to_json(self) -> dict[str, str]:
        return {"status": self.status, "path": self.path, "found": self.found, "expected": self.expected}


class BadSignature(Violation):
    """A signature that does not verify over these bytes."""

    status = "bad_signature"


class Revoked(Violation):
    """Signed by a key that has been revoked."""

    status = "revoked"


class UntrustedKey(Violation):
    """Neither the pins nor enough trusted keys vouch for the bundle."""

    status = "untrusted_key"


class Expired(Violation):
    """The key's validity had ended, or has not begun."""

    status = "expired"


class WrongType(Violation):
    """Payload, statement or predicate type is not the one kernseal signs."""

    status = "wrong_type"


class Mismatch(Violation):
    """Content that is not what the manifest, the pins or the policy name."""

    status = "mismatch"


class Unknown(Violation):
    """An entry that the manifest or the pins do not name."""

    status = "unknown"


class Missing(Violation):
    """A file that the manifest or the pins name is not there."""

    status = "missing"


class Malformed(Violation):
    """A file, or a field in it, that is not what it must be."""

    status = "malformed"


class WrongSm(Violation):
    """The bundle is for another target than the caller asked for."""

    status = "wrong_sm"


class AbiMismatch(Violation):
    """The bundle's C ABI is not the caller's."""

    status = "abi_mismatch"


class IoError(Violation):
    """The operating system refused to read."""

    status = "io_error"


# Gravest first: a forged signature outranks a damaged file, which outranks a wrong choice of bundle.
KINDS: tuple[type[Violation], ...] = (
    BadSignature,
    Revoked,
    UntrustedKey,
    Expired,
    WrongType,
    Mismatch,
    Unknown,
    Missing,
    Malformed,
    WrongSm,
    AbiMismatch,
    IoError,
)

MESSAGE_LINES = 20


class VerificationFailed(errors.KernsealError):
    """Carries every violation. Its status and exit code are those of the gravest.

    Attributes:
        violations: sorted, without duplicates, never empty.
    """

    violations: tuple[Violation, ...]

    def to_json(self) -> list[dict[str, str]]:
        return [violation.to_json() for violation in self.violations]


def ordered(violations: Iterable[Violation]) -> tuple[Violation, ...]:
    """Without duplicates, by path, then kind."""
    return tuple(sorted(set(violations), key=lambda v: (v.path, v.status, v.found, v.expected)))


def gravest(violations: Iterable[Violation]) -> Violation:
    return min(violations, key=lambda v: KINDS.index(type(v)))


def failed(*violations: Violation) -> VerificationFailed:
    """The error to raise for these violations (at least one).

    It is also an instance of the gravest one's class in ``loader/errors.py``, for ``except errors.Mismatch``.
    """
    every = ordered(violations)
    lines = [str(violation) for violation in every[:MESSAGE_LINES]]
    if len(every) > MESSAGE_LINES:
        lines.append(f"and {len(every) - MESSAGE_LINES} more")
    result = _error_class(gravest(every).status)("\n".join(lines))
    result.violations = every
    return result


def raise_first(violations: Iterable[Violation]) -> None:
    """Raise one error that carries all of ``violations``; return if there is none."""
    collected = ordered(violations)
    if collected:
        raise failed(*collected)


@cache
def _error_class(status: str) -> type[VerificationFailed]:
    base = next(error for error in errors.BY_VALUE.values() if error.status == status)
    namespace = {"__doc__": base.__doc__, "__module__": __name__}
    return type("VerificationFailed", (VerificationFailed, base), namespace)
