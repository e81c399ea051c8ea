"""What the queue remembers to save a look, and what becomes of it where it is not true any more."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest

from onceward import Inbox, Kind, Message, Outcome, Position, Reject, State, lanes
from onceward.asyncpg import AsyncpgStore
from onceward.identity import Identity
from onceward.queue import Queued
from onceward.slot import Slot
from onceward.testing import PostgresLab

CLAIM = "SELECT lanes FROM onceward_claim('{consumer}', 'me', 1, 30, '2000-01-01', 2, 1, '{hints}')"


def message(number: int, **more: Any) -> Message[Any]:
    return Message(id=f"m{number}", type="order.paid", payload={"n": number}, topic="orders", **more)


async def done(_message: Message[Any]) -> None:
    pass


# --- where a record is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", [lanes.by_stream, lanes.by_topic], ids=["no lane", "one lane"])
@pytest.mark.parametrize("batch", [1, 10])
@pytest.mark.parametrize("wrong", ["another's", "nobody's", "none"])
async def test_a_place_may_be_of_another_record_by_now(
    postgres_lab: PostgresLab, lane: Any, batch: int, wrong: str
) -> None:
    """As after VACUUM, or after a restore."""
    seen: dict[str, Any] = {}

    async with await postgres_lab.inbox(lane=lane) as inbox:
        await inbox.accept([message(number) for number in range(3)])
        places = [row[0] for row in await postgres_lab.query("SELECT ctid::text FROM onceward_records")]
        for table in ("onceward_lanes", "onceward_pending"):
            for one, other in zip(places, [*places[1:], places[0]], strict=True):
                new = {"another's": f"'*{other}'", "nobody's": "'*(999,9)'", "none": "NULL"}[wrong]
                await postgres_lab.query(f"UPDATE {table} SET record = {new} WHERE record = '{one}'")
            await postgres_lab.query(f"UPDATE {table} SET record = substr(record, 2)")

        async def keep(one: Message[Any]) -> None:
            seen[one.id] = one.payload
            if len(seen) == 3:
                stop.set()

        stop = asyncio.Event()
        await inbox.run(keep, batch=batch, stop=stop)
        assert seen == {f"m{number}": {"n": number} for number in range(3)}
        if lane is lanes.by_topic:
            assert list(seen) == ["m0", "m1", "m2"]
        states = [row[0] for row in await postgres_lab.query("SELECT state FROM onceward_records")]
        assert states == [State.PROCESSED] * 3


# --- what is due next -----------------------------------------------------------------------------------------------


async def test_a_claim_follows_its_hints(postgres_lab: PostgresLab) -> None:
    store = AsyncpgStore(postgres_lab.url)
    async with Inbox(store, consumer="billing") as inbox:
        await inbox.setup()
        await inbox.accept([message(number) for number in range(30)])
        for _ in range(5):
            assert await inbox.dispatch(done) is not None
        hints = [mark.hints for mark in store.driver.marks.values()]
        assert hints[0] is not None
        following = hints[0].strip("{}").replace('"', "").replace("),(", ") (").split()
        next_one = await postgres_lab.query(f"SELECT lane FROM onceward_lanes WHERE ctid = '{following[0]}'")
        handled: list[str] = []

        async def note(one: Message[Any]) -> None:
            handled.append(str(inbox.identity_of(one)))

        await inbox.dispatch(note)
        assert [str(lane) for (lane,) in next_one] == handled


@pytest.mark.parametrize(
    "spoilt",
    [
        "owner = 'other', until = now() + interval '1 minute'",
        "run_at = now() + interval '1 minute'",
        "run_at = NULL",
        "consumer = 'another'",
        "share = 4",
    ],
)
async def test_a_hint_may_not_be_due_any_more(postgres_lab: PostgresLab, spoilt: str) -> None:
    inbox = await postgres_lab.inbox()
    await inbox.accept([message(number) for number in range(2)])
    await postgres_lab.query("UPDATE onceward_lanes SET share = 3")
    first, second = await postgres_lab.query("SELECT lane FROM onceward_lanes ORDER BY lane")
    await postgres_lab.query(f"UPDATE onceward_lanes SET {spoilt} WHERE lane = '{first[0]}'")
    ((place,),) = await postgres_lab.query(f"SELECT ctid::text FROM onceward_lanes WHERE lane = '{first[0]}'")
    claim = CLAIM.format(consumer=inbox.consumer, hints=f'{{"{place}"}}')
    ((claimed,),) = await postgres_lab.query(claim)
    assert claimed == [second[0]]
    ((claimed,),) = await postgres_lab.query(claim)
    assert claimed is None


async def test_what_another_claims_this_very_moment_is_passed_over(postgres_lab: PostgresLab) -> None:
    inbox = await postgres_lab.inbox()
    await inbox.accept([message(number) for number in range(2)])
    await postgres_lab.query("UPDATE onceward_lanes SET share = 3")
    rows = await postgres_lab.query("SELECT lane, ctid::text FROM onceward_lanes ORDER BY lane")
    (first, place), (second, _) = rows
    other = await asyncpg.connect(postgres_lab.url)
    try:
        await other.execute("BEGIN")
        await other.execute("SELECT FROM onceward_lanes WHERE lane = $1 FOR NO KEY UPDATE", first)
        ((claimed,),) = await postgres_lab.query(CLAIM.format(consumer=inbox.consumer, hints=f'{{"{place}"}}'))
        assert claimed == [second]
    finally:
        await other.close()


# --- what follows in a lane -----------------------------------------------------------------------------------------


async def test_a_lane_that_was_thought_to_have_more_ends(postgres_lab: PostgresLab) -> None:
    async with await postgres_lab.inbox(lane=lanes.by_topic) as inbox:
        await inbox.accept([message(number) for number in range(2)])

        async def take_away(_message: Message[Any]) -> None:
            await postgres_lab.query("DELETE FROM onceward_pending WHERE seq = (SELECT max(seq) FROM onceward_pending)")

        assert (await _dispatched(inbox, take_away)) == "m0"
        assert await inbox.dispatch(done) is None
        assert await postgres_lab.query("SELECT 1 FROM onceward_lanes") == []


async def test_a_lane_ends_with_its_last_message(postgres_lab: PostgresLab) -> None:
    async with await postgres_lab.inbox(lane=lanes.by_topic) as inbox:
        await inbox.accept([message(number) for number in range(3)])
        for left in (1, 1, 0):
            assert await inbox.dispatch(done) is not None
            assert len(await postgres_lab.query("SELECT 1 FROM onceward_lanes")) == left


async def _dispatched(inbox: Inbox[Any], handler: Any) -> str:
    seen: list[str] = []

    async def handle(one: Message[Any]) -> None:
        await handler(one)
        seen.append(one.id)

    await inbox.dispatch(handle)
    (one,) = seen
    return one


# --- what others wait for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settles"),
    [(None, True), (Kind.PROCESSED, True), (Kind.DUPLICATE, True), (Kind.DEAD, True), (Kind.FAILED, False)],
)
def test_what_is_not_tried_again_settles_its_position(kind: Kind | None, settles: bool) -> None:
    """None: a lease that is being completed."""

    def settled(**fields: Any) -> list[tuple[str, str, int]]:
        one = message(1, **fields)
        queued = Queued(1, b"lane", Identity("billing", "acme", "id", one.id), one, datetime.now(UTC))
        return Slot(queued, one, outcome=None if kind is None else Outcome(kind)).settled()

    assert settled(stream="s", position=0) == ([("acme", "s", 0)] if settles else [])
    assert settled(stream="s") == settled() == []


@pytest.mark.parametrize("batch", [1, 10])
async def test_what_waits_for_one_that_is_done_and_for_one_that_is_dead_is_woken(
    postgres_lab: PostgresLab, batch: int
) -> None:
    """At position 0, which is no position that is missing."""
    async with await postgres_lab.inbox(on_dead_dependency="run") as inbox:
        await inbox.accept([
            message(1, depends_on=[Position("good", 0)]),
            message(2, depends_on=[Position("bad", 0)]),
        ])  # fmt: skip
        assert await inbox.dispatch(done) is None
        await inbox.accept([message(3, stream="good", position=0), message(4, stream="bad", position=0)])
        order: list[str] = []

        async def handle(one: Message[Any]) -> None:
            if one.id == "m4":
                raise Reject("no")
            order.append(one.id)
            if len(order) == 3:
                stop.set()

        stop = asyncio.Event()
        await asyncio.wait_for(inbox.run(handle, batch=batch, stop=stop, poll_interval=60), 10)
        assert order[0] == "m3"
        assert set(order) == {"m1", "m2", "m3"}
