"""Telling those who listen what becomes of a delivery, from its start to its end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

from onceward import events
from onceward.events import tell
from onceward.outcome import Outcome
from onceward.work import Work


async def watched(
    bus: events.Bus, consumer: str, work: Work, settle: Callable[[Work], Awaitable[Outcome[Any]]]
) -> Outcome[Any]:
    """Started, what happened, Finished: who hears the first hears the last, also when it unsubscribes meanwhile."""
    watchers = bus.watchers
    message, identity = work.message, work.identity
    base: dict[str, Any] = {"consumer": consumer, "type": message.type, "message_id": message.id, "identity": identity}
    began = perf_counter()
    if watchers:
        tell(watchers, events.Started(**base))
    try:
        outcome = await settle(work)
        bus.emit(events.of_outcome(consumer, message, identity, outcome))
        return outcome
    except Exception as error:
        bus.emit(events.of_error(consumer, message, identity, error))
        raise
    except BaseException:
        bus.emit(events.Cancelled(**base, duration_ms=(perf_counter() - began) * 1000))
        raise
    finally:
        if watchers:
            tell(watchers, events.Finished(**base, duration_ms=(perf_counter() - began) * 1000))
