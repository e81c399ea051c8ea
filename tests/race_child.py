"""A worker process of the race, with or without a known mistake: `python -m tests.race_child`.

The environment says which mistake; the rest is onceward.testing.worker_child.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from onceward.queue import LaneClaim, Taken
from onceward.sql.plan import Statement
from onceward.sql.queue_rows import queued_of
from onceward.sql.unit import SqlUnit
from onceward.testing import worker_child

MISTAKE = "claim and read in one statement"
VARIABLE = "ONCEWARD_RACE_MISTAKE"

# onceward_read is what onceward_take reads, as of the snapshot of the statement that calls it. The moment between the
# snapshot and the lock is made longer here, so that nobody has to hope for it.
CLAIM_AND_READ = """
WITH pause AS MATERIALIZED (SELECT pg_sleep(0.02)),
due AS MATERIALIZED (
    SELECT lane FROM onceward_lanes, pause
    WHERE consumer = :consumer::text AND run_at <= clock_timestamp()
    ORDER BY run_at LIMIT :most::int FOR NO KEY UPDATE OF onceward_lanes SKIP LOCKED),
claimed AS MATERIALIZED (
    UPDATE onceward_lanes l SET owner = :owner::text, state = 'running' FROM due WHERE l.lane = due.lane
    RETURNING l.lane, l.ctid AS place),
turn AS MATERIALIZED (
    SELECT set_config('onceward.turn', coalesce(array_agg(place)::text, '{}'), true), array_agg(lane) AS lanes
    FROM claimed)
SELECT t.* FROM turn, LATERAL onceward_read(4, false, NULL, turn.lanes) t
"""


def claim_and_read_in_one_statement() -> None:
    """As it is often written by hand: a lane is claimed by locking it, in the transaction of the turn, and read in the
    same statement. What is read is as of before the lock, so it may be what the one before us has just done."""
    take_what_is_ours = SqlUnit.take_lanes

    async def claim_lanes(
        self: Any, consumer: str, owner: str, *, most: int, lease: float, share: Any = None
    ) -> list[LaneClaim]:
        values = {"consumer": consumer, "owner": owner, "most": most}
        result = await self._session.begin(Statement(CLAIM_AND_READ, values))
        self._placed = False
        self.read = result.rows
        if not self.read:
            await self.rollback()
        return [LaneClaim(lane, 1) for lane in dict.fromkeys(bytes(row["lane_id"]) for row in self.read)]

    async def take_lanes(self: Any, owner: str, lanes: Sequence[bytes], **options: Any) -> Taken:
        read, self.read = self.read, None
        if read is None:  # another try: it was rolled back, and is ours no more
            return await take_what_is_ours(self, owner, lanes, **options)
        messages = tuple(queued_of(row, read[0]["now"]) for row in read if row["seq"] is not None)
        return Taken(frozenset(lanes), messages, str(read[0]["xid"]))

    SqlUnit._rides = lambda _self: False  # type: ignore[method-assign]
    SqlUnit.claim_lanes = claim_lanes  # type: ignore[method-assign]
    SqlUnit.take_lanes = take_lanes  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    if os.environ.get(VARIABLE) == MISTAKE:
        claim_and_read_in_one_statement()
    with suppress(BrokenPipeError):
        asyncio.run(worker_child.main())
