"""Redis, one server: workers that are killed and frozen, a server that is killed, answers that are lost.

What a handler says through its tx takes effect exactly once all the same, and the record says how it came about.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, NamedTuple

import pytest
from redis.asyncio import Redis

from onceward import Inbox, Message, RetryPolicy, State, TryLater, events
from onceward.errors import CommandFailed, HandlerEndedTransaction, LeaseLost, StoreUnavailable, UsageError
from onceward.outcome import Kind, Outcome
from onceward.record import Record
from onceward.redis import RedisStore, scripts, value
from onceward.redis.scripts import Script
from onceward.testing.contract.base import Listener
from onceward.testing.contract.queue.base import until
from onceward.testing.lab import Gate, Recorder
from onceward.testing.proxy import Proxy
from onceward.testing.redis_labs import RedisLab
from tests.redis_child import Child, message
from tests.services import valkey

LEASE = 0.4
"""Seconds. Long enough for a worker on a busy machine to be heard, and short enough to wait for."""

Start = Callable[..., Awaitable[Child]]


def short(lab: RedisLab) -> str:
    return f"{lab.plain_url}?lease={LEASE}"


@pytest.fixture
async def start(redis_lab: RedisLab) -> AsyncIterator[Start]:
    """Starts worker processes, which are gone at the end of the test."""
    async with AsyncExitStack() as stack:

        async def start(url: str | None = None, **job: Any) -> Child:
            child = await Child.start(url or short(redis_lab), **job)
            stack.push_async_callback(child.clean_up)
            return child

        yield start


async def short_inbox(lab: RedisLab, **options: Any) -> Inbox[Any]:
    """An inbox of this process, which is another one than the worker's. It remembers nothing by itself."""
    usual: dict[str, Any] = {"cache": 0, "listeners": (), "wait": 10.0}
    return await lab.inbox(store=RedisStore(lab.plain_url, lease=LEASE), **usual | options)


async def record_of(inbox: Inbox[Any], id_: str) -> Record:
    record = await inbox.get_record(message(id_))
    assert record is not None
    return record


async def counts(inbox: Inbox[Any], id_: str) -> tuple[int, int]:
    """Attempts that ended, and starts that did not."""
    record = await record_of(inbox, id_)
    return record.attempts, record.started


async def failed_before(lab: RedisLab, id_: str) -> None:
    inbox = await short_inbox(lab)
    with pytest.raises(ValueError, match="no"):
        await inbox.process(message(id_), Recorder(lab, error=ValueError("no")))


async def lapsed(lab: RedisLab, inbox: Inbox[Any], ids: Iterable[str]) -> None:
    """Wait until the leases of all of these are over, by the server's clock."""
    store: Any = inbox.store
    keys = [store.key(inbox.identity_of(message(id_))) for id_ in ids]
    async with lab.client() as client:

        async def over() -> bool:
            seconds, micros = await client.time()
            ends = [value.front_of(found).at for found in await client.mget(keys)]
            return max(ends) < int(seconds) * 1_000_000 + int(micros)

        await until(over)


def kinds(outcomes: Sequence[Outcome[Any]]) -> list[str]:
    return [outcome.kind.value for outcome in outcomes]


# --- killed at each step ------------------------------------------------------------------------------------


class Step(NamedTuple):
    """Where a worker dies, and what the next delivery comes to."""

    kill_at: str
    kind: Kind
    attempts: int
    started: int
    fail: str = ""


NEVER_BEGAN = (Kind.PROCESSED, 1, 0)
CRASHED = (Kind.PROCESSED, 1, 1)

STEPS = (
    Step("before claim", *NEVER_BEGAN),
    Step("after claim", *CRASHED),
    Step("handler", *CRASHED),
    Step("effect", *CRASHED),
    Step("before complete", *CRASHED),
    Step("after complete", Kind.DUPLICATE, 1, 0),
    Step("before fail", *CRASHED, "error"),
    Step("after fail", Kind.PROCESSED, 2, 0, "error"),
    Step("before release", *CRASHED, "cancel"),
    Step("after release", *NEVER_BEGAN, "cancel"),
)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.kill_at)
async def test_a_worker_killed_at_any_step_leaves_one_effect_and_the_right_counts(
    redis_lab: RedisLab, start: Start, step: Step
) -> None:
    worker = await start(kill_at=step.kill_at)
    worker.tell("process", ["m"], fail=step.fail)
    await worker.died()
    assert worker.ended() == {}
    inbox, handler = await short_inbox(redis_lab), Recorder(redis_lab)
    outcome = await inbox.process(message("m"), handler)
    assert (outcome.kind, outcome.result) == (step.kind, {"charged": "m"})
    assert await counts(inbox, "m") == (step.attempts, step.started)
    assert len(handler.runs) == (0 if outcome.duplicate else 1)
    assert await redis_lab.effects() == ["m"]


TAKES = (
    Step("before take", Kind.PROCESSED, 2, 0),
    Step("after take", Kind.PROCESSED, 2, 1),
    Step("before complete", Kind.PROCESSED, 2, 1),
    Step("after complete", Kind.DUPLICATE, 2, 0),
    Step("before fail", Kind.PROCESSED, 2, 1, "error"),
    Step("after fail", Kind.PROCESSED, 3, 0, "error"),
    Step("after release", Kind.PROCESSED, 2, 0, "cancel"),
)


@pytest.mark.parametrize("step", TAKES, ids=lambda step: step.kill_at)
async def test_a_worker_killed_while_it_takes_a_failed_message_over_forgets_nothing_of_it(
    redis_lab: RedisLab, start: Start, step: Step
) -> None:
    await failed_before(redis_lab, "m")
    worker = await start(kill_at=step.kill_at)
    worker.tell("process", ["m"], fail=step.fail)
    await worker.died()
    inbox = await short_inbox(redis_lab)
    before = await record_of(inbox, "m")
    assert [error.text for error in before.errors] == ["no"] * (2 if step.kill_at == "after fail" else 1)
    outcome = await inbox.process(message("m"), Recorder(redis_lab))
    assert outcome.kind is step.kind
    assert await counts(inbox, "m") == (step.attempts, step.started)
    assert (await record_of(inbox, "m")).received_at == before.received_at
    assert await redis_lab.effects() == ["m"]


BATCH = [f"{number}" for number in range(10)]


async def test_a_batch_killed_in_its_middle_keeps_what_was_completed_and_blames_nobody_at_first(
    redis_lab: RedisLab, start: Start
) -> None:
    """Its handlers take so long that each is completed before the next one runs."""
    worker = await start(kill_at="handler of 5", slow=0.02)
    worker.tell("many", BATCH)
    await worker.died()
    inbox = await short_inbox(redis_lab)
    assert await redis_lab.effects() == BATCH[:5]
    found = [await record_of(inbox, id_) for id_ in BATCH]
    assert [record.state for record in found] == [State.PROCESSED] * 5 + [State.RUNNING] * 5
    assert {record.started for record in found} == {0}, "who was it? Any of five may have been"
    handler = Recorder(redis_lab)
    outcomes = await inbox.process_many([message(id_) for id_ in BATCH], handler)
    assert kinds(outcomes) == ["duplicate"] * 5 + ["processed"] * 5
    assert [outcome.result for outcome in outcomes] == [{"charged": id_} for id_ in BATCH]
    assert handler.runs == BATCH[5:]
    assert {await counts(inbox, id_) for id_ in BATCH} == {(1, 0)}
    assert await redis_lab.effects() == BATCH


async def test_after_a_killed_batch_its_messages_are_worked_one_by_one_and_the_next_crash_is_counted_for_one(
    redis_lab: RedisLab, start: Start
) -> None:
    for number in (0, 1):
        worker = await start(kill_at="handler of 5", slow=0.02)
        worker.tell("many", BATCH)
        await worker.died()
        assert number == 1 or worker.said("running").keys() == set(BATCH[:5])
    inbox = await short_inbox(redis_lab)
    started = {id_: (await record_of(inbox, id_)).started for id_ in BATCH}
    assert started == dict.fromkeys(BATCH, 0) | {"5": 1}
    outcomes = await inbox.process_many([message(id_) for id_ in BATCH], Recorder(redis_lab))
    assert kinds(outcomes) == ["duplicate"] * 5 + ["processed"] * 5
    assert await counts(inbox, "5") == (1, 1)
    assert await redis_lab.effects() == BATCH


async def test_a_message_that_kills_every_batch_is_buried_and_its_neighbours_are_not(
    redis_lab: RedisLab, start: Start
) -> None:
    for _ in range(3):
        worker = await start(kill_at="handler of 5", max_attempts=2)
        worker.tell("many", BATCH)
        await worker.died()
    await redis_lab.change("5", next_try_at=value.moment(1))  # half a minute later: its runner is surely gone
    inbox, handler = await short_inbox(redis_lab, retry=RetryPolicy(max_attempts=2, base=0.0)), Recorder(redis_lab)
    outcomes = await inbox.process_many([message(id_) for id_ in BATCH], handler)
    assert {id_: kind for id_, kind in zip(BATCH, kinds(outcomes), strict=True) if kind == "dead"} == {"5": "dead"}
    assert "5" not in handler.runs
    assert (await record_of(inbox, "5")).started == 2
    assert await redis_lab.effects() == [id_ for id_ in BATCH if id_ != "5"]


@pytest.mark.parametrize("kill_at", ["before complete", "after complete"])
async def test_a_bulk_is_completed_as_a_whole_or_not_at_all(redis_lab: RedisLab, start: Start, kill_at: str) -> None:
    worker = await start(kill_at=kill_at)
    worker.tell("bulk", BATCH)
    await worker.died()
    done = kill_at == "after complete"
    assert await redis_lab.effects() == (BATCH if done else [])
    inbox = await short_inbox(redis_lab)
    runs: list[str] = []

    async def charge_all(messages: list[Message[Any]], tx: Any) -> None:
        for one in messages:
            runs.append(one.id)
            await redis_lab.write(tx, one.id)

    outcomes = await inbox.process_bulk([message(id_) for id_ in BATCH], charge_all)
    assert kinds(outcomes) == ["duplicate" if done else "processed"] * 10
    assert sorted(runs) == ([] if done else BATCH)
    assert await redis_lab.effects() == BATCH
    assert {await counts(inbox, id_) for id_ in BATCH} == {(1, 0)}


async def test_a_worker_killed_before_it_could_keep_the_payload_leaves_a_dead_letter_that_says_so(
    redis_lab: RedisLab, start: Start
) -> None:
    """The second command of its tx failed, so the script buried the message. The worker dies before it brings the
    payload: that is the one dead letter that cannot be replayed, and nobody runs it with a payload of None."""
    worker = await start(kill_at="before explain")
    worker.tell("process", ["m"], fail="command")
    await worker.died()
    inbox, handler = await short_inbox(redis_lab), Recorder(redis_lab)
    assert (await inbox.process(message("m"), handler)).kind is Kind.DEAD
    record = await record_of(inbox, "m")
    assert (record.state, record.payload) == (State.DEAD, None)
    assert "failed after 2 had been applied" in record.last_error
    with pytest.raises(UsageError, match="was not kept"):
        await inbox.replay(message("m"), handler)
    assert handler.runs == []


# --- frozen past the lease ----------------------------------------------------------------------------------

ZOMBIES = 10
ROUNDS = 20
"""So 200 freezes. Each process holds two messages when it is frozen."""


async def freeze_and_replace(
    lab: RedisLab, inbox: Inbox[Any], zombies: list[Child], rescuer: Child, number: int
) -> int:
    """One round. How many messages were taken over while their first runner stood still."""
    returns = [f"{number}-{place}-returns" for place in range(len(zombies))]
    waits = [f"{number}-{place}-waits" for place in range(len(zombies))]
    first: dict[str, int] = {}
    for place, zombie in enumerate(zombies):
        zombie.tell("process", [returns[place], waits[place]], hold="await")
    for place, zombie in enumerate(zombies):
        first |= await zombie.running([returns[place], waits[place]])
        zombie.freeze()
    await lapsed(lab, inbox, first)
    rescuer.tell("process", first)
    await rescuer.all_ended(first)
    second = await rescuer.running(first)
    assert all(second[id_] > first[id_] for id_ in first), "a fence that does not grow protects nobody"
    for place, zombie in enumerate(zombies):
        zombie.tell("go", [returns[place]])  # one handler returns when it wakes; the other one has to be stopped
        zombie.thaw()
    for place, zombie in enumerate(zombies):
        await zombie.all_ended([returns[place], waits[place]])
        assert waits[place] in zombie.said("told")
    return len(first)


async def test_200_times_frozen_past_the_lease_and_every_completion_of_a_zombie_is_refused(
    redis_lab: RedisLab, start: Start
) -> None:
    *zombies, rescuer = await asyncio.gather(*(start() for _ in range(ZOMBIES + 1)))
    inbox = await short_inbox(redis_lab)
    taken = [await freeze_and_replace(redis_lab, inbox, zombies, rescuer, number) for number in range(ROUNDS)]
    ended = Counter(how for zombie in zombies for how in zombie.ended().values())
    assert ended == {"LeaseLost": sum(taken)}, "each was told, none succeeded in silence"
    assert sum(taken) == 2 * ZOMBIES * ROUNDS
    assert Counter(rescuer.ended().values()) == {"processed": sum(taken)}
    effects = Counter(await redis_lab.effects())
    assert (len(effects), set(effects.values())) == (sum(taken), {1})
    assert {(kept["attempts"], kept["started"]) for kept in await redis_lab.kept()} == {(1, 1)}
    print(f"{ZOMBIES * ROUNDS} freezes: {ended['LeaseLost']} of {sum(taken)} completions of zombies refused")


async def test_a_frozen_batch_loses_only_what_others_have_taken(redis_lab: RedisLab, start: Start) -> None:
    """Of ten, five are completed before the freeze; of the rest, three are taken over meanwhile."""
    zombie, inbox = await start(slow=0.02), await short_inbox(redis_lab)
    zombie.tell("many", BATCH)
    await zombie.hear(lambda: "5" in zombie.said("running"))
    zombie.freeze()
    left = [kept["message_id"] for kept in await redis_lab.kept() if kept["state"] == State.RUNNING]
    taken = sorted(left)[-3:]
    await lapsed(redis_lab, inbox, left)
    outcomes = await inbox.process_many([message(id_) for id_ in taken], Recorder(redis_lab))
    assert kinds(outcomes) == ["processed"] * 3
    zombie.thaw()
    await zombie.obeyed()
    ended = zombie.ended()
    assert {ended[id_] for id_ in taken} <= {"busy", "duplicate"}
    assert {ended[id_] for id_ in BATCH if id_ not in taken} <= {"processed", "busy"}
    again = await inbox.process_many([message(id_) for id_ in BATCH], Recorder(redis_lab))
    for id_, outcome in zip(BATCH, again, strict=True):
        assert outcome.duplicate or ended[id_] == "busy"
    assert await redis_lab.effects() == BATCH


# --- leases in one process ----------------------------------------------------------------------------------


async def test_a_handler_that_blocks_the_event_loop_past_its_lease_loses_it(redis_lab: RedisLab, start: Start) -> None:
    worker, inbox = await start(), await short_inbox(redis_lab)
    worker.tell("process", ["m"], hold="block")
    await worker.running(["m"])
    await lapsed(redis_lab, inbox, ["m"])
    assert (await inbox.process(message("m"), Recorder(redis_lab))).processed
    async with redis_lab.client() as client:
        await client.rpush("go:m", "go")
    await worker.obeyed()
    assert worker.ended() == {"m": "LeaseLost"}
    assert await redis_lab.effects() == ["m"]
    assert await counts(inbox, "m") == (1, 1)


async def test_a_handler_that_blocked_past_its_lease_may_complete_if_nobody_has_taken_over(
    redis_lab: RedisLab, start: Start
) -> None:
    worker, inbox = await start(), await short_inbox(redis_lab)
    worker.tell("process", ["m"], hold="block")
    await worker.running(["m"])
    await lapsed(redis_lab, inbox, ["m"])
    async with redis_lab.client() as client:
        await client.rpush("go:m", "go")
    await worker.obeyed()
    assert worker.ended() == {"m": "processed"}
    assert (await inbox.process(message("m"), Recorder(redis_lab))).duplicate
    assert await redis_lab.effects() == ["m"]


async def test_a_handler_that_awaits_past_its_lease_keeps_it(redis_lab: RedisLab) -> None:
    inbox, gate = await short_inbox(redis_lab), Gate(redis_lab)
    running = asyncio.ensure_future(inbox.process(message("m"), gate))
    await gate.started.wait()
    ends = [(await record_of(inbox, "m")).next_try_at]

    async def grown_four_times() -> bool:
        end = (await record_of(inbox, "m")).next_try_at
        if end != ends[-1]:
            ends.append(end)
        return len(ends) > 4

    await until(grown_four_times)
    assert ends == sorted(ends)  # type: ignore[type-var]
    assert ends[-1] is not None
    assert ends[0] is not None
    assert (ends[-1] - ends[0]).total_seconds() > LEASE, "it is over the first lease by now"
    with pytest.raises(TryLater, match="another runner"):
        await (await short_inbox(redis_lab, wait=0.0)).process(message("m"), Recorder(redis_lab))
    gate.go.set()
    assert (await running).processed
    assert await counts(inbox, "m") == (1, 0)
    assert await redis_lab.effects() == ["m"]


async def delete_record(lab: RedisLab, inbox: Inbox[Any], id_: str) -> None:
    store: Any = inbox.store
    async with lab.client() as client:
        assert await client.delete(store.key(inbox.identity_of(message(id_)))) == 1


async def test_a_handler_whose_record_vanished_is_stopped_within_a_lease(redis_lab: RedisLab) -> None:
    inbox, gate = await short_inbox(redis_lab), Gate(redis_lab)
    running = asyncio.ensure_future(inbox.process(message("m"), gate))
    await gate.started.wait()
    await delete_record(redis_lab, inbox, "m")
    began = time.monotonic()
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(running, 10)
    assert time.monotonic() - began < LEASE
    assert await redis_lab.effects() == []
    assert (await inbox.process(message("m"), Recorder(redis_lab))).processed


async def test_a_batch_whose_record_vanished_stops_that_one_handler_and_goes_on(redis_lab: RedisLab) -> None:
    inbox = await short_inbox(redis_lab)
    gate = Gate(redis_lab)

    async def handler(one: Message[Any], tx: Any) -> None:
        if one.id == "1":
            await gate(one, tx)
        else:
            await redis_lab.write(tx, one.id)

    running = asyncio.ensure_future(inbox.process_many([message(id_) for id_ in ("0", "1", "2")], handler))
    await gate.started.wait()
    await delete_record(redis_lab, inbox, "1")
    outcomes = await asyncio.wait_for(running, 10)
    assert kinds(outcomes) == ["processed", "busy", "processed"]
    assert isinstance(outcomes[1].error, LeaseLost)
    again = await inbox.process_many([message(id_) for id_ in ("0", "1", "2")], Recorder(redis_lab))
    assert kinds(again) == ["duplicate", "processed", "duplicate"]
    assert {await counts(inbox, id_) for id_ in ("0", "1", "2")} == {(1, 0)}
    assert await redis_lab.effects() == ["0", "1", "2"]


async def test_a_handler_that_swallows_being_stopped_still_loses_and_its_task_is_left_as_it_was(
    redis_lab: RedisLab,
) -> None:
    inbox, gate, left = await short_inbox(redis_lab), Gate(redis_lab), 1

    async def stubborn(one: Message[Any], tx: Any) -> None:
        with suppress(asyncio.CancelledError):
            await gate(one, tx)

    async def run() -> None:
        nonlocal left
        try:
            await inbox.process(message("m"), stubborn)
        finally:
            task = asyncio.current_task()
            assert task is not None
            left = task.cancelling()

    running = asyncio.ensure_future(run())
    await gate.started.wait()
    await delete_record(redis_lab, inbox, "m")
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(running, 10)
    assert await redis_lab.effects() == []
    assert left == 0, "whoever uses asyncio.timeout or a TaskGroup next would take it for a cancellation of theirs"


class LateAnswer(Redis):
    """A client that hears of a kept failure only after the next heartbeat was answered."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.beats = 0

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        parent: Any = super()
        reply = await parent.execute_command(*args, **options)
        if args[1:2] == (scripts.HEARTBEAT.sha,):
            self.beats += 1
        if args[1:2] == (scripts.FAIL.sha,):
            before = self.beats

            async def beaten() -> bool:
                return self.beats > before

            await until(beaten)
        return reply


async def test_a_heartbeat_that_crosses_a_kept_failure_is_no_lost_lease(redis_lab: RedisLab) -> None:
    await scripts_known(redis_lab)
    ids = BATCH[:3]

    async def handler(one: Message[Any], tx: Any) -> None:
        await redis_lab.write(tx, one.id)
        if one.id == "1":
            raise ValueError("no")

    async with LateAnswer.from_url(redis_lab.plain_url) as client:
        inbox = await redis_lab.inbox(store=RedisStore(client=client, lease=LEASE), cache=0, listeners=())
        outcomes = await inbox.process_many([message(id_) for id_ in ids], handler)
        assert kinds(outcomes) == ["processed", "failed", "processed"]
        assert isinstance(outcomes[1].error, ValueError)
        assert await counts(inbox, "1") == (1, 0)
        await inbox.close()


# --- the server is killed -----------------------------------------------------------------------------------

needs_a_binary = pytest.mark.skipif(valkey.binary() is None, reason="no Valkey or Redis here to be killed")
IDS = [f"{number:03}" for number in range(300)]
KILLS = 3


def acknowledged(workers: list[Child]) -> set[str]:
    return {id_ for worker in workers for id_, how in worker.ended().items() if how in ("processed", "duplicate")}


async def some_acknowledged(workers: list[Child], number: int) -> None:
    await workers[0].hear(lambda: len(acknowledged(workers)) >= number)


async def states(lab: RedisLab) -> dict[str, State]:
    return {kept["message_id"]: kept["state"] for kept in await lab.kept()}


@needs_a_binary
async def test_no_acknowledged_completion_is_lost_when_a_server_is_killed_that_writes_each_to_disk(
    start: Start,
) -> None:
    """Both workers are given all messages, and a message that is not acknowledged is delivered again."""
    with valkey.throwaway(in_memory=True, appendonly="yes", appendfsync="always") as server:
        lab = RedisLab(server.url)
        workers = [await start(short(lab), slow=0.005) for _ in range(2)]
        for worker in workers:
            worker.tell("drain", IDS if worker is workers[0] else reversed(IDS), concurrency=6)
        for number in range(KILLS):
            await some_acknowledged(workers, len(IDS) * (number + 1) // (KILLS + 2))
            server.kill()
            before = acknowledged(workers)
            if number == 0:  # long enough that it is not only a hiccup
                await workers[0].hear(lambda: {"StoreUnavailable", "CommitUnknown"} & set(workers[0].ended().values()))
            server.start()
            found = await states(lab)
            assert {found.get(id_) for id_ in before} == {State.PROCESSED}
        for worker in workers:
            await worker.obeyed()
            assert worker.said("surprise") == {}
        assert acknowledged(workers) == set(IDS)
        async with Inbox(RedisStore(server.url), consumer="billing", cache=0) as inbox:
            handler = Recorder(lab)
            outcomes = [await inbox.process(message(id_), handler) for id_ in IDS]
        assert {outcome.kind for outcome in outcomes} == {Kind.DUPLICATE}
        assert await lab.effects() == IDS
        runs = sum(worker.count("running") for worker in workers)
        print(f"{KILLS} kills of the server, {len(IDS)} messages: {runs} runs, {len(await lab.effects())} effects")


@needs_a_binary
async def test_a_server_that_keeps_nothing_forgets_and_that_was_said_at_start() -> None:
    heard, runs = Listener(), []

    async def handler(one: Message[Any]) -> None:
        runs.append(one.id)

    with valkey.throwaway(in_memory=True) as server:
        store = RedisStore(server.url)
        async with Inbox(store, consumer="billing", cache=0, listeners=(heard,)) as inbox:
            assert [finding.name for finding in await store.check()] == ["no-persistence"]
            assert [event.finding for event in heard if isinstance(event, events.AtRisk)] == ["no-persistence"]
            assert (await inbox.process(message("m"), handler)).processed
            assert (await inbox.process(message("m"), handler)).duplicate
            server.kill()
            server.start()
            assert (await inbox.process(message("m"), handler)).processed
    assert runs == ["m", "m"]


@needs_a_binary
async def test_a_server_that_evicts_is_found_out_at_start() -> None:
    heard = Listener()
    options = {"maxmemory_policy": "allkeys-lru", "appendonly": "yes", "appendfsync": "always"}
    with valkey.throwaway(in_memory=True, **options) as server:
        store = RedisStore(server.url)
        async with Inbox(store, consumer="billing", listeners=(heard,)):
            assert [finding.name for finding in await store.check()] == ["eviction"]
            assert [event.finding for event in heard if isinstance(event, events.AtRisk)] == ["eviction"]


@needs_a_binary
async def test_a_server_that_is_back_is_used_at_once_however_many_connections_have_died() -> None:
    """Nobody who delivers one message at a time is told of an outage that is over."""
    with valkey.throwaway(in_memory=True, appendonly="yes", appendfsync="always") as server:
        lab = RedisLab(server.url)
        async with Inbox(RedisStore(server.url), consumer="billing", cache=0) as inbox:
            gates = [Gate(lab) for _ in range(30)]
            at_work = [asyncio.ensure_future(inbox.process(message(f"{n}"), gate)) for n, gate in enumerate(gates)]
            for gate in gates:
                await gate.started.wait()
            for gate in gates:
                gate.go.set()
            await asyncio.gather(*at_work)
            server.kill()
            server.start()
            assert (await inbox.process(message("after"), Recorder(lab))).processed


@needs_a_binary
async def test_a_claim_that_a_frozen_server_grants_to_nobody_costs_a_lease_and_no_effect() -> None:
    """The worker was told that the server is not there, and cannot know that the claim will be granted after all. So it
    may count as a start that never ended."""
    with valkey.throwaway(in_memory=True, appendonly="yes", appendfsync="always") as server:
        lab = RedisLab(server.url)
        store, handler = RedisStore(server.url, lease=LEASE, socket_timeout=0.1), Recorder(lab)
        async with Inbox(store, consumer="billing", cache=0, listeners=()) as inbox:
            assert (await inbox.process(message("before"), handler)).processed
            server.freeze()
            began = time.monotonic()
            with pytest.raises(StoreUnavailable):
                await inbox.process(message("m"), handler)
            took = time.monotonic() - began
            assert took < 5
            server.thaw()
            assert (await inbox.process(message("m"), handler)).processed
            attempts, started = await counts(inbox, "m")
            assert (attempts, started <= 1) == (1, True)
        assert handler.runs == ["before", "m"]
        assert await lab.effects() == ["before", "m"]
        print(f"a frozen server, with a timeout of 0.1 s: told after {took:.1f} s")


# --- answers that are lost ----------------------------------------------------------------------------------


async def scripts_known(lab: RedisLab) -> None:
    """So that no script has to be sent as a whole, whose hash nobody could see on the wire."""
    async with lab.client() as client:
        for script in vars(scripts).values():
            if isinstance(script, Script):
                assert (await client.script_load(script.text)) in (script.sha, script.sha.encode())


async def evaluations(lab: RedisLab) -> int:
    async with lab.client() as client:
        return int((await client.info("commandstats"))["cmdstat_evalsha"]["calls"])


@pytest.fixture
async def proxy(redis_lab: RedisLab) -> AsyncIterator[Proxy]:
    await scripts_known(redis_lab)
    proxy = Proxy(*redis_lab.address)
    async with proxy.running():
        yield proxy


async def behind(lab: RedisLab, proxy: Proxy) -> Inbox[Any]:
    return await lab.inbox(store=lab.store_behind(proxy.port), cache=0, listeners=())


def cut(proxy: Proxy, script: Script, *, deliver: bool) -> None:
    proxy.cut_at, proxy.deliver = script.sha.encode(), deliver


delivered = pytest.mark.parametrize("deliver", [True, False], ids=["answer lost", "question lost"])


@delivered
async def test_a_claim_that_is_sent_again_is_granted_once(redis_lab: RedisLab, proxy: Proxy, deliver: bool) -> None:
    inbox, handler, before = await behind(redis_lab, proxy), Recorder(redis_lab), await evaluations(redis_lab)
    cut(proxy, scripts.CLAIM, deliver=deliver)
    outcome = await inbox.process(message("m"), handler)
    assert proxy.was_cut.is_set()
    assert outcome.processed
    assert handler.runs == ["m"]
    assert await evaluations(redis_lab) - before == (3 if deliver else 2)
    assert await counts(inbox, "m") == (1, 0)
    assert await redis_lab.effects() == ["m"]
    await inbox.close()


@delivered
async def test_a_takeover_that_is_sent_again_is_granted_once(redis_lab: RedisLab, proxy: Proxy, deliver: bool) -> None:
    await failed_before(redis_lab, "m")
    inbox, handler = await behind(redis_lab, proxy), Recorder(redis_lab)
    cut(proxy, scripts.TAKE, deliver=deliver)
    assert (await inbox.process(message("m"), handler)).processed
    assert proxy.was_cut.is_set()
    assert handler.runs == ["m"]
    assert await counts(inbox, "m") == (2, 0)
    assert await redis_lab.effects() == ["m"]
    await inbox.close()


@delivered
async def test_a_completion_that_is_sent_again_is_applied_once(
    redis_lab: RedisLab, proxy: Proxy, deliver: bool
) -> None:
    inbox, handler, before = await behind(redis_lab, proxy), Recorder(redis_lab), await evaluations(redis_lab)
    cut(proxy, scripts.COMPLETE, deliver=deliver)
    outcome = await inbox.process(message("m"), handler)
    assert proxy.was_cut.is_set()
    assert outcome.processed
    assert await evaluations(redis_lab) - before == (3 if deliver else 2)
    assert await counts(inbox, "m") == (1, 0)
    assert await redis_lab.effects() == ["m"]
    assert (await inbox.process(message("m"), handler)).result == {"charged": "m"}
    assert handler.runs == ["m"]
    await inbox.close()


@delivered
@pytest.mark.parametrize("verb", ["process_many", "process_bulk"])
async def test_the_completion_of_a_batch_that_is_sent_again_is_applied_once(
    redis_lab: RedisLab, proxy: Proxy, verb: str, deliver: bool
) -> None:
    inbox = await behind(redis_lab, proxy)

    async def charge_all(messages: list[Message[Any]], tx: Any) -> None:
        for one in messages:
            await redis_lab.write(tx, one.id)

    cut(proxy, scripts.COMPLETE, deliver=deliver)
    handler = charge_all if verb == "process_bulk" else Recorder(redis_lab)
    outcomes = await getattr(inbox, verb)([message(id_) for id_ in BATCH], handler)
    assert proxy.was_cut.is_set()
    assert kinds(outcomes) == ["processed"] * 10
    assert {await counts(inbox, id_) for id_ in BATCH} == {(1, 0)}
    assert await redis_lab.effects() == BATCH
    await inbox.close()


@delivered
async def test_a_failure_that_is_sent_again_is_counted_once(redis_lab: RedisLab, proxy: Proxy, deliver: bool) -> None:
    inbox = await behind(redis_lab, proxy)
    cut(proxy, scripts.FAIL, deliver=deliver)
    with pytest.raises(ValueError, match="no"):
        await inbox.process(message("m"), Recorder(redis_lab, error=ValueError("no")))
    assert proxy.was_cut.is_set()
    record = await record_of(inbox, "m")
    assert (record.state, record.attempts, record.started, len(record.errors)) == (State.FAILED, 1, 0, 1)
    assert (await inbox.process(message("m"), Recorder(redis_lab))).processed
    assert await counts(inbox, "m") == (2, 0)
    await inbox.close()


@delivered
async def test_what_is_given_back_twice_is_given_back_once(redis_lab: RedisLab, proxy: Proxy, deliver: bool) -> None:
    inbox, gate = await behind(redis_lab, proxy), Gate(redis_lab)
    cut(proxy, scripts.RELEASE, deliver=deliver)
    running = asyncio.ensure_future(inbox.process(message("m"), gate))
    await gate.started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert proxy.was_cut.is_set()
    assert await redis_lab.kept() == []
    assert (await inbox.process(message("m"), Recorder(redis_lab))).processed
    assert await counts(inbox, "m") == (1, 0)
    assert await redis_lab.effects() == ["m"]
    await inbox.close()


# --- commands that fail -------------------------------------------------------------------------------------


async def with_text(lab: RedisLab, key: str) -> None:
    """A key that cannot be counted up."""
    async with lab.client() as client:
        await client.set(key, "text")


async def second_fails(one: Message[Any], tx: Any) -> None:
    tx.rpush("effects:all", one.id)
    tx.lpush("text", one.id)


async def test_a_command_that_fails_after_another_leaves_a_dead_letter_that_names_it(redis_lab: RedisLab) -> None:
    await with_text(redis_lab, "text")
    inbox, handler = await short_inbox(redis_lab), Recorder(redis_lab)
    with pytest.raises(HandlerEndedTransaction, match=r"command 2 .* 1 had been applied: WRONGTYPE"):
        await inbox.process(message("m"), second_fails)
    assert await redis_lab.effects() == ["m"], "what was applied stands"
    record = await record_of(inbox, "m")
    assert (record.state, record.started, record.payload) == (State.DEAD, 0, {"amount": 7})
    assert "WRONGTYPE" in record.last_error
    assert "command 2" in record.last_error
    for redelivered in (False, True):
        outcome = await inbox.process(message("m"), handler, redelivered=redelivered)
        assert (outcome.kind, handler.runs) == (Kind.DEAD, [])
        assert "WRONGTYPE" in str(outcome.error)
    assert await redis_lab.effects() == ["m"]


async def test_a_first_command_that_fails_leaves_nothing_and_the_message_is_tried_again(redis_lab: RedisLab) -> None:
    await with_text(redis_lab, "text")

    async def first_fails(one: Message[Any], tx: Any) -> None:
        tx.lpush("text", one.id)
        tx.rpush("effects:all", one.id)

    inbox = await short_inbox(redis_lab)
    with pytest.raises(CommandFailed, match="WRONGTYPE"):
        await inbox.process(message("m"), first_fails)
    assert await redis_lab.effects() == []
    record = await record_of(inbox, "m")
    assert (record.state, record.attempts, record.started) == (State.FAILED, 1, 0)
    assert (await inbox.process(message("m"), Recorder(redis_lab))).processed
    assert await counts(inbox, "m") == (2, 0)
    assert await redis_lab.effects() == ["m"]


async def test_in_a_batch_a_command_that_fails_is_the_trouble_of_its_own_message(redis_lab: RedisLab) -> None:
    await with_text(redis_lab, "text")

    async def handler(one: Message[Any], tx: Any) -> None:
        if one.id == "2":
            await second_fails(one, tx)
        elif one.id == "3":
            tx.lpush("text", one.id)
        else:
            await redis_lab.write(tx, one.id)

    inbox, ids = await short_inbox(redis_lab), BATCH[:6]
    outcomes = await inbox.process_many([message(id_) for id_ in ids], handler)
    assert kinds(outcomes) == ["processed", "processed", "failed", "failed", "processed", "processed"]
    assert await states(redis_lab) == dict.fromkeys(ids, State.PROCESSED) | {"2": State.DEAD, "3": State.FAILED}
    assert await counts(inbox, "3") == (1, 0)
    assert await redis_lab.effects() == ["0", "1", "2", "4", "5"]
    again = await inbox.process_many([message(id_) for id_ in ids], Recorder(redis_lab))
    assert kinds(again) == ["duplicate", "duplicate", "dead", "processed", "duplicate", "duplicate"]
    assert await redis_lab.effects() == ids


async def test_in_a_bulk_a_command_that_fails_buries_all_of_its_messages(redis_lab: RedisLab) -> None:
    await with_text(redis_lab, "text")
    runs: list[list[str]] = []

    async def charge_all(messages: list[Message[Any]], tx: Any) -> None:
        runs.append([one.id for one in messages])
        for one in messages:
            tx.rpush("effects:all", one.id)
        tx.lpush("text", "all")

    inbox, ids = await short_inbox(redis_lab), BATCH[:4]
    outcomes = await inbox.process_bulk([message(id_) for id_ in ids], charge_all)
    assert kinds(outcomes) == ["failed"] * 4
    assert await states(redis_lab) == dict.fromkeys(ids, State.DEAD)
    for id_ in ids:
        record = await record_of(inbox, id_)
        assert "WRONGTYPE" in record.last_error
        assert (record.started, record.payload) == (0, {"amount": 7})
    again = await inbox.process_bulk([message(id_) for id_ in ids], charge_all)
    assert kinds(again) == ["dead"] * 4
    assert runs == [ids]
    assert await redis_lab.effects() == ids, "nothing is applied twice"


async def test_a_bulk_whose_first_command_fails_is_split_and_nothing_is_applied_twice(redis_lab: RedisLab) -> None:
    """The list belongs to message 2, which alone is to blame."""
    await with_text(redis_lab, "text")

    async def charge_all(messages: list[Message[Any]], tx: Any) -> None:
        for one in sorted(messages, key=lambda one: one.id != "2"):
            tx.rpush("text" if one.id == "2" else "effects:all", one.id)

    inbox, ids = await short_inbox(redis_lab), BATCH[:4]
    outcomes = await inbox.process_bulk([message(id_) for id_ in ids], charge_all)
    assert kinds(outcomes) == ["processed", "processed", "failed", "processed"]
    assert await counts(inbox, "2") == (1, 0)
    assert await redis_lab.effects() == ["0", "1", "3"]


async def test_a_dead_letter_has_its_reason_also_when_the_answer_was_lost(redis_lab: RedisLab, proxy: Proxy) -> None:
    await with_text(redis_lab, "text")
    inbox = await behind(redis_lab, proxy)
    cut(proxy, scripts.COMPLETE, deliver=True)
    with pytest.raises((HandlerEndedTransaction, LeaseLost)):
        await inbox.process(message("m"), second_fails)
    record = await record_of(inbox, "m")
    assert (record.state, await redis_lab.effects()) == (State.DEAD, ["m"])
    assert (bool(record.last_error), record.payload) == (True, {"amount": 7})
