"""Accepting: a message is kept, exactly once, to be worked on later.

What is kept is a record in the state accepted, and a line in the queue. A message that was accepted or processed before
is a duplicate; a failed record of `process` joins the queue, with its attempts.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any

import msgspec

from onceward import codec, events, lanes
from onceward.attempt import compare, dead_outcome
from onceward.errors import InvalidMessage, OncewardError, PayloadMismatch, TryLater, UsageError
from onceward.flights import in_flight
from onceward.identity import digest
from onceward.intake import Intake, Maker
from onceward.keys import KeyLike
from onceward.message import Message, Position, check_text
from onceward.outcome import Kind, Outcome
from onceward.queue import LAST, SHARED, Kept, KeptLine, QueueLine
from onceward.record import Record
from onceward.settle import Settler
from onceward.work import Work

CHUNK = 2000
"""Messages that are kept in one transaction. PostgreSQL keeps a lock in memory for each of them."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a call of `accept` says about all of its messages."""

    lane: str | None = None
    not_before: datetime | None = None
    wait: timedelta | None = None
    """From now on, by the clock of the database."""
    origin: str | None = None
    origins: Sequence[str | None] | None = None
    """Of each."""
    key: KeyLike | None = None
    tx: Any = None

    def origin_of(self, place: int) -> str | None:
        return self.origin if self.origins is None else self.origins[place]


def asked(*, lane: str | None, not_before: datetime | timedelta | None, **rest: Any) -> Asked:
    if lane is not None:
        lane = check_text("lane", lane)
    if isinstance(not_before, timedelta):
        return Asked(lane=lane, wait=not_before, **rest)
    if not_before is not None and (not isinstance(not_before, datetime) or not_before.tzinfo is None):
        raise UsageError("not_before= is a timedelta, or a datetime with a timezone")
    return Asked(lane=lane, not_before=not_before, **rest)


class _Place(msgspec.Struct, eq=False):
    """One message of a call, until it has its outcome."""

    message: Message[Any]
    work: Work | None = None
    line: QueueLine | None = None
    outcome: Outcome[Any] | None = None
    first: _Place | None = None
    """The same message, earlier in the call."""


class Acceptor:
    def __init__(self, intake: Intake, settler: Settler[Any], bus: events.Bus, *, strict: bool, first: int) -> None:
        self._intake = intake
        self._settler = settler
        self._bus = bus
        self._strict = strict
        self._first = first

    async def accept(self, messages: Iterable[Message[Any]], about: Asked) -> list[Outcome[Any]]:
        """An outcome for each. Nothing is raised for one message; what concerns all is."""
        if about.wait is not None:
            async with self._settler.plain_unit() as unit:
                about = msgspec.structs.replace(about, not_before=_moment(await unit.now(), about.wait))
        makers: dict[str, Maker] = {}
        places = [self._place(at, message, about, makers) for at, message in enumerate(messages)]
        self._pair(places)
        todo = [place for place in places if place.outcome is None and place.first is None]
        deadline, pause = asyncio.get_running_loop().time() + self._settler.wait, 0.005
        while todo:
            for start in range(0, len(todo), CHUNK):
                await self._keep(todo[start : start + CHUNK], about.tx)
            todo = [place for place in todo if place.outcome is None]
            if todo and asyncio.get_running_loop().time() + pause > deadline:
                for place in todo:
                    place.outcome = _failed(in_flight(self._settler.wait))
                break
            if todo:
                await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311 - jitter
                pause = min(pause * 2, 0.25)
        outcomes = [self._outcome_of(place) for place in places]
        self._tell(places, outcomes)
        return outcomes

    # --- what is asked for ----------------------------------------------------------------------------------

    def _place(self, at: int, message: Message[Any], about: Asked, makers: dict[str, Maker]) -> _Place:
        if not isinstance(message, Message):
            raise UsageError(f"accept takes a Message or several, not {type(message).__name__}")
        place = _Place(message)
        try:
            make = makers.get(message.type)
            if make is None:
                claimant = self._intake.claimant(message)
                make = makers[message.type] = self._intake.maker(message.type, claimant, key=about.key)
            place.work = make(message, about.origin_of(at))
            place.line = self.line(place.work, about)
        except Exception as error:  # noqa: BLE001 - also what a strategy of the user raises
            place.outcome = _failed(error)
        return place

    def line(self, work: Work, about: Asked) -> QueueLine:
        message, identity = work.message, work.identity
        own, name = identity.digest, about.lane if about.lane is not None else lanes.check(work.lane)
        lane = own if name is None else digest(identity.consumer, identity.tenant, "lane", name)
        is_stream = name is not None and name == message.stream
        needed = self._needed(message, identity.tenant)
        return QueueLine(
            identity=own.hex(),
            lock=int.from_bytes(own[:8], "big", signed=True),
            tenant=identity.tenant,
            scope=identity.scope,
            key=identity.key,
            type=message.type,
            lane=lane.hex(),
            share=int.from_bytes(lane[:4], "big"),
            rank=SHARED if not is_stream else LAST if message.position is None else message.position,
            track=None if is_stream or name is None or message.position is None else message.stream,
            lane_name=name,
            message_id=None if message.id == identity.key else message.id,
            source=message.source,
            topic=message.topic,
            origin=work.origin,
            payload=None if work.payload is None else work.payload.decode(),
            body=message.body,
            headers=None if work.headers is None else work.headers.decode(),
            payload_hash=work.payload_hash,
            occurred_at=message.occurred_at,
            stream=message.stream,
            position=message.position,
            depends_on=codec.encode(needed, "depends_on").decode() if needed else None,
            not_before=about.not_before,
        )

    def line_of(self, record: Record) -> QueueLine:
        """As it was accepted: of a dead letter, to find its place again."""
        message = record.message()
        work = self._intake.maker(message.type, self._intake.claimant(message))(message, record.origin, record.identity)
        if record.received_position is not None:
            work = msgspec.structs.replace(work, lane=record.lane)
        return self.line(work, Asked())

    def _needed(self, message: Message[Any], tenant: str) -> tuple[Position, ...]:
        """What it depends on; in a gapless stream also on the position before its own."""
        stream, position = message.stream, message.position
        if stream is None or position is None:
            return message.depends_on
        for needed in message.depends_on:
            if needed.stream == stream and needed.position >= position and (needed.tenant or tenant) == tenant:
                raise InvalidMessage(
                    f"position {position} of {stream!r} depends on position {needed.position} of the same stream, "
                    "which does not run before it"
                )
        if not self._strict or position <= self._first:
            return message.depends_on
        return (*message.depends_on, Position(stream, position - 1))

    @staticmethod
    def _pair(places: list[_Place]) -> None:
        firsts: dict[str, _Place] = {}
        for place in places:
            if place.line is not None:
                first = firsts.setdefault(place.line.identity, place)
                place.first = None if first is place else first

    # --- keeping --------------------------------------------------------------------------------------------

    async def _keep(self, places: list[_Place], tx: Any) -> None:
        if not self._settler.has_hook:
            await self._keep_together(places, tx)
            return
        by_tenant = sorted(places, key=_tenant)  # on_begin may have to say whose rows these are
        for _, group in groupby(by_tenant, key=_tenant):
            await self._keep_together(list(group), tx)

    async def _keep_together(self, places: list[_Place], tx: Any) -> None:
        lines = [place.line for place in places if place.line is not None]
        async with self._unit(places[0], tx) as unit:
            kept = await unit.accept(lines, consumer=self._intake.consumer, host=self._intake.host)
        rest = []
        for place, how in zip(places, kept, strict=True):
            place.outcome = self._judged(place, how)
            if how.how is Kept.DEAD and place.work is not None:
                rest.append(place)
        if rest:
            await self._look_at_dead(rest, tx)

    def _unit(self, place: _Place, tx: Any) -> AbstractAsyncContextManager[Any]:
        if tx is None:
            return self._settler.unit(place.message)
        return self._settler.joined(place.message, tx)

    def _judged(self, place: _Place, kept: KeptLine) -> Outcome[Any] | None:
        """None: another runner has it, or more has to be looked up."""
        if kept.how in (Kept.NEW, Kept.PARKED):
            return Outcome(Kind.ACCEPTED)
        if kept.how is Kept.IN_FLIGHT or place.work is None:
            return None
        try:
            return Outcome(Kind.DUPLICATE, mismatch=compare(place.work, kept.payload_hash))
        except PayloadMismatch as error:
            return _failed(error)

    async def _look_at_dead(self, places: list[_Place], tx: Any) -> None:
        """People want to know why."""
        works = [place.work for place in places if place.work is not None]
        async with self._settler.reading(works[0].message, tx) as unit:
            for place, work in zip(places, works, strict=True):
                found = await unit.find(work.identity)
                if found is not None and place.outcome is not None and place.outcome.kind is not Kind.FAILED:
                    place.outcome = dead_outcome(found.record, mismatch=place.outcome.mismatch)

    # --- what comes of it -----------------------------------------------------------------------------------

    def _outcome_of(self, place: _Place) -> Outcome[Any]:
        first = place.first
        if first is None:
            if place.outcome is None:
                raise OncewardError("a message was not settled")  # pragma: no cover
            return place.outcome
        outcome = first.outcome
        if place.work is None or first.work is None or outcome is None:
            return place.outcome or _failed(OncewardError("a message was not settled"))
        if outcome.kind is Kind.ACCEPTED:
            try:
                return Outcome(Kind.DUPLICATE, mismatch=compare(place.work, first.work.payload_hash))
            except PayloadMismatch as error:
                return _failed(error)
        return outcome

    def _tell(self, places: Sequence[_Place], outcomes: Sequence[Outcome[Any]]) -> None:
        if self._bus.is_quiet and all(one.error is None and not one.mismatch for one in outcomes):
            return
        consumer = self._intake.consumer
        for place, outcome in zip(places, outcomes, strict=True):
            message, work = place.message, place.work
            if work is None or place.line is None:
                error = outcome.error or InvalidMessage()
                told = events.Refused(consumer=consumer, type=message.type, message_id=message.id, error=error)
                self._bus.emit(told)
            elif outcome.kind is Kind.ACCEPTED:
                base: dict[str, Any] = {"type": message.type, "message_id": message.id, "identity": work.identity}
                self._bus.emit(events.Accepted(consumer=consumer, **base))
            else:
                self._bus.emit(events.of_outcome(consumer, message, work.identity, outcome))


def _failed(error: Exception) -> Outcome[Any]:
    kind = Kind.BUSY if isinstance(error, TryLater) else Kind.FAILED
    return Outcome(kind, error=error)


def _moment(now: datetime, wait: timedelta) -> datetime:
    try:
        return now + wait
    except OverflowError as error:
        raise UsageError(f"not_before={wait}: no calendar goes that far") from error


def _tenant(place: _Place) -> str:
    return "" if place.work is None else place.work.identity.tenant
