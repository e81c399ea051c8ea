"""Every source must pass this, on its real broker.

It is the half of the decision table that has to do with brokers: settled means processed or durably kept, a failed
message is never skipped by a later success, and whoever dies, the message comes again.
"""

from __future__ import annotations

import asyncio
import signal
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from time import monotonic
from typing import Any

import pytest

from onceward.brokers.consume import consume
from onceward.current import current
from onceward.errors import HandlerNotFound, TryLater
from onceward.inbox import Inbox
from onceward.message import Message
from onceward.record import State
from onceward.retry import RetryPolicy
from onceward.testing.lab import Lab
from onceward.testing.proxy import Proxy
from onceward.testing.sources.children import Consumer
from onceward.testing.sources.lab import BrokerLab, ConsumerJob, Sent
from onceward.testing.waiting import until

QUICK = RetryPolicy(max_attempts=5, base=0.05, factor=1.0)
LONG = 60.0
"""Seconds that anything may take on a busy machine."""


def ids(number: int, prefix: str = "m") -> list[str]:
    return [f"{prefix}{at:04}" for at in range(number)]


def needs(broker: BrokerLab, feature: str) -> None:
    if not getattr(broker, feature):
        pytest.skip(f"{type(broker).__name__} does not have {feature}")


class Handler:
    """Writes the message's id as its effect, and fails in so many attempts of some of them."""

    def __init__(self, lab: Lab, **fails: int) -> None:
        self._lab = lab
        self._fails = fails
        self.tries: dict[str, list[float]] = defaultdict(list)
        self.order: list[str] = []
        """Each id when its last run was through. A run that is undone may count here, and is followed by another."""

    async def __call__(self, message: Message[Any], tx: Any) -> None:
        self.tries[message.id].append(monotonic())
        await self._lab.write(tx, message.id)
        if current().attempt <= self._fails.get(message.id, 0):
            raise ValueError(f"not yet: {message.id}")
        if message.id in self.order:
            self.order.remove(message.id)
        self.order.append(message.id)


class Consuming:
    """`consume` in the background."""

    def __init__(self, task: asyncio.Task[None], stop: asyncio.Event) -> None:
        self.task = task
        self._stop = stop

    async def stop(self) -> None:
        self._stop.set()
        async with asyncio.timeout(LONG):
            await self.task


class SourceContract:
    @pytest.fixture
    def broker(self) -> BrokerLab:
        raise NotImplementedError("give a fixture `broker`")

    @pytest.fixture
    def lab(self) -> Lab:
        raise NotImplementedError("give a fixture `lab`, of a store with a queue")

    @pytest.fixture
    async def stack(self) -> AsyncIterator[AsyncExitStack]:
        async with AsyncExitStack() as stack:
            yield stack

    @pytest.fixture
    async def inbox(self, lab: Lab, stack: AsyncExitStack) -> Inbox[Any]:
        return await self.opened(lab, stack)

    async def opened(self, lab: Lab, stack: AsyncExitStack, **options: Any) -> Inbox[Any]:
        given: dict[str, Any] = {"consumer": "billing", "retry": QUICK, "listeners": ()} | options
        store = given.pop("store", None) or lab.store()
        return await stack.enter_async_context(Inbox(store, **given))

    @asynccontextmanager
    async def consuming(
        self, broker: BrokerLab, inbox: Inbox[Any], handler: Any = None, *, port: int | None = None, **options: Any
    ) -> AsyncIterator[Consuming]:
        stop, opened = asyncio.Event(), asyncio.Event()

        async def run() -> None:
            async with broker.source(port=port) as source:
                opened.set()
                await consume(source, inbox, handler, stop=stop, **options)

        task = asyncio.ensure_future(run())
        running = Consuming(task, stop)
        try:
            await asyncio.wait([task, asyncio.ensure_future(opened.wait())], return_when=asyncio.FIRST_COMPLETED)
            yield running
        finally:
            stop.set()
            if not task.done():
                await asyncio.wait([task], timeout=LONG)
            if not task.done():
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def settled(self, broker: BrokerLab) -> None:
        if broker.remembers:
            await until(lambda: _is_none(broker), within=LONG)

    async def effects(self, lab: Lab, wanted: list[str], within: float = LONG) -> None:
        await until(lambda: _has(lab, wanted), within=within)
        assert await lab.effects() == sorted(wanted)

    # --- delivering -----------------------------------------------------------------------------------------

    async def test_everything_takes_effect_once_and_is_settled(
        self, broker: BrokerLab, lab: Lab, inbox: Inbox[Any]
    ) -> None:
        sent = ids(150)
        await broker.send(*(Sent(id_, key=id_[-1]) for id_ in sent + sent[::3]))
        async with self.consuming(broker, inbox, Handler(lab), batch=20):
            await self.effects(lab, sent)
            await self.settled(broker)
        assert await lab.effects() == sent

    async def test_nothing_is_settled_before_its_commit(self, broker: BrokerLab, lab: Lab, inbox: Inbox[Any]) -> None:
        needs(broker, "remembers")
        begun, go = asyncio.Event(), asyncio.Event()

        async def slow(message: Message[Any], tx: Any) -> None:
            await lab.write(tx, message.id)
            begun.set()
            await go.wait()

        await broker.send(Sent("a"))
        async with self.consuming(broker, inbox, slow) as running:
            await begun.wait()
            await asyncio.sleep(0.5)  # whoever settles too early has the time to
            assert await broker.unsettled() == 1
            go.set()
            await self.settled(broker)
            await running.stop()
        assert await lab.effects() == ["a"]

    async def test_messages_of_a_key_run_in_their_order(self, broker: BrokerLab, lab: Lab, inbox: Inbox[Any]) -> None:
        needs(broker, "ordered")
        sent = [Sent(f"{key}{number:02}", key=key) for number in range(30) for key in "abc"]
        await broker.send(*sent)
        handler = Handler(lab)
        async with self.consuming(broker, inbox, handler, batch=7):
            await self.effects(lab, [str(one.id) for one in sent])
        for key in "abc":
            run = [id_ for id_ in handler.order if id_.startswith(key)]
            assert run == sorted(run)

    async def test_a_body_that_is_not_json_is_a_dead_letter_and_the_next_one_works(
        self, broker: BrokerLab, lab: Lab, inbox: Inbox[Any]
    ) -> None:
        await broker.send(Sent("bad", body=b"\xff{not json"), Sent("good"))
        async with self.consuming(broker, inbox, Handler(lab)):
            await self.effects(lab, ["good"])
            await self.settled(broker)
            await until(lambda: inbox.records(State.DEAD))
        (dead,) = await inbox.records(State.DEAD)
        assert dead.body is not None
        assert b"\xff{not json" in dead.body

    async def test_without_an_id_it_is_a_dead_letter_that_says_what_to_do(
        self, broker: BrokerLab, lab: Lab, inbox: Inbox[Any]
    ) -> None:
        await broker.send(Sent(None, body=b'{"n": 1}'), Sent("good"))
        async with self.consuming(broker, inbox, Handler(lab)):
            await self.effects(lab, ["good"])
            await self.settled(broker)
            await until(lambda: inbox.records(State.DEAD))
        (dead,) = await inbox.records(State.DEAD)
        assert " id" in dead.last_error
        assert dead.origin

    async def test_an_unhandled_type_stops_it_and_stays_with_the_broker(
        self, broker: BrokerLab, lab: Lab, inbox: Inbox[Any]
    ) -> None:
        await broker.send(Sent("a"), Sent("u", type="order.lost"))
        inbox.handler("order.paid")(Handler(lab))
        async with self.consuming(broker, inbox) as running:
            with pytest.raises(HandlerNotFound):
                async with asyncio.timeout(LONG):
                    await running.task
        await self.effects(lab, ["a"])
        if broker.remembers:
            await until(lambda: _is_one(broker), within=LONG)

    async def test_an_unhandled_type_is_a_dead_letter_where_the_inbox_says_so(
        self, broker: BrokerLab, lab: Lab, stack: AsyncExitStack
    ) -> None:
        inbox = await self.opened(lab, stack, unhandled="dead")
        inbox.handler("order.paid")(Handler(lab))
        await broker.send(Sent("u", type="order.lost"), Sent("a"))
        async with self.consuming(broker, inbox):
            await self.effects(lab, ["a"])
            await self.settled(broker)
            await until(lambda: inbox.records(State.DEAD))
        assert [record.message_id for record in await inbox.records(State.DEAD)] == ["u"]

    async def test_accepted_is_settled_and_worked_on_from_the_queue(
        self, broker: BrokerLab, lab: Lab, inbox: Inbox[Any]
    ) -> None:
        sent = ids(60)
        await broker.send(*(Sent(id_) for id_ in sent + sent[:20]))
        async with self.consuming(broker, inbox, Handler(lab), mode="accept", batch=10):
            await self.effects(lab, sent)
            await self.settled(broker)

    # --- failing --------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("on_failure", ["park", "hold"])
    async def test_one_of_a_batch_fails_and_the_others_do_not(
        self, broker: BrokerLab, lab: Lab, inbox: Inbox[Any], on_failure: Any
    ) -> None:
        sent = ids(30)
        await broker.send(*(Sent(id_) for id_ in sent))
        async with self.consuming(broker, inbox, Handler(lab, m0007=2), batch=30, on_failure=on_failure):
            await self.effects(lab, sent)
            await self.settled(broker)

    async def test_what_is_parked_is_settled_although_it_fails(
        self, broker: BrokerLab, lab: Lab, stack: AsyncExitStack
    ) -> None:
        inbox = await self.opened(lab, stack, retry=RetryPolicy(max_attempts=5, base=600.0))
        await broker.send(Sent("a1", key="a"), Sent("b1", key="b"), Sent("a2", key="a"))
        async with self.consuming(broker, inbox, Handler(lab, a1=9), on_failure="park"):
            await self.settled(broker)
            await until(lambda: inbox.get_record(Message("a1", "order.paid", None)))
            await until(lambda: _is_queued(inbox, "a1"))
            await self.effects(lab, ["b1"] if broker.ordered else ["a2", "b1"])
            if broker.ordered:
                await until(lambda: _is_queued(inbox, "a2"))

    async def test_what_is_held_stays_with_the_broker_and_comes_in_its_time(
        self, broker: BrokerLab, lab: Lab, inbox: Inbox[Any]
    ) -> None:
        tries: list[float] = []

        async def later(message: Message[Any], tx: Any) -> None:
            if message.id == "a1":
                tries.append(monotonic())
                if current().attempt < 3:
                    raise TryLater(1.0)
            await lab.write(tx, message.id)

        await broker.send(Sent("a1", key="a"), Sent("b1", key="b"))
        async with self.consuming(broker, inbox, later, on_failure="hold", batch=1):
            await self.effects(lab, ["b1"])
            if broker.remembers:
                assert await broker.unsettled() >= 1
            await self.effects(lab, ["a1", "b1"])
            await self.settled(broker)
        assert len(tries) == 3, "it was not tried in between"
        assert tries[2] - tries[0] >= 1.9

    async def test_what_is_held_holds_up_its_key(self, broker: BrokerLab, lab: Lab, inbox: Inbox[Any]) -> None:
        needs(broker, "ordered")
        sent = [Sent("a1", key="a"), Sent("a2", key="a"), Sent("b1", key="b"), Sent("a3", key="a")]
        await broker.send(*sent)
        handler = Handler(lab, a1=3)
        async with self.consuming(broker, inbox, handler, on_failure="hold", batch=2):
            await self.effects(lab, ["a1", "a2", "a3", "b1"])
            await self.settled(broker)
        assert [id_ for id_ in handler.order if id_ != "b1"] == ["a1", "a2", "a3"]

    async def test_a_failed_message_is_not_skipped_by_a_later_success(
        self, broker: BrokerLab, lab: Lab, stack: AsyncExitStack
    ) -> None:
        """Held, and its consumer goes away: whoever comes next has it."""
        needs(broker, "remembers")
        inbox = await self.opened(lab, stack, retry=RetryPolicy(max_attempts=5, base=1.0, factor=1.0))
        sent = ids(40)
        await broker.send(*(Sent(id_) for id_ in sent))
        others = [id_ for id_ in sent if id_ != "m0003"]
        async with self.consuming(broker, inbox, Handler(lab, m0003=9), on_failure="hold", batch=10):
            await self.effects(lab, others)
        assert await broker.unsettled() >= 1
        async with self.consuming(broker, inbox, Handler(lab), on_failure="hold"):
            await self.effects(lab, sent)
            await self.settled(broker)

    @pytest.mark.slow
    async def test_the_database_is_away_for_ten_seconds_and_nothing_is_lost_or_settled(
        self, broker: BrokerLab, lab: Lab, stack: AsyncExitStack
    ) -> None:
        if not lab.network:
            pytest.skip(f"{type(lab).__name__} does not have network")
        before, during = ids(20), ids(20, "n")
        async with AsyncExitStack() as line:
            proxy = await line.enter_async_context(Proxy(*lab.address).running())
            port = proxy.port
            inbox = await self.opened(lab, stack, store=lab.store_behind(port), consumer="billing")
            handler = Handler(lab)
            await broker.send(*(Sent(id_) for id_ in before))
            async with self.consuming(broker, inbox, handler, batch=5) as running:
                await self.effects(lab, before)
                await self.settled(broker)
                await line.aclose()  # nobody answers there any more
                await broker.send(*(Sent(id_) for id_ in during))
                tried = len(handler.tries)
                await asyncio.sleep(10.0)
                assert not running.task.done()
                assert len(handler.tries) == tried
                assert not broker.remembers or await broker.unsettled() == 20
                async with Proxy(*lab.address).running(port):
                    await self.effects(lab, before + during)
                    await self.settled(broker)
                    await running.stop()
                    await inbox.close()

    # --- coming and going -----------------------------------------------------------------------------------

    async def test_told_to_stop_it_finishes_what_was_begun_and_leaves_the_rest(
        self, broker: BrokerLab, lab: Lab, inbox: Inbox[Any]
    ) -> None:
        begun, go = asyncio.Event(), asyncio.Event()
        started: list[str] = []

        async def slow(message: Message[Any], tx: Any) -> None:
            started.append(message.id)
            begun.set()
            await go.wait()
            await lab.write(tx, message.id)

        sent = ids(30)
        await broker.send(*(Sent(id_) for id_ in sent))
        async with self.consuming(broker, inbox, slow, batch=1, concurrency=1) as running:
            await begun.wait()
            stopping = asyncio.ensure_future(running.stop())
            await asyncio.sleep(0.1)
            assert not stopping.done()
            go.set()
            await stopping
        done = await lab.effects()
        assert done == sorted(set(started))
        assert len(done) < 30
        if broker.remembers:
            assert await broker.unsettled() == 30 - len(done)
        async with self.consuming(broker, inbox, Handler(lab)):
            await self.effects(lab, sent)

    @pytest.mark.parametrize("kill_at", ["handler", "effect", "after commit"])
    async def test_killed_at_any_moment_it_comes_again_and_takes_effect_once(
        self, broker: BrokerLab, lab: Lab, inbox: Inbox[Any], kill_at: str
    ) -> None:
        needs(broker, "remembers")
        sent = ids(12)
        await broker.send(*(Sent(id_) for id_ in sent))
        first = await Consumer.start(ConsumerJob(url=lab.url, source=broker.job(), kill_at=kill_at, batch=4))
        async with asyncio.timeout(LONG):
            assert await first.ended() == -signal.SIGKILL
        async with self.consuming(broker, inbox, Handler(lab)):
            await self.effects(lab, sent)
            await self.settled(broker)
        assert await lab.effects() == sent

    @pytest.mark.slow
    async def test_a_message_that_kills_its_process_ends_as_a_dead_letter(
        self, broker: BrokerLab, lab: Lab, inbox: Inbox[Any]
    ) -> None:
        needs(broker, "remembers")
        sent = [*ids(5), "poison", *ids(5, "n")]
        await broker.send(*(Sent(id_) for id_ in sent))
        rest, deaths = sorted(id_ for id_ in sent if id_ != "poison"), 0
        job = ConsumerJob(
            url=lab.url, source=broker.job(), kill_at="handler", kill_on="poison", max_attempts=3, batch=3,
            concurrency=1,
        )  # fmt: skip
        for _ in range(12):
            child = await Consumer.start(job)
            await until(lambda child=child: _is_over(child, lab, inbox), within=2 * LONG)  # type: ignore[misc]
            if child.running:
                await child.stop()
                break
            deaths += 1
        assert await lab.effects() == rest
        assert [record.message_id for record in await inbox.records(State.DEAD)] == ["poison"]
        assert 3 <= deaths <= 6
        await self.settled(broker)

    async def test_partitions_move_in_the_middle_of_a_batch_and_nothing_is_doubled_or_lost(
        self, broker: BrokerLab, lab: Lab, stack: AsyncExitStack
    ) -> None:
        """Two members, then three, then the first one leaves."""
        needs(broker, "members")
        sent = [Sent(f"{key}{number:03}", key=key) for number in range(60) for key in "abcdef"]
        await broker.send(*sent)
        inboxes = [await self.opened(lab, stack) for _ in range(3)]
        handler = Slow(lab, 0.01)
        async with AsyncExitStack() as members:
            first = await members.enter_async_context(self.consuming(broker, inboxes[0], handler, batch=8))
            await until(lambda: len(handler.order) > 20, within=LONG)
            await members.enter_async_context(self.consuming(broker, inboxes[1], handler, batch=8))
            await until(lambda: len(handler.order) > 60, within=LONG)
            await members.enter_async_context(self.consuming(broker, inboxes[2], handler, batch=8))
            await until(lambda: len(handler.order) > 120, within=LONG)
            await first.stop()
            await self.effects(lab, [str(one.id) for one in sent])
            await self.settled(broker)
        for key in "abcdef":
            run = [id_ for id_ in handler.order if id_.startswith(key)]
            assert run == sorted(run), "of one key they run in their order, whoever has it"

    async def test_several_consumers_of_one_queue_share_the_work(
        self, broker: BrokerLab, lab: Lab, stack: AsyncExitStack
    ) -> None:
        needs(broker, "competing")
        sent = ids(200)
        await broker.send(*(Sent(id_) for id_ in sent + sent[::4]))
        handler = Slow(lab, 0.002)
        async with AsyncExitStack() as members:
            for _ in range(3):
                inbox = await self.opened(lab, stack)
                await members.enter_async_context(self.consuming(broker, inbox, handler, batch=8))
            await self.effects(lab, sent)
            await self.settled(broker)

    @pytest.mark.slow
    async def test_the_broker_is_killed_and_comes_back(self, broker: BrokerLab, lab: Lab, inbox: Inbox[Any]) -> None:
        needs(broker, "restarts")
        before, after = ids(60), ids(30, "n")
        await broker.send(*(Sent(id_) for id_ in before))
        handler = Slow(lab, 0.01)
        async with self.consuming(broker, inbox, handler, batch=5) as running:
            await until(lambda: len(handler.order) > 10, within=LONG)
            await broker.restart()
            await broker.send(*(Sent(id_) for id_ in after))
            await self.effects(lab, before + after, within=2 * LONG)
            await self.settled(broker)
            assert not running.task.done()

    @pytest.mark.slow
    async def test_the_network_is_cut_and_comes_back(self, broker: BrokerLab, lab: Lab, inbox: Inbox[Any]) -> None:
        needs(broker, "network")
        before, after = ids(60), ids(30, "n")
        await broker.send(*(Sent(id_) for id_ in before))
        handler = Slow(lab, 0.01)
        async with broker.proxy() as proxy, self.consuming(
            broker, inbox, handler, batch=5, port=proxy.port
        ) as running:  # fmt: skip
            await until(lambda: len(handler.order) > 10, within=LONG)
            proxy.cut()
            await broker.send(*(Sent(id_) for id_ in after))
            await self.effects(lab, before + after, within=2 * LONG)
            await self.settled(broker)
            await running.stop()


class Slow(Handler):
    def __init__(self, lab: Lab, seconds: float) -> None:
        super().__init__(lab)
        self._seconds = seconds

    async def __call__(self, message: Message[Any], tx: Any) -> None:
        await super().__call__(message, tx)
        await asyncio.sleep(self._seconds)


async def _is_none(broker: BrokerLab) -> bool:
    return await broker.unsettled() == 0


async def _is_one(broker: BrokerLab) -> bool:
    return await broker.unsettled() == 1


async def _has(lab: Lab, wanted: list[str]) -> bool:
    return set(await lab.effects()) >= set(wanted)


async def _is_queued(inbox: Inbox[Any], id_: str) -> bool:
    record = await inbox.get_record(Message(id_, "order.paid", None))
    return record is not None and record.queued


async def _is_over(child: Consumer, lab: Lab, inbox: Inbox[Any]) -> bool:
    """It died, or everything but the poison is done and that is dead."""
    return not child.running or (len(await lab.effects()) == 10 and bool(await inbox.records(State.DEAD)))
