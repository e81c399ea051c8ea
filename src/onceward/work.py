"""Work: one delivery, with everything that is known about how to work on it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from onceward import codec
from onceward.errors import PayloadInvalid
from onceward.handlers import Handler
from onceward.identity import Identity
from onceward.message import Message
from onceward.record import Record, State
from onceward.retention import milliseconds
from onceward.retry import RetryPolicy
from onceward.store import ClaimHead, ClaimLine


class Work(msgspec.Struct, frozen=True, gc=False):
    """One delivery, with everything that is known about how to work on it."""

    message: Message[Any]
    identity: Identity
    handler: Handler
    payload_hash: bytes
    lane: str | None = None
    payload: bytes | None = None
    """The payload and headers as JSON, from before the handler could change them."""
    headers: bytes | None = None
    retry: RetryPolicy | None = None
    retention: timedelta | None = None
    origin: str | None = None
    redelivered: bool = False
    host: str = ""
    raise_on_mismatch: bool = False
    record_duration: bool = False
    seen_before: Callable[[Any, Message[Any]], Awaitable[bool]] | None = None
    replayed: bool = False
    """A person asked for it: a dead record may run again."""
    mark_left: Callable[[Work], None] | None = None
    """Told when a start mark could not be taken back right away."""
    marked: int = 0
    """1 once a start mark of ours is committed."""

    def draft(self) -> Record:
        """The record of a run that succeeds. It is what `claim` inserts."""
        message = self.message
        return Record(
            identity=self.identity,
            message_id=message.id,
            type=message.type,
            source=message.source,
            topic=message.topic,
            origin=self.origin,
            state=State.PROCESSED,
            started=self.marked,
            payload_hash=self.payload_hash,
            handler=self.handler.shape.name,
            host=self.host,
            occurred_at=message.occurred_at,
            retention=self.retention,
            stream=message.stream,
            position=message.position,
        )

    def whole(self, duration_ms: float | None = None) -> Record:
        """The record with all of the message, so that it can be run again without its broker."""
        message = self.message
        return msgspec.structs.replace(
            self.draft(),
            payload=None if self.payload is None else msgspec.Raw(self.payload),
            body=message.body,
            headers=None if self.headers is None else msgspec.Raw(self.headers),
            depends_on=message.depends_on,
            duration_ms=duration_ms,
        )

    def afresh(self) -> Work:
        """For another run: a handler that changed its payload must not find the change."""
        if self.payload is None or self._payload_as_it_came():
            return self
        payload = codec.decode(self.payload)
        return msgspec.structs.replace(self, message=msgspec.structs.replace(self.message, payload=payload))

    def _payload_as_it_came(self) -> bool:
        try:
            return codec.encode(self.message.payload) == self.payload
        except PayloadInvalid:  # the handler put something into it that is no JSON
            return False


def claims_of(works: Sequence[Work]) -> tuple[list[ClaimLine], ClaimHead]:
    """The drafts of many as the lines of one claim, under what they have in common."""
    rows = [_often_alike(work) for work in works]
    common = [column[0] if column.count(column[0]) == len(rows) else None for column in zip(*rows, strict=True)]
    if None not in common:
        lines = [_line(work) for work in works]
    else:
        lines = [
            _line(work, *[None if said is not None else own for own, said in zip(row, common, strict=True)])
            for work, row in zip(works, rows, strict=True)
        ]
    return lines, ClaimHead(works[0].identity.consumer, works[0].host, *common)


def _often_alike(work: Work) -> tuple[str, str, str, str, str, str]:
    """In the order of ClaimHead."""
    message, identity = work.message, work.identity
    return identity.tenant, identity.scope, message.type, message.source, message.topic, work.handler.shape.name


def _line(work: Work, *own: str | None) -> ClaimLine:
    message, identity = work.message, work.identity
    key = identity.key
    return ClaimLine(
        identity.digest,
        work.payload_hash,
        key,
        None if message.id == key else message.id,
        work.origin,
        message.occurred_at,
        message.stream,
        message.position,
        None if work.retention is None else milliseconds(work.retention),
        *own,
    )
