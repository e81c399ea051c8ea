"""Lane strategies: messages of one lane run one after another, lanes run side by side.

A strategy takes the message and the key of its identity, and gives the name of a lane, or None: a message
without a lane waits for nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from onceward.errors import InvalidMessage, UsageError
from onceward.keys import MAX_KEY, look_up
from onceward.message import Message


class Lane(msgspec.Struct, frozen=True):
    """A named strategy. Any function `Message -> str | None` serves as well."""

    name: str
    pick: Callable[[Message[Any], str], str | None]

    def __call__(self, message: Message[Any], key: str = "") -> str | None:
        return self.pick(message, key)


def check(name: object) -> str | None:
    """What any strategy returned: a string that can be kept, or None."""
    if name is None:
        return None
    if not isinstance(name, str):
        raise InvalidMessage(f"the lane strategy returned {type(name).__name__}, not a string or None")
    if "\0" in name:
        raise InvalidMessage("the lane contains a NUL character, which databases cannot store")
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise InvalidMessage("the lane contains a lone surrogate and is not valid Unicode") from error
    if size > MAX_KEY:
        raise InvalidMessage(f"the lane has {size} bytes; {MAX_KEY} are allowed. Use a hash of it.")
    return name if type(name) is str else str.__str__(name)


LaneLike: TypeAlias = "Lane | Callable[[Message[Any]], str | None]"


def of(strategy: LaneLike | None) -> Lane:
    if strategy is None:
        return by_stream
    if isinstance(strategy, Lane):
        return strategy
    if not callable(strategy):
        raise UsageError(f"lane= takes a strategy of onceward.lanes or a function, not {strategy!r}")
    return Lane(getattr(strategy, "__qualname__", "lane"), lambda message, _key: strategy(message))


def field(path: str) -> Lane:
    """By a field of the payload or envelope, such as `field("customer.id")`."""

    def pick(message: Message[Any], _key: str) -> str | None:
        value = look_up(message, path)
        return None if value is None else str(value)

    return Lane(f"field({path})", pick)


by_stream = Lane("by_stream", lambda message, _key: message.stream)
"""One lane per stream; messages without a stream run in parallel. The default."""
by_topic = Lane("by_topic", lambda message, _key: message.topic or None)
"""One lane per topic, the whole URI, such as `kafka://orders/order-123`."""
by_key = Lane("by_key", lambda _message, key: key)
"""One lane per key of the identity."""
