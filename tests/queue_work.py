"""What the queue of a PostgreSQL store does in its life, once through, below the inbox."""

from __future__ import annotations

import asyncpg

from onceward import Inbox, Message
from onceward.asyncpg import AsyncpgStore
from onceward.identity import Identity
from onceward.queue import BlockedLine, DoneLine, FailedLine, LaneEnd, QueueLine, Then, TurnClosing


def line(key: str, **fields: object) -> QueueLine:
    one = Identity("billing", "default", "id", key)
    lane = one.digest.hex()
    given = {"lane": lane, "share": 1, "rank": -1, "payload": "1"} | fields
    return QueueLine(lane, int.from_bytes(one.digest[:8], "big", signed=True), "default", "id", key, "t", **given)  # type: ignore[arg-type]


async def work_the_queue(store: AsyncpgStore, inbox: Inbox[asyncpg.Connection]) -> None:
    """A message that waits for two others, one of them settled where nobody sees who waits; and a dead letter."""
    needs = '[{"stream":"s","position":1},{"stream":"s","position":2}]'
    lines = [line("waits", depends_on=needs), line("dies")]
    waits, dies = (bytes.fromhex(one.lane) for one in lines)
    who = {"consumer": "billing", "host": "h"}

    async def claimed() -> list[bytes]:
        async with store.unit() as unit:
            return [one.lane for one in await unit.claim_lanes("billing", "w", most=9, lease=30)]

    async def settle(position: int, isolation: str) -> None:
        async with store.pool.acquire() as connection, connection.transaction(isolation=isolation):
            message = Message(f"s-{position}", "t", None, stream="s", position=position)
            await inbox.mark_processed(message, tx=connection)

    async def turn(lanes: list[LaneEnd], **came_to: object) -> None:
        async with store.unit() as unit:
            taken = await unit.take_lanes("w", [bytes.fromhex(end.lane) for end in lanes], most=9)
            seqs = {one.lane.hex(): one.seq for one in taken.messages}
            made = {how: [one(seqs[end.lane], end.lane) for end in lanes] for how, one in came_to.items()}  # type: ignore[operator]
            await unit.close_lanes(TurnClosing("w", lanes, **made), **who)
            await unit.commit()

    def blocked(position: int) -> object:
        return lambda seq, id_: BlockedLine(seq, id_, lines[0].lane, "default", "s", position)

    async with store.unit() as unit:
        assert [kept.how for kept in await unit.accept(lines, **who)] == ["new", "new"]
    assert set(await claimed()) == {waits, dies}
    async with store.unit() as unit:
        await unit.extend("w", [waits, dies], 30)
        assert await unit.mark_start("w", dies, Identity("billing", "default", "id", "dies")) is not None
        await unit.release("w", [waits])
    await turn(
        [LaneEnd(dies.hex(), Then.BLOCKED, blocker=dies.hex())],
        failed=lambda seq, id_: FailedLine(seq, id_, '{"type": "E", "text": "no"}', dead=True),
    )
    assert await claimed() == [waits]
    await turn([LaneEnd(waits.hex())], blocked=blocked(1))
    assert await claimed() == []
    await settle(1, "read_committed")
    assert await claimed() == [waits]
    await turn([LaneEnd(waits.hex())], blocked=blocked(2))
    await settle(2, "repeatable_read")
    assert await claimed() == []
    async with store.unit() as unit:
        assert await unit.wake_overdue("billing") == 1
    assert await claimed() == [waits]
    async with store.unit() as unit:
        assert await unit.requeue(Identity("billing", "default", "id", "dies"), lines[1])
    assert await claimed() == [dies]
    await turn([LaneEnd(waits.hex()), LaneEnd(dies.hex())], done=lambda seq, id_: DoneLine(seq, id_))
