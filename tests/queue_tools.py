"""What tests of the queue have in common: lines, and a worker in its simplest form."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import msgspec

from onceward.identity import Identity, digest
from onceward.message import Position
from onceward.queue import (
    LAST,
    SHARED,
    BlockedLine,
    DoneLine,
    FailedLine,
    Kept,
    KeptLine,
    LaneEnd,
    Queued,
    QueueLine,
    Share,
    Taken,
    Then,
    TurnClosing,
)
from onceward.record import Record, State

CONSUMER = "billing"
BOOM = '{"type":"ValueError","text":"boom"}'


def identity_of(key: str, tenant: str = "default") -> Identity:
    return Identity(CONSUMER, tenant, "orders", key)


def lane_of(name: str, tenant: str = "default") -> bytes:
    return digest(CONSUMER, tenant, "lane", name)


def line_of(
    key: str,
    *,
    lane: str | None = None,
    stream: str | None = None,
    position: int | None = None,
    depends_on: Sequence[Position] = (),
    not_before: datetime | None = None,
    tenant: str = "default",
    payload: str = '{"n":1}',
    payload_hash: bytes = b"1",
) -> QueueLine:
    """In the lane of its stream, or in another one that it shares with others, or in none."""
    identity = identity_of(key, tenant).digest
    name = lane or stream
    number = identity if name is None else lane_of(name, tenant)
    own = name == stream and name is not None
    rank = SHARED if not own else LAST if position is None else position
    depends = msgspec.json.encode(tuple(depends_on)).decode() if depends_on else None
    return QueueLine(
        identity=identity.hex(),
        lock=int.from_bytes(identity[:8], "big", signed=True),
        tenant=tenant,
        scope="orders",
        key=key,
        type="order.paid",
        lane=number.hex(),
        share=int.from_bytes(number[:4], "big"),
        rank=rank,
        track=None if own else stream,
        lane_name=name,
        payload=payload,
        payload_hash=payload_hash,
        stream=stream,
        position=position,
        depends_on=depends,
        not_before=not_before,
    )


class Queue:
    """The queue of one consumer, through units of their own."""

    def __init__(self, store: Any) -> None:
        self.store = store

    @asynccontextmanager
    async def unit(self) -> AsyncIterator[Any]:
        async with self.store.unit() as unit:
            yield unit

    async def kept(self, *lines: QueueLine) -> list[KeptLine]:
        async with self.unit() as unit:
            found: list[KeptLine] = await unit.accept(lines, consumer=CONSUMER, host="here")
            return found

    async def accept(self, *lines: QueueLine) -> list[Kept]:
        return [one.how for one in await self.kept(*lines)]

    async def claim(
        self, owner: str = "w", *, most: int = 100, lease: float = 30.0, share: Share | None = None
    ) -> dict[bytes, int]:
        async with self.unit() as unit:
            claims = await unit.claim_lanes(CONSUMER, owner, most=most, lease=lease, share=share)
            return {claim.lane: claim.claims for claim in claims}

    async def look(self, owner: str, lanes: Iterable[bytes], *, most: int = 100) -> Taken:
        """What a turn would have to do."""
        async with self.unit() as unit:
            taken: Taken = await unit.take_lanes(owner, list(lanes), most=most)
            await unit.rollback()
            return taken

    async def peek(self, *, most: int = 100) -> list[str]:
        """The keys of what is to run now, in order, and ! where one is behind."""
        lanes = await self.claim("peek")
        taken = await self.look("peek", lanes, most=most)
        async with self.unit() as unit:
            await unit.release("peek", list(lanes))
        return [f"{one.identity.key}!" if one.behind else one.identity.key for one in taken.messages]

    async def close(self, owner: str, lanes: Iterable[bytes], closing: TurnClosing) -> None:
        async with self.unit() as unit:
            assert await unit.hold_lanes(owner, list(lanes)) == set(lanes)
            await unit.close_lanes(closing, consumer=CONSUMER, host="here")
            await unit.commit()

    async def turn(self, owner: str = "w", *, most: int = 100, lanes: int = 100, work: Any = None) -> list[str]:
        """Claim, take, do, close: what ran. A message that says `fail` or `dead` in its key does."""
        claimed = await self.claim(owner, most=lanes)
        async with self.unit() as unit:
            return await turn(unit, owner, list(claimed), most=most, work=work)

    async def drain(self, owner: str = "w", *, most: int = 100) -> list[str]:
        """Turn by turn, until nothing is due."""
        ran: list[str] = []
        while await self.due_in() == 0.0:
            ran += await self.turn(owner, most=most)
        return ran

    async def due_in(self, share: Share | None = None) -> float | None:
        async with self.unit() as unit:
            seconds: float | None = await unit.due_in(CONSUMER, share)
            return seconds

    async def find(self, key: str) -> Record:
        async with self.unit() as unit:
            found = await unit.find(identity_of(key))
            record: Record = found.record
            return record

    async def gone(self, *keys: str) -> bool:
        async with self.unit() as unit:
            return [await unit.find(identity_of(key)) for key in keys] == [None] * len(keys)

    async def state(self, key: str) -> State:
        return (await self.find(key)).state


async def turn(unit: Any, owner: str, lanes: list[bytes], *, most: int = 100, work: Any = None) -> list[str]:
    taken: Taken = await unit.take_lanes(owner, lanes, most=most)
    ran: list[str] = []
    done: list[DoneLine] = []
    failed: list[FailedLine] = []
    blocked: list[BlockedLine] = []
    behind: list[int] = []
    ends: list[LaneEnd] = []
    for lane in taken.lanes:
        end = LaneEnd(lane.hex())
        held: set[str] = set()
        for one in (one for one in taken.messages if one.lane == lane):
            if one.behind or one.track in held:
                behind.append(one.seq)
            elif one.waits:
                end = LaneEnd(lane.hex(), Then.LATER, one.waits)
                break
            elif one.unmet is not None:
                blocked.append(blocked_line(one))
                if one.rank != SHARED:
                    end = LaneEnd(lane.hex(), Then.WAIT)
                    break
                if one.track is not None:
                    held.add(one.track)
            elif "fail" in one.identity.key:
                failed.append(failed_line(one, delay=60.0))
                end = LaneEnd(lane.hex(), Then.RETRY, 60.0)
                break
            elif "dead" in one.identity.key:
                failed.append(failed_line(one, dead=True))
                end = LaneEnd(lane.hex(), Then.BLOCKED, blocker=one.identity.digest.hex())
                break
            else:
                if work is not None:
                    await work(unit.tx, one)
                ran.append(one.identity.key)
                done.append(done_line(one))
        ends.append(end)
    closing = TurnClosing(owner, ends, done, failed, blocked, behind)
    await unit.close_lanes(closing, consumer=CONSUMER, host="here")
    await unit.commit()
    return ran


def done_line(one: Queued, **more: Any) -> DoneLine:
    return DoneLine(one.seq, one.identity.digest.hex(), handler="pay", **more)


def failed_line(one: Queued, **more: Any) -> FailedLine:
    return FailedLine(one.seq, one.identity.digest.hex(), BOOM, handler="pay", **more)


def blocked_line(one: Queued, deadline: datetime | None = None) -> BlockedLine:
    assert one.unmet is not None
    needed = one.unmet.position
    return BlockedLine(
        one.seq,
        one.identity.digest.hex(),
        one.lane.hex(),
        needed.tenant or one.identity.tenant,
        needed.stream,
        needed.position,
        deadline,
    )
