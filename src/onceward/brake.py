"""Brake: while everything fails, little is tried.

When a service that all handlers need is away, each message would burn its attempts on it, and an outage of an hour
would fill the dead letters with messages that nothing is wrong with. So after a number of failures without a single
success the brake is on: one message is tried, and after a pause another one, with longer and longer pauses. The first
that succeeds takes it off.

A message that was rejected, or does not decode, says nothing about the others.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

from onceward.errors import Reject
from onceward.outcome import Kind, Outcome

FAILURES = 20
"""In a row, from which on it is not the messages."""
SHORTEST = 0.5
LONGEST = 60.0
"""Seconds between two tries."""


class Brake:
    def __init__(
        self, *, failures: int = FAILURES, shortest: float = SHORTEST, longest: float = LONGEST,
        clock: Callable[[], float] = monotonic,
    ) -> None:  # fmt: skip
        self._most = failures
        self._shortest = shortest
        self._longest = longest
        self._clock = clock
        self._failures = 0
        self._next = 0.0

    @property
    def on(self) -> bool:
        return self._failures >= self._most

    def note(self, outcome: Outcome[Any] | None) -> None:
        """What became of a message."""
        if outcome is None:
            return
        if outcome.kind is Kind.PROCESSED:
            self._failures = 0
        elif outcome.attempts and outcome.kind in (Kind.FAILED, Kind.DEAD) and not isinstance(outcome.error, Reject):
            self._failures += 1

    def give_back(self) -> None:
        """Who was allowed to try one had none to try."""
        self._next = 0.0

    def pause(self) -> float:
        """Seconds until the next message may be tried. 0: now, and whoever hears it tries one; others wait again."""
        if not self.on:
            return 0.0
        left = self._next - self._clock()
        if left > 0:
            return left
        tried = min(self._failures - self._most, 20)
        self._next = self._clock() + min(self._longest, self._shortest * 2.0**tried)
        return 0.0
