"""What document 003 of the seeds asks for: a transactional inbox with causal consistency and partitioned workers.

Each part names the section it comes from, with the document's words beside ours. Its traps (a position of 32 bits, a
URI of 60 characters, dependants that must go to the same worker) are looked at too, and nobody is in them here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

import pytest

from onceward import Inbox, Kind, Message, Position, keys, lanes, stream_of
from onceward.testing import Lab, PostgresLab
from onceward.testing.contract.queue.base import drain, record_of, until
from onceward.testing.contract.queue.fleets import make_ledger
from onceward.testing.lab import Recorder


@pytest.fixture(params=["postgres", "sqlite"])
def lab(request: pytest.FixtureRequest) -> Lab:
    found: Lab = request.getfixturevalue(f"{request.param}_lab")
    return found


def inbox_message(
    stream_position: int,
    stream_id: dict[str, Any] | None = None,
    *,
    tenant_id: str = "tenant1",
    stream_type: str = "Order",
    uri: str = "kafka://orders",
    payload: dict[str, Any] | None = None,
    metadata: dict[str, Any] | None = None,
) -> Message[Any]:
    """`InboxMessage(tenant_id=, stream_type=, stream_id=, stream_position=, uri=, payload=, metadata=)` as a Message.

    Its primary key is (tenant_id, stream_type, stream_id, stream_position): keys.stream_position is that identity.
    """
    given, said = payload or {"type": "OrderCreated", "amount": 100}, metadata or {}
    stream = stream_of(stream_type, stream_id or {"id": "order-123"})
    return Message(
        said.get("event_id", f"{stream}/{stream_position}"),
        given["type"],
        given,
        topic=uri,
        tenant=tenant_id,
        stream=stream,
        position=stream_position,
        depends_on=tuple(
            Position(stream_of(one["stream_type"], one["stream_id"]), one["stream_position"], one["tenant_id"])
            for one in said.get("causal_dependencies", ())
        ),
    )


def user(position: int, **more: Any) -> Message[Any]:
    return inbox_message(position, {"id": "user-1"}, stream_type="User", uri="kafka://users", **more)


AFTER_USER_5 = {
    "causal_dependencies": [
        {"tenant_id": "tenant1", "stream_type": "User", "stream_id": {"id": "user-1"}, "stream_position": 5}
    ]
}


async def inbox_of(lab: Lab, **options: Any) -> Inbox[Any]:
    """`Inbox(session_pool)`; the primary key of the document is the key here."""
    return await lab.inbox(key=keys.stream_position, **options)


class Seen(Recorder):
    """`handle_message(session, message)`; ours is handler(message, tx)."""

    async def __call__(self, message: Message[Any], tx: Any) -> dict[str, str]:
        await self.lab.write(tx, f"{message.stream}/{message.position}")
        self.runs.append(f"{message.stream}/{message.position}")
        return {}


# --- "Usage": setup ---------------------------------------------------------------------------------------------------


async def test_setup_makes_what_is_needed_and_may_be_called_again(postgres_dsn: str) -> None:
    """`await inbox.setup(session)`."""
    lab = PostgresLab(postgres_dsn)
    async with lab.stack:
        inbox: Inbox[Any] = Inbox(lab.store(), consumer="billing", key=keys.stream_position)
        for _ in range(2):
            await inbox.setup()
        await lab.query("CREATE TABLE effects (what text)")
        async with inbox:
            await inbox.accept(inbox_message(1))
            assert len(await drain(inbox, Seen(lab))) == 1


# --- "Publishing messages", "Idempotency" -----------------------------------------------------------------------------


async def test_a_message_with_the_same_primary_key_is_the_same_message(lab: Lab) -> None:
    """`await inbox.publish(InboxMessage(...))`: accept."""
    inbox, handler = await inbox_of(lab), Seen(lab)
    first = inbox_message(1, metadata={"event_id": "uuid-123"}, uri="kafka://orders/order-123")
    again = inbox_message(1, metadata={"event_id": "uuid-456"}, uri="kafka://orders-retry/order-123")
    assert (await inbox.accept(first)).kind is Kind.ACCEPTED
    assert (await inbox.accept(again)).kind is Kind.DUPLICATE
    others = [
        inbox_message(2),
        inbox_message(1, tenant_id="tenant2"),
        inbox_message(1, stream_type="Invoice"),
        inbox_message(1, {"id": "order-124"}),
    ]
    assert [outcome.kind for outcome in await inbox.accept(others)] == [Kind.ACCEPTED] * 4
    assert len(await drain(inbox, handler)) == 5
    assert (await inbox.accept(first)).kind is Kind.DUPLICATE
    assert len(handler.runs) == 5


async def test_a_stream_id_is_a_dict_and_its_order_does_not_matter(lab: Lab) -> None:
    inbox = await inbox_of(lab)
    await inbox.accept(inbox_message(1, {"id": "o-1", "shop": 7}))
    assert (await inbox.accept(inbox_message(1, {"shop": 7, "id": "o-1"}))).kind is Kind.DUPLICATE
    assert (await inbox.accept(inbox_message(1, {"shop": "7", "id": "o-1"}))).kind is Kind.ACCEPTED


async def test_positions_and_uris_may_be_longer_than_the_columns_of_the_document(lab: Lab) -> None:
    """`stream_position integer`, `uri varchar(60)`."""
    inbox, handler, uri = await inbox_of(lab), Seen(lab), "kafka://" + "orders/" * 40
    await inbox.accept([inbox_message(2**40 + 1, uri=uri), inbox_message(2**40, uri=uri)])
    await drain(inbox, handler)
    assert [run.rsplit("/", 1)[1] for run in handler.runs] == [str(2**40), str(2**40 + 1)]


async def test_received_and_processed_positions_are_kept(lab: Lab) -> None:
    """`received_position`, `processed_position` (NULL = unprocessed)."""
    inbox, messages = await inbox_of(lab), [inbox_message(2), inbox_message(1)]
    for message in messages:
        await inbox.accept(message)
    waiting = [await record_of(inbox, message) for message in messages]
    assert [record.processed_position for record in waiting] == [None, None]
    received = [record.received_position or 0 for record in waiting]
    assert received == sorted(set(received))
    await drain(inbox, Seen(lab))
    second, first = [(await record_of(inbox, message)).processed_position or 0 for message in messages]
    assert 0 < first < second


# --- "Partition key strategies" ---------------------------------------------------------------------------------------


async def lanes_of(lab: Lab) -> list[str]:
    return sorted(row[0] for row in await lab.query("SELECT name FROM onceward_lanes"))


async def test_uri_partition_key_strategy(lab: Lab) -> None:
    """`UriPartitionKeyStrategy()`: lanes.by_topic. `kafka://orders`: all go to one worker; `kafka://orders/order-123`:
    by the hash of the full URI."""
    inbox, handler = await inbox_of(lab, lane=lanes.by_topic), Seen(lab)
    await inbox.accept([inbox_message(1, {"id": one}) for one in ("b", "a")])
    await inbox.accept([inbox_message(1, {"id": one}, uri=f"kafka://orders/order-{one}") for one in ("c", "d")])
    assert await lanes_of(lab) == ["kafka://orders", "kafka://orders/order-c", "kafka://orders/order-d"]
    await drain(inbox, handler)
    in_one = [run for run in handler.runs if '"a"' in run or '"b"' in run]
    assert [('"b"' in run) for run in in_one] == [True, False], "in the order of arrival"
    assert len(handler.runs) == 4


async def test_stream_partition_key_strategy(lab: Lab) -> None:
    """`StreamPartitionKeyStrategy()`: lanes.by_stream, the default. By (tenant_id, stream_type, stream_id)."""
    inbox, handler = await inbox_of(lab), Seen(lab)
    messages = [inbox_message(position, tenant_id=tenant) for position in (3, 1, 2) for tenant in ("t1", "t2")]
    await inbox.accept(messages)
    assert len(await lanes_of(lab)) == 2
    await drain(inbox, handler)
    assert sorted(handler.runs) == sorted(handler.runs[:3] * 2) or len(handler.runs) == 6
    for message in messages:
        record = await record_of(inbox, message)
        before = await record_of(inbox, inbox_message(max(1, (message.position or 1) - 1), tenant_id=record.tenant))
        assert (before.processed_position or 0) <= (record.processed_position or 0)


# --- "Option 1: dispatch()" -------------------------------------------------------------------------------------------


async def test_dispatch_one_message_at_a_time(lab: Lab) -> None:
    """`has_message = await inbox.dispatch(handle_message)`."""
    inbox, handler = await inbox_of(lab), Seen(lab)
    await inbox.accept([inbox_message(1), inbox_message(2)])
    has_message = [(await inbox.dispatch(handler)) is not None for _ in range(3)]
    assert has_message == [True, True, False]


async def test_dispatch_with_partitioning(lab: Lab) -> None:
    """`dispatch(handle_message, worker_id=0, num_workers=3)`: share=(0, 3)."""
    inbox, parts = await inbox_of(lab), []
    await inbox.accept([inbox_message(1, {"id": number}) for number in range(24)])
    for worker_id in range(3):
        handler = Seen(lab)
        await drain(inbox, handler, share=(worker_id, 3))
        parts.append(handler.runs)
    assert all(parts)
    assert len({run for part in parts for run in part}) == sum(map(len, parts)) == 24


# --- "Option 2: run()" ------------------------------------------------------------------------------------------------

LAYOUTS = {"1x1": (1, 1), "1x4": (1, 4), "3x1": (3, 1), "2x2": (2, 2)}
"""num_processes x concurrency."""


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_run_in_each_layout_dispatches_every_message_once(lab: Lab, layout: str) -> None:
    """`run(handle_message, process_id=, num_processes=, concurrency=)`: share=(process_id, num_processes)."""
    processes, concurrency = LAYOUTS[layout]
    await make_ledger(lab)
    inbox = await lab.inbox(wait=30)
    messages = [
        Message(f"{stream}-{position}", "order.paid", {}, stream=f"s{stream}", position=position)
        for position in range(1, 6)
        for stream in range(12)
    ]
    hands = [
        await lab.hand(
            ledger=True, concurrency=concurrency, share=(process_id, processes) if processes > 1 else None, base=0.0
        )
        for process_id in range(processes)
    ]
    for hand in hands:
        await hand.hear("ready")
    await inbox.accept(messages[:30])
    await inbox.accept(messages[30:])
    await inbox.accept(messages[:30])  # at least once

    async def done() -> bool:
        return await lab.query("SELECT count(*) FROM onceward_records WHERE state = 'processed'") == [(60,)]

    await until(done, within=40)
    assert [await hand.stop() for hand in hands] == [0] * processes
    rows = await lab.query("SELECT id, stream, position, pid FROM ledger ORDER BY n")
    assert Counter(row[0] for row in rows) == Counter(message.id for message in messages)
    for stream in range(12):
        mine = [row for row in rows if row[1] == f"s{stream}"]
        assert [row[2] for row in mine] == [1, 2, 3, 4, 5]
        assert len({row[3] for row in mine}) == 1, "a stream stays with its process"
    assert len({row[3] for row in rows}) == processes


async def test_run_stops_gracefully(lab: Lab) -> None:
    """`stop_event`: what has begun is finished, the rest is kept."""
    inbox, stop_event, begun, go = await inbox_of(lab), asyncio.Event(), asyncio.Event(), asyncio.Event()
    handler = Seen(lab)

    async def handle_message(message: Message[Any], tx: Any) -> None:
        begun.set()
        await go.wait()
        await handler(message, tx)

    await inbox.accept([inbox_message(position) for position in (1, 2, 3)])
    running = asyncio.ensure_future(inbox.run(handle_message, poll_interval=1.0, stop=stop_event))
    await begun.wait()
    stop_event.set()
    go.set()
    await asyncio.wait_for(running, 20)
    done = len(handler.runs)
    assert done >= 1
    assert len(await lab.effects()) == done
    await drain(inbox, handler)
    assert [run.rsplit("/", 1)[1] for run in handler.runs] == ["1", "2", "3"]


# --- "Option 3: async iterator" ---------------------------------------------------------------------------------------


async def test_the_async_iterator(lab: Lab) -> None:
    """`async for session, message in inbox`: `async for work in inbox`, `async with work as (message, tx)`."""
    inbox, got = await inbox_of(lab), []
    await inbox.accept([inbox_message(2), inbox_message(1), inbox_message(3)])
    with contextlib.suppress(LookupError):
        async for work in inbox:
            async with work as (message, tx):
                await lab.write(tx, str(message.position))
                got.append(message.position)
                if message.position == 3:
                    raise LookupError
    assert got == [1, 2, 3]
    assert await lab.effects() == ["1", "2"], "marked when the block has ended, and not before"


# --- "Causal dependencies" --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [lanes.by_stream, lanes.by_topic], ids=lambda strategy: strategy.name)
async def test_a_message_is_processed_after_its_causal_dependencies(lab: Lab, strategy: Any) -> None:
    """If dependencies are not satisfied, it skips to the next message."""
    inbox, handler = await inbox_of(lab, lane=strategy), Seen(lab)
    await inbox.accept(inbox_message(1, metadata=AFTER_USER_5))
    await inbox.accept(inbox_message(1, {"id": "order-124"}))
    await drain(inbox, handler)
    assert len(handler.runs) == 1
    assert "order-124" in handler.runs[0]
    await inbox.accept(user(4))
    await drain(inbox, handler)
    assert len(handler.runs) == 2
    await inbox.accept(user(5))
    await drain(inbox, handler)
    assert "user-1" in handler.runs[2]
    assert "order-123" in handler.runs[3]


async def test_causally_related_messages_need_not_go_to_the_same_worker(lab: Lab) -> None:
    """ "Important: use StreamPartitionKeyStrategy to ensure causally related messages go to the same worker": here a
    worker that settles a position wakes whoever waits for it."""
    inbox, handler = await inbox_of(lab), Seen(lab)
    orders = [inbox_message(1, {"id": number}, metadata=AFTER_USER_5) for number in range(8)]
    await inbox.accept(orders)
    for share in ((0, 2), (1, 2)):
        assert await drain(inbox, handler, share=share) == []
    await inbox.accept(user(5))
    for share in ((0, 2), (1, 2), (0, 2)):
        await drain(await inbox_of(lab), handler, share=share)
    assert len(handler.runs) == 9
    assert "user-1" in handler.runs[0]
