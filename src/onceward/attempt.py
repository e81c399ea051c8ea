"""One message through its unit: claim, judge what is found, run the handler, commit or keep the failure.

Read `attempt` first. It returns an Outcome; a handler's own error is the outcome FAILED or DEAD, and `process` raises
it. What is raised here is not the handler's: TryLater, PayloadMismatch, errors of the store, and a cancellation.
`InFlight` and `Conflict` mean: not now, the caller may try again.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Coroutine
from contextlib import suppress
from datetime import datetime
from inspect import isawaitable
from time import perf_counter
from types import CoroutineType
from typing import Any

import msgspec

from onceward import codec
from onceward.current import Current, enter, leave
from onceward.errors import (
    AttemptsExhausted,
    HandlerEndedTransaction,
    LeaseLost,
    MessageDead,
    OncewardError,
    PayloadMismatch,
    RecordNotFound,
    Reject,
    ResultInvalid,
    StoreError,
    StoreUnavailable,
    TryLater,
)
from onceward.message import Position
from onceward.outcome import Kind, Outcome
from onceward.record import Change, Decision, Failure, Record, State, decide, from_states
from onceward.retry import RetryPolicy
from onceward.shield import finish, wait_out
from onceward.store import Conflict, Done, Ended, Found, InFlight, Unit
from onceward.work import Work

MARK_TRIES = 3
"""How often a start mark is taken back before it is left: a pool may have several dead connections to give."""

LONGEST_DELAY = 10 * 365 * 86400.0
"""Seconds. A handler may ask for longer, and no database could write the date."""


def attempt(unit: Unit[Any], work: Work) -> Coroutine[Any, Any, Outcome[Any]]:
    """Take one delivery through one unit of work."""
    if not work.redelivered or work.retry is None or work.replayed or unit.joined or unit.claim_marks:
        return _claim_and_run(unit, work)
    return _mark_and_run(unit, work)


async def _mark_and_run(unit: Unit[Any], work: Work) -> Outcome[Any]:
    settled = await _mark_start(unit, work)
    if settled is not None:
        return settled
    work = msgspec.structs.replace(work, marked=1)
    try:
        return await _claim_and_run(unit, work)
    except HandlerEndedTransaction:
        raise  # buried, and its mark with it
    except BaseException:
        # Whatever this is, the process did not die of it. (A failure that was kept has taken its mark back itself.)
        await _take_mark_back(unit, work)
        raise


async def _claim_and_run(unit: Unit[Any], work: Work) -> Outcome[Any]:
    found = await unit.claim(work.draft())
    if found is None and not work.replayed and not work.message.depends_on:
        return await _run(unit, work, None)  # new, and nothing else to look at
    settled, before = await _admit(unit, work, found)
    if settled is not None:
        return settled
    outcome = await _run(unit, work, before)
    if before is None:
        return outcome
    return msgspec.structs.replace(outcome, mismatch=is_mismatch(work, before.payload_hash))


async def claim(unit: Unit[Any], work: Work) -> tuple[Outcome[Any] | None, Record | None]:
    """An outcome: there is nothing to do. Else the work is ours now, and the record before it, if there was one."""
    return await _admit(unit, work, await unit.claim(work.draft()))


async def _admit(unit: Unit[Any], work: Work, found: Found | None) -> tuple[Outcome[Any] | None, Record | None]:
    if found is None:
        if work.replayed:
            raise RecordNotFound
        await _check_dependencies(unit, work)
        return None, None
    settled = await _judge(unit, work, found)
    if settled is not None:
        if work.marked and not isinstance(settled.error, AttemptsExhausted):
            await _take_mark_back(unit, work)
        return settled, found.record
    if not await unit.take(found.record, work.draft()):
        raise InFlight
    await _check_dependencies(unit, work)
    return None, found.record


async def _check_dependencies(unit: Unit[Any], work: Work) -> None:
    """Inline, a message that comes before what it depends on has to come again."""
    if not work.message.depends_on or work.replayed:
        return
    missing = await unit.unmet(work.whole())
    if missing is not None:
        raise blocked_by(missing)


def blocked_by(missing: Position) -> TryLater:
    text = f"it depends on position {missing.position} of {missing.stream!r}, which is not processed yet"
    return TryLater(reason="blocked", text=text)


async def _mark_start(unit: Unit[Any], work: Work) -> Outcome[Any] | None:
    """A delivery that comes again may be one that killed its process: commit that we start, before we do.

    For a second the mark also keeps others away, until the claim does; see `decide`.
    """
    found = await unit.find(work.identity)
    if found is not None:
        settled = await _judge(unit, work, found)
        if settled is not None:
            return settled
    marking = asyncio.ensure_future(unit.mark(found.record if found else None, work.whole()))
    try:
        marked = await wait_out(marking)
    except asyncio.CancelledError:
        if not marking.cancelled() and marking.exception() is None and marking.result():
            await _take_mark_back(unit, work)
        raise
    if not marked:
        raise InFlight
    return None


async def _take_mark_back(unit: Unit[Any], work: Work) -> None:
    async def take_back() -> bool:
        await unit.rollback()
        for _ in range(MARK_TRIES):
            with suppress(StoreUnavailable):
                return await unit.unmark(work.draft())
        return False

    taken = False
    try:
        with suppress(OncewardError):
            taken = await finish(take_back())
    finally:
        if not taken and work.mark_left is not None:
            work.mark_left(work)  # busy or away: again, a little later


async def _judge(unit: Unit[Any], work: Work, found: Found) -> Outcome[Any] | None:
    """What an existing record means for this delivery. None: run it."""
    if work.replayed and found.record.state is State.DEAD:
        return None
    record = found.record
    if work.marked:  # our own start mark is neither a crash nor somebody else's
        record = msgspec.structs.replace(record, started=record.started - 1, next_try_at=None)
    match decide(record, work.retry, found.now):
        case Decision.RUN:
            return None
        case Decision.BUSY:
            raise InFlight
        case Decision.DUPLICATE | Decision.ACCEPTED | Decision.DEAD:
            return settled_by(work, record)
        case Decision.LATER:
            raise too_early(record, found.now)
        case Decision.EXHAUSTED:
            return await _exhausted(unit, work, record)


def settled_by(work: Work, record: Record) -> Outcome[Any] | None:
    """What a record says that leaves nothing to do. None: it has to be run, now or later."""
    match record.state:
        case State.PROCESSED:
            mismatch = compare(work, record.payload_hash)
            return Outcome(
                Kind.DUPLICATE, result=work.handler.restored(record.result), mismatch=mismatch, record=record
            )
        case _ if record.queued or record.state is State.ACCEPTED:
            return Outcome(Kind.ACCEPTED, mismatch=compare(work, record.payload_hash), record=record)
        case State.DEAD | State.DISCARDED:
            return dead_outcome(record, mismatch=compare(work, record.payload_hash))
        case _:
            return None


def too_early(record: Record, now: datetime) -> TryLater:
    return TryLater(
        (record.next_try_at - now).total_seconds() if record.next_try_at else None,
        f"{record.attempts} attempts failed, the next is due at {record.next_try_at}",
        reason="backoff",
        retry_at=record.next_try_at,
    )


def compare(work: Work, payload_hash: bytes | None) -> bool:
    """Whether a delivery that is about to be skipped says something else than the first; raise where asked to."""
    mismatch = is_mismatch(work, payload_hash)
    if mismatch and work.raise_on_mismatch:
        known = f"{work.identity.scope} {work.identity.key}"
        raise PayloadMismatch(f"{known} was used before with another payload. Use a new id or key for new work.")
    return mismatch


def is_mismatch(work: Work, payload_hash: bytes | None) -> bool:
    """A store may keep the beginning of a hash only."""
    return payload_hash is not None and not work.payload_hash.startswith(payload_hash)


_DUPLICATE: Outcome[Any] = Outcome(Kind.DUPLICATE)


def duplicate(work: Work, done: Done, *, mismatch: bool) -> Outcome[Any]:
    """Told from what is known of the first run."""
    if done.result is None and not mismatch:
        return _DUPLICATE
    result = None if done.result is None else work.handler.restored(codec.decode(done.result))
    return Outcome(Kind.DUPLICATE, result=result, mismatch=mismatch)


def dead_outcome(record: Record, *, mismatch: bool = False, kind: type[MessageDead] = MessageDead) -> Outcome[Any]:
    tries = f"attempts: {record.attempts}, crashes: {record.started}"
    error = kind(f"{record.state} ({tries}): {record.last_error}", attempts=record.attempts)
    return Outcome(Kind.DEAD, error=error, record=record, mismatch=mismatch)


async def _exhausted(unit: Unit[Any], work: Work, record: Record) -> Outcome[Any]:
    """No tries are left, most often because the last ones killed the process."""
    await unit.rollback()
    crashed = f"the process died {record.started} times while handling it; " if record.started else ""
    failure = Failure("Exhausted", f"{crashed}no attempts are left")
    buried = await unit.bury(work.whole(), failure, over=from_states(Change.FAIL))
    if buried is None:
        raise InFlight  # it has changed meanwhile
    return dead_outcome(buried, kind=AttemptsExhausted)


async def _run(unit: Unit[Any], work: Work, before: Record | None) -> Outcome[Any]:
    """The claim is ours: run the handler in its transaction, and commit."""
    began, handler = perf_counter(), work.handler
    number = 1 if before is None else before.attempts + 1
    token = enter(Current(work.identity, handler.shape.name, number, work.redelivered, work.origin, unit.fence))
    try:
        if work.seen_before is not None and not work.replayed and await work.seen_before(unit.tx, work.message):
            kind, result = Kind.DUPLICATE, None
        else:
            result = handler.call(work.message, unit.tx if handler.shape.wants_tx else None)
            if type(result) is CoroutineType or isawaitable(result):
                result = await result
            kind = Kind.PROCESSED
        closing = closing_of(work, before, result, (perf_counter() - began) * 1000)
    except BaseException as error:  # noqa: BLE001 - also cancellation: everything must be undone
        return await _failed(unit, work, before, error, (perf_counter() - began) * 1000)
    finally:
        leave(token)
    try:
        if closing is not None:
            await unit.complete(closing)
        await unit.commit()
    except HandlerEndedTransaction as error:
        if not unit.joined:
            await bury_ended(unit, work, error)
        raise
    except (StoreError, LeaseLost):
        raise
    except Exception as error:  # noqa: BLE001 - the database refused the commit: a deferred constraint, a serialization failure
        return await _failed(unit, work, before, error, (perf_counter() - began) * 1000)
    return Outcome(kind, result=result, attempts=number, duration_ms=(perf_counter() - began) * 1000)


def closing_of(
    work: Work, before: Record | None, result: Any, duration_ms: float | None, extra: Any = None
) -> Record | None:
    """What is written after the handler. With nothing to say there is no second write."""
    if result is None and extra is None and before is None and not work.record_duration:
        return None
    return msgspec.structs.replace(
        work.draft(), result=_stored("result", result), extra=_stored("extra", extra), duration_ms=duration_ms
    )


def _stored(name: str, value: Any) -> msgspec.Raw | None:
    return None if value is None else msgspec.Raw(codec.encode(value, name, ResultInvalid))


async def _failed(
    unit: Unit[Any], work: Work, before: Record | None, error: BaseException, duration_ms: float
) -> Outcome[Any]:
    """Undo, and keep the failure in a second transaction."""
    ended = await unit.ended()
    await unit.rollback()
    if unit.joined:  # deduplication only: to keep the failure is the caller's, after the rollback
        if ended:
            raise Ended from error
        raise error
    if ended or isinstance(error, HandlerEndedTransaction):
        await bury_ended(unit, work, error)
        if isinstance(error, Exception) and not isinstance(error, HandlerEndedTransaction):
            raise HandlerEndedTransaction from error
        raise error
    if not isinstance(error, Exception):
        raise error
    if unit.lost:
        raise StoreUnavailable(f"the connection was lost while the handler ran: {error}") from error
    if unit.is_conflict(error):
        raise Conflict from error
    return await keep_failure(unit, work, before, error, duration_ms)


async def keep_failure(
    unit: Unit[Any], work: Work, before: Record | None, error: Exception, duration_ms: float | None = None
) -> Outcome[Any]:
    """Count it, in a transaction of its own: FAILED, to be tried again, or DEAD."""
    attempts = (before.attempts if before else 0) + 1
    crashes = (before.started if before else 0) - work.marked
    state, delay = consequence(error, work.retry, attempts, max(0, crashes))
    if work.replayed:  # by a person, who is told
        state, delay = State.DEAD, None
    kept = await unit.fail(work.whole(duration_ms), failure_of(error), state, delay, replayed=work.replayed)
    if kept is None and work.marked:
        await _take_mark_back(unit, work)
    if kept is None and state is State.DEAD:
        raise InFlight  # another runner has it, and nothing is kept of this run: its outcome counts
    retry_at = kept.next_try_at if kept else None
    if isinstance(error, TryLater):
        error.retry_at = retry_at
    if state is State.FAILED:
        with suppress(Exception):  # a frozen exception
            error.add_note(f"onceward: attempt {attempts} of {work.message.type} {work.message.id!r} failed")
    kind = Kind.DEAD if state is State.DEAD else Kind.FAILED
    return Outcome(
        kind, error=error, retry_at=retry_at, record=kept, attempts=attempts, duration_ms=duration_ms,
        delay=None if kept is None else delay,
    )  # fmt: skip


def consequence(error: Exception, retry: RetryPolicy | None, attempts: int, crashes: int) -> tuple[State, float | None]:
    """What a failed attempt comes to: dead, or tried again after a delay."""
    if isinstance(error, Reject) or (retry is not None and retry.exhausted(attempts + crashes)):
        return State.DEAD, None
    if isinstance(error, TryLater) and error.delay is not None:
        return State.FAILED, min(max(error.delay, 0.0), LONGEST_DELAY)
    return State.FAILED, None if retry is None else retry.delay(attempts)


async def bury_ended(unit: Unit[Any], work: Work, error: BaseException) -> None:
    """Part of the effect may stand, and so may our claim: whatever the record says, it is dead now."""
    await unit.rollback()
    over = (*from_states(Change.FAIL), State.PROCESSED)
    failure = failure_of(error if isinstance(error, HandlerEndedTransaction) else HandlerEndedTransaction())
    await finish(unit.bury(work.whole(), failure, over=over))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - a __str__ of the user's
        return f"(its text cannot be shown: {type(broken).__name__})"


def failure_of(error: BaseException) -> Failure:
    lines = traceback.format_exception(error, limit=-8)
    return Failure(
        type=type(error).__qualname__,
        text=codec.printable(_text(error)),
        traceback="\n".join(codec.printable(line) for line in "".join(lines).splitlines())[-8000:],
    )
