"""Who takes part in a comparison, and why somebody does not."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from gpu.left_out import reason
from gpu.problems import relative_error
from gpu.timing import Call

PATIENCE_S = 10.0
"""Whoever takes longer to fail is not tried again: it was compiling, and would once more for each row."""


@dataclass(frozen=True)
class Contender:
    """A call with everything allocated beforehand.

    Attributes:
        output: what the call wrote last, comparable with the output of every other contender.
        scratch_bytes: device memory that a call takes beyond its results; None where nobody asked.
    """

    call: Call
    output: Callable[[], torch.Tensor]
    scratch_bytes: int | None = None


@dataclass
class Contenders:
    """Contenders of one problem. The first one's output is what the others must agree with.

    Attributes:
        limit: largest ||difference|| / ||output|| at which a contender computes the same thing.
        given_up: reasons by name, kept from one problem to the next, of those who took long to fail.
        left_out: the reason by the name of each that is absent, raises, or computes something else.
    """

    limit: float
    given_up: dict[str, str] = field(default_factory=dict)
    wait: Callable[[], None] = torch.cuda.synchronize
    calls: dict[str, Call] = field(default_factory=dict)
    scratch_bytes: dict[str, int] = field(default_factory=dict)
    differs_by: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    _expected: torch.Tensor | None = None

    def add(self, name: str, make: Callable[[], Contender]) -> None:
        """Make it, call it once and look at its output."""
        if name in self.given_up:
            self.left_out[name] = self.given_up[name]
            return
        start = time.monotonic()
        try:
            made = make()
            made.call()
            self.wait()
            output = made.output()
        except (Exception, SystemExit) as error:  # whatever somebody else's code raises is a reason
            self.left_out[name] = reason(error)
            if time.monotonic() - start > PATIENCE_S:
                self.given_up[name] = self.left_out[name]
            return
        if self._expected is None:
            self._expected = output.clone()
        difference = relative_error(output, self._expected)
        if not difference <= self.limit:
            self.left_out[name] = f"its output differs by {difference:.1e}, limit {self.limit:.0e}"
            return
        self.calls[name], self.differs_by[name] = made.call, difference
        if made.scratch_bytes is not None:
            self.scratch_bytes[name] = made.scratch_bytes
