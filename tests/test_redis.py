"""What only the Redis store has: its options, its tx, its keys, and what it says of what it cannot do."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from onceward import Inbox, Message, Reject, State, TryLater, current
from onceward.connect import store_from_url
from onceward.errors import CommandFailed, HandlerEndedTransaction, LeaseLost, StoreError, StoreUnavailable, UsageError
from onceward.identity import Identity
from onceward.message import Position
from onceward.outcome import Kind, Verdict, verdict_of
from onceward.record import Failure, Record
from onceward.redis import RedisStore, RedisTx, value
from onceward.testing.contract.base import SOON
from onceward.testing.lab import Gate
from onceward.testing.proxy import Proxy
from onceward.testing.redis_labs import RedisLab


async def nothing(_message: Message[Any]) -> None: ...


# --- how it is made -----------------------------------------------------------------------------------------


def test_a_url_says_what_the_store_is_to_be() -> None:
    store: Any = store_from_url("redis://app:secret@cache:6380/3?lease=2.5&prefix=shop&replicas=1&socket_timeout=1")
    assert (store.prefix, store.lease_us) == ("shop", 2_500_000)
    assert store._url == "redis://app:secret@cache:6380/3?socket_timeout=1"
    assert store._safety["replicas"] == 1


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://localhost?lease=soon", "lease=soon"),
        ("redis://localhost?lease=0", "lease="),
        ("redis://localhost?prefix=a:b", "prefix="),
        ("redis://localhost?replicas=-1", "replicas="),
    ],
)
def test_options_that_make_no_sense_are_refused(url: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        store_from_url(url)


def test_a_schema_is_refused() -> None:
    with pytest.raises(UsageError, match="prefix"):
        store_from_url("redis://localhost", schema="inbox")


def test_either_a_url_or_a_client() -> None:
    with pytest.raises(UsageError, match="URL, or client="):
        RedisStore()
    with pytest.raises(UsageError, match="for the client itself"):
        RedisStore(client=Redis(), socket_timeout=1)


async def test_a_client_of_the_users_is_used_and_left_open(redis_lab: RedisLab) -> None:
    async with Redis.from_url(redis_lab.plain_url) as client:
        async with Inbox(RedisStore(client=client), consumer="billing") as inbox:
            assert inbox.store.client is client  # type: ignore[attr-defined]
            assert (await inbox.process(redis_lab.message("m"), nothing)).processed
        assert await client.ping()
        async with Inbox(RedisStore(client=client), consumer="billing") as inbox:
            assert (await inbox.process(redis_lab.message("m"), nothing)).duplicate


async def test_a_client_that_decodes_cannot_read_records(redis_lab: RedisLab) -> None:
    async with Redis.from_url(redis_lab.plain_url, decode_responses=True) as client:
        with pytest.raises(UsageError, match="decode_responses"):
            await RedisStore(client=client).open()


def test_a_store_may_be_used_by_one_event_loop_after_another(valkey_server: str) -> None:
    store = RedisStore(valkey_server, prefix="loops")

    async def once() -> Kind:
        async with Inbox(store, consumer="billing") as inbox:
            return (await inbox.process(Message("m", "order.paid", 1), nothing)).kind

    assert [asyncio.run(once()) for _ in range(2)] == [Kind.PROCESSED, Kind.DUPLICATE]


# --- what it cannot do --------------------------------------------------------------------------------------


async def test_what_needs_a_queue_names_the_stores_that_have_one(redis_lab: RedisLab) -> None:
    inbox = await redis_lab.inbox()
    with pytest.raises(UsageError, match=r"accept: RedisStore cannot .* AsyncpgStore"):
        await inbox.accept(redis_lab.message())
    with pytest.raises(UsageError, match=r"run: RedisStore"):
        await inbox.run(nothing)
    with pytest.raises(UsageError, match=r"dispatch: RedisStore"):
        await inbox.dispatch(nothing)
    with pytest.raises(UsageError, match=r"works: RedisStore"):
        async for _work in inbox:
            pass


async def test_there_is_no_transaction_to_join(redis_lab: RedisLab) -> None:
    inbox = await redis_lab.inbox()
    with pytest.raises(UsageError, match="no transactions"):
        await inbox.process(redis_lab.message(), nothing, tx=object())


async def test_a_dependency_is_refused_and_leaves_nothing(redis_lab: RedisLab) -> None:
    inbox, message = await redis_lab.inbox(), redis_lab.message(depends_on=(Position("s", 1),))
    with pytest.raises(UsageError, match="depends_on"):
        await inbox.process(message, nothing)
    assert await redis_lab.kept() == []


# --- claims -------------------------------------------------------------------------------------------------


async def test_a_fence_grows_with_each_claim_also_when_the_record_was_gone(redis_lab: RedisLab) -> None:
    inbox, message, fences = await redis_lab.inbox(cache=0), redis_lab.message(), list[int | None]()

    async def note(_message: Message[Any]) -> None:
        fences.append(current().fence)
        if len(fences) < 4:
            raise ValueError("again")

    for _ in range(3):
        with pytest.raises(ValueError, match="again"):
            await inbox.process(message, note)
    await inbox.process(message, note)
    await redis_lab.forget()
    await inbox.process_many([message, redis_lab.message()], note)
    numbers = [fence for fence in fences[:5] if fence is not None]
    assert len(numbers) == 5
    assert numbers == sorted(set(numbers))


async def test_a_claim_block_without_a_transaction_is_a_lease(redis_lab: RedisLab) -> None:
    one, two, message = await redis_lab.inbox(), await redis_lab.inbox(wait=0.05), redis_lab.message()
    async with one.claim(message, tx=None) as claim:
        assert claim.first
        assert not await two.is_processed(message)
        claim.save({"invoice": 1})
    async with two.claim(message, tx=None) as claim:
        assert not claim.first
        assert claim.result == {"invoice": 1}


async def test_a_lease_that_is_lost_stops_the_handler_and_is_told(redis_lab: RedisLab) -> None:
    inbox, gate, message = await redis_lab.inbox(store=redis_lab.store(lease=0.3)), Gate(redis_lab), redis_lab.message()
    running = asyncio.ensure_future(inbox.process(message, gate))
    await gate.started.wait()
    await redis_lab.forget()  # as a failover may do
    with pytest.raises(LeaseLost) as caught:
        async with asyncio.timeout(5):
            await running
    assert verdict_of(caught.value) is Verdict.RETRY
    assert await redis_lab.effects() == []
    assert (await inbox.process(message, nothing)).processed


async def test_a_lost_lease_in_a_batch_stops_its_own_message_only(redis_lab: RedisLab) -> None:
    inbox, lost = await redis_lab.inbox(store=redis_lab.store(lease=0.3)), redis_lab.message("lost")
    messages = [redis_lab.message("before"), lost, redis_lab.message("after")]
    others = {message.id for message in messages} - {"lost"}

    async def handle(message: Message[Any], tx: RedisTx) -> str:
        if message.id == "lost":
            async with redis_lab.client() as client:
                await client.delete(inbox.store.key(inbox.identity_of(message)))  # type: ignore[attr-defined]
            await asyncio.sleep(5)
        await redis_lab.write(tx, message.id)
        return message.id

    async with asyncio.timeout(4):
        outcomes = await inbox.process_many(messages, handle)
    assert [outcome.kind for outcome in outcomes] == [Kind.PROCESSED, Kind.BUSY, Kind.PROCESSED]
    assert isinstance(outcomes[1].error, LeaseLost)
    assert set(await redis_lab.effects()) == others


async def test_a_worker_that_is_cut_off_is_told_when_its_lease_is_over(redis_lab: RedisLab) -> None:
    proxy, gate, message = Proxy(*redis_lab.address), Gate(redis_lab), redis_lab.message()
    async with proxy.running():
        url = f"redis://127.0.0.1:{proxy.port}"
        inbox = await redis_lab.inbox(store=RedisStore(url, lease=0.5))
        running = asyncio.ensure_future(inbox.process(message, gate))
        await gate.started.wait()
    with pytest.raises(LeaseLost):
        async with asyncio.timeout(10):
            await running
    other = await redis_lab.inbox()
    assert (await other.process(message, nothing)).processed
    await inbox.close()


async def test_a_slow_handler_keeps_its_lease(redis_lab: RedisLab) -> None:
    inbox, gate, message = await redis_lab.inbox(store=redis_lab.store(lease=0.3)), Gate(redis_lab), redis_lab.message()
    running = asyncio.ensure_future(inbox.process(message, gate))
    await gate.started.wait()
    ends = {(await redis_lab.kept())[0]["next_try_at"]}
    async with asyncio.timeout(5):
        while len(ends) < 5:  # more than a lease
            await asyncio.sleep(0.02)
            ends.add((await redis_lab.kept())[0]["next_try_at"])
    gate.go.set()
    assert (await running).processed


# --- tx -----------------------------------------------------------------------------------------------------


async def test_commands_are_applied_with_the_completion_and_not_before(redis_lab: RedisLab) -> None:
    inbox = await redis_lab.inbox()
    async with redis_lab.client() as client:

        async def pay(message: Message[Any], tx: RedisTx) -> None:
            tx.incrby("balance", message.payload)
            await tx.hset("last", mapping={"id": message.id, "amount": 1.5})
            tx.execute_command("SET", "raw", b"\x00\xff")
            assert await client.exists("balance", "last", "raw") == 0

        for message in (redis_lab.message("a", payload=5), redis_lab.message("a", payload=5)):
            await inbox.process(message, pay)
        assert await client.get("balance") == b"5"
        assert await client.hgetall("last") == {b"id": b"a", b"amount": b"1.5"}
        assert await client.get("raw") == b"\x00\xff"


async def test_a_first_command_that_is_refused_leaves_nothing_and_is_tried_again(redis_lab: RedisLab) -> None:
    inbox, message = await redis_lab.inbox(), redis_lab.message()
    async with redis_lab.client() as client:
        await client.set("text", "no number")

        async def pay(_message: Message[Any], tx: RedisTx) -> None:
            tx.incr("text")
            tx.incr("balance")

        with pytest.raises(CommandFailed, match="not an integer"):
            await inbox.process(message, pay)
        assert await client.exists("balance") == 0
        await client.set("text", 1)
        assert (await inbox.process(message, pay)).processed
        assert await client.mget("text", "balance") == [b"2", b"1"]


@pytest.mark.parametrize("many", [False, True])
async def test_a_later_command_that_is_refused_buries_the_message(redis_lab: RedisLab, many: bool) -> None:
    inbox, message, other = await redis_lab.inbox(cache=0), redis_lab.message("a"), redis_lab.message("b")
    async with redis_lab.client() as client:
        await client.set("text", "no number")

        async def pay(message: Message[Any], tx: RedisTx) -> None:
            tx.incr("balance")
            if message.id == "a":
                tx.incr("text")

        if many:
            outcomes = await inbox.process_many([message, other], pay)
            assert [outcome.kind for outcome in outcomes] == [Kind.FAILED, Kind.PROCESSED]
            assert isinstance(outcomes[0].error, HandlerEndedTransaction)
        else:
            with pytest.raises(HandlerEndedTransaction, match="command 2 of the handler failed after 1"):
                await inbox.process(message, pay)
        record = await inbox.get_record(message)
        assert record is not None
        assert (record.state, record.payload) == (State.DEAD, {"amount": 7})
        assert "not an integer" in record.last_error
        assert (await inbox.process(message, pay)).kind is Kind.DEAD
        assert await client.get("balance") == (b"2" if many else b"1")


async def test_a_bulk_whose_commands_fail_in_the_middle_is_buried_whole(redis_lab: RedisLab) -> None:
    inbox, messages = await redis_lab.inbox(cache=0), [redis_lab.message() for _ in range(150)]
    async with redis_lab.client() as client:
        await client.set("text", "no number")

        async def pay(messages: list[Message[Any]], tx: RedisTx) -> None:
            for _ in messages:
                tx.incr("balance")
            tx.incr("text")

        outcomes = await inbox.process_bulk(messages, pay)
        assert {outcome.kind for outcome in outcomes} == {Kind.FAILED}
        assert {row["state"] for row in await redis_lab.kept()} == {State.DEAD}
        again = await inbox.process_bulk(messages, pay)
        assert {outcome.kind for outcome in again} == {Kind.DEAD}
        assert await client.get("balance") == b"150"


async def test_a_bulk_is_applied_once_however_many_it_has(redis_lab: RedisLab) -> None:
    inbox, messages = await redis_lab.inbox(), [redis_lab.message() for _ in range(350)]

    async def pay(messages: list[Message[Any]], tx: RedisTx) -> None:
        tx.incrby("balance", len(messages))

    await inbox.process_bulk(messages, pay)
    async with redis_lab.client() as client:
        assert await client.get("balance") == b"350"


async def test_nothing_can_be_read_through_a_buffer(redis_lab: RedisLab) -> None:
    tx = RedisTx("tag")
    for read in (lambda: tx.get("a"), lambda: tx.hgetall("a"), lambda: tx.execute_command("lrange", "a", 0, 1)):
        with pytest.raises(UsageError, match="read with a client"):
            read()
    for wrong in (None, True, object(), {"a": 1}):
        with pytest.raises(UsageError, match="no value for Redis"):
            tx.execute_command("SET", "a", wrong)
    with pytest.raises(UsageError, match="takes a command"):
        tx.execute_command()
    assert len(tx) == 0


async def test_a_message_of_a_batch_cannot_write_after_its_handler(redis_lab: RedisLab) -> None:
    inbox, kept = await redis_lab.inbox(), list[RedisTx]()

    async def keep(message: Message[Any], tx: RedisTx) -> None:
        for one in kept:
            with pytest.raises(UsageError, match="over"):
                one.incr("late")
        kept.append(tx)

    assert all(one.processed for one in await inbox.process_many([redis_lab.message() for _ in range(3)], keep))
    with pytest.raises(UsageError, match="over"):
        kept[-1].incr("late")


# --- batches ------------------------------------------------------------------------------------------------


async def test_nobody_runs_again_because_a_neighbour_failed(redis_lab: RedisLab) -> None:
    inbox, runs = await redis_lab.inbox(), list[str]()

    async def handle(message: Message[Any]) -> None:
        runs.append(message.id)
        if message.id in ("3", "7"):
            raise ValueError("no")
        if message.id == "5":
            raise Reject("never")

    messages = [redis_lab.message(str(number)) for number in range(10)]
    outcomes = await inbox.process_many(messages, handle)
    assert runs == [str(number) for number in range(10)]
    assert [outcome.kind.value for outcome in outcomes] == [
        "failed" if number in (3, 7) else "dead" if number == 5 else "processed" for number in range(10)
    ]


async def test_what_is_done_is_said_before_a_slow_handler_ends(redis_lab: RedisLab) -> None:
    inbox, gate = await redis_lab.inbox(), asyncio.Event()

    async def handle(message: Message[Any]) -> None:
        await asyncio.sleep(0.02)
        if message.id == "last":
            await gate.wait()

    messages = [redis_lab.message("a"), redis_lab.message("b"), redis_lab.message("last")]
    running = asyncio.ensure_future(inbox.process_many(messages, handle))
    async with asyncio.timeout(5):
        while sorted(row["state"] for row in await redis_lab.kept()) != ["processed", "processed", "running"]:
            await asyncio.sleep(0.01)
    gate.set()
    assert all(outcome.processed for outcome in await running)


# --- keys and values ----------------------------------------------------------------------------------------

NAMES = ["billing", "a:b", "{a}", "*", "[x]", "=", "=6f", "a\\b", "ü", "shop\n", "a b", "x" * 200]


@pytest.mark.parametrize("name", NAMES)
async def test_any_consumer_has_records_of_its_own(redis_lab: RedisLab, name: str) -> None:
    inbox, other = await redis_lab.inbox(consumer=name), await redis_lab.inbox(consumer=name + "2")
    for one in (inbox, other):
        await one.process(redis_lab.message("m"), nothing)
    assert [record.consumer for record in await inbox.records()] == [name]
    assert (await inbox.stats()).processed == 1
    async with inbox.store.unit() as unit:
        assert await unit.consumers() == sorted([name, name + "2"])
    assert await inbox.cleanup(timedelta(0)) == 1
    assert (await other.stats()).processed == 1


def test_names_of_consumers_never_meet() -> None:
    fronts = [value.front_of_keys("onceward", name) for name in NAMES]
    assert len(set(fronts)) == len(NAMES)
    assert [value.consumer_of(front + b"{x}", "onceward") for front in fronts] == NAMES
    assert not any(set(front[len("onceward:") : -1]) & set(b":{}*?[]\\") for front in fronts)


@pytest.mark.parametrize("tag", ["", "a{b", "a}b", None, 7])
async def test_a_tag_that_makes_no_sense_is_refused(redis_lab: RedisLab, tag: Any) -> None:
    inbox = await redis_lab.inbox(store=redis_lab.store(tag=lambda _identity: tag))
    with pytest.raises(UsageError, match="tag="):
        await inbox.process(redis_lab.message(), nothing)


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_TIME = st.datetimes(datetime(1990, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001


@given(
    state=st.sampled_from(list(State)), fence=st.integers(1, 2**53), at=_TIME, attempts=st.integers(0, 65_535),
    started=st.integers(0, 255), received=_TIME, key=_TEXT, message_id=_TEXT, source=_TEXT, tenant=_TEXT, scope=_TEXT,
    stream=st.none() | _TEXT, position=st.none() | st.integers(0, 2**63 - 1), result=st.none() | st.integers() | _TEXT,
    payload=st.none() | st.lists(_TEXT), headers=st.dictionaries(_TEXT, _TEXT), body=st.none() | st.binary(max_size=9),
    occurred_at=st.none() | _TIME, errors=st.lists(st.builds(Failure, _TEXT, _TEXT), max_size=3),
)  # fmt: skip
def test_what_is_packed_comes_back(
    state: State, fence: int, at: datetime, attempts: int, started: int, received: datetime, key: str, message_id: str,
    source: str, tenant: str, scope: str, stream: str | None, position: int | None, result: Any, payload: Any,
    headers: dict[str, str], body: bytes | None, occurred_at: datetime | None, errors: list[Failure],
) -> None:  # fmt: skip
    record = Record(
        identity=Identity("billing", tenant or "default", scope, key), message_id=message_id or key, type="t",
        state=state, source=source, stream=stream, position=position, result=result, payload=payload, headers=headers,
        body=body, occurred_at=occurred_at, errors=tuple(errors), received_at=received, payload_hash=b"h" * 32,
    )  # fmt: skip
    front = value.Front(state, fence, value.micros(at), attempts, started, value.micros(received))
    found = value.record_of("billing", value.packed_front(front) + value.packed(value.columns_of(record)))
    for name in ("identity", "message_id", "state", "source", "stream", "position", "result", "payload", "headers",
                 "body", "occurred_at", "errors", "received_at"):  # fmt: skip
        assert getattr(found, name) == getattr(record, name), name
    assert (found.attempts, found.started, found.payload_hash) == (attempts, started, b"h" * 16)


@pytest.mark.parametrize(
    "key",
    [
        "3f2b8c1e-9a4d-4c6b-8e2f-0123456789ab", "3F2B8C1E-9A4D-4C6B-8E2F-0123456789AB",
        "3f2b8c1e-9a4d-4c6b-8e2f-0123456789ag", "3f2b8c1e-9a4d-4c6b-8e2f-0123456789 a", "x" * 36, "-" * 36,
        "3f2b8c1e-9a4d-4c6b-8e2f-01234567-9ab", "\uff11f2b8c1e-9a4d-4c6b-8e2f-0123456789ab",
    ],
)  # fmt: skip
async def test_an_id_that_is_or_is_not_a_uuid_comes_back_to_the_letter(redis_lab: RedisLab, key: str) -> None:
    inbox = await redis_lab.inbox(cache=0)
    assert (await inbox.process(redis_lab.message(key), nothing)).processed
    assert (await inbox.process(redis_lab.message(key), nothing)).duplicate
    [record] = await inbox.records()
    assert (record.message_id, record.key) == (key, key)
    assert record.identity == inbox.identity_of(redis_lab.message(key))


# --- trouble ------------------------------------------------------------------------------------------------


async def test_scripts_that_the_server_forgot_are_sent_again(redis_lab: RedisLab) -> None:
    inbox = await redis_lab.inbox()
    async with redis_lab.client() as client:
        for many in (False, True):
            await client.script_flush()
            messages = [redis_lab.message() for _ in range(150)]
            if many:
                assert all(one.processed for one in await inbox.process_many(messages, nothing))
            else:
                assert (await inbox.process(messages[0], nothing)).processed


async def test_a_full_server_is_told_and_nothing_is_half_written(redis_lab: RedisLab) -> None:
    inbox, message = await redis_lab.inbox(), redis_lab.message()
    async with redis_lab.client() as client:
        await client.config_set("maxmemory", 1)
        try:
            with pytest.raises(StoreError, match="memory"):
                await inbox.process(message, nothing)
        finally:
            await client.config_set("maxmemory", 0)
    assert (await inbox.process(message, nothing)).processed


async def test_rights_that_are_missing_are_told(redis_lab: RedisLab) -> None:
    async with redis_lab.client() as client:
        await client.execute_command("ACL", "SETUSER", "reader", "on", ">x", "~*", "+@read", "+ping", "+info")
        url = redis_lab.plain_url.replace("redis://", "redis://reader:x@")
        async with Inbox(RedisStore(url), consumer="billing") as inbox:
            with pytest.raises(StoreError, match="rights"):
                await inbox.process(redis_lab.message(), nothing)
        await client.execute_command("ACL", "DELUSER", "reader")


# --- attacks ----------------------------------------------------------------------------------------------


def test_processes_forked_off_a_store_make_claims_of_their_own(valkey_server: str) -> None:
    """As with gunicorn --preload: a claim is known by its name, so two must never have the same."""
    store = RedisStore(valkey_server)
    mine = [store.next_claim() for _ in range(3)]
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, " ".join(store.next_claim() for _ in range(3)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(reader, 10_000).decode().split()
    os.close(reader)
    os.close(writer)
    assert len({*mine, *theirs}) == 6


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "command", [("SELECT", 3), ("EVAL", "return 1", 0), ("MULTI",), ("WAIT", 1, 0), ("CLIENT LIST",)]
)
def test_commands_that_cannot_ride_with_the_completion_are_refused(command: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError, match="cannot be applied"):
        RedisTx("tag").execute_command(*command)


async def test_a_command_of_many_words_is_refused_before_anything_is_applied(redis_lab: RedisLab) -> None:
    inbox, message = await redis_lab.inbox(), redis_lab.message()

    async def too_much(_message: Message[Any], tx: RedisTx) -> None:
        tx.incr("n")
        tx.sadd("s", *range(9_000))

    async def much(_message: Message[Any], tx: RedisTx) -> None:
        tx.sadd("s", *range(6_900))

    with pytest.raises(UsageError, match="9002 words"):
        await inbox.process(message, too_much)
    async with redis_lab.client() as client:
        assert await client.exists("n", "s") == 0
        await inbox.process(message, much)
        assert await client.scard("s") == 6_900


async def test_nothing_is_published_when_the_completion_is_refused(redis_lab: RedisLab) -> None:
    inbox, message = await redis_lab.inbox(), redis_lab.message()
    async with redis_lab.client() as client, client.pubsub() as ear:
        await ear.subscribe("news")
        await ear.get_message(timeout=5)

        async def tell(_message: Message[Any], tx: RedisTx) -> None:
            tx.publish("news", "paid")
            await client.config_set("maxmemory", 1)

        try:
            with pytest.raises(StoreError):
                await inbox.process(message, tell)
        finally:
            await client.config_set("maxmemory", 0)
        assert await ear.get_message(ignore_subscribe_messages=True, timeout=0.2) is None


async def test_a_buried_message_is_told_again_when_nobody_heard_it(redis_lab: RedisLab) -> None:
    """The connection is cut behind the completion that buried it; it is sent again, and says the same."""
    proxy = Proxy(*redis_lab.address)
    async with proxy.running(), redis_lab.client() as client:
        await client.set("text", "no number")
        inbox, message = await redis_lab.inbox(store=redis_lab.store_behind(proxy.port)), redis_lab.message()

        async def pay(_message: Message[Any], tx: RedisTx) -> None:
            tx.incr("balance")
            tx.incr("text")
            proxy.cut_at, proxy.deliver = redis_lab.commit_word, True

        with pytest.raises(HandlerEndedTransaction, match="not an integer"):
            await inbox.process(message, pay)
        record = await inbox.get_record(message)
        assert record is not None
        assert (record.state, record.payload) == (State.DEAD, {"amount": 7})
        assert await client.get("balance") == b"1"
        await inbox.close()


async def test_a_dead_letter_whose_worker_died_before_it_was_explained_says_why(redis_lab: RedisLab) -> None:
    inbox, message = await redis_lab.inbox(), redis_lab.message()
    async with redis_lab.client() as client:
        await client.set("text", "no number")
        async with inbox.store.unit() as unit:
            work: Any = unit
            record = Record(
                identity=inbox.identity_of(message), message_id=message.id, type="t", state=State.PROCESSED,
                payload_hash=b"h" * 32,
            )  # fmt: skip
            assert await unit.claim(record) is None
            work.tx.incr("balance")
            work.tx.incr("text")
            with pytest.raises(HandlerEndedTransaction):
                await unit.commit()
    found = await inbox.get_record(message)
    assert found is not None
    assert found.state is State.DEAD
    assert "command 2 of the handler failed after 1" in found.last_error
    with pytest.raises(UsageError, match="was not kept"):
        await inbox.replay(message, nothing)
    await inbox.discard(message)


async def test_a_replay_that_was_killed_can_be_replayed_or_discarded(redis_lab: RedisLab) -> None:
    inbox, handler = await redis_lab.inbox(wait=0.05), redis_lab.message
    for name in ("again", "never"):
        await inbox.process(handler(name), lambda _message: (_ for _ in ()).throw(Reject("no")))
        identity = inbox.identity_of(handler(name))
        async with inbox.store.unit() as unit:  # what a killed replay leaves
            dead = await unit.find(identity)
            assert dead is not None
            await unit.take(dead.record, dead.record)
            unit._held.clear()  # type: ignore[attr-defined]
    with pytest.raises(TryLater):
        await inbox.replay(handler("again"), nothing)
    await redis_lab.let_time_pass()
    assert (await inbox.replay(handler("again"), nothing)).processed
    await inbox.discard(handler("never"))
    assert [row["state"] for row in await redis_lab.kept() if row["message_id"] == "never"] == [State.DISCARDED]


async def test_a_claim_that_nobody_heard_is_given_back_and_counts_as_nothing(redis_lab: RedisLab) -> None:
    inbox, message = await redis_lab.inbox(retry=SOON), redis_lab.message()
    servers: Any = inbox.store.servers  # type: ignore[attr-defined]
    say, runs = servers.run_claims, 0

    async def unheard(*args: Any) -> Any:
        await say(*args)
        raise StoreUnavailable("cut")

    async def note(_message: Message[Any]) -> None:
        nonlocal runs
        runs += 1

    for _ in range(4):
        servers.run_claims = unheard
        with pytest.raises(StoreUnavailable):
            await inbox.process(message, note)
        servers.run_claims = say
        assert await redis_lab.kept() == []
    assert (await inbox.process(message, note)).processed
    assert runs == 1


async def test_a_lane_stops_where_a_completion_is_refused(redis_lab: RedisLab) -> None:
    inbox = await redis_lab.inbox()
    async with redis_lab.client() as client:
        await client.set("text", "no number")

        async def handle(message: Message[Any], tx: RedisTx) -> None:
            if message.id == "1":
                tx.incr("text")
            else:
                tx.rpush("order", message.id)

        messages = [redis_lab.message(str(number), stream="lane", position=number) for number in (1, 2, 3)]
        outcomes = await inbox.process_many(messages, handle)
        assert [outcome.kind for outcome in outcomes] == [Kind.FAILED, Kind.BUSY, Kind.BUSY]
        assert await client.exists("order") == 0


async def test_connections_that_died_on_the_shelf_are_no_failure(redis_lab: RedisLab) -> None:
    inbox = await redis_lab.inbox()
    await asyncio.gather(*(inbox.process(redis_lab.message(), nothing) for _ in range(40)))
    async with redis_lab.client() as client:
        await client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    for _ in range(20):
        assert (await inbox.process(redis_lab.message(), nothing)).processed


async def test_attempts_are_counted_up_to_a_limit(redis_lab: RedisLab) -> None:
    inbox, message = await redis_lab.inbox(), redis_lab.message()
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            await inbox.process(message, lambda _message: (_ for _ in ()).throw(ValueError("no")))
        await redis_lab.change(attempts=65_535, started=300)
    record = await inbox.get_record(message)
    assert record is not None
    assert (record.attempts, record.started) == (65_535, 300)


async def test_keys_of_others_are_passed_over(redis_lab: RedisLab) -> None:
    inbox = await redis_lab.inbox()
    await inbox.process(redis_lab.message(), nothing)
    async with redis_lab.client() as client:
        await client.rpush("onceward:billing:list", "a")
        await client.set("onceward:billing:short", "p")
        await client.set("onceward:billing:other", "q" * 40)
        await client.set("onceward:=zz:x", "p" * 40)
        assert (await inbox.stats()).total == 1
        assert len(await inbox.records()) == 1
        async with inbox.store.unit() as unit:
            assert await unit.consumers() == ["billing"]
        assert await inbox.cleanup(timedelta(0)) == 1
        assert await client.exists("onceward:billing:list", "onceward:billing:short", "onceward:billing:other") == 3
        await client.delete("onceward:billing:list")


async def test_a_cancelled_batch_is_cancelled_also_when_the_server_is_away(redis_lab: RedisLab) -> None:
    proxy, started = Proxy(*redis_lab.address), asyncio.Event()

    async def slow(message: Message[Any]) -> None:
        if message.id == "last":
            started.set()
            await asyncio.sleep(30)

    async with proxy.running():
        inbox = await redis_lab.inbox(store=redis_lab.store_behind(proxy.port))
        running = asyncio.ensure_future(inbox.process_many([redis_lab.message(), redis_lab.message("last")], slow))
        await started.wait()
    running.cancel()  # and nobody listens any more
    with pytest.raises(asyncio.CancelledError):
        await running
    await inbox.close()
