"""What the parts of the suite for the stored inbox share."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from onceward.inbox import Inbox
from onceward.message import Message, Position
from onceward.outcome import Outcome
from onceward.record import Record
from onceward.testing.lab import Lab, Recorder

TAKEOVER = 5.0
"""Seconds after which another worker has taken over what a dead one left."""


async def drain(inbox: Inbox[Any], handler: Any = None, **options: Any) -> list[Outcome[Any]]:
    """Dispatch until nothing is ready."""
    outcomes: list[Outcome[Any]] = []
    while (outcome := await asyncio.wait_for(inbox.dispatch(handler, **options), 15)) is not None:
        outcomes.append(outcome)
        assert len(outcomes) < 1000, "it never ends"
    return outcomes


async def until(true: Callable[[], Awaitable[Any]], *, within: float = 20.0) -> float:
    """Look again until it is so. How long that took; an AssertionError when it takes longer than `within` seconds."""
    began = time.monotonic()
    while not await true():
        assert time.monotonic() - began < within, "it does not happen"
        await asyncio.sleep(0.01)
    return time.monotonic() - began


def place_of(text: str) -> Position:
    """ "a2" is position 2 of stream a."""
    found = re.fullmatch(r"([a-z]+)(\d+)", text)
    assert found is not None
    return Position(found[1], int(found[2]))


def at(lab: Lab, place: str, *needs: str | Position, **fields: Any) -> Message[Any]:
    """`at(lab, "a2", "b1")` is position 2 of stream a, which depends on position 1 of stream b; its id is a2."""
    here = place_of(place)
    needed = tuple(place_of(one) if isinstance(one, str) else one for one in needs)
    return lab.message(place, **{"stream": here.stream, "position": here.position, "depends_on": needed} | fields)


async def record_of(inbox: Inbox[Any], message: Message[Any]) -> Record:
    record = await inbox.get_record(message)
    assert record is not None
    return record


class Failing(Recorder):
    """A handler that fails for the messages that it was told, until it is told otherwise."""

    def __init__(self, lab: Lab, *ids: str, error: BaseException | None = None) -> None:
        super().__init__(lab)
        self.ids = set(ids)
        self.with_error = error or ValueError("no")

    async def __call__(self, message: Message[Any], tx: Any) -> dict[str, str]:
        result = await super().__call__(message, tx)
        if message.id in self.ids:
            raise self.with_error
        return result
