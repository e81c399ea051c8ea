"""A worker process of the race, with or without a known mistake: `python -m tests.race_child`.

The environment says which mistake; the rest is onceward.testing.worker_child.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from onceward.queue import LaneClaim, Queued, Taken
from onceward.sql.plan import Statement
from onceward.sql.store import SqlUnit
from onceward.sql.verbs import moment_of, record_of
from onceward.testing import worker_child

CLAIM_AND_READ = """
WITH pause AS MATERIALIZED (SELECT pg_sleep(0.02)),
due AS MATERIALIZED (
    SELECT lane FROM onceward_lanes, pause
    WHERE consumer = :consumer::text AND run_at <= now() AND state <> 'blocked'
    ORDER BY run_at LIMIT :most::int FOR NO KEY UPDATE OF onceward_lanes SKIP LOCKED),
claimed AS (
    UPDATE onceward_lanes l SET owner = :owner::text, state = 'running' FROM due WHERE l.lane = due.lane
    RETURNING l.lane)
SELECT uuid_send(claimed.lane) AS lane, p.seq, p.rank, p.track, p.due, clock_timestamp() AS now,
       r.consumer, r.tenant, r.scope, r.key, r.message_id, r.type, r.source, r.topic, r.origin, r.state, r.attempts,
       r.started, r.errors::text, r.result::text, r.payload::text, r.body, r.headers::text, r.payload_hash,
       r.extra::text, r.handler, r.host, r.received_at, r.processed_at, r.duration_ms, r.occurred_at, r.expires_at,
       r.next_try_at, r.stream, r.position, r.depends_on::text, r.received_position, r.processed_position
FROM claimed
LEFT JOIN LATERAL (
    SELECT * FROM onceward_pending p WHERE p.lane = claimed.lane AND NOT p.aside
    ORDER BY p.rank, p.seq LIMIT 4) p ON true
LEFT JOIN onceward_records r ON r.identity = p.identity
ORDER BY claimed.lane, p.rank, p.seq
"""


def claim_and_read_in_one_statement() -> None:
    """What is read is as of before the lock, so it may be what the one before us has just done. The moment between
    the two is made a little longer here, so that it need not be hoped for."""

    async def claim_lanes(
        self: Any, consumer: str, owner: str, *, most: int, lease: float, share: Any = None
    ) -> list[LaneClaim]:
        values = {"consumer": consumer, "owner": owner, "most": most}
        result = await self._session.begin(Statement(CLAIM_AND_READ, values))
        self.read = result.rows
        if not self.read:
            await self.rollback()
        return [LaneClaim(lane, 1) for lane in dict.fromkeys(bytes(row["lane"]) for row in self.read)]

    async def take_lanes(self: Any, owner: str, lanes: Sequence[bytes], **_: Any) -> Taken:
        messages = tuple(
            Queued(
                row["seq"], bytes(row["lane"]), record_of(row), moment_of(row["now"]), row["rank"],
                None if row["due"] is None else moment_of(row["due"]), row["track"],
            )
            for row in self.read if row["seq"] is not None
        )  # fmt: skip
        return Taken(frozenset(lanes), messages)

    SqlUnit.claim_lanes = claim_lanes  # type: ignore[method-assign]
    SqlUnit.take_lanes = take_lanes  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    if os.environ.get("ONCEWARD_RACE_MISTAKE") == "claim and read in one statement":
        claim_and_read_in_one_statement()
    with suppress(BrokenPipeError):
        asyncio.run(worker_child.main())
