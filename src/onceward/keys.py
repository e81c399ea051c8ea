"""Key strategies: what makes two messages the same work.

A key is unique within a scope. Message ids are scoped by the source that gave them, never by the topic: a
message that comes back through a retry topic is still the same. Business keys are scoped by the message type,
or by an explicit `name=`, so that `order.paid` and `order.shipped`, both keyed by the order id, never eat each
other. Composite keys are JSON arrays, never joined by a separator.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from datetime import date
from decimal import Decimal
from enum import Enum
from typing import Any, TypeAlias
from uuid import UUID

import msgspec

from onceward import codec
from onceward.errors import KeyInvalid, KeyMissing
from onceward.message import Message, payload_of

MAX_KEY = 8192


class Key(msgspec.Struct, frozen=True):
    """A named strategy: how to take the key out of a message, and what it is unique within."""

    name: str
    take: Callable[[Message[Any]], str]
    scope: Callable[[Message[Any]], str]

    def __call__(self, message: Message[Any]) -> str:
        return self.take(message)


KeyLike: TypeAlias = "Key | Callable[[Message[Any]], str]"


def of(strategy: KeyLike | None, name: str | None = None) -> Key:
    """Any function is a business key, within the message type or within `name`."""
    if strategy is None:
        return message_id
    if isinstance(strategy, Key):
        return strategy
    if not callable(strategy):
        raise KeyInvalid(f"key= takes a strategy of onceward.keys or a function, not {strategy!r}")
    return Key(getattr(strategy, "__qualname__", "key"), strategy, _business_scope(name))


def check(key: object) -> str:
    """What any strategy returned: a non-empty string that can be kept."""
    if not isinstance(key, str):
        raise KeyInvalid(f"the key strategy returned {type(key).__name__}, not a string")
    if not key:
        raise KeyMissing("the key strategy returned an empty key", field="")
    if "\0" in key:
        raise KeyInvalid("the key contains a NUL character, which databases cannot store")
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise KeyInvalid("the key contains a lone surrogate and is not valid Unicode") from error
    if size > MAX_KEY:
        raise KeyInvalid(f"the key has {size} bytes; {MAX_KEY} are allowed. Use keys.payload_hash or fewer fields.")
    return key if type(key) is str else str.__str__(key)


def field(path: str, *, name: str | None = None) -> Key:
    """One field, such as `field("order.id")`: looked up in the payload, then in the envelope."""
    return Key(f"field({path})", lambda message: _json(_scalar(message, path)), _business_scope(name))


def fields(*paths: str, name: str | None = None) -> Key:
    """Several fields together, such as `fields("order.id", "version")`."""
    if not paths:
        raise KeyInvalid("keys.fields needs at least one field")
    return Key(
        f"fields({', '.join(paths)})",
        lambda message: _json([_scalar(message, path) for path in paths]),
        _business_scope(name),
    )


def _business_scope(name: str | None) -> Callable[[Message[Any]], str]:
    if name is not None:
        return lambda _message: f"name:{name}"
    return lambda message: f"type:{message.type}"


def _stream_position(message: Message[Any]) -> str:
    if message.stream is None or message.position is None:
        raise KeyMissing("keys.stream_position needs both stream and position on the message", field="position")
    return _json([message.stream, message.position])


def _aggregate_version(message: Message[Any]) -> str:
    if message.stream is None:
        raise KeyMissing("keys.aggregate_version needs a stream on the message", field="stream")
    return _json([message.stream, _scalar(message, "version")])


def _payload_hash(message: Message[Any]) -> str:
    data = message.body if message.body is not None else codec.encode(message.payload)
    return hashlib.sha256(data).hexdigest()


message_id = Key("message_id", lambda message: message.id, lambda message: f"source:{message.source}")
"""The producer's message id, within its source. The default."""
stream_position = Key("stream_position", _stream_position, lambda _message: "position")
"""The stream and the position in it."""
aggregate_version = Key("aggregate_version", _aggregate_version, _business_scope(None))
"""The stream and `payload.version`, within the message type."""
payload_hash = Key("payload_hash", _payload_hash, _business_scope(None))
"""The payload itself: two equal payloads of one type are the same work."""


def _json(value: Any) -> str:
    return codec.encode(value, "key").decode()


def _scalar(message: Message[Any], path: str) -> Any:
    return scalar(look_up(message, path), path)


def scalar(value: Any, path: str) -> Any:
    """A value that can be part of a key, or an error that says why not."""
    if value is NOTHING:
        value = None
    if value is None or value == "":
        raise KeyMissing(f"the key field {path!r} is {'missing or null' if value is None else 'empty'}", field=path)
    if isinstance(value, float) and not math.isfinite(value):
        raise KeyInvalid(f"the key field {path!r} is {value}, which is not a usable key")
    if isinstance(value, _ONE_SPELLING):
        value = msgspec.to_builtins(value)
    if not isinstance(value, (str, int, float)):
        raise KeyInvalid(f"the key field {path!r} is a {type(value).__name__}; a key is made of scalars")
    return value


# What a decoded model may hold that JSON writes in one obvious way.
_ONE_SPELLING = (UUID, Decimal, date, Enum)


def look_up(message: Message[Any], path: str) -> Any:
    """A dotted path in the payload; where the payload has no such field, in the envelope. None for nothing."""
    parts = path.split(".")
    found = walk(payload_of(message), parts)
    if found is NOTHING:
        found = walk(message, parts)
    return None if found is NOTHING else found


NOTHING = object()


def walk(value: Any, parts: list[str]) -> Any:
    """Through mappings by key and through models by attribute."""
    for part in parts:
        if isinstance(value, Mapping):
            value = value.get(part, NOTHING)
        elif value is None or isinstance(value, (str, int, float, list, tuple)):
            return NOTHING
        else:
            value = getattr(value, part, NOTHING)
    return value
