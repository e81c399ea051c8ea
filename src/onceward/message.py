"""Message, Position and the names of streams.

A message is a frozen value with an id that its producer gave it. It knows nothing about brokers or acks. What
can be checked cheaply is checked when it is made, so that every Message in the system can be kept.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

import msgspec
from msgspec.structs import force_setattr

from onceward import codec
from onceward.errors import InvalidMessage, PayloadInvalid

P = TypeVar("P")

MAX_TEXT = 2048
"""Bytes of UTF-8 that an id, type, source, topic, tenant or stream may have."""


class Position(msgspec.Struct, frozen=True):
    """One place in a stream. Without a tenant it means the tenant of the message that names it."""

    stream: str
    position: int
    tenant: str | None = None

    def __post_init__(self) -> None:
        force_setattr(self, "stream", check_text("stream", self.stream))
        force_setattr(self, "position", check_position(self.position))
        if self.tenant is not None:
            force_setattr(self, "tenant", check_text("tenant", self.tenant))


class Message(msgspec.Struct, Generic[P], frozen=True):
    """What a producer said, once. `payload` is a JSON value or a model, `body` the bytes as they came."""

    id: str
    type: str
    payload: P
    source: str = ""
    topic: str = ""
    tenant: str | None = None
    headers: Mapping[str, Any] = msgspec.field(default_factory=dict)
    occurred_at: datetime | None = None
    stream: str | None = None
    position: int | None = None
    depends_on: tuple[Position, ...] = ()
    body: bytes | None = None

    def __post_init__(self) -> None:
        self._check("id", self.id, "The producer has to give every message a stable id of its own.")
        self._check("type", self.type)
        if self.source != "":
            self._check("source", self.source, "Leave it away where there is none.")
        if self.topic != "":
            self._check("topic", self.topic, "Leave it away where there is none.")
        if self.tenant is not None:
            self._check("tenant", self.tenant)
        if self.stream is not None:
            self._check("stream", self.stream)
        if self.position is not None:
            force_setattr(self, "position", check_position(self.position))
        if not isinstance(self.headers, Mapping) or not all(isinstance(name, str) for name in self.headers):
            raise InvalidMessage("headers is not a mapping with string keys; leave it away where there are none")
        if self.body is not None and type(self.body) is not bytes:
            if not isinstance(self.body, (bytes, bytearray, memoryview)):
                raise InvalidMessage(f"body is a {type(self.body).__name__}; it is the bytes as they came")
            force_setattr(self, "body", bytes(self.body))
        if self.stream is not None and any(self._is_self(needed) for needed in self.depends_on):
            raise InvalidMessage("the message depends on its own position")
        if isinstance(self.payload, (bytes, bytearray, memoryview)):
            raise InvalidMessage("the payload is bytes; pass its decoded value as payload= and the bytes as body=")
        if self.occurred_at is not None:
            force_setattr(self, "occurred_at", _in_utc(self.occurred_at))

    def _check(self, name: str, value: object, advice: str = "") -> None:
        text = check_text(name, value, advice)
        if text is not value:
            force_setattr(self, name, text)

    def _is_self(self, needed: Position) -> bool:
        return (needed.stream, needed.position) == (self.stream, self.position) and needed.tenant in (None, self.tenant)

    @staticmethod
    def from_cloudevent(event: Mapping[str, Any] | bytes | str, *, topic: str = "") -> Message[Any]:
        """A message from a CloudEvents 1.0 event in JSON, as text, bytes or a dict.

        `id`, `source` and `type` keep their meaning, `time` is occurred_at, `data` the payload and
        `data_base64` the body; `subject` and extension attributes become headers.
        """
        attributes = codec.decode(event) if isinstance(event, (bytes, str)) else dict(event)
        if not isinstance(attributes, dict):
            raise InvalidMessage("a CloudEvent is a JSON object")
        return _from_cloudevent(attributes, topic)


def payload_of(message: Message[P]) -> P:
    """The payload; where there is only a body, what the body says as JSON."""
    if message.payload is None and message.body is not None:
        payload: P = codec.decode(message.body)
        return payload
    return message.payload


def stream_of(type: str, id: Any) -> str:  # noqa: A002 - the words of the domain
    """A canonical stream name from a type and an id: a scalar, or a dict whose key order does not matter."""
    return codec.encode([type, id], "stream id").decode()


def check_text(name: str, value: object, advice: str = "") -> str:
    """A text that every store can hold and that keeps its bytes; InvalidMessage says what is wrong with it.

    An enum or another kind of string comes back as the plain string that it is.
    """
    if not isinstance(value, str):
        kind = "missing" if value is None else f"a {type(value).__name__}, not a string"
        raise InvalidMessage(f"{name} is {kind}. {advice}".rstrip())
    if not value:
        raise InvalidMessage(f"{name} is empty. {advice}".rstrip())
    if "\0" in value:
        raise InvalidMessage(f"{name} contains a NUL character, which databases cannot store")
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"{name} contains a lone surrogate and is not valid Unicode") from error
    if size > MAX_TEXT:
        raise InvalidMessage(f"{name} has {size} bytes; {MAX_TEXT} are allowed. Use a hash of it.")
    return value if type(value) is str else str.__str__(value)


def check_position(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise InvalidMessage(f"position is {value!r}; it must be an integer from 0 to 2**63-1")
    return int(value)


def _in_utc(moment: object) -> datetime:
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        raise InvalidMessage("occurred_at is not a datetime with a time zone; use datetime.now(timezone.utc)")
    try:
        return moment.astimezone(UTC)
    except OverflowError as error:
        raise InvalidMessage("occurred_at is outside of the years that can be written") from error


_BLANK: Message[Any] = Message(id="-", type="-", payload=None)


def restored(  # noqa: PLR0917 - called for each message
    id: str,  # noqa: A002 - the word of the domain
    type: str,  # noqa: A002
    payload: Any,
    source: str,
    topic: str,
    tenant: str | None,
    headers: Mapping[str, Any] | None,
    occurred_at: datetime | None,
    stream: str | None,
    position: int | None,
    depends_on: tuple[Position, ...],
    body: bytes | None,
) -> Message[Any]:
    """A message that a store has kept. It was checked when it was made; to check it again would take longer than all
    else that is done with it."""
    message: Message[Any] = _BLANK.__copy__()  # type: ignore[attr-defined] # without __post_init__
    force_setattr(message, "id", id)
    force_setattr(message, "type", type)
    force_setattr(message, "payload", payload)
    force_setattr(message, "source", source)
    force_setattr(message, "topic", topic)
    force_setattr(message, "tenant", tenant)
    force_setattr(message, "headers", headers or {})
    if occurred_at is not None:
        force_setattr(message, "occurred_at", occurred_at)
    if stream is not None:
        force_setattr(message, "stream", stream)
        force_setattr(message, "position", position)
    if depends_on:
        force_setattr(message, "depends_on", depends_on)
    if body is not None:
        force_setattr(message, "body", body)
    return message


_CORE_ATTRIBUTES = {"id", "source", "type", "specversion", "time", "data", "data_base64"}


def _from_cloudevent(attributes: dict[str, Any], topic: str) -> Message[Any]:
    version = attributes.get("specversion")
    if version != "1.0":
        raise InvalidMessage(f"not a CloudEvent of version 1.0 (specversion is {version!r})")
    check_text("source", attributes.get("source"), "CloudEvents 1.0 requires it.")
    return Message(
        id=attributes.get("id"),  # type: ignore[arg-type]  # checked by Message
        type=attributes.get("type"),  # type: ignore[arg-type]
        payload=attributes.get("data"),
        source=attributes["source"],
        topic=topic,
        headers={name: value for name, value in attributes.items() if name not in _CORE_ATTRIBUTES},
        occurred_at=_time(attributes.get("time")),
        body=_binary(attributes.get("data_base64")),
    )


def _time(value: Any) -> datetime | None:
    if value is None:
        return None
    try:
        moment: datetime = msgspec.convert(value, datetime)
    except msgspec.ValidationError as error:
        raise InvalidMessage(f"the time of the CloudEvent is not an RFC 3339 timestamp: {value!r}") from error
    return moment


def _binary(value: Any) -> bytes | None:
    if value is None:
        return None
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise PayloadInvalid(f"data_base64 of the CloudEvent is not base64: {error}") from error
