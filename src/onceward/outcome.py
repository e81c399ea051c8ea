"""Outcome: what happened to one delivery, and Verdict: what its broker should be told.

The one sentence: if `process` returns, acknowledge; if it raises, do not. `verdict_of` says the same for the
errors, for loops that want to be told more exactly.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from enum import StrEnum
from typing import Any, Generic, TypeVar

import msgspec

from onceward import errors
from onceward.record import Record

R = TypeVar("R")


class Kind(StrEnum):
    PROCESSED = "processed"
    DUPLICATE = "duplicate"
    ACCEPTED = "accepted"
    IGNORED = "ignored"
    FAILED = "failed"
    BUSY = "busy"
    DEAD = "dead"
    EXPIRED = "expired"


class Verdict(StrEnum):
    """What a broker loop does with the delivery."""

    ACK = "ack"
    RETRY = "retry"  # deliver again, not before `retry_at` where that is known
    REJECT = "reject"  # cannot be kept: quarantine it where possible
    PAUSE = "pause"  # settle nothing, wait for the database
    STOP = "stop"  # settle nothing, a person has to change the code


class Outcome(msgspec.Struct, Generic[R], frozen=True):
    """`result` is the handler's; for a duplicate it is the first run's. `record` is there where it was read."""

    kind: Kind
    result: R | None = None
    mismatch: bool = False
    error: BaseException | None = None
    retry_at: datetime | None = None
    record: Record | None = None
    attempts: int = 0
    duration_ms: float | None = None
    delay: float | None = None
    """Of one that failed: seconds from its failure to `retry_at`, whatever the clock here says."""

    @property
    def processed(self) -> bool:
        return self.kind is Kind.PROCESSED

    @property
    def duplicate(self) -> bool:
        return self.kind is Kind.DUPLICATE

    @property
    def verdict(self) -> Verdict:
        if self.kind is Kind.FAILED and not self.attempts and self.error is not None:
            return _by_class(self.error)  # in a batch: the handler did not fail, the message could not be run
        return Verdict.RETRY if self.kind in (Kind.FAILED, Kind.BUSY) else Verdict.ACK


# The first class that fits decides.
_VERDICTS: tuple[tuple[type[BaseException], Verdict], ...] = (
    (errors.TryLater, Verdict.RETRY),
    (errors.InvalidMessage, Verdict.REJECT),
    (errors.PayloadMismatch, Verdict.ACK),
    (errors.AlreadyProcessed, Verdict.ACK),
    (errors.TransactionUnusable, Verdict.RETRY),
    (errors.HandlerEndedTransaction, Verdict.RETRY),
    (errors.HandlerNotFound, Verdict.STOP),
    (errors.StoreError, Verdict.PAUSE),
    (errors.SecondConnection, Verdict.RETRY),
    (errors.UsageError, Verdict.STOP),
)


def raised(outcome: Outcome[R]) -> Outcome[R]:
    """For those who call `process`: a failed handler's error is raised, so that nobody acknowledges it."""
    if outcome.error is not None and outcome.kind is Kind.FAILED:
        with suppress(AttributeError):  # an exception with __slots__
            outcome.error.__onceward__ = outcome  # type: ignore[attr-defined]
        raise outcome.error
    return outcome


def outcome_of(error: BaseException) -> Outcome[Any] | None:
    """The outcome behind an error of a handler that `process` raised: its `retry_at`, `attempts`, `record`."""
    return getattr(error, "__onceward__", None)


def verdict_of(error: BaseException) -> Verdict:
    """What an error that `process` raised means for the delivery. A handler's own error, of any kind, is RETRY."""
    outcome = outcome_of(error)
    if outcome is not None:
        return outcome.verdict
    return _by_class(error)


def _by_class(error: BaseException) -> Verdict:
    for kind, verdict in _VERDICTS:
        if isinstance(error, kind):
            return verdict
    return Verdict.RETRY
