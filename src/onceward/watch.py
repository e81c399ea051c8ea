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
    began = perf_counter()
    if watchers:
        tell(watchers, events.Started(**_of(consumer, work)))
    try:
        outcome = await settle(work)
        if outcome.mismatch or outcome.error is not None or not bus.is_quiet:
            bus.emit(events.of_outcome(consumer, work.message, work.identity, outcome))
        return outcome
    except Exception as error:
        bus.emit(events.of_error(consumer, work.message, work.identity, error))
        raise
    except BaseException:
        bus.emit(events.Cancelled(**_of(consumer, work), duration_ms=(perf_counter() - began) * 1000))
        raise
    finally:
        if watchers:
            tell(watchers, events.Finished(**_of(consumer, work), duration_ms=(perf_counter() - began) * 1000))


def _of(consumer: str, work: Work) -> dict[str, Any]:
    message = work.message
    return {"consumer": consumer, "type": message.type, "message_id": message.id, "identity": work.identity}
