"""A server's loop without a model: who is served when, who goes away, when each token came. Time is given from outside."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

Turn = TypeVar("Turn")

PROMPT = (64, 4096)
"""Tokens of the shortest and the longest prompt; as many are between 64 and 128 as between 2048 and 4096."""

TOKENS = (16, 64)
"""Fewest and most to generate, all as likely."""

IMPATIENT = 0.2
"""Share of clients in an open loop that go away after a while, answered or not."""


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def wait_until(self, at: float) -> None:
        time.sleep(max(0.0, at - self.now()))


@dataclass(frozen=True)
class Request:
    """What a client asks for.

    Attributes:
        seed: of the prompt.
        prompt: tokens in it.
        tokens: to generate.
        arrival: second in which it is sent, in an open loop.
        patience: seconds after which its client goes away.
    """

    seed: int
    prompt: int
    tokens: int
    arrival: float = 0.0
    patience: float = math.inf


@dataclass
class Answer:
    """What a client got.

    Attributes:
        arrival: when the request was sent, which may be before the loop had time to look.
        tokens, times: one of each for each token.
        ended: when the last token came or the client went away.
    """

    request: Request
    arrival: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    ended: float | None = None
    cancelled: bool = False

    def add(self, token: int, now: float) -> None:
        self.tokens.append(token)
        self.times.append(now)

    def settle(self, now: float) -> bool:
        """End it if there is nothing left to do for it. Whether it has ended."""
        complete = len(self.tokens) == self.request.tokens
        if complete or now >= self.arrival + self.request.patience:
            self.ended, self.cancelled = now, not complete
        return self.ended is not None


class Engine(Protocol):
    """Generates tokens for the requests that run, which are its rows."""

    def start(self, request: Request) -> int:
        """Add a row; its first token."""

    def step(self) -> list[int]:
        """The next token of each row."""

    def keep(self, rows: list[int]) -> None:
        """Drop all rows but these."""


class Source(Protocol):
    """Where requests come from."""

    def due(self, now: float) -> list[Answer]:
        """Those sent since the last call, unanswered."""

    def ended(self) -> None:
        """Hear that a request has."""

    def next_arrival(self, now: float) -> float | None:
        """When to look again if nothing runs; None if nothing comes any more."""


class Closed:
    """So many clients, each of which sends its next request when its last one ended, until the time is over."""

    def __init__(self, requests: Iterator[Request], clients: int, until: float) -> None:
        self._requests, self._free, self._until = requests, clients, until

    def due(self, now: float) -> list[Answer]:
        if now >= self._until:
            return []
        free, self._free = self._free, 0
        return [Answer(request, now) for request in itertools.islice(self._requests, free)]

    def ended(self) -> None:
        self._free += 1

    def next_arrival(self, now: float) -> float | None:
        return now if self._free and now < self._until else None


class Open:
    """Requests that come when they come, however busy the server is."""

    def __init__(self, requests: list[Request]) -> None:
        self._requests = sorted(requests, key=lambda request: request.arrival)

    def due(self, now: float) -> list[Answer]:
        found = list(itertools.takewhile(lambda request: request.arrival <= now, self._requests))
        del self._requests[: len(found)]
        return [Answer(request, request.arrival) for request in found]

    def ended(self) -> None:
        pass

    def next_arrival(self, now: float) -> float | None:
        return self._requests[0].arrival if self._requests else None


def stream(
    seed: int, prompt: tuple[int, int] = PROMPT, tokens: tuple[int, int] = TOKENS
) -> Iterator[Request]:
    """Requests without end, the same ones for the same seed."""
    draw = random.Random(seed)
    shortest, longest = map(math.log, prompt)
    while True:
        length = round(math.exp(draw.uniform(shortest, longest)))
        yield Request(draw.getrandbits(32), length, draw.randint(*tokens))


def poisson(
    requests: Iterator[Request], seed: int, rate: float, until: float, patience: float
) -> list[Request]:
    """Those that are sent in time, ``rate`` a second. Impatient clients wait up to ``patience`` seconds."""
    draw = random.Random(f"arrivals {seed}")
    found, at = [], 0.0
    for request in requests:
        at += draw.expovariate(rate)
        if at >= until:
            break
        wait = patience * draw.random() if draw.random() < IMPATIENT else math.inf
        found.append(replace(request, arrival=at, patience=wait))
    return found


def serve(engine: Engine, source: Source, slots: int, clock: Clock) -> list[Answer]:
    """Answer until nothing runs and nothing comes.

    A turn takes in at most one prompt, the one that waits longest, and then gives each request that runs a token: prompts
    keep nobody waiting for more than one of them. A client that goes away is noticed between two steps.
    """
    answers: list[Answer] = []
    waiting: list[Answer] = []
    running: list[Answer] = []
    while True:
        now = clock.now()
        came = source.due(now)
        answers += came
        waiting = unsettled([*waiting, *came], source, now)
        if waiting and len(running) < slots:
            first = waiting.pop(0)
            first.add(engine.start(first.request), clock.now())
            running = kept(engine, [*running, first], source, clock.now())
        if running:
            tokens, now = engine.step(), clock.now()
            for answer, token in zip(running, tokens, strict=True):
                answer.add(token, now)
            running = kept(engine, running, source, now)
        elif not waiting:
            at = source.next_arrival(clock.now())
            if at is None:
                return answers
            clock.wait_until(at)


def unsettled(answers: list[Answer], source: Source, now: float) -> list[Answer]:
    """Those that go on; the source hears of the others."""
    found = [answer for answer in answers if not answer.settle(now)]
    for _ in range(len(answers) - len(found)):
        source.ended()
    return found


def kept(engine: Engine, running: list[Answer], source: Source, now: float) -> list[Answer]:
    """The same for those that run, of which the engine hears, too."""
    found = unsettled(running, source, now)
    if len(found) < len(running):
        engine.keep([row for row, answer in enumerate(running) if answer.ended is None])
    return found


def alternate(sides: Mapping[str, Callable[[int], Turn]], rounds: int) -> dict[str, list[Turn]]:
    """Each side's turns in the order A B B A, twice ``rounds`` of them. A call is told which turn of its side it is."""
    found: dict[str, list[Turn]] = {name: [] for name in sides}
    for number in range(2 * rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            found[name].append(sides[name](number))
    return found
