"""Lane strategies: messages of one lane run one after another, lanes run side by side.

A strategy takes the message and the key of its identity, and gives the name of a lane, or None: a message
without a lane waits for nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from onceward.keys import look_up
from onceward.message import Message


class Lane(msgspec.Struct, frozen=True):
    """A named strategy. Any function `Message -> str | None` serves as well."""

    name: str
    pick: Callable[[Message[Any], str], str | None]

    def __call__(self, message: Message[Any], key: str = "") -> str | None:
        return self.pick(message, key)


LaneLike: TypeAlias = "Lane | Callable[[Message[Any]], str | None]"


def of(strategy: LaneLike | None) -> Lane:
    if strategy is None:
        return by_stream
    if isinstance(strategy, Lane):
        return strategy
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
