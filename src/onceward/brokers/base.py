"""What a broker has to be for `consume`: a Source, which gives deliveries, and a Delivery, which can be settled.

    receive      some deliveries, in the order of their broker
    begin        one is about to be worked on; or the broker has taken it back meanwhile, and somebody else has it
    put_back     it is not worked on after all, or not any more, and is begun again later
    settle       what became of it

**Settled means processed, or durably kept.** ACK says so, and the broker may forget it. RETRY says that it has to come
again, not before `delay`; who brings it is the broker where the source `redelivers`, and else `consume`, which keeps
it. REJECT says that it cannot even be kept as a dead letter: the source puts it into quarantine, and only then it may
be forgotten. A source never drops anything by itself, and a delivery that nobody settles comes again.

A **partition** is what must be worked on one after another, such as a partition of Kafka. Deliveries that have none
are free, and only those of one lane wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol, Self

from onceward.message import Message
from onceward.outcome import Outcome, Verdict
from onceward.store import Finding


class Delivery(Protocol):
    """One arrival of a message."""

    @property
    def message(self) -> Message[Any]: ...

    @property
    def origin(self) -> str:
        """Where exactly it came from, for people: topic/partition/offset, queue and tag, file and line."""

    @property
    def redelivered(self) -> bool:
        """It may have been delivered before, to somebody who died over it."""

    @property
    def partition(self) -> str | None: ...

    @property
    def problem(self) -> Exception | None:
        """Why no handler can run it: it has no id, or its body is not what it should be. It becomes a dead letter."""

    def begin(self) -> bool:
        """It is about to be worked on. False: it is not ours any more, and must be left alone, unsettled."""

    def put_back(self) -> None:
        """After `begin`: it is not worked on for now, and nothing is settled. `begin` is called again."""

    async def settle(self, verdict: Verdict, *, delay: float = 0.0, outcome: Outcome[Any] | None = None) -> None:
        """ACK or REJECT, and RETRY where the source `redelivers`: once, after `begin`. RETRY without a delay also for
        what was not begun, and is given back. It raises nothing because the broker is away: then the delivery comes
        again, which is no harm."""


class Source(Protocol):
    """Where deliveries come from. Open for as long as its block lasts."""

    @property
    def name(self) -> str:
        """For people: kafka:orders."""

    @property
    def redelivers(self) -> bool:
        """After settle(RETRY) the broker delivers again. If not, `consume` keeps the delivery and tries it again; the
        broker still has it, should this process die."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def assignment(self) -> int | None:
        """A number that grows when partitions come or go. While it stays the same, nobody else has the partitions that
        deliveries come from. None: others may have messages of the same lanes at the same time."""

    @property
    def redelivery_horizon(self) -> timedelta | None:
        """For so long the broker may deliver a message again. None: that is not known."""

    async def receive(self, most: int) -> Sequence[Delivery]:
        """Wait for some. Empty: it has come to its end, and there will be no more. Not to ask is to pause it: what
        comes meanwhile is bounded. It may be cancelled, and nothing is lost by that."""

    async def flush(self) -> None:
        """Tell the broker what was settled so far, where that is not done at once."""

    async def check(self) -> list[Finding]:
        """What about the broker's settings endangers what is promised. Asked once, at the start."""

    def trouble(self) -> str | None:
        """What is wrong with the connection to the broker right now, for probes. None: nothing that is known."""
