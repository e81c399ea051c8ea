"""What do events cost where nobody listens? The promise is less than a microsecond for each message.

The inbox runs over a settler that does nothing and has the outcome ready, so that what is left is telling about it.
The floor is one coroutine that awaits the same settler.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, cast

from bench.messages import CONSUMER, new_messages
from bench.questions import Facts, World
from bench.rounds import Spread
from onceward import Inbox, Outcome, events
from onceward.handlers import handler_of
from onceward.outcome import Kind
from onceward.sqlite import SqliteStore

TARGET_NS = 1000


class Ready:
    """A settler whose outcome is always the same."""

    outcome: Outcome[Any] = Outcome(Kind.PROCESSED, attempts=1, duration_ms=1.0)

    async def settle(self, _work: Any) -> Outcome[Any]:
        return self.outcome


def _inbox(listeners: tuple[events.Listener, ...]) -> Inbox[Any]:
    inbox = Inbox(SqliteStore(":memory:"), consumer=CONSUMER, listeners=listeners)
    inbox._settler = cast("Any", Ready())
    inbox._open = True
    return inbox


def _ignored(_event: events.InboxEvent) -> None:
    """A listener that does nothing."""


async def _ns_per_call(call: Callable[[Any], Awaitable[Any]], work: Any, calls: int) -> float:
    """Of processor time, which does not count what the neighbours do."""
    began = time.thread_time_ns()
    for _ in range(calls):
        await call(work)
    return (time.thread_time_ns() - began) / calls


async def measure(calls: int, rounds: int) -> dict[str, Spread]:
    """Nanoseconds a message that events add, by who listens: each round's time less the floor's of the same round."""
    settler = Ready()

    async def floor(work: Any) -> Outcome[Any]:
        return await settler.settle(work)

    inboxes = {
        "nobody listens": _inbox(()),
        "a listener that does nothing": _inbox((_ignored,)),
        "onceward.events.log, the default, below its level": _inbox((events.log,)),
    }
    work = inboxes["nobody listens"]._work(new_messages(1)[0], handler_of(_handler))
    spent: dict[str, list[float]] = {name: [] for name in inboxes}
    for _ in range(rounds):
        bare = await _ns_per_call(floor, work, calls)
        for name, inbox in inboxes.items():
            spent[name].append(await _ns_per_call(inbox._settle, work, calls) - bare)
    return {name: Spread.of(numbers) for name, numbers in spent.items()}


async def _handler(_message: Any, _tx: Any) -> None:
    """Never called."""


async def stages(world: World) -> AsyncGenerator[Facts, None]:
    found = await measure(world.calls, world.rounds)
    yield Facts(
        question="events",
        title="Events, nanoseconds for each message",
        columns=("who listens", "ns", "quartiles"),
        rows=tuple(
            (name, f"{spread.middle:,.0f}", f"{spread.low:,.0f} to {spread.high:,.0f}")
            for name, spread in found.items()
        ),
        note=f"With nobody listening it should be less than {TARGET_NS:,}.",
    )
