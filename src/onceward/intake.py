"""Intake: from a message to Work. Which handler, which identity, lane and hash; what cannot be kept is refused here."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from types import MethodType
from typing import Any, Literal, NamedTuple

import msgspec

from onceward import codec, keys, lanes
from onceward.errors import HandlerNotFound, InvalidMessage, PayloadTooLarge, Reject
from onceward.handlers import Handler, Router, handler_of
from onceward.identity import Identity
from onceward.keys import Key, KeyLike
from onceward.lanes import Lane
from onceward.message import Message
from onceward.retention import check_retention
from onceward.retry import RetryPolicy
from onceward.work import Work

Unhandled = Literal["raise", "ignore", "dead"]


async def claim(_message: Message[Any]) -> None:
    """Stands for the code of a caller that claims a message itself."""


_CLAIMANT = handler_of(claim)

Maker = Callable[..., Work]
"""(message, origin) or (message, origin, identity)."""

MOST_OF_A_PLACE = 2560
"""Bytes of consumer, tenant and stream together. A position is found by an index on them, and PostgreSQL has no entries
of more than a third of a page."""

QUARANTINE = "quarantine"
"""The scope of dead letters that have no usable key or tenant."""

TYPES = 1000
"""Message types whose last maker is kept."""


def check_place(*names: str) -> None:
    """InvalidMessage: its stream cannot be kept."""
    if sum(map(len, names)) * 4 > MOST_OF_A_PLACE:  # a character has up to four bytes
        size = sum(len(name.encode()) for name in names)
        if size > MOST_OF_A_PLACE:
            raise InvalidMessage(
                f"consumer, tenant and stream have {size} bytes together; {MOST_OF_A_PLACE} are allowed. "
                "Use a hash of the stream's name."
            )


class _Last(NamedTuple):
    """How the last message of a type became work."""

    given: Callable[..., Any] | None
    registered: Handler | None
    make: Maker


class Intake(msgspec.Struct, frozen=True, kw_only=True):
    """The options of an inbox that say how a message becomes work."""

    consumer: str
    router: Router
    key: Key
    lane: Lane
    tenant: Callable[[Message[Any]], str]
    has_tenants: bool
    retry: RetryPolicy | None
    unhandled: Unhandled
    raise_on_mismatch: bool
    record_duration: bool
    max_payload: int
    seen_before: Callable[[Any, Message[Any]], Awaitable[bool]] | None
    fingerprint: Callable[[Message[Any]], Any] | None
    host: str = msgspec.field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}")
    last: dict[str, _Last] = msgspec.field(default_factory=dict)
    """By message type."""

    def handler_for(self, message: Message[Any], given: Callable[..., Any] | None) -> Handler | None:
        """The one given, with the key and retries that are registered for the type; else the registered one.

        None: there is none, and the inbox ignores such messages.
        """
        registered = self.router.find(message.type)
        if given is None:
            return registered or self._for_unhandled(message)
        if registered is None:
            return handler_of(given)
        if registered.function is given:
            return registered
        return handler_of(given, key=registered.key, retry=registered.retry, retention=registered.retention)

    def claimant(self, message: Message[Any]) -> Handler:
        """For code that is not a handler: with the key and retries that are registered for the type."""
        registered = self.router.find(message.type)
        return registered if registered is not None else _CLAIMANT

    def _for_unhandled(self, message: Message[Any]) -> Handler | None:
        if self.unhandled == "ignore":
            return None
        text = f"no handler is registered for {message.type!r}"
        if self.unhandled == "raise":
            raise HandlerNotFound(
                f"{text}. Register one with @inbox.handler({message.type!r}), or set unhandled= to "
                '"ignore" or "dead" on the inbox.',
                type=message.type,
            )

        async def unhandled(_message: Message[Any]) -> None:
            raise Reject(text)

        return handler_of(unhandled)

    def take_in(
        self,
        message: Message[Any],
        given: Callable[..., Any] | None,
        *,
        key: KeyLike | None,
        retry: RetryPolicy | None,
        retention: timedelta | None,
        redelivered: bool,
        origin: str | None,
    ) -> Work | None:
        """The work of one delivery. None: it has no handler, and the inbox ignores such messages."""
        if key is None and retry is None and retention is None and not redelivered:
            make = self._maker_for(message, given)
        else:
            handler = self.handler_for(message, given)
            asked: dict[str, Any] = {"key": key, "retry": retry, "retention": retention, "redelivered": redelivered}
            make = None if handler is None else self.maker(message.type, handler, **asked)
        return None if make is None else make(message, origin)

    def _maker_for(self, message: Message[Any], given: Callable[..., Any] | None) -> Maker | None:
        """With nothing special asked for. Most often it is the same as for the last message of the type."""
        registered, last = self.router.find(message.type), self.last.get(message.type)
        # A bound method is a new object at each access; two of them are equal only if their objects are the same one.
        if last is not None and last.registered is registered and (
            last.given is given or (type(given) is MethodType and last.given == given)
        ):  # fmt: skip
            return last.make
        handler = self.handler_for(message, given)
        if handler is None:
            return None
        if len(self.last) >= TYPES:
            self.last.clear()
        make = self.maker(message.type, handler)
        self.last[message.type] = _Last(given, registered, make)
        return make

    def maker(
        self,
        type_: str,
        handler: Handler,
        *,
        key: KeyLike | None = None,
        retry: RetryPolicy | None = None,
        retention: timedelta | None = None,
        fallback: RetryPolicy | None = None,
        redelivered: bool = False,
        raise_on_mismatch: bool | None = None,
        replayed: bool = False,
    ) -> Maker:
        """Makes the work of messages of one type; what is the same for all of them is found out once."""
        strategy = self._strategy(type_, key or handler.key)
        policy = retry or handler.retry or self.retry or fallback
        kept = handler.retention if retention is None else check_retention(retention)
        by_id, by_stream = strategy is keys.message_id, self.lane is lanes.by_stream
        consumer, tenant, scope, has_tenants = self.consumer, self.tenant, strategy.scope, self.has_tenants
        raises = self.raise_on_mismatch if raise_on_mismatch is None else raise_on_mismatch
        host, record_duration, seen_before = self.host, self.record_duration, self.seen_before
        is_plain, most = self.fingerprint is None, self.max_payload

        def make(message: Message[Any], origin: str | None, identity: Identity | None = None) -> Work:
            """InvalidMessage: it cannot be kept."""
            if identity is None:
                taken = message.id if by_id else keys.check(strategy(message))  # an id was checked with its message
                identity = Identity(consumer, tenant(message), scope(message), taken)
            if message.stream is not None:
                check_place(consumer, identity.tenant, message.stream)
            payload = None if message.payload is None else codec.encode(message.payload)
            headers = codec.encode(dict(message.headers), "headers") if message.headers else None
            if is_plain and payload is not None and message.body is None and len(payload) <= most:
                payload_hash = sha256(payload).digest()  # as nearly always
            else:
                payload_hash = self._payload_hash(message, payload)
            if has_tenants and message.tenant != identity.tenant:
                # What the strategy found is the message's tenant, for on_begin and for the handler too.
                message = msgspec.structs.replace(message, tenant=identity.tenant)
            # By position: with names it would take four times as long, for each message.
            return Work(
                message,
                identity,
                handler,
                payload_hash,
                message.stream if by_stream else self.lane(message, identity.key),
                payload,
                headers,
                policy,
                kept,
                None if origin is None else codec.printable(str(origin)),
                redelivered,
                host,
                raises,
                record_duration,
                seen_before,
                replayed,
            )

        return make

    def work_to_bury(self, message: Message[Any], handler: Handler, origin: str | None) -> Work:
        """Of a message that no handler can run, with as much of it as can be kept. InvalidMessage: nothing can."""
        make = self.maker(message.type, handler)
        bare = msgspec.structs.replace(
            message, payload=None, body=None, headers={}, stream=None, position=None, depends_on=()
        )
        aside = Identity(self.consumer, message.tenant or "default", QUARANTINE, message.id)
        for kept, identity in ((message, None), (bare, None), (message, aside)):
            with suppress(Exception):  # also what a strategy of the user raises
                return make(kept, origin, identity)
        return make(bare, origin, aside)

    def identity_of(self, message: Message[Any], key: KeyLike | None = None) -> Identity:
        strategy = self._strategy(message.type, key)
        return Identity(self.consumer, self.tenant(message), strategy.scope(message), keys.check(strategy(message)))

    def _strategy(self, type_: str, key: KeyLike | None) -> Key:
        if key:
            return keys.of(key)
        registered = self.router.find(type_)
        return registered.key if registered and registered.key else self.key

    def lane_of(self, message: Message[Any]) -> tuple[str, str] | None:
        """The lane of a message that did not become work, as far as it can be known."""
        with suppress(Exception):
            if self.lane is lanes.by_stream:  # known also where the key is not
                return None if message.stream is None else (self.tenant(message), message.stream)
            identity = self.identity_of(message)
            lane = self.lane(message, identity.key)
            return None if lane is None else (identity.tenant, lane)
        return None

    def _payload_hash(self, message: Message[Any], payload: bytes | None) -> bytes:
        """Of what makes two payloads the same: the fingerprint, else the bytes as they came, else sorted JSON."""
        data = message.body if message.body is not None else payload or b"null"
        size = len(data) if payload is None or data is payload else max(len(data), len(payload))
        if size > self.max_payload:
            raise PayloadTooLarge(
                f"the payload has {size} bytes, {self.max_payload} are allowed. Send a reference to it, or raise "
                "max_payload= on the inbox.",
                size=size,
                limit=self.max_payload,
            )
        if self.fingerprint is not None:
            seen = self.fingerprint(message)
            data = seen if isinstance(seen, bytes) else codec.encode(seen, "fingerprint")
        return sha256(data).digest()
