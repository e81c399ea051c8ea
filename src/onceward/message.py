"""Message, Position and the names of streams.

A message is a frozen value with an id that its producer gave it. It knows nothing about brokers or acks. What
can be checked cheaply is checked when it is made, so that every Message in the system can be kept.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Generic, TypeVar

import msgspec

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
        check_text("stream", self.stream)
        _check_position(self.position)


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
        check_text("id", self.id, "The producer has to give every message a stable id of its own.")
        check_text("type", self.type)
        if self.source:
            check_text("source", self.source)
        if self.topic:
            check_text("topic", self.topic)
        if self.tenant is not None:
            check_text("tenant", self.tenant)
        if self.stream is not None:
            check_text("stream", self.stream)
        if self.position is not None:
            _check_position(self.position)
        if self.stream is not None and any(self._is_self(needed) for needed in self.depends_on):
            raise InvalidMessage("the message depends on its own position")
        if isinstance(self.payload, (bytes, bytearray, memoryview)):
            raise InvalidMessage("the payload is bytes; pass its decoded value as payload= and the bytes as body=")
        if self.occurred_at is not None and self.occurred_at.tzinfo is None:
            raise InvalidMessage("occurred_at has no time zone; use datetime.now(timezone.utc)")

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


def check_text(name: str, value: object, advice: str = "") -> None:
    """A text that every store can hold and that keeps its bytes; InvalidMessage says what is wrong with it."""
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


def _check_position(value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise InvalidMessage(f"position is {value!r}; it must be an integer from 0 to 2**63-1")


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
