"""What the parts of the suite share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import random
from typing import Any

import pytest

from onceward.errors import CommitUnknown, StoreError, StoreUnavailable
from onceward.outcome import Verdict, verdict_of
from onceward.record import Record
from onceward.retry import RetryPolicy
from onceward.store import Features
from onceward.testing.lab import Lab


class Longest(RetryPolicy, frozen=True):
    """Every delay is the longest that it can be: once in some thousand times a random one is over at once."""

    def delay(self, attempt: int, chance: Callable[[], float] = random) -> float:
        return self.ceiling(attempt)


SOON = RetryPolicy(max_attempts=3, base=0.0)
LATER = Longest(max_attempts=3, base=600.0, cap=600.0)


def has(lab: Lab, feature: str) -> bool:
    """Whether the store has the feature, or the lab."""
    features: Features = lab.store().features
    found = getattr(features, feature, None)
    return bool(getattr(lab, feature) if found is None else found)


def needs(lab: Lab, feature: str) -> None:
    """Leave a case out for a store that does not have the feature, visibly."""
    if not has(lab, feature):
        pytest.skip(f"{type(lab).__name__} does not have {feature}")


def counts_nothing(lab: Lab, record: Record | None) -> bool:
    """Whether a run that did not end left no trace; where a claim is a mark, a record may stay that counts nothing."""
    if record is None or not has(lab, "claim_marks"):
        return record is None
    return (record.started, record.attempts) == (0, 0)


def unprocessed_states(lab: Lab) -> tuple[str, ...]:
    """All that a record of this store can be, but processed. Without a queue nothing is ever accepted."""
    states = ("failed", "dead", "discarded", "running")
    return (*states, "accepted") if has(lab, "queue") else states


async def visible(lab: Lab, tx: Any, key: str) -> int:
    """How many records of this key a handler sees: in its transaction, or, where claims are seen by all, outside."""
    if has(lab, "transactional"):
        return len(await lab.run(tx, "SELECT 1 FROM onceward_records WHERE key = $1", key))
    return sum(record["key"] == key for record in await lab.kept())


async def cut_off(lab: Lab, running: Coroutine[Any, Any, Any], *errors: type[StoreError]) -> Any:
    """Work whose connection is cut raises one of these, and None comes back: the transaction went with the connection.
    Without one, what was written is sent at the end only, and may be sent again over another connection: that ends as
    usual, or with an error that says to pause."""
    if has(lab, "transactional"):
        with pytest.raises(errors) as caught:
            await running
        assert verdict_of(caught.value) is Verdict.PAUSE
        return None
    ended: Any = (await asyncio.gather(running, return_exceptions=True))[0]
    if not isinstance(ended, BaseException):
        return ended
    if not isinstance(ended, (StoreUnavailable, CommitUnknown)):
        raise ended
    assert verdict_of(ended) is Verdict.PAUSE
    return None


async def claims_lapse(lab: Lab) -> None:
    """As if a runner had paused for so long that others may have what it claimed. A transaction is not in their way."""
    if has(lab, "claim_marks"):
        await lab.let_time_pass()


class Listener(list[Any]):
    """Collects events."""

    def __call__(self, event: Any) -> None:
        self.append(event)

    def names(self) -> list[str]:
        return [type(event).__name__ for event in self]
