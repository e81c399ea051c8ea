"""Slot: one message of the queue while it is worked on, and what becomes of it.

The same holds whether its handler runs in the transaction of a turn or with a lease: when it is dead, when it is tried
again, how its lane goes on, and what is written down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from inspect import isawaitable
from typing import Any, Literal

import msgspec

from onceward import codec
from onceward.attempt import consequence, failure_of
from onceward.current import Current
from onceward.errors import HandlerCancelled, HandlerEndedTransaction, HandlerTimeout, ResultInvalid
from onceward.handlers import Handler
from onceward.intake import Intake
from onceward.message import Message
from onceward.outcome import Kind, Outcome
from onceward.queue import DoneLine, FailedLine, LaneEnd, Queued, Then
from onceward.record import State
from onceward.retention import milliseconds
from onceward.retry import RetryPolicy

OnDead = Literal["block", "skip"]
OnDeadDependency = Literal["wait", "dead", "run"]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How an inbox works on its queue."""

    intake: Intake
    retry: RetryPolicy
    on_dead: OnDead
    on_dead_dependency: OnDeadDependency
    dependency_timeout: timedelta | None
    on_begin: Callable[[Any, Message[Any]], Awaitable[Any]] | None
    freeze_after: float | None = 300.0
    """Seconds. A turn that was silent for longer towards the database, in a handler or frozen, is undone by it."""


class Slot(msgspec.Struct, eq=False):
    """One message, until it has its outcome."""

    queued: Queued
    message: Message[Any]
    marked: int = 0
    """1: its start was marked by us, which is no crash."""
    handler: Handler | None = None
    outcome: Outcome[Any] | None = None
    encoded: bytes | None = None
    """Its result as JSON."""
    duration_ms: float = 0.0
    counted: bool = True
    """As an attempt."""

    @property
    def identity(self) -> str:
        return self.queued.identity.digest.hex()

    @property
    def is_ordered(self) -> bool:
        """It is in a lane, which others may be in too."""
        return self.queued.lane != self.queued.identity.digest

    @property
    def was_called(self) -> bool:
        """Its handler was, whatever it came to."""
        return self.duration_ms > 0.0

    @property
    def attempts(self) -> int:
        """With this one."""
        return self.queued.attempts + 1

    @property
    def crashes(self) -> int:
        return max(0, self.queued.started - self.marked)

    def retry(self, settings: Settings) -> RetryPolicy:
        return (self.handler.retry if self.handler is not None else None) or settings.retry

    def run(self, handler: Handler) -> Current:
        """What the handler may know about its own run."""
        queued, attempts = self.queued, self.attempts
        redelivered = attempts > 1 or queued.started > 0
        return Current(queued.identity, handler.name, attempts, redelivered, queued.origin)

    def keep_result(self, result: Any) -> None:
        self.encoded = None if result is None else codec.encode(result, "result", ResultInvalid)

    # --- what becomes of it ---------------------------------------------------------------------------------

    def succeed(self, result: Any, kind: Kind = Kind.PROCESSED) -> None:
        # kind, result, mismatch, error, retry_at, record, attempts, duration_ms: with names it takes four times as long
        self.outcome = Outcome(kind, result, False, None, None, None, self.attempts, self.duration_ms)  # noqa: FBT003

    def fail(self, error: Exception, settings: Settings) -> LaneEnd | None:
        """Dead, or tried again after a delay. How its lane goes on; None: with the next message."""
        if isinstance(error, HandlerEndedTransaction):
            return self.bury(error, settings, counted=False)
        state, delay = consequence(error, self.retry(settings), self.attempts, self.crashes)
        if state is State.DEAD:
            return self.bury(error, settings)
        self._end(Kind.FAILED, error, delay)
        return LaneEnd(self.queued.lane.hex(), Then.RETRY, delay or 0.0)

    def bury(self, error: Exception, settings: Settings, *, counted: bool = True) -> LaneEnd | None:
        """As `fail`, whatever the attempts."""
        self.counted = counted
        self._end(Kind.DEAD, error, None)
        if settings.on_dead == "skip" or not self.is_ordered:
            return None
        return LaneEnd(self.queued.lane.hex(), Then.BLOCKED, blocker=self.identity)

    def _end(self, kind: Kind, error: Exception, delay: float | None) -> None:
        retry_at = None if delay is None else self.queued.now + timedelta(seconds=delay)
        self.outcome = Outcome(
            kind, error=error, retry_at=retry_at, attempts=self.attempts, duration_ms=self.duration_ms
        )

    # --- what is written down -------------------------------------------------------------------------------

    def done_line(self) -> DoneLine:
        handler, queued = self.handler, self.queued
        record, row = queued.places or (None, None)
        return DoneLine(
            queued.seq,
            queued.identity.digest.hex(),
            None if handler is None else handler.name,
            None if self.encoded is None else self.encoded.decode(),
            self.duration_ms or None,
            None if handler is None else milliseconds(handler.retention),
            self.marked,
            record,
            row,
        )

    def settled(self) -> list[tuple[str, str, int]]:
        """Its position, if it has one, unless it is tried again: nobody need wait for it any more."""
        message, outcome = self.message, self.outcome
        if message.stream is None or message.position is None or (outcome and outcome.kind is Kind.FAILED):
            return []
        return [(self.queued.identity.tenant, message.stream, message.position)]

    def failed_line(self, outcome: Outcome[Any]) -> FailedLine:
        delay = None
        if outcome.retry_at is not None:
            delay = round((outcome.retry_at - self.queued.now).total_seconds(), 6)
        return FailedLine(
            seq=self.queued.seq,
            identity=self.identity,
            error=codec.encode(failure_of(outcome.error or Exception("unknown")), "error").decode(),
            handler=None if self.handler is None else self.handler.name,
            delay=delay,
            dead=outcome.kind is Kind.DEAD,
            counted=self.counted,
            duration_ms=self.duration_ms,
            started=self.marked,
        )


async def awaited(handler: Handler, given: Any) -> Any:
    """What a handler gave, as a result, within its timeout."""
    if not isawaitable(given):
        return given
    if handler.timeout is None:
        return await given
    try:
        async with asyncio.timeout(handler.timeout) as patience:
            return await given
    except TimeoutError as error:
        if not patience.expired():
            raise
        raise HandlerTimeout(f"{handler.name} did not end within {handler.timeout:g} s") from error


def told_apart(error: BaseException) -> BaseException:
    """A cancellation that nobody asked for is a failure of the handler: it waited for something that was cancelled."""
    task = asyncio.current_task()
    if not isinstance(error, asyncio.CancelledError) or task is None or task.cancelling():
        return error
    failure = HandlerCancelled()
    failure.__cause__ = error
    return failure
