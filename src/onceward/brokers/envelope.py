"""Envelope: from what a broker brings to a Message.

A broker has bytes and headers; a message needs an id, a type and a payload. Where they are is said once, for a source:
by the names of headers, by a function of the raw record, or, for the type and the source, by a fixed text.

What cannot become a message is a **problem**, and no error: a record without an id, a body that is not JSON. It still
gives a message, so that it can be kept as a dead letter with everything that came.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

import msgspec

from onceward import codec
from onceward.errors import InvalidMessage, OncewardError, PayloadUndecodable, Reject, UsageError
from onceward.message import Message

ID_HEADERS = ("message_id", "id", "ce_id")
TYPE_HEADERS = ("type", "message_type", "event_type", "ce_type")
SOURCE_HEADERS = ("source", "ce_source")
CLOUDEVENT = "application/cloudevents+json"


class Raw(msgspec.Struct, frozen=True, kw_only=True):
    """One record as its broker brings it. Functions given as id=, type= and so on get this."""

    topic: str
    """The topic or queue."""
    place: str
    """A name of its own that is the same each time it is delivered, as far as the broker has one."""
    body: bytes | None
    """None: a tombstone."""
    headers: Sequence[tuple[str, Any]] = ()
    """As they came: names may be repeated, values are bytes or what the broker has."""
    key: bytes | None = None
    id: str | None = None
    """What the protocol itself has, as AMQP does."""
    type: str | None = None
    content_type: str | None = None
    at: datetime | None = None

    def header(self, name: str) -> str | None:
        """The last value of that name, as text."""
        for found, value in reversed(self.headers):
            if found == name and value is not None:
                return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
        return None


Pick: TypeAlias = "str | Sequence[str] | Callable[[Raw], str | None]"
Decode: TypeAlias = "Callable[[bytes], Any]"


class Unpacked(NamedTuple):
    message: Message[Any]
    problem: Exception | None = None


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """Where in a record the parts of a message are."""

    id: Sequence[str] | Callable[[Raw], str | None] = ID_HEADERS
    type: str | Sequence[str] | Callable[[Raw], str | None] = TYPE_HEADERS
    """A text is the type of all; several are names of headers; where none is there, the topic."""
    source: str | Sequence[str] | Callable[[Raw], str | None] = SOURCE_HEADERS
    stream: Callable[[Raw], str | None] | None = None
    """Messages of one stream run one after another, unless the inbox has another lane strategy."""
    decode: Decode | None = codec.decode
    """From the body to the payload. None: the payload stays None, and handlers read `message.body`."""
    opt_ins: str = ""
    """What else could be the id, told to those who have none."""

    def open(self, raw: Raw) -> Unpacked:
        """Never raises: what is wrong with the record is its problem."""
        try:
            return self._open(raw)
        except Exception as error:  # noqa: BLE001 - also what a function of the user raises
            problem = error if isinstance(error, OncewardError) else Reject(f"the record cannot be read: {error!r}")
            return Unpacked(_stand_in(raw), problem)

    def _open(self, raw: Raw) -> Unpacked:
        if raw.body is not None and (raw.content_type or "").startswith(CLOUDEVENT):
            event = Message.from_cloudevent(raw.body, topic=raw.topic)
            stream = self.stream(raw) if self.stream else None
            return Unpacked(msgspec.structs.replace(event, body=raw.body, stream=stream))
        id_ = self._id(raw)
        if not id_:
            return Unpacked(_stand_in(raw, self._type(raw)), Reject(self._missing(raw)))
        payload, problem = self._payload(raw.body)
        message = Message(
            id=id_,
            type=self._type(raw),
            payload=payload,
            source=_picked(self.source, raw) or "",
            topic=raw.topic,
            headers=headers_of(raw.headers),
            occurred_at=raw.at,
            stream=self.stream(raw) if self.stream else None,
            body=raw.body,
        )
        return Unpacked(message, problem)

    def _id(self, raw: Raw) -> str | None:
        return self.id(raw) if callable(self.id) else _first(self.id, raw) or raw.id

    def _type(self, raw: Raw) -> str:
        return _picked(self.type, raw) or raw.type or raw.topic

    def _missing(self, raw: Raw) -> str:
        where = "the function given as id= found none" if callable(self.id) else f"none of the headers {_told(self.id)}"
        if not callable(self.id):
            where += " is there"
        return f"the record at {raw.place} has no id: {where}. The producer has to give it one. {self.opt_ins}".rstrip()

    def _payload(self, body: bytes | None) -> tuple[Any, Exception | None]:
        if body is None or self.decode is None:
            return None, None
        try:
            return self.decode(body), None
        except Exception as error:  # noqa: BLE001 - whatever the decoder raises
            return None, PayloadUndecodable(f"the body cannot be decoded: {error}")


def _first(names: Iterable[str], raw: Raw) -> str | None:
    return next((found for name in names if (found := raw.header(name))), None)


def _picked(pick: Any, raw: Raw) -> str | None:
    if callable(pick):
        found: str | None = pick(raw)
        return found
    return pick if isinstance(pick, str) else _first(pick, raw)


def _told(names: Iterable[str]) -> str:
    return ", ".join(names)


def _stand_in(raw: Raw, type_: str | None = None) -> Message[Any]:
    """For a record that is no message: its place is its id, and all that came is kept."""
    return Message(
        id=raw.place[:500],
        type=(type_ or raw.topic or "unknown")[:500].replace("\0", "") or "unknown",
        payload=None,
        topic=raw.topic,
        headers=headers_of(raw.headers),
        body=raw.body,
    )


def headers_of(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """As JSON can keep them: bytes that are no text are {"base64": ...}, and what is repeated is a list."""
    headers: dict[str, Any] = {}
    repeated: set[str] = set()
    for name, value in pairs:
        kept = _kept(value)
        if name not in headers:
            headers[name] = kept
        elif name in repeated:
            headers[name].append(kept)
        else:
            headers[name] = [headers[name], kept]
            repeated.add(name)
    return headers


def _kept(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray)):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, dict):
        return {str(name): _kept(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_kept(one) for one in value]
    try:
        codec.encode(value, "headers")
    except InvalidMessage:
        return str(value)
    return value


def check_pick(name: str, pick: object) -> None:
    """UsageError for what cannot be meant."""
    if callable(pick) or isinstance(pick, str):
        return
    if isinstance(pick, Sequence) and all(isinstance(one, str) for one in pick):
        return
    alone = "the name of a header" if name == "id" else f"the {name} of all messages"
    raise UsageError(f"{name}={pick!r}: it is {alone}, a list of names of headers, or a function of the record")
