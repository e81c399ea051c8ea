"""Rulings: what to do with each delivery of a batch, given what became of its message. Pure.

| what happened | ruling |
|---|---|
| processed, a duplicate, ignored, dead, kept in the queue | ACK |
| it failed, or waits for what it depends on | PARK, where failed messages go to the queue; else AGAIN |
| it comes later in a lane than one that failed | as that one |
| another runner has it, or the store is busy | AGAIN, soon |
| it cannot be kept as it is | BURY, as a dead letter with as much of it as can be kept |
| nobody handles its type, and the inbox says that this is an error | STOP |
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from onceward.brokers.tracks import Item, Lane
from onceward.errors import LeaseLost, TryLater
from onceward.outcome import Kind, Outcome, Verdict


class Step(StrEnum):
    ACK = "ack"
    PARK = "park"
    AGAIN = "again"
    BURY = "bury"
    REJECT = "reject"
    STOP = "stop"


class Ruling(msgspec.Struct, frozen=True):
    item: Item
    step: Step
    outcome: Outcome[Any]


_PASSING = ("in_flight", "store_busy")
"""Reasons to try later that have nothing to do with the message."""


def rule(items: Sequence[Item], outcomes: Sequence[Outcome[Any]], *, parks: bool) -> list[Ruling]:
    """In a lane the first that cannot be settled decides for all behind it: what is parked never overtakes what is
    put off, and the other way round."""
    lanes: dict[Lane, Step] = {}
    rulings = []
    for item, outcome in zip(items, outcomes, strict=True):
        step = _step(outcome, parks=parks)
        if item.lane is not None and step in (Step.PARK, Step.AGAIN, Step.STOP):
            first = lanes.setdefault(item.lane, Step.PARK if step is Step.PARK else Step.AGAIN)
            step = step if step is Step.STOP else first
        rulings.append(Ruling(item, step, outcome))
    return rulings


def _step(outcome: Outcome[Any], *, parks: bool) -> Step:
    match outcome.verdict:
        case Verdict.ACK:
            return Step.ACK
        case Verdict.REJECT:
            return Step.BURY
        case Verdict.STOP:
            return Step.STOP
        case _:
            return Step.PARK if parks and not _passes(outcome.error) else Step.AGAIN


def _passes(error: BaseException | None) -> bool:
    return isinstance(error, LeaseLost) or (isinstance(error, TryLater) and error.reason in _PASSING)


SOON, LATER = 5.0, 60.0
"""Seconds: the longest pause before another try, where no time is said."""


def delay_of(ruling: Ruling) -> float:
    """Seconds until it is tried again. What says no time is tried after longer and longer pauses."""
    outcome, error = ruling.outcome, ruling.outcome.error
    delay = error.delay if outcome.delay is None and isinstance(error, TryLater) else outcome.delay
    if delay is not None:
        return max(0.05, delay)
    longest = SOON if outcome.kind is Kind.BUSY or _passes(error) else LATER
    return float(min(longest, 0.1 * 2.0 ** min(ruling.item.tries, 20)))
