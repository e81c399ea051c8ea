"""Batches: many deliveries at once, each with its own outcome.

`Batcher.run` makes Work of the messages, answers what is known, sets twins aside to follow their first, and works off
the rest in passes. A pass takes segments through one transaction each (`onceward.together`) and what is left of them in
parts; a part of one message is settled as any single message is. What another runner has is set aside for the next
pass, and nothing is held between passes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from itertools import chain, groupby
from operator import attrgetter
from time import perf_counter
from typing import Any, Generic, TypeVar, cast

import msgspec

from onceward import codec, events
from onceward.errors import (
    CommitNotApplied,
    HandlerEndedTransaction,
    HandlerNotFound,
    InvalidMessage,
    LeaseLost,
    PayloadMismatch,
    StoreError,
    TryLater,
    UsageError,
)
from onceward.flights import in_flight
from onceward.handlers import BulkHandler, Handler, bulk_handler_of
from onceward.intake import Intake, Maker
from onceward.keys import KeyLike
from onceward.message import Message
from onceward.outcome import Kind, Outcome
from onceward.retry import RetryPolicy
from onceward.settle import CONFLICTS, Settler
from onceward.severally import Severally
from onceward.store import Conflict, Done, LeaseUnit, Unit
from onceward.together import HookFailed, Lanes, Segment, Slot, busy, comes_again, settle_done

Tx = TypeVar("Tx")

LARGEST = 5_000
"""Messages in one transaction. More would be more advisory locks than a PostgreSQL server may have room for."""

MOSTLY = 0.5
"""Share of duplicates in recent batches from which on it pays to look before claiming."""

_IGNORED: Outcome[Any] = Outcome(Kind.IGNORED)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller asked for."""

    messages: list[Message[Any]]
    given: Callable[..., Any] | None
    bulk: BulkHandler | None
    key: KeyLike | None
    retry: RetryPolicy | None
    retention: timedelta | None
    redelivered: bool
    origins: Sequence[str | None] | None
    fallback: RetryPolicy | None = None
    """The policy where neither the call, the handler nor the inbox has one."""


def call_of(
    name: str,
    messages: Iterable[Message[Any]],
    handler: Callable[..., Any] | None,
    *,
    origins: Sequence[str | None] | None,
    **asked: Any,
) -> Call:
    """UsageError for what cannot be meant."""
    if isinstance(messages, (Message, str, bytes, dict)) or not isinstance(messages, Iterable):
        raise UsageError(f"{name} takes a list of messages, not {type(messages).__name__}")
    listed = list(messages)
    for place, message in enumerate(listed):
        if not isinstance(message, Message):
            raise UsageError(f"{name} takes messages, but number {place} is {type(message).__name__}")
    if origins is not None and len(origins) != len(listed):
        raise UsageError(f"{name} got {len(listed)} messages and {len(origins)} origins")
    bulk = None
    if name == "process_bulk":
        if handler is None:
            raise UsageError("process_bulk needs a handler: (messages, tx) or (messages)")
        bulk = bulk_handler_of(handler)
    return Call(messages=listed, given=handler, bulk=bulk, origins=origins, **asked)


class _Taken(msgspec.Struct):
    """A batch on its way."""

    call: Call
    outcomes: list[Outcome[Any] | None]
    lanes: Lanes
    slots: list[Slot] = []
    twins: list[tuple[Slot, Slot]] = []
    said: list[events.InboxEvent] = []


class Batcher(Generic[Tx]):
    def __init__(self, intake: Intake, settler: Settler[Tx], bus: events.Bus) -> None:
        self._intake = intake
        self._settler = settler
        self._bus = bus
        self._duplicates = 0.0
        """The share of duplicates in recent batches."""

    async def run(self, call: Call) -> list[Outcome[Any]]:
        began = perf_counter()
        batch = self._take_in(call)
        failure: Exception | None = None
        try:
            await self._work_off(batch)
        except Exception as error:
            failure = error
            raise
        finally:
            for slot in batch.slots:
                batch.outcomes[slot.place] = slot.outcome
            for twin, first in batch.twins:
                twin.outcome = batch.outcomes[twin.place] = _follow(twin, first)
            self._tell(batch, failure, (perf_counter() - began) * 1000)
        outcomes = [outcome for outcome in batch.outcomes if outcome is not None]
        assert len(outcomes) == len(call.messages)  # noqa: S101 - one for each, or the caller would mix them up
        return outcomes

    # --- intake ---------------------------------------------------------------------------------------------

    def _take_in(self, call: Call) -> _Taken:
        batch = _Taken(call, [None] * len(call.messages), Lanes())
        makers: dict[str, Maker | None] = {}
        firsts: dict[bytes, Slot] = {}
        origins = call.origins
        for place, message in enumerate(call.messages):
            try:
                if message.type not in makers:
                    makers[message.type] = self._maker(call, message)
                make = makers[message.type]
                if make is None:
                    self._say(batch, events.Ignored, message)
                    batch.outcomes[place] = _IGNORED
                    continue
                work = make(message, None if origins is None else origins[place])
            except Exception as error:  # noqa: BLE001 - also what a strategy of the user raises
                batch.outcomes[place] = self._cannot_be_kept(batch, place, error)
                continue
            digest = work.identity.digest
            lane = None if work.lane is None else (work.identity.tenant, work.lane)
            slot = Slot(place, work, digest, lane, lane is None and not message.depends_on)
            first = firsts.setdefault(digest, slot)
            if first is not slot:
                batch.twins.append((slot, first))
        batch.slots.extend(firsts.values())
        for digest, done in self._settler.cache.known(firsts.keys()):
            settle_done(firsts[digest], done)
        return batch

    def _maker(self, call: Call, message: Message[Any]) -> Maker | None:
        if call.bulk is not None:
            handler: Handler | None = call.bulk.of_one(self._intake.router.find(message.type))
        else:
            handler = self._intake.handler_for(message, call.given)
        if handler is None:
            return None
        return self._intake.maker(
            message.type, handler, key=call.key, retry=call.retry, fallback=call.fallback, retention=call.retention,
            redelivered=call.redelivered,
        )  # fmt: skip

    def _cannot_be_kept(self, batch: _Taken, place: int, error: Exception) -> Outcome[Any]:
        message = batch.call.messages[place]
        if isinstance(error, InvalidMessage):
            self._say(batch, events.Refused, message, error=error)
        elif isinstance(error, UsageError) and not isinstance(error, HandlerNotFound):
            raise error
        outcome: Outcome[Any] = Outcome(Kind.FAILED, error=error)
        if comes_again(outcome):
            batch.lanes.stop_at(self._intake.lane_of(message), place)
        return outcome

    # --- passes ---------------------------------------------------------------------------------------------

    async def _work_off(self, batch: _Taken) -> None:
        loop = asyncio.get_running_loop()
        deadline, pause, tries = loop.time() + self._settler.wait, 0.005, 0
        asked = left = [slot for slot in batch.slots if slot.outcome is None]
        while left:
            # What another runner had before is most likely done by now.
            if (self._duplicates > MOSTLY or tries) and len(left) > 1:
                await self._look(left)
                left = [slot for slot in left if slot.outcome is None]
            await self._pass(batch, left)
            left = [slot for slot in left if slot.outcome is None]
            tries += 1
            if left and tries > 1 and loop.time() + pause > deadline:
                for slot in left:
                    text = "a message before it in its lane is with another runner"
                    behind = TryLater(reason="blocked", text=text)
                    slot.outcome = busy(behind if slot.waits == "lane" else in_flight(self._settler.wait))
                left = []
            if left:
                await self._pause(left, pause * (0.5 + random.random()))  # noqa: S311 - jitter
                pause = min(pause * 2, 0.25)
        if asked:
            self._note_duplicates(asked)

    async def _pause(self, left: list[Slot], seconds: float) -> None:
        """Holding nothing. A runner of this process can be waited for."""
        landing = self._settler.flights.landing(slot.digest for slot in left)
        if landing:
            await asyncio.wait(landing, timeout=seconds)
        else:
            await asyncio.sleep(seconds)

    async def _pass(self, batch: _Taken, slots: list[Slot]) -> None:
        if not slots:
            return
        batch.lanes.let_go()
        flight = self._settler.flights.enter_free([slot.digest for slot in slots])
        try:
            for slot in slots:
                slot.waits = ""
                if slot.digest not in flight.digests:
                    slot.waits = "flight"
                    batch.lanes.hold(slot)
            for segment in self._segments(batch.call, slots):
                await self._work_off_segment(batch, segment)
        finally:
            flight.land()

    def _segments(self, call: Call, slots: list[Slot]) -> list[list[Slot]]:
        """What shares a transaction: all, or with `on_begin` those of one tenant."""
        if call.redelivered and any(slot.work.retry is not None for slot in slots):
            # Each commits that it starts. One that kills the process must not take the others' tries with it.
            return [[slot] for slot in slots]
        parts = [part for group in self._groups(slots) for part in _runs(group)]
        return [part[at : at + LARGEST] for part in parts for at in range(0, len(part), LARGEST)]

    def _groups(self, slots: list[Slot]) -> list[list[Slot]]:
        if not self._settler.has_hook:
            return [slots]
        groups: dict[str, list[Slot]] = {}
        for slot in slots:
            groups.setdefault(slot.work.identity.tenant, []).append(slot)
        return list(groups.values())

    async def _look(self, slots: list[Slot]) -> None:
        """Most will be duplicates, and a plain read can say so. It cannot say "new": what it misses is claimed."""
        for group in self._groups(slots):
            try:
                async with self._settler.unit(group[0].work.message, read_only=True) as unit:
                    found = await unit.look_done([slot.work.identity for slot in group])
            except StoreError:
                raise
            except Exception:  # noqa: BLE001, S112 - busy, or `on_begin` raised: the claim will hear it too
                continue
            for slot in group:
                done = found.get(slot.digest)
                if done is not None:
                    settle_done(slot, done)
            self._settler.cache.put_all(found.items())

    def _note_duplicates(self, slots: list[Slot]) -> None:
        kinds = [slot.outcome.kind for slot in slots if slot.outcome is not None]
        share = kinds.count(Kind.DUPLICATE) / len(slots)
        self._duplicates += 0.3 * (share - self._duplicates)

    # --- segments -------------------------------------------------------------------------------------------

    async def _work_off_segment(self, batch: _Taken, segment: list[Slot]) -> None:
        todo, lanes, conflicts = [segment], batch.lanes, 0
        while todo:
            part = [
                slot for slot in todo.pop()
                if slot.outcome is None and not slot.waits and (slot.lane is None or not lanes.bars(slot))
            ]  # fmt: skip
            if len(part) <= 1:
                for slot in part:
                    await self._settle_alone(slot, lanes)
                continue
            try:
                left = await self._together(part, batch)
            except Conflict as conflict:
                conflicts += 1
                _unsettle(part)
                if conflicts < CONFLICTS:
                    todo.append(part)
                    for slot in part:
                        slot.work = slot.work.afresh()
                    await asyncio.sleep(0.005 * (0.5 + random.random()))  # noqa: S311 - jitter
                else:
                    text = f"the database asked {conflicts} times to run the transaction again"
                    _give_up(part, lanes, busy(TryLater(reason="store_busy", text=text)), conflict.__cause__)
            except TryLater as later:
                _unsettle(part)
                _give_up(part, lanes, busy(later))
            except LeaseLost as lost:
                _give_up(part, lanes, Outcome(Kind.BUSY, error=lost))
            except HookFailed as failed:
                _give_up(part, lanes, Outcome(Kind.FAILED, error=failed.__cause__))
            else:
                for slot in chain(*left):
                    slot.apart = True
                todo.extend(reversed(left))

    async def _together(self, part: list[Slot], batch: _Taken) -> list[list[Slot]]:
        async with self._unit(part[0].work.message) as unit:
            bulk, leases = batch.call.bulk, cast("LeaseUnit[Any]", unit)
            if bulk is not None or self._settler.features.transactional:
                left = await Segment(unit, part, batch.lanes, bulk).work()
            else:
                left = await Severally(leases, part, batch.lanes).work()
        self._settler.cache.put_all([(slot.digest, slot.done) for slot in part if slot.done is not None])
        return left

    def _unit(self, message: Message[Any]) -> AbstractAsyncContextManager[Unit[Tx]]:
        return self._settler.unit(message, around=_told_apart)

    async def _settle_alone(self, slot: Slot, lanes: Lanes) -> None:
        try:
            slot.outcome = await self._settler.settle_now(slot.work)
        except TryLater as later:
            if later.reason == "in_flight":
                slot.waits = "flight"
                lanes.hold(slot)
                return
            slot.outcome = busy(later)
        except (CommitNotApplied, HandlerEndedTransaction) as error:
            slot.outcome = Outcome(Kind.FAILED, error=error)
        except LeaseLost as lost:
            slot.outcome = Outcome(Kind.BUSY, error=lost)
        except (StoreError, UsageError):
            raise
        except Exception as error:  # noqa: BLE001 - PayloadMismatch, or what `on_begin` raised
            slot.outcome = Outcome(Kind.FAILED, error=error)
        if comes_again(slot.outcome):
            lanes.stop(slot)

    # --- events ---------------------------------------------------------------------------------------------

    def _say(self, batch: _Taken, kind: Any, message: Message[Any], **more: Any) -> None:
        consumer = self._intake.consumer
        batch.said.append(kind(consumer=consumer, type=message.type, message_id=message.id, **more))

    def _tell(self, batch: _Taken, failure: Exception | None, duration_ms: float) -> None:
        bus, consumer, quiet = self._bus, self._intake.consumer, self._bus.is_quiet
        for event in batch.said:
            bus.emit(event)
        for slot in (*batch.slots, *(twin for twin, _ in batch.twins)):
            work, outcome = slot.work, slot.outcome
            if outcome is None:
                if failure is not None:
                    bus.emit(events.of_error(consumer, work.message, work.identity, failure))
            elif not quiet or outcome.mismatch or outcome.error is not None:
                bus.emit(events.of_outcome(consumer, work.message, work.identity, outcome))
        if not quiet:
            kind = "many" if batch.call.bulk is None else "bulk"
            size = len(batch.call.messages)
            bus.emit(events.Batch(consumer=consumer, handler=kind, size=size, duration_ms=duration_ms))


def _runs(slots: list[Slot]) -> list[list[Slot]]:
    """In their order: what may share a transaction, and each that may not."""
    if not any(slot.apart for slot in slots):
        return [slots]
    return [
        part
        for apart, run in groupby(slots, attrgetter("apart"))
        for part in ([[slot] for slot in run] if apart else [list(run)])
    ]


def _told_apart(begin: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
    """What `on_begin` raises concerns all that share its transaction; TryLater and errors of the store already do."""

    async def wrapped(tx: Any) -> None:
        try:
            await begin(tx)
        except (TryLater, StoreError):
            raise
        except Exception as error:
            raise HookFailed from error

    return wrapped


def _unsettle(part: list[Slot]) -> None:
    """On SQLite a duplicate may be told from what a neighbour wrote and then could not commit."""
    for slot in part:
        if slot.outcome is not None and not comes_again(slot.outcome):
            slot.outcome = slot.done = None


def _give_up(part: list[Slot], lanes: Lanes, outcome: Outcome[Any], cause: BaseException | None = None) -> None:
    if outcome.error is not None and cause is not None:
        outcome.error.__cause__ = cause
    for slot in part:
        if slot.outcome is None and not slot.waits:
            slot.outcome = outcome
            lanes.stop(slot)


def _follow(twin: Slot, first: Slot) -> Outcome[Any] | None:
    """The second of two in one batch: a duplicate of what its first became, or it comes again."""
    outcome = first.outcome
    if outcome is None:
        return None
    done = first.done
    if done is None and outcome.kind in (Kind.PROCESSED, Kind.DUPLICATE):
        known = outcome.record.payload_hash if outcome.record else first.work.payload_hash
        done = Done(known, None if outcome.result is None else codec.encode(outcome.result, "result"))
    if done is not None:
        settle_done(twin, done)
        return twin.outcome
    same = twin.work.payload_hash == first.work.payload_hash
    if outcome.kind in (Kind.DEAD, Kind.ACCEPTED):
        if not same and twin.work.raise_on_mismatch:
            return Outcome(Kind.FAILED, error=PayloadMismatch())
        return msgspec.structs.replace(outcome, mismatch=outcome.mismatch or not same)
    if same and isinstance(outcome.error, PayloadMismatch) and not outcome.attempts:
        return outcome
    return busy(TryLater(reason="in_flight", text="its twin in the same batch was not settled"))
