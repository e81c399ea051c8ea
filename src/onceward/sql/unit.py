"""SqlUnit: one message, or a batch, through one transaction; over any driver and dialect."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, TypeVar

from onceward.identity import Identity
from onceward.message import Position
from onceward.record import Change, Failure, Record, State, from_states
from onceward.sql import upkeep, verbs
from onceward.sql.queue_unit import QueueVerbs
from onceward.stats import Stats
from onceward.store import Claims, Closing, Done, Found, InFlight, Sweepable, SweptBatch

Tx = TypeVar("Tx")


class SqlUnit(QueueVerbs[Tx]):
    """See onceward.store.Unit."""

    async def claim(self, record: Record) -> Found | None:
        """The insert decides. Only when it did not insert do we look, and a look never answers "new"."""
        inserted = await self._first(verbs.claim(self._dialect, record))
        if inserted.changed == 1:
            return None
        found = await self._say(verbs.find(self._dialect, record.identity))
        if found is None:
            raise InFlight
        return found

    async def take(self, found: Record, record: Record) -> bool:
        return await self._say(verbs.take(self._dialect, found, record))

    async def unmet(self, record: Record) -> Position | None:
        return await self._say(verbs.unmet(self._dialect, record.identity, record.depends_on))

    async def complete(self, record: Record) -> None:
        await self._say(verbs.complete(self._dialect, record))

    async def find(self, identity: Identity) -> Found | None:
        return await self._alone(verbs.find(self._dialect, identity))

    async def mark(self, found: Record | None, record: Record) -> bool:
        return await self._alone(verbs.mark(self._dialect, found, record))

    async def unmark(self, record: Record) -> bool:
        return await self._alone(verbs.unmark(self._dialect, record))

    async def fail(
        self, record: Record, failure: Failure, state: State, delay: float | None, *, replayed: bool = False
    ) -> Record | None:
        over = (State.DEAD,) if replayed else from_states(Change.FAIL)
        return await self._alone(verbs.fail(self._dialect, record, failure, state=state, over=over, delay=delay))

    async def bury(self, record: Record, failure: Failure, *, over: tuple[State, ...]) -> Record | None:
        return await self._alone(verbs.fail(self._dialect, record, failure, state=State.DEAD, over=over, counted=False))

    async def sweep(
        self, consumer: str, what: Sweepable, older: float, *, batch: int, after: tuple[Any, Any] | None = None
    ) -> SweptBatch | None:
        return await self._alone(upkeep.sweep(self._dialect, consumer, what, older, batch=batch, after=after))

    async def sweepable(self, consumer: str, older: float) -> int:
        return await self._alone(upkeep.sweepable(self._dialect, consumer, older))

    async def now(self) -> datetime:
        return await self._alone(upkeep.now(self._dialect))

    async def consumers(self) -> list[str]:
        return await self._alone(upkeep.consumers(self._dialect))

    async def stats(self, consumer: str) -> Stats:
        return await self._alone(upkeep.stats(self._dialect, consumer))

    async def records(
        self, consumer: str, states: tuple[State, ...], *, older: float | None, limit: int
    ) -> list[Record]:
        return await self._alone(upkeep.records(self._dialect, consumer, states, older=older, limit=limit))

    async def discard(self, identity: Identity) -> bool:
        return await self._alone(verbs.discard(self._dialect, identity))

    # --- many -----------------------------------------------------------------------------------------------

    async def claim_many(self, claims: Claims) -> set[bytes]:
        return await self._start(verbs.claim_many(self._dialect, claims))

    async def find_done(self, identities: Sequence[Identity]) -> dict[bytes, Done]:
        return await self._say(verbs.find_done(self._dialect, identities))

    async def find_many(self, identities: Sequence[Identity]) -> dict[bytes, Found]:
        return await self._say(verbs.find_many(self._dialect, identities))

    async def unclaim(self, identities: Sequence[Identity]) -> None:
        await self._say(verbs.unclaim(self._dialect, identities))

    async def complete_many(self, closings: Sequence[Closing]) -> None:
        await self._say(verbs.complete_many(self._dialect, closings))

    async def look_done(self, identities: Sequence[Identity]) -> dict[bytes, Done]:
        plan = verbs.find_done(self._dialect, identities)
        if self._begin is None and self._driver.features.concurrent_units and not self._session.gone:
            return await self._say(plan)  # one statement on a connection of its own sees only what is committed
        return await self._alone(plan)

    async def look_many(self, identities: Sequence[Identity]) -> dict[bytes, Found]:
        return await self._alone(verbs.find_many(self._dialect, identities))

    async def repair(
        self, *, unclaim: Sequence[Identity], complete: Sequence[Closing], bury: Sequence[tuple[Record, Failure]]
    ) -> None:
        await self._alone(verbs.repair(self._dialect, unclaim, complete, bury))
