"""From a record of Kafka to a message. The same for both clients."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple, TypeAlias

from onceward.brokers.envelope import Decode, Envelope, Pick, Raw, check_pick
from onceward.errors import UsageError

Order: TypeAlias = "Literal['key', 'partition'] | None"

OPT_INS = (
    "Where it cannot, there are id=offset and id=key, both in the module of KafkaSource. With id=offset an event that "
    "was produced twice is two messages. With id=key all events of one key are one message, and only the first is run."
)
LONGEST_KEY = 500
"""Bytes of a key that are part of the name of a stream. Of a longer one it is a hash."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Fetched(NamedTuple):
    """A record as a client brought it."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, Any]]
    timestamp: int | None
    """Milliseconds since 1970."""

    @property
    def place(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"


def offset(raw: Raw) -> str:
    """For id=: the place of the record, topic/partition/offset. An event that was produced twice is two messages."""
    return raw.place


def key(raw: Raw) -> str | None:
    """For id=: the record's key, as text. All events of one key are one message, and only the first is run."""
    if raw.key is None:
        return None
    try:
        return raw.key.decode()
    except UnicodeDecodeError:
        return f"hex:{raw.key.hex()}"


def raw_of(record: Fetched) -> Raw:
    return Raw(
        topic=record.topic,
        place=record.place,
        body=record.value,
        headers=record.headers,
        key=record.key,
        content_type=_content_type(record.headers),
        at=_time(record.timestamp),
    )


def _content_type(headers: Sequence[tuple[str, Any]]) -> str | None:
    """As the Kafka binding of CloudEvents has it."""
    found = next((value for name, value in headers if name == "content-type"), None)
    return found.decode("utf-8", "replace") if isinstance(found, bytes) else None


def _time(milliseconds: int | None) -> datetime | None:
    if milliseconds is None or milliseconds < 0:  # the producer's client was too old to say, or has no clock
        return None
    try:
        return _EPOCH + timedelta(milliseconds=milliseconds)
    except OverflowError:
        return None


def envelope(*, id: Pick, type: Pick, source: Pick, decode: Decode | None, order: Order) -> Envelope:  # noqa: A002
    """Where the parts of a message are, as the options of a source say it."""
    for name, pick in (("id", id), ("type", type), ("source", source)):
        check_pick(name, pick)
    if decode is not None and not callable(decode):
        raise UsageError(f"decode={decode!r}: it is a function from bytes to a payload, or None to leave them alone")
    if order not in _STREAMS:
        raise UsageError(f'order={order!r}: it is "key", "partition" or None')
    names = (id,) if isinstance(id, str) else id
    return Envelope(id=names, type=type, source=source, stream=_STREAMS[order], decode=decode, opt_ins=OPT_INS)


def _by_key(raw: Raw) -> str | None:
    """A record without a key has no order that anybody could rely on."""
    if raw.key is None:
        return None
    return f"kafka://{raw.topic}/{_readable(raw.key)}"


def _by_partition(raw: Raw) -> str | None:
    return f"kafka://{raw.place.rpartition('/')[0]}"


def _readable(name: bytes) -> str:
    if len(name) <= LONGEST_KEY and b"\0" not in name:
        try:
            return name.decode()
        except UnicodeDecodeError:
            pass
    return f"sha256:{hashlib.sha256(name).hexdigest()}"


_STREAMS: dict[Order, Callable[[Raw], str | None] | None] = {"key": _by_key, "partition": _by_partition, None: None}
