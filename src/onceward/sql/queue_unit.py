"""The queue's half of a unit: the verbs of onceward.queue.QueueUnit over any driver and dialect."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from onceward.errors import CommitUnknown, HandlerEndedTransaction, OncewardError
from onceward.identity import Identity
from onceward.message import Position
from onceward.queue import (
    Begun,
    BusyLanes,
    Claiming,
    KeptLine,
    LaneClaim,
    Queued,
    QueueLine,
    Share,
    Taken,
    TurnClosing,
    Unmet,
)
from onceward.record import Record
from onceward.sql import queue_postgresql, queue_rows, queue_sqlite, queue_stats
from onceward.sql.plan import Plan
from onceward.sql.plan_unit import PlanUnit
from onceward.stats import QueueStats

Tx = TypeVar("Tx")
T = TypeVar("T")

QUEUES: dict[str, Any] = {"postgresql": queue_postgresql, "sqlite": queue_sqlite}
"""The plans of the queue, by dialect."""


class QueueVerbs(PlanUnit[Tx]):
    """See onceward.queue.QueueUnit."""

    @property
    def _queue(self) -> Any:
        return QUEUES[self._dialect.name]

    async def accept(self, lines: Sequence[QueueLine], *, consumer: str, host: str) -> list[KeptLine]:
        plan = self._queue.accept(self._dialect, lines, consumer, host)
        if not self.joined:
            return await self._at_once(plan)
        kept: list[KeptLine] = await self._start(plan)
        if self._dialect.sets:
            await self._say(self._queue.call(self._dialect, consumer))  # heard when the caller commits
        await self.commit()
        return kept

    async def claim_lanes(
        self, consumer: str, owner: str, *, most: int, lease: float, share: Share | None = None
    ) -> list[LaneClaim]:
        marks = {"marks": self._driver.marks} if self._dialect.sets else {}  # type: ignore[attr-defined]
        plan = self._queue.claim_lanes(self._dialect, consumer, owner, most=most, lease=lease, share=share, **marks)
        return await self._at_once(plan)

    async def take_lanes(
        self, owner: str, lanes: Sequence[bytes], *, most: int, idle_limit: float | None = None
    ) -> Taken:
        session: Any = self._session
        if not self._dialect.sets:
            return await self._start(self._queue.take_lanes(self._dialect, owner, lanes, most))
        session.idle_limit = idle_limit
        if self._begin is not None or not self._rides():
            return await self._start(self._queue.take_lanes(self._dialect, owner, lanes, most, opened=False))
        # The savepoint that a turn begins with comes after the lock, or it would be given back with it.
        session.opening = self._queue.opening(self._dialect, owner, lanes)
        return await self._opened(self._queue.take_lanes(self._dialect, owner, lanes, most, opened=True))

    async def begin_turn(self, claiming: Claiming, *, apart: bool = False) -> Begun:
        if apart or self._begin is not None or not self._rides():
            claims = await self.claim_lanes(
                claiming.consumer, claiming.owner, most=claiming.lanes, lease=claiming.lease, share=claiming.share
            )
            sound = [claim.lane for claim in claims if claim.claims == 1]
            return Begun(sound, [claim.lane for claim in claims if claim.claims > 1])
        plan = self._plan_turn(claiming)
        try:
            return await self._unless_empty(await self._opened(plan))
        except Exception:
            await self._give_up_claim(claiming)
            raise

    def _plan_turn(self, claiming: Claiming) -> Plan[Begun]:
        """The claim and the opening ride with the next BEGIN; what is left to do is this."""
        session: Any = self._session
        marks = self._driver.marks  # type: ignore[attr-defined]
        session.opening = self._queue.opening_claimed(self._dialect, claiming)
        session.idle_limit = claiming.idle_limit
        plan: Plan[Begun]
        if claiming.spare:
            plan = self._queue.take_spare(self._dialect, claiming)
        else:
            session.claiming = self._queue.claiming(self._dialect, claiming, marks)
            plan = self._queue.take_claimed(self._dialect, claiming, marks)
        return plan

    async def _unless_empty(self, begun: Begun) -> Begun:
        if not begun.lanes:
            await self.rollback()
        return begun

    async def _give_up_claim(self, claiming: Claiming) -> None:
        await self.rollback()
        if claiming.spare:
            return  # who has it knows which lanes they are
        with suppress(Exception):  # the claim is over in a moment; what went wrong first is what to tell
            await self._at_once(self._queue.release_claimed(self._dialect, claiming))

    def to_its_end(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        return self._session.to_its_end(work)

    async def _opened(self, plan: Plan[T]) -> T:
        """Begin a turn whose savepoint was made with BEGIN."""
        value = await self._start(plan)
        self._placed = self._unused = True
        return value

    async def hold_lanes(self, owner: str, lanes: Sequence[bytes]) -> frozenset[bytes]:
        return await self._start(self._queue.hold_lanes(self._dialect, owner, lanes))

    async def unmet_of(self, queued: Queued, depends_on: Sequence[Position]) -> Unmet | None:
        return await self._say(queue_rows.unmet_of(self._dialect, queued, depends_on))

    async def waits_in_circle(self, queued: Queued, needed: Position) -> bool:
        return await self._say(queue_rows.waits_in_circle(self._dialect, queued, needed))

    async def stood(self, taken: Taken) -> bool | None:
        if taken.xid is None:
            return False if self._driver.features.refuses_end else None
        return await self._at_once(self._queue.stood(self._dialect, taken.xid))

    async def savepoint(self) -> None:
        if self._unused:
            self._unused = False
            return
        await self._session.flush()
        # Released first: a thousand savepoints, one in the other, are slow everywhere.
        await self._session.script(("RELEASE onceward_turn;\n" if self._placed else "") + "SAVEPOINT onceward_turn;")
        self._placed = True

    async def back_to_savepoint(self) -> None:
        await self._session.forget()
        if not self._session.stands():
            raise HandlerEndedTransaction
        await self._session.script("ROLLBACK TO onceward_turn;")

    async def close_lanes(self, closing: TurnClosing, *, consumer: str, host: str) -> None:
        await self._say(self._queue.close_lanes(self._dialect, closing, consumer, host))

    async def close_and_commit(
        self, closing: TurnClosing, *, consumer: str, host: str, then: Claiming | None = None
    ) -> Begun | None:
        if not self._rides():
            await self.close_lanes(closing, consumer=consumer, host=host)
            await self.commit()
            return None
        session: Any = self._session
        session.ride(self._queue.closing(self._dialect, closing, consumer, host), after=self._placed)
        if then is None or not self.goes_on:
            await self.commit()
            return None
        plan = self._plan_turn(then)
        try:
            await self.commit()
        except OncewardError:
            raise  # nothing was sent, or it is known what became of it
        except Exception as error:
            if not await self._committed(closing.xid, error):
                raise
            await self._give_up_claim(then)
            return None
        try:
            begun = await self._say(plan)
            self._placed = self._unused = True
            return await self._unless_empty(begun)
        except Exception:  # noqa: BLE001 - what was committed stands; who begins the next turn will hear of it
            await self._give_up_claim(then)
            return None

    async def _committed(self, xid: str | None, error: Exception) -> bool:
        """Whether it was what came after the COMMIT that has failed."""
        try:
            await self.rollback()
            return bool(xid and await self._at_once(self._queue.stood(self._dialect, xid)))
        except Exception:  # noqa: BLE001 - nobody answers
            raise CommitUnknown from error

    @property
    def goes_on(self) -> bool:
        return self._begin is None and self._rides() and bool(self._session.goes_on)

    def _rides(self) -> bool:
        """Whether statements can be said in the trips of BEGIN and COMMIT."""
        return self._dialect.sets and not self.joined

    async def release(self, owner: str, lanes: Sequence[bytes], *, delay: float = 0.0, suspect: bool = False) -> None:
        await self._at_once(self._queue.release(self._dialect, owner, lanes, delay, suspect=suspect))

    async def extend(self, owner: str, lanes: Sequence[bytes], lease: float) -> frozenset[bytes]:
        return await self._at_once(self._queue.extend(self._dialect, owner, lanes, lease))

    async def mark_start(self, owner: str, lane: bytes, identity: Identity) -> Record | None:
        return await self._at_once(self._queue.mark_start(self._dialect, owner, lane, identity))

    async def unmark_start(self, identity: Identity) -> None:
        await self._at_once(self._queue.unmark_start(self._dialect, identity))

    async def call(self, consumer: str) -> None:
        if self._driver.features.listens:
            await self._at_once(self._queue.call(self._dialect, consumer))

    async def busy_lanes(self, consumer: str, lanes: Sequence[bytes]) -> BusyLanes:
        return await self._at_once(self._queue.busy_lanes(self._dialect, consumer, lanes))

    async def due_in(self, consumer: str, share: Share | None = None) -> float | None:
        return await self._at_once(self._queue.due_in(self._dialect, consumer, share))

    async def wake_overdue(self, consumer: str) -> int:
        return await self._at_once(self._queue.wake_overdue(self._dialect, consumer))

    async def requeue(self, identity: Identity, line: QueueLine) -> bool:
        return await self._at_once(self._queue.requeue(self._dialect, identity, line))

    async def drop(self, identity: Identity, line: QueueLine) -> bool:
        return await self._at_once(self._queue.drop(self._dialect, identity, line))

    async def queue_stats(self, consumer: str, *, worst: int = 20) -> QueueStats:
        return await self._at_once(queue_stats.queue_stats(self._dialect, consumer, worst))
