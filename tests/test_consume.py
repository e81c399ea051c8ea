"""`consume` with a source in memory: what becomes of deliveries, whatever their broker is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from onceward import Inbox, Message, Reject, RetryPolicy, TryLater, current
from onceward.brake import Brake
from onceward.brokers import MemorySource, NdjsonSource, consume
from onceward.brokers.memory import MemoryDelivery
from onceward.errors import HandlerNotFound, StoreUnavailable, UsageError
from onceward.outcome import Kind, Outcome, Verdict
from onceward.record import State
from onceward.testing import SqliteLab
from onceward.testing.waiting import until


def paid(id_: str, stream: str | None = None, **more: Any) -> Message[Any]:
    return Message(id_, "order.paid", {"id": id_}, stream=stream, **more)


QUICK = RetryPolicy(max_attempts=3, base=0.01, factor=1.0)


@pytest.fixture
async def inbox(sqlite_lab: SqliteLab) -> AsyncIterator[Inbox[Any]]:
    async with Inbox(sqlite_lab.store(), consumer="billing", retry=QUICK, listeners=()) as inbox:
        yield inbox


class Handler:
    """Writes an effect; fails in as many attempts as it is told to for each id. `runs`: those that count."""

    def __init__(self, lab: SqliteLab, **fails: int) -> None:
        self.lab = lab
        self.fails = fails
        self.runs: list[tuple[str, int]] = []

    async def __call__(self, message: Message[Any], tx: Any) -> None:
        await self.lab.write(tx, message.id)
        attempt = current().attempt
        if (message.id, attempt) not in self.runs:  # a batch whose neighbour fails is run again
            self.runs.append((message.id, attempt))
        if attempt <= self.fails.get(message.id, 0):
            raise ValueError(message.id)

    @property
    def ids(self) -> list[str]:
        return [id_ for id_, _ in self.runs]


def verdicts(source: MemorySource) -> dict[str, tuple[Verdict, Kind]]:
    return {one.id: (one.verdict, one.outcome.kind) for one in source.settled if one.outcome is not None}


ACKED = (Verdict.ACK, Kind.PROCESSED)


async def test_every_message_takes_effect_once_and_is_acknowledged(inbox: Inbox[Any], sqlite_lab: SqliteLab) -> None:
    ids = [f"m{number:03}" for number in range(250)]
    source = MemorySource([paid(id_) for id_ in ids + ids[:50]])
    await consume(source, inbox, Handler(sqlite_lab), batch=20)
    assert await sqlite_lab.effects() == ids
    assert len(source.settled) == 300
    assert {one.verdict for one in source.settled} == {Verdict.ACK}
    assert Counter(one.outcome.kind for one in source.settled if one.outcome) == {"processed": 250, "duplicate": 50}


async def test_a_failed_message_is_parked_and_tried_again_from_the_queue(
    inbox: Inbox[Any], sqlite_lab: SqliteLab
) -> None:
    handler = Handler(sqlite_lab, b=1)
    source = MemorySource([paid("a"), paid("b"), paid("c")], open=True)
    consuming = asyncio.ensure_future(consume(source, inbox, handler))
    await until(lambda: len(source.settled) == 3)
    assert verdicts(source) == {"a": ACKED, "b": (Verdict.ACK, Kind.ACCEPTED), "c": ACKED}
    await until(lambda: handler.ids.count("b") == 2)
    source.end()
    await consuming
    assert await sqlite_lab.effects() == ["a", "b", "c"]


async def test_later_ones_of_its_lane_are_parked_behind_it_and_overtake_nobody(
    inbox: Inbox[Any], sqlite_lab: SqliteLab
) -> None:
    handler = Handler(sqlite_lab, a1=2)
    source = MemorySource([paid("a1", "a"), paid("b1", "b"), paid("a2", "a")], open=True, partition="0")
    consuming = asyncio.ensure_future(consume(source, inbox, handler))
    await until(lambda: len(source.settled) == 3)
    source.put(paid("a3", "a"), paid("b2", "b"))  # in a batch of its own, and a has messages in the queue
    await until(lambda: len(source.settled) == 5)
    await until(lambda: "a3" in handler.ids)
    source.end()
    await consuming
    assert [id_ for id_ in handler.ids if id_.startswith("a")] == ["a1", "a1", "a1", "a2", "a3"]
    assert verdicts(source)["b2"] == ACKED
    assert verdicts(source)["a2"] == (Verdict.ACK, Kind.ACCEPTED)


async def test_a_lane_in_the_queue_is_known_to_whoever_comes_next(inbox: Inbox[Any], sqlite_lab: SqliteLab) -> None:
    """As after a rebalance: the failed one was parked by somebody else."""
    handler = Handler(sqlite_lab)
    await inbox.accept(paid("a1", "a"))
    source = MemorySource([paid("a2", "a"), paid("b1", "b")])
    await consume(source, inbox, handler, workers=0)
    assert verdicts(source) == {"a2": (Verdict.ACK, Kind.ACCEPTED), "b1": ACKED}
    assert await inbox.dispatch(handler)
    assert await inbox.dispatch(handler)
    assert handler.ids == ["b1", "a1", "a2"]


async def test_what_is_held_comes_again_and_holds_up_its_lane_alone(inbox: Inbox[Any], sqlite_lab: SqliteLab) -> None:
    handler = Handler(sqlite_lab, a1=2)
    source = MemorySource(
        [paid("a1", "a"), paid("b1", "b"), paid("a2", "a"), paid("c"), paid("a3", "a")], partition="0"
    )
    await consume(source, inbox, handler, on_failure="hold", batch=2)
    assert [id_ for id_ in handler.ids if id_.startswith("a")] == ["a1", "a1", "a1", "a2", "a3"]
    assert handler.ids.index("b1") < 3
    assert set(verdicts(source).values()) == {ACKED}
    assert len(source.settled) == 5


async def test_what_fails_for_good_is_a_dead_letter_and_acknowledged(inbox: Inbox[Any], sqlite_lab: SqliteLab) -> None:
    source = MemorySource([paid("a"), paid("b")])
    await consume(source, inbox, Handler(sqlite_lab, a=9), on_failure="hold")
    assert verdicts(source) == {"a": (Verdict.ACK, Kind.DEAD), "b": ACKED}
    assert [record.message_id for record in await inbox.records(State.DEAD)] == ["a"]


async def test_a_problem_becomes_a_dead_letter_with_its_body(inbox: Inbox[Any], sqlite_lab: SqliteLab) -> None:
    source = MemorySource([paid("a")])
    source.put(Message("x", "unknown", None, body=b"\xff{"), problem=Reject("no id"))
    await consume(source, inbox, Handler(sqlite_lab))
    assert verdicts(source) == {"a": ACKED, "x": (Verdict.ACK, Kind.DEAD)}
    (dead,) = await inbox.records(State.DEAD)
    assert (dead.body, dead.last_error) == (b"\xff{", "Reject: no id")


async def test_what_is_too_large_is_buried_without_its_payload(sqlite_lab: SqliteLab) -> None:
    async with Inbox(sqlite_lab.store(), consumer="billing", max_payload=50) as inbox:
        source = MemorySource([paid("a"), Message("big", "order.paid", {"text": "x" * 100}), paid("b")])
        await consume(source, inbox, Handler(sqlite_lab))
        assert verdicts(source)["big"] == (Verdict.ACK, Kind.DEAD)
        (dead,) = await inbox.records(State.DEAD)
        assert dead.payload is None
        assert "50 are allowed" in dead.last_error
    assert await sqlite_lab.effects() == ["a", "b"]


async def test_without_a_tenant_it_is_buried_in_quarantine(sqlite_lab: SqliteLab) -> None:
    from onceward import tenants

    async with Inbox(sqlite_lab.store(), consumer="billing", tenant=tenants.header("x-tenant")) as inbox:
        source = MemorySource([paid("a", headers={"x-tenant": "t1"}), paid("b")])
        await consume(source, inbox, Handler(sqlite_lab))
        assert verdicts(source) == {"a": ACKED, "b": (Verdict.ACK, Kind.DEAD)}
        (dead,) = await inbox.records(State.DEAD)
        assert (dead.scope, dead.payload) == ("quarantine", {"id": "b"})


async def test_an_unhandled_type_stops_it_and_nothing_is_lost(inbox: Inbox[Any], sqlite_lab: SqliteLab) -> None:
    inbox.handler("order.paid")(Handler(sqlite_lab))
    source = MemorySource([paid("a"), Message("u", "order.lost", None), paid("b")])
    with pytest.raises(HandlerNotFound, match=r"order\.lost"):
        await consume(source, inbox)
    assert verdicts(source) == {"a": ACKED, "b": ACKED}
    assert source.left == ["u"]


@pytest.mark.parametrize(("unhandled", "kind"), [("ignore", Kind.IGNORED), ("dead", Kind.DEAD)])
async def test_an_unhandled_type_is_ignored_or_dead(sqlite_lab: SqliteLab, unhandled: Any, kind: Kind) -> None:
    async with Inbox(sqlite_lab.store(), consumer="billing", unhandled=unhandled) as inbox:
        source = MemorySource([Message("u", "order.lost", None)])
        await consume(source, inbox)
        assert verdicts(source) == {"u": (Verdict.ACK, kind)}


async def test_accept_keeps_them_and_the_queue_works_on_them(inbox: Inbox[Any], sqlite_lab: SqliteLab) -> None:
    handler = Handler(sqlite_lab)
    source = MemorySource([paid("a"), paid("b"), paid("a")], open=True)
    consuming = asyncio.ensure_future(consume(source, inbox, handler, mode="accept"))
    await until(lambda: len(source.settled) == 3)
    assert [one.outcome.kind for one in source.settled if one.outcome] == ["accepted", "accepted", "duplicate"]
    await until(lambda: sorted(handler.ids) == ["a", "b"])
    source.end()
    await consuming
    assert await sqlite_lab.effects() == ["a", "b"]


async def test_stop_finishes_what_was_begun_and_gives_the_rest_back(inbox: Inbox[Any], sqlite_lab: SqliteLab) -> None:
    begun, go, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(message: Message[Any], tx: Any) -> None:
        await sqlite_lab.write(tx, message.id)
        begun.set()
        await go.wait()

    source = MemorySource([paid("a"), paid("b"), paid("c")], partition="0")
    consuming = asyncio.ensure_future(consume(source, inbox, slow, batch=1, stop=stop))
    await begun.wait()
    stop.set()
    go.set()
    await consuming
    assert verdicts(source) == {"a": ACKED}
    assert source.left == ["b", "c"]
    assert await sqlite_lab.effects() == ["a"]


async def test_after_its_grace_what_was_begun_is_undone(inbox: Inbox[Any], sqlite_lab: SqliteLab) -> None:
    begun, stop = asyncio.Event(), asyncio.Event()

    async def stuck(message: Message[Any], tx: Any) -> None:
        await sqlite_lab.write(tx, message.id)
        begun.set()
        await asyncio.Event().wait()

    source = MemorySource([paid("a")])
    consuming = asyncio.ensure_future(consume(source, inbox, stuck, stop=stop, grace=0.05))
    await begun.wait()
    stop.set()
    await consuming
    assert (source.settled, source.left) == ([], ["a"])
    assert await sqlite_lab.effects() == []


async def test_cancelled_it_leaves_everything_as_if_it_had_not_begun(inbox: Inbox[Any], sqlite_lab: SqliteLab) -> None:
    begun = asyncio.Event()

    async def stuck(message: Message[Any], tx: Any) -> None:
        await sqlite_lab.write(tx, message.id)
        begun.set()
        await asyncio.Event().wait()

    source = MemorySource([paid("a"), paid("b")])
    consuming = asyncio.ensure_future(consume(source, inbox, stuck))
    await begun.wait()
    consuming.cancel()
    with suppress(asyncio.CancelledError):
        await consuming
    assert consuming.cancelled()
    assert sorted(source.left) == ["a", "b"]
    source.end()
    await consume(source, inbox, Handler(sqlite_lab))
    assert await sqlite_lab.effects() == ["a", "b"]


async def test_what_the_broker_took_back_is_left_alone(inbox: Inbox[Any], sqlite_lab: SqliteLab) -> None:
    class TakesBack(MemorySource):
        def begun(self, delivery: MemoryDelivery) -> bool:
            return delivery.message.id != "b"

    source = TakesBack([paid("a"), paid("b"), paid("c")])
    handler = Handler(sqlite_lab)
    await consume(source, inbox, handler)
    assert handler.ids == ["a", "c"]
    assert set(verdicts(source)) == {"a", "c"}


async def test_while_the_database_is_away_nothing_is_settled_and_little_is_tried(
    sqlite_lab: SqliteLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Inbox(sqlite_lab.store(), consumer="billing", listeners=()) as inbox:
        away, tries = True, 0
        deliver = inbox.deliver

        async def sometimes(*args: Any, **options: Any) -> Any:
            nonlocal tries
            tries += 1
            if away:
                raise StoreUnavailable
            return await deliver(*args, **options)

        monkeypatch.setattr(inbox, "deliver", sometimes)
        source = MemorySource([paid(f"m{number}") for number in range(2000)], open=True)
        consuming = asyncio.ensure_future(consume(source, inbox, Handler(sqlite_lab), batch=10))
        await until(lambda: tries >= 4)
        assert source.settled == []
        assert len(source.left) >= 2000 - 2 * 10 * 4 - 1, "no more is received than can be worked on"
        (health,) = (await inbox.health()).sources
        assert health.state == "paused"
        away = False
        source.end()
        await consuming
        assert len(await sqlite_lab.effects()) == 2000


async def test_while_the_database_is_away_nothing_more_is_received(
    sqlite_lab: SqliteLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Inbox(sqlite_lab.store(), consumer="billing", listeners=()) as inbox:
        away, tries, deliver = True, 0, inbox.deliver

        async def sometimes(*args: Any, **options: Any) -> Any:
            nonlocal tries
            tries += 1
            if away:
                raise StoreUnavailable
            return await deliver(*args, **options)

        monkeypatch.setattr(inbox, "deliver", sometimes)
        source = MemorySource(open=True)
        consuming = asyncio.ensure_future(consume(source, inbox, Handler(sqlite_lab)))
        source.put(paid("a"))
        await until(lambda: tries >= 2)
        source.put(*(paid(f"m{number}") for number in range(10)))  # a receive that was on its way may have one portion
        await until(lambda: tries >= 3)
        source.put(*(paid(f"n{number}") for number in range(10)))
        await until(lambda: tries >= 4)
        assert len(source.left) >= 10
        away = False
        source.end()
        await consuming
        assert len(await sqlite_lab.effects()) == 21


async def test_no_more_is_held_than_can_be(
    inbox: Inbox[Any], sqlite_lab: SqliteLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("onceward.brokers.consume"), "MOST_HELD", 5)  # its name is also the function's
    stop = asyncio.Event()

    async def later(message: Message[Any]) -> None:
        raise TryLater(600)

    source = MemorySource([paid(f"m{number}") for number in range(50)])
    consuming = asyncio.ensure_future(
        consume(source, inbox, later, on_failure="hold", batch=1, concurrency=1, stop=stop, brake=Brake(failures=999))
    )
    await until(lambda: inbox._reports and inbox._reports[0]().held >= 5)
    await asyncio.sleep(0.1)
    assert inbox._reports[0]().held <= 5 + 2
    stop.set()
    await consuming
    assert len(source.left) == 50


async def test_what_is_delivered_again_is_known_to_be_and_its_lane_keeps_its_order(
    inbox: Inbox[Any], sqlite_lab: SqliteLab
) -> None:
    """Those that are delivered again run apart from the others, which must not overtake them."""
    handler = Handler(sqlite_lab, a1=2)
    redelivered: dict[str, bool] = {}

    async def noting(message: Message[Any], tx: Any) -> None:
        redelivered[message.id] = current().redelivered
        await handler(message, tx)

    source = MemorySource(partition="0", open=True)
    source.put(paid("a1", "a"), redelivered=True)
    source.put(paid("b1", "b"), paid("a2", "a"))
    source.end()
    await consume(source, inbox, noting, on_failure="hold")
    assert redelivered == {"a1": True, "b1": False, "a2": False}
    assert [id_ for id_ in handler.ids if id_.startswith("a")] == ["a1", "a1", "a1", "a2"]


async def test_while_everything_fails_little_is_tried(inbox: Inbox[Any], sqlite_lab: SqliteLab) -> None:
    """An outage must not fill the dead letters with messages that nothing is wrong with."""
    is_out, runs = True, Counter[str]()

    async def needs_bank(message: Message[Any], tx: Any) -> None:
        runs[message.id] += 1
        if is_out:
            raise ConnectionError("the bank does not answer")
        await sqlite_lab.write(tx, message.id)

    source = MemorySource([paid(f"m{number}") for number in range(500)], open=True)
    brake = Brake(failures=10, shortest=0.1, longest=0.2)
    consuming = asyncio.ensure_future(consume(source, inbox, needs_bank, batch=5, concurrency=2, brake=brake))
    await until(lambda: brake.on)
    before = sum(runs.values())
    await asyncio.sleep(1.0)
    assert sum(runs.values()) - before <= 20, "a hundred a second would have been tried"
    assert len(source.left) > 400
    assert (await inbox.health()).sources[0].state == "braking"
    is_out = False
    source.end()
    await consuming
    assert not brake.on
    done = len(await sqlite_lab.effects()) + len(await inbox.records(State.DEAD, limit=500))
    queued = (await inbox.queue_stats()).pending
    assert done + queued == 500


async def test_what_is_only_kept_is_kept_whatever_fails(inbox: Inbox[Any], sqlite_lab: SqliteLab) -> None:
    brake = Brake(failures=1, shortest=60.0)
    source = MemorySource([paid(f"m{number}") for number in range(50)])
    brake.note(Outcome(Kind.FAILED, error=ValueError(), attempts=1))
    await consume(source, inbox, Handler(sqlite_lab), mode="accept", batch=5, brake=brake)
    assert len(source.settled) == 50


async def test_another_runners_message_is_tried_again_soon(sqlite_lab: SqliteLab) -> None:
    """Neither parked nor lost."""
    tries = 0

    async def later(message: Message[Any], tx: Any) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise TryLater(0.01)
        await sqlite_lab.write(tx, message.id)

    async with Inbox(sqlite_lab.store(), consumer="billing") as inbox:
        source = MemorySource([paid("a")])
        await consume(source, inbox, later, on_failure="hold")
        assert verdicts(source) == {"a": ACKED}
        assert tries == 2


async def test_a_bulk_handler_gets_the_list(inbox: Inbox[Any], sqlite_lab: SqliteLab) -> None:
    sizes = []

    async def all_of_them(messages: list[Message[Any]], tx: Any) -> None:
        sizes.append(len(messages))
        for message in messages:
            await sqlite_lab.write(tx, message.id)

    source = MemorySource([paid(f"m{number:02}") for number in range(40)])
    await consume(source, inbox, bulk=all_of_them, batch=40, concurrency=1)
    assert sizes == [40]
    assert len(await sqlite_lab.effects()) == 40


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"mode": "inbox"}, "mode="),
        ({"on_failure": "drop"}, "on_failure="),
        ({"batch": 0}, "batch=0"),
        ({"concurrency": 1.5}, "concurrency="),
        ({"grace": -1}, "grace="),
        ({"handler": print, "bulk": print}, "either"),
    ],
)
async def test_what_cannot_be_meant_is_refused(inbox: Inbox[Any], wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        await consume(MemorySource(), inbox, **wrong)


# --- files --------------------------------------------------------------------------------------------------


async def test_a_file_of_json_lines_is_consumed(inbox: Inbox[Any], sqlite_lab: SqliteLab, tmp_path: Path) -> None:
    file = tmp_path / "events.ndjson"
    file.write_text(
        '{"id": "a", "type": "order.paid", "payload": {"n": 1}}\n'
        "\n"
        '{"specversion": "1.0", "id": "b", "source": "shop", "type": "order.paid", "data": 1}\n'
        "not json\n"
        '{"type": "order.paid"}\n'
        '{"id": "c", "type": "order.paid", "surprise": 1}\n'
        '{"id": "a", "type": "order.paid", "payload": {"n": 1}}\n'
        '{"id": "d", "type": "order.paid", "occurred_at": "2026-01-01T00:00:00Z", "stream": "s", "position": 2,'
        ' "depends_on": []}'
    )
    for _ in range(2):
        async with NdjsonSource(file) as source:
            await consume(source, inbox, Handler(sqlite_lab))
        assert await sqlite_lab.effects() == ["a", "b", "d"]
    dead = {record.origin: record.last_error for record in await inbox.records(State.DEAD)}
    assert set(dead) == {f"{file}:4", f"{file}:5", f"{file}:6"}
    assert "id is missing" in dead[f"{file}:5"]
    assert "surprise" in dead[f"{file}:6"]
