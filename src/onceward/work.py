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
from onceward.store import Claims


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


def claims_of(works: Sequence[Work]) -> Claims:
    """The drafts of many."""
    messages, identities = [work.message for work in works], [work.identity for work in works]
    return Claims(
        consumer=identities[0].consumer,
        host=works[0].host,
        digest=[identity.digest for identity in identities],
        payload_hash=[work.payload_hash for work in works],
        key=[identity.key for identity in identities],
        message_id=[message.id for message in messages],
        tenant=[identity.tenant for identity in identities],
        scope=[identity.scope for identity in identities],
        type=[message.type for message in messages],
        source=[message.source for message in messages],
        topic=[message.topic for message in messages],
        handler=[work.handler.shape.name for work in works],
        origin=[work.origin for work in works],
        occurred_at=[message.occurred_at for message in messages],
        stream=[message.stream for message in messages],
        position=[message.position for message in messages],
        keep_ms=[None if work.retention is None else milliseconds(work.retention) for work in works],
    )
