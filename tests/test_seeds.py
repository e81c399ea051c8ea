"""What the documents in the seeds ask of `process`, scenario by scenario, on every store.

Each part names the document and the section it comes from. Where the code in a document has a trap (a row that is
committed before the handler, a key that two consumers share, None for a duplicate, look-then-act, keys that collide),
the test shows the trap sprung and nobody in it.
"""

from __future__ import annotations

import asyncio
import signal
import sqlite3
from collections import Counter
from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from onceward import Inbox, Kind, Message, RetryPolicy, State, TryLater, Verdict, keys, stream_of, tenants, verdict_of
from onceward.errors import CommitUnknown, InvalidMessage, KeyMissing, StoreUnavailable, TenantMissing
from onceward.testing import Lab, PostgresLab, Proxy, SqliteLab
from onceward.testing.contract.base import LATER
from onceward.testing.lab import Gate, Recorder
from tests.services.postgres import free_port


@pytest.fixture(params=["sqlite", "postgres"])
def lab(request: pytest.FixtureRequest) -> Lab:
    found: Lab = request.getfixturevalue(f"{request.param}_lab")
    return found


class Queue:
    """A broker in one line of thought: what is not acknowledged comes again."""

    def __init__(self, *messages: Message[Any]) -> None:
        self.unsettled = list(messages)
        self.deliveries = 0

    async def deliver(self, inbox: Inbox[Any], handler: Any) -> Any:
        """The oldest message once: acknowledged if `process` returns, kept if it raises."""
        self.deliveries += 1
        outcome = await inbox.process(self.unsettled[0], handler)
        self.unsettled.pop(0)
        return outcome


# --- 000, "Processing Messages" and "Duplicate Detection": two deliveries -------------------------------------------


async def test_the_second_delivery_is_skipped_and_given_the_first_result(lab: Lab) -> None:
    """The document gives None for a duplicate, and the caller never learns the order's number again."""
    inbox, process_order, message = await lab.inbox(consumer="order-service"), Recorder(lab), lab.message("order-123")
    first = await inbox.process(message, process_order)
    second = await inbox.process(message, process_order)
    assert (first.processed, first.result) == (True, {"charged": "order-123"})
    assert (second.duplicate, second.result) == (True, {"charged": "order-123"})
    assert process_order.runs == ["order-123"]
    assert await lab.effects() == ["order-123"]


async def test_a_handler_that_returns_none_is_still_told_apart_from_a_duplicate(lab: Lab) -> None:
    """`if result is None` takes every handler without a result for a duplicate."""

    async def send_confirmation(message: Message[Any], tx: Any) -> None:
        await lab.write(tx, message.id)

    inbox, message = await lab.inbox(), lab.message()
    outcomes = [await inbox.process(message, send_confirmation) for _ in range(2)]
    assert [outcome.result for outcome in outcomes] == [None, None]
    assert [outcome.kind for outcome in outcomes] == [Kind.PROCESSED, Kind.DUPLICATE]
    assert await lab.effects() == [message.id]


async def test_the_loop_of_the_document_charges_each_order_once(lab: Lab) -> None:
    inbox, process_order, committed = await lab.inbox(consumer="order-service"), Recorder(lab), []
    deliveries = [lab.message(id_) for id_ in ("a", "a", "b", "a", "c", "b")]
    for message in deliveries:
        await inbox.process(message, process_order)
        committed.append(message.id)
    assert committed == ["a", "a", "b", "a", "c", "b"], "a duplicate is acknowledged like any other"
    assert process_order.runs == await lab.effects() == ["a", "b", "c"]


# --- 000, "Event ID Selection" --------------------------------------------------------------------------------------


async def test_two_events_about_one_customer_are_not_the_same_event(lab: Lab) -> None:
    """The document takes the Kafka key as the id. It says what belongs together, not what is the same."""
    inbox, handler = await lab.inbox(), Recorder(lab)
    for id_ in ("paid", "paid-again"):
        assert (await inbox.process(lab.message(id_, headers={"kafka_key": "customer-1"}), handler)).processed
    assert await lab.effects() == ["paid", "paid-again"]


async def test_the_same_event_at_another_offset_is_the_same_event(lab: Lab) -> None:
    inbox, handler = await lab.inbox(), Recorder(lab)
    assert (await inbox.process(lab.message("m", topic="orders"), handler, origin="orders/0/17")).processed
    assert (await inbox.process(lab.message("m", topic="orders"), handler, origin="orders/2/4711")).duplicate


@pytest.mark.parametrize("missing", [None, ""])
def test_a_message_without_an_id_is_refused_before_it_can_hide_others(missing: Any) -> None:
    """`headers.get("message_id") or key` is None when both are missing, for every such message."""
    with pytest.raises(InvalidMessage, match="stable id") as caught:
        Message(missing, "OrderCreated", {})
    assert verdict_of(caught.value) is Verdict.REJECT


# --- 000, "Handler Failures" ----------------------------------------------------------------------------------------


async def test_a_failing_handler_is_not_acknowledged_and_its_message_is_not_lost(lab: Lab) -> None:
    """As shipped there, the row is committed before the handler: the redelivery is skipped and the order is gone."""
    inbox, queue = await lab.inbox(), Queue(lab.message("order-123"))
    with pytest.raises(ValueError, match="Negative amount"):
        await queue.deliver(inbox, Recorder(lab, error=ValueError("Negative amount")))
    assert queue.unsettled, "it raised, so nobody acknowledged"
    assert await lab.effects() == [], "what the handler wrote went with its failure"
    outcome = await queue.deliver(inbox, Recorder(lab))
    assert outcome.processed
    assert not queue.unsettled
    assert await lab.effects() == ["order-123"]


async def test_the_retries_of_a_failing_handler_are_held_off(lab: Lab) -> None:
    """ "Let it retry with backoff": an eager broker cannot make it a hot loop."""
    handler, message = Recorder(lab, error=ValueError("no")), lab.message()
    inbox = await lab.inbox(retry=LATER)
    with pytest.raises(ValueError, match="no"):
        await inbox.process(message, handler)
    for _ in range(5):
        with pytest.raises(TryLater) as caught:
            await inbox.process(message, handler)
        assert caught.value.reason == "backoff"
    assert len(handler.runs) == 1


# --- 000, "Database Failures" ---------------------------------------------------------------------------------------


async def test_a_connection_lost_during_processing_rolls_everything_back(postgres_lab: PostgresLab) -> None:
    lab, proxy = postgres_lab, Proxy(*postgres_lab.address)
    async with proxy.running():
        inbox, queue = await lab.inbox(store=lab.store_behind(proxy.port)), Queue(lab.message("m"))

        async def unlucky(message: Message[Any], tx: Any) -> None:
            await lab.write(tx, message.id)
            proxy.cut()
            await lab.write(tx, "after")

        with pytest.raises(StoreUnavailable):
            await queue.deliver(inbox, unlucky)
        assert queue.unsettled
        assert await lab.effects() == []
        assert await lab.query("SELECT * FROM onceward_records") == [], "the inbox row is rolled back too"
        assert (await queue.deliver(inbox, Recorder(lab))).processed, "the next delivery starts from scratch"
        assert await lab.effects() == ["m"]
        await inbox.close()


@pytest.mark.parametrize("arrives", [True, False], ids=["the answer is lost", "the commit is lost"])
async def test_a_connection_lost_at_commit_is_settled_by_the_redelivery(
    postgres_lab: PostgresLab, arrives: bool
) -> None:
    """The document knows only the rollback. Here the transaction may just as well stand: nobody guesses."""
    lab, proxy, handler = postgres_lab, Proxy(*postgres_lab.address), Recorder(postgres_lab)
    proxy.deliver = arrives

    async def reached(point: str) -> None:
        if point == "before commit":
            proxy.cut_at = b"COMMIT"

    async with proxy.running():
        inbox = await lab.inbox(store=lab.store_behind(proxy.port), reached=reached)
        queue = Queue(lab.message("m"))
        with pytest.raises(CommitUnknown) as caught:
            await queue.deliver(inbox, handler)
        assert verdict_of(caught.value) is Verdict.PAUSE
        assert queue.unsettled
        outcome = await queue.deliver(await lab.inbox(), handler)
        assert outcome.kind is (Kind.DUPLICATE if arrives else Kind.PROCESSED)
        assert await lab.effects() == ["m"]
        await inbox.close()


async def test_a_full_disk_during_processing_rolls_everything_back(sqlite_lab: SqliteLab) -> None:
    lab, queue = sqlite_lab, Queue(sqlite_lab.message("m"))

    async def unlucky(message: Message[Any], tx: Any) -> None:
        await lab.write(tx, message.id)
        pages = await tx.fetchval("PRAGMA page_count")
        await tx.fetchval(f"PRAGMA max_page_count = {pages}")
        await lab.write(tx, "x" * 1_000_000)

    inbox = await lab.inbox()
    with pytest.raises(StoreUnavailable, match="full"):
        await queue.deliver(inbox, unlucky)
    assert queue.unsettled
    assert await lab.effects() == []
    assert await lab.query("SELECT * FROM onceward_records") == []
    assert (await queue.deliver(await lab.inbox(), Recorder(lab))).processed
    assert await lab.effects() == ["m"]


async def test_a_database_held_by_somebody_else_is_tried_later(sqlite_lab: SqliteLab) -> None:
    lab, handler, queue = sqlite_lab, Recorder(sqlite_lab), Queue(sqlite_lab.message("m"))
    inbox = await lab.inbox(wait=0.05)
    with closing(sqlite3.connect(lab.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(TryLater) as caught:
            await queue.deliver(inbox, handler)
        assert caught.value.reason == "store_busy"
        assert verdict_of(caught.value) is Verdict.RETRY
    assert handler.runs == [], "it never began"
    assert (await queue.deliver(inbox, handler)).processed
    assert await lab.effects() == ["m"]


async def test_a_database_that_is_not_there_is_said_so_when_the_inbox_opens(lab: Lab) -> None:
    if isinstance(lab, SqliteLab):
        missing = f"sqlite:///{lab.path.parent}/no-such-folder/shop.db"
    else:
        missing = f"postgresql://onceward@127.0.0.1:{free_port()}/shop"
    with pytest.raises(StoreUnavailable) as caught:
        await Inbox.connect(missing, consumer="order-service").open()
    assert verdict_of(caught.value) is Verdict.PAUSE


# --- 000, "Multiple Consumers, Same Service" ------------------------------------------------------------------------


async def test_what_one_instance_processed_the_next_one_skips(lab: Lab) -> None:
    handler, message = Recorder(lab), lab.message()
    one, two = await lab.inbox(consumer="order-service"), await lab.inbox(consumer="order-service")
    assert (await one.process(message, handler)).processed
    outcome = await two.process(message, handler)
    assert (outcome.duplicate, outcome.result) == (True, {"charged": message.id})
    assert handler.runs == [message.id]


async def test_instances_that_look_at_the_same_moment_do_not_both_act(lab: Lab) -> None:
    """The check in one transaction and the work in another: the race that the document warns of, fifty times."""
    handler = Recorder(lab)
    one, two = await lab.inbox(wait=30, cache=0), await lab.inbox(wait=30, cache=0)
    messages = [lab.message(f"{number:02}") for number in range(50)]
    outcomes = await asyncio.gather(*(inbox.process(m, handler) for m in messages for inbox in (one, two)))
    assert Counter(outcome.kind for outcome in outcomes) == {Kind.PROCESSED: 50, Kind.DUPLICATE: 50}
    assert sorted(handler.runs) == await lab.effects() == [message.id for message in messages]


async def test_instances_in_processes_of_their_own_share_one_memory(lab: Lab) -> None:
    ids = [f"{number:02}" for number in range(20)]
    reports = await asyncio.gather(*(lab.child(ids=order, concurrency=4) for order in (ids, ids[::-1])))
    assert [code for code, _ in reports] == [0, 0]
    kinds = Counter(line["kind"] for _, lines in reports for line in lines)
    assert kinds == {"processed": 20, "duplicate": 20}
    assert await lab.effects() == ids


# --- 000, "Consumer Name": two services -----------------------------------------------------------------------------


async def test_a_second_service_is_not_starved_by_the_first(lab: Lab) -> None:
    """There the event id alone is the primary key, so whoever comes second is told that it has been there."""
    message = lab.message("order-123")
    for service in ("order-service", "inventory-service", "notification-service"):

        async def note(message: Message[Any], tx: Any, service: str = service) -> str:
            await lab.write(tx, f"{service} {message.id}")
            return service

        inbox = await lab.inbox(consumer=service)
        outcomes = [await inbox.process(message, note) for _ in range(2)]
        assert [outcome.kind for outcome in outcomes] == [Kind.PROCESSED, Kind.DUPLICATE]
        assert {outcome.result for outcome in outcomes} == {service}, "each gets its own result back"
    assert await lab.effects() == [
        "inventory-service order-123", "notification-service order-123", "order-service order-123",
    ]  # fmt: skip


async def test_a_failure_of_one_service_does_not_touch_the_other(lab: Lab) -> None:
    message, orders, stock = lab.message(), await lab.inbox(consumer="orders"), await lab.inbox(consumer="stock")
    with pytest.raises(ValueError, match="no"):
        await orders.process(message, Recorder(lab, error=ValueError("no")))
    assert (await stock.process(message, Recorder(lab))).processed
    assert (await orders.process(message, Recorder(lab))).processed


# --- 001, 6.1: the consumer crashes before processing ---------------------------------------------------------------


@pytest.mark.parametrize("point", ["before claim", "after claim", "handler", "effect", "before commit"])
async def test_a_consumer_killed_before_its_commit_leaves_nothing_in_the_way(lab: Lab, point: str) -> None:
    """Up to the commit it is as if nobody had ever seen the message, however far the work had come."""
    code, reports = await lab.child(ids=["m"], kill_at=point)
    assert (code, reports) == (-signal.SIGKILL, []), "it died before it could acknowledge"
    assert await lab.query("SELECT * FROM onceward_records") == []
    assert await lab.effects() == []
    assert await lab.child(ids=["m"]) == (0, [{"id": "m", "kind": "processed"}])
    assert await lab.effects() == ["m"]


# --- 001, 6.2: the consumer crashes after the side effects, before the ack ------------------------------------------


async def test_a_consumer_killed_before_its_ack_does_not_do_it_twice(lab: Lab) -> None:
    code, reports = await lab.child(ids=["m"], kill_at="after commit")
    assert (code, reports) == (-signal.SIGKILL, []), "it died before it could acknowledge"
    assert await lab.effects() == ["m"]
    handler = Recorder(lab)
    outcome = await (await lab.inbox()).process(lab.message("m"), handler)
    assert (outcome.duplicate, outcome.verdict) == (True, Verdict.ACK)
    assert outcome.result == {"charged": "m"}, "and the redelivery even has the lost result"
    assert handler.runs == []
    assert await lab.effects() == ["m"]


# --- 001, 6.3: the handler throws -----------------------------------------------------------------------------------


async def test_a_handler_that_throws_leaves_a_failed_entry_and_is_retried(lab: Lab) -> None:
    inbox, queue, message = await lab.inbox(), Queue(lab.message("m")), lab.message("m")
    with pytest.raises(RuntimeError, match="mail server"):
        await queue.deliver(inbox, Recorder(lab, error=RuntimeError("mail server away")))
    record = await inbox.get_record(message)
    assert record is not None
    assert (record.state, record.attempts, record.last_error) == (State.FAILED, 1, "RuntimeError: mail server away")
    assert (record.processed_at, record.payload) == (None, {"amount": 7})
    assert (await queue.deliver(inbox, Recorder(lab))).processed
    record = await inbox.get_record(message)
    assert record is not None
    assert (record.state, record.attempts) == (State.PROCESSED, 2)
    assert record.processed_at is not None
    assert record.payload_hash is not None
    assert await lab.effects() == ["m"]


async def test_the_retry_policy_decides_what_becomes_of_a_handler_that_keeps_throwing(lab: Lab) -> None:
    inbox = await lab.inbox(retry=RetryPolicy(max_attempts=3, base=0))
    handler, queue = Recorder(lab, error=RuntimeError("no")), Queue(lab.message("m"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            await queue.deliver(inbox, handler)
    outcome = await queue.deliver(inbox, handler)
    assert outcome.kind is Kind.DEAD
    assert not queue.unsettled, "it is kept where a person finds it, so the queue may go on"
    record = await inbox.get_record(lab.message("m"))
    assert record is not None
    assert (record.state, record.attempts, record.payload) == (State.DEAD, 3, {"amount": 7})
    assert await lab.effects() == []


# --- 004, "Test Cases" ----------------------------------------------------------------------------------------------


async def test_an_event_is_processed_only_once(lab: Lab) -> None:
    """The first case of the document."""
    inbox, handler, event = await lab.inbox(consumer="test"), Recorder(lab), lab.message()
    assert (await inbox.process(event, handler)).processed
    assert len(handler.runs) == 1
    assert not (await inbox.process(event, handler)).processed
    assert len(handler.runs) == 1


@pytest.mark.parametrize("cache", [0, 10], ids=["from the store", "from memory"])
async def test_a_duplicate_gets_the_cached_result(lab: Lab, cache: int) -> None:
    """The second case, on both ways that an answer can take."""

    async def create_trade(message: Message[Any]) -> dict[str, Any]:
        return {"tradeId": "123", "legs": [1, 2.5, "ü"]}

    inbox, event = await lab.inbox(consumer="test", cache=cache), lab.message()
    first = await inbox.process(event, create_trade)
    assert first.result == {"tradeId": "123", "legs": [1, 2.5, "ü"]}
    for _ in range(2):
        assert (await inbox.process(event, create_trade)).result == first.result


@pytest.mark.parametrize("result", [{"tradeId": "123", "settledAt": None}, [None], "null"], ids=str)
async def test_a_cached_result_may_have_nothing_in_it(lab: Lab, result: Any) -> None:
    async def create_trade(message: Message[Any], tx: Any) -> Any:
        await lab.write(tx, message.id)
        return result

    inbox, event = await lab.inbox(consumer="test"), lab.message()
    assert (await inbox.process(event, create_trade)).result == result
    for other in (inbox, await lab.inbox(consumer="test")):
        assert (await other.process(event, create_trade)).result == result
    assert await lab.effects() == [event.id]


async def test_a_custom_key_makes_two_quotes_of_one_request_two_events(lab: Lab) -> None:
    """The third case."""
    inbox, handler = await lab.inbox(consumer="test", key=keys.fields("rfqId", "quoteId")), Recorder(lab)
    for quote in ("a", "b"):
        assert (await inbox.process(lab.message(payload={"rfqId": "1", "quoteId": quote}), handler)).processed
    assert len(handler.runs) == 2
    again = await inbox.process(lab.message(payload={"rfqId": "1", "quoteId": "a"}), handler)
    assert again.duplicate, "another event id, but the same quote of the same request"


@pytest.mark.parametrize("instances", [1, 2])
async def test_of_two_that_run_at_once_only_one_acts(lab: Lab, instances: int) -> None:
    """The fourth case. There `FOR UPDATE SKIP LOCKED` locks a row that does not exist yet, and both act."""
    inboxes = [await lab.inbox(consumer="test", wait=30) for _ in range(instances)]
    slow, event = Gate(lab), lab.message()
    both = [asyncio.ensure_future(inbox.process(event, slow)) for inbox in (inboxes[0], inboxes[-1])]
    await slow.started.wait()
    slow.go.set()
    outcomes = await asyncio.gather(*both)
    assert sorted(outcome.kind for outcome in outcomes) == [Kind.DUPLICATE, Kind.PROCESSED]
    assert [outcome.result for outcome in outcomes] == [{"charged": event.id}] * 2
    assert len(slow.runs) == 1
    assert await lab.effects() == [event.id]


# --- 004, "Idempotency Key Strategies" ------------------------------------------------------------------------------


async def test_the_event_id_is_the_key_unless_told_otherwise(lab: Lab) -> None:
    """eventIdStrategy."""
    inbox, handler = await lab.inbox(), Recorder(lab)
    assert (await inbox.process(lab.message("e-1", payload={"n": 1}), handler)).processed
    assert (await inbox.process(lab.message("e-2", payload={"n": 1}), handler)).processed
    assert (await inbox.process(lab.message("e-1", payload={"n": 1}), handler)).duplicate


async def test_an_aggregate_and_its_version_are_a_key(lab: Lab) -> None:
    """aggregateVersionStrategy. The first version may be 0, which is not nothing."""
    inbox, handler = await lab.inbox(key=keys.aggregate_version), Recorder(lab)
    events = [("Order", "o-1", 0), ("Order", "o-1", 1), ("Order", "o-2", 0), ("Invoice", "o-1", 0)]
    for expected in (Kind.PROCESSED, Kind.DUPLICATE):
        for type_, id_, version in events:
            message = lab.message(stream=stream_of(type_, id_), payload={"version": version})
            assert (await inbox.process(message, handler)).kind is expected
    assert len(handler.runs) == 4


async def test_an_event_without_a_version_does_not_pass_for_version_zero(lab: Lab) -> None:
    """`payload.version || 0` makes all events without a version one event, the same as version 0."""
    inbox, handler, order = await lab.inbox(key=keys.aggregate_version), Recorder(lab), stream_of("Order", "o-1")
    for payload in ({}, {"version": None}):
        with pytest.raises(KeyMissing) as caught:
            await inbox.process(lab.message(stream=order, payload=payload), handler)
        assert caught.value.field == "version"
    assert (await inbox.process(lab.message(stream=order, payload={"version": 0}), handler)).processed
    with pytest.raises(KeyMissing, match="stream"):
        await inbox.process(lab.message(payload={"version": 0}), handler)


async def test_the_names_of_aggregates_cannot_run_into_each_other(lab: Lab) -> None:
    """`type:id:version` is the same text for ("a:b", "c") and ("a", "b:c")."""
    inbox, handler = await lab.inbox(key=keys.aggregate_version), Recorder(lab)
    for stream in (stream_of("a:b", "c"), stream_of("a", "b:c"), stream_of("a", {"b": "c"})):
        assert (await inbox.process(lab.message(stream=stream, payload={"version": 1}), handler)).processed


async def test_a_field_of_the_payload_is_a_key(lab: Lab) -> None:
    """payloadFieldStrategy, with a path."""
    inbox, handler = await lab.inbox(key=keys.field("order.id")), Recorder(lab)
    assert (await inbox.process(lab.message(payload={"order": {"id": "o-1"}}), handler)).processed
    assert (await inbox.process(lab.message(payload={"order": {"id": "o-2"}}), handler)).processed
    assert (await inbox.process(lab.message(payload={"order": {"id": "o-1"}}), handler)).duplicate


@pytest.mark.parametrize(
    "payload", [{}, {"order": None}, {"order": {}}, {"order": {"id": None}}, {"order": {"id": ""}}, {"order": "o-1"}]
)
async def test_a_missing_field_is_an_error_and_not_the_key_undefined(lab: Lab, payload: Any) -> None:
    """`String(undefined)` is a perfectly good key: the first event without the field hides all that follow."""
    inbox, handler = await lab.inbox(key=keys.field("order.id")), Recorder(lab)
    for _ in range(2):
        with pytest.raises(KeyMissing) as caught:
            await inbox.process(lab.message(payload=payload), handler)
        assert caught.value.field == "order.id"
        assert verdict_of(caught.value) is Verdict.REJECT
    for text in ("undefined", "null", "None"):
        assert (await inbox.process(lab.message(payload={"order": {"id": text}}), handler)).processed
    assert len(handler.runs) == 3


async def test_several_fields_together_are_a_key_that_cannot_collide(lab: Lab) -> None:
    """compositeKeyStrategy joins with ":", so that all of these are one key to it."""
    inbox, handler = await lab.inbox(key=keys.fields("a", "b")), Recorder(lab)
    payloads: list[dict[str, Any]] = [
        {"a": "1:2", "b": "3"}, {"a": "1", "b": "2:3"}, {"a": 1, "b": "2:3"}, {"a": '1","2', "b": "3"},
    ]  # fmt: skip
    for expected in (Kind.PROCESSED, Kind.DUPLICATE):
        for payload in payloads:
            assert (await inbox.process(lab.message(payload=payload), handler)).kind is expected


async def test_a_field_is_looked_up_in_the_payload_and_then_in_the_envelope(lab: Lab) -> None:
    inbox, handler = await lab.inbox(key=keys.fields("source", "number")), Recorder(lab)
    from_envelope = lab.message(source="shop", payload={"number": 1})
    from_payload = lab.message(source="shop", payload={"number": 1, "source": "warehouse"})
    assert (await inbox.process(from_envelope, handler)).processed
    assert (await inbox.process(from_payload, handler)).processed
    assert (await inbox.process(lab.message(source="warehouse", payload={"number": 1}), handler)).duplicate


async def test_zero_and_false_are_values_of_a_composite_key(lab: Lab) -> None:
    """`payload[field] || event[field] || ""` drops them, and takes a missing field for an empty one."""
    inbox, handler = await lab.inbox(key=keys.fields("leg", "final")), Recorder(lab)
    for payload in ({"leg": 0, "final": False}, {"leg": 0, "final": True}, {"leg": 1, "final": False}):
        assert (await inbox.process(lab.message(payload=payload), handler)).processed
    with pytest.raises(KeyMissing, match="final"):
        await inbox.process(lab.message(payload={"leg": 0}), handler)


async def test_any_function_is_a_key_strategy(lab: Lab) -> None:
    """IdempotencyKeyExtractor."""

    def by_day(message: Message[Any]) -> str:
        return str(message.payload["at"])[:10]

    inbox, handler = await lab.inbox(key=by_day), Recorder(lab)
    assert (await inbox.process(lab.message(payload={"at": "2024-01-16T08:00"}), handler)).processed
    assert (await inbox.process(lab.message(payload={"at": "2024-01-16T20:00"}), handler)).duplicate
    assert (await inbox.process(lab.message(payload={"at": "2024-01-17T08:00"}), handler)).processed


# --- 004, "Idempotent Consumer Wrapper": tenants and metrics --------------------------------------------------------


async def test_the_tenant_comes_from_the_context_or_from_the_event_and_must_be_there(lab: Lab) -> None:
    current_tenant: ContextVar[str | None] = ContextVar("current_tenant", default=None)

    def tenant(message: Message[Any]) -> str | None:
        return current_tenant.get() or message.tenant

    inbox, handler = await lab.inbox(consumer="trade-service", tenant=tenant), Recorder(lab)
    with pytest.raises(TenantMissing, match="no tenant") as caught:
        await inbox.process(lab.message("e"), handler)
    assert verdict_of(caught.value) is Verdict.REJECT
    assert handler.runs == []
    assert (await inbox.process(lab.message("e", tenant="north"), handler)).processed
    current_tenant.set("south")
    assert (await inbox.process(lab.message("e", tenant="north"), handler)).processed, "the context goes first"
    current_tenant.set("north")
    assert (await inbox.process(lab.message("e"), handler)).duplicate


async def test_a_tenant_from_a_header_must_be_there_too(lab: Lab) -> None:
    inbox, handler = await lab.inbox(tenant=tenants.header("x-tenant")), Recorder(lab)
    for headers in ({}, {"x-tenant": ""}):
        with pytest.raises(TenantMissing):
            await inbox.process(lab.message("e", headers=headers), handler)
    assert (await inbox.process(lab.message("e", headers={"X-Tenant": "north"}), handler)).processed


async def test_what_the_document_counts_is_told_as_events(lab: Lab) -> None:
    """idempotent.processed, idempotent.duplicate_detected and idempotent.processing_failed, by type and consumer."""
    counted: Counter[tuple[str, str, str]] = Counter()
    inbox = await lab.inbox(consumer="trade-service", listeners=[])
    inbox.subscribe(lambda event: counted.update([(type(event).__name__, event.consumer, event.type)]))
    event = lab.message(type="rfq.executed")
    with pytest.raises(ValueError, match="no"):
        await inbox.process(event, Recorder(lab, error=ValueError("no")))
    for _ in range(3):
        await inbox.process(event, Recorder(lab))
    assert counted == {
        ("Failed", "trade-service", "rfq.executed"): 1,
        ("Processed", "trade-service", "rfq.executed"): 1,
        ("Duplicate", "trade-service", "rfq.executed"): 2,
    }


# --- 004, "Usage Example": a method as handler ----------------------------------------------------------------------


class RfqExecuted(msgspec.Struct, rename="camel"):
    rfq_id: str
    quote_id: str
    executed_price: float
    executed_quantity: int


@dataclass
class Trade:
    id: str
    value: float


class TradeService:
    def __init__(self, desk: str) -> None:
        self.desk = desk
        self.executions: list[str] = []

    async def create_trade_from_execution(self, execution: RfqExecuted, tx: Any) -> Trade:
        self.executions.append(execution.quote_id)
        await tx.execute("INSERT INTO effects VALUES ($1)", f"{self.desk} {execution.rfq_id} {execution.quote_id}")
        return Trade(f"{self.desk}-{execution.quote_id}", execution.executed_price * execution.executed_quantity)


class RfqExecutedHandler:
    """The class of the document: it owns its services, and its method is the handler."""

    key = keys.fields("rfqId", "quoteId")

    def __init__(self, inbox: Inbox[Any], trades: TradeService) -> None:
        self.inbox = inbox
        self.trades = trades
        self.skipped = 0

    async def handle(self, event: Message[Any]) -> Trade | None:
        outcome = await self.inbox.process(event, self.create_trade, key=self.key)
        self.skipped += outcome.duplicate
        return outcome.result

    async def create_trade(self, event: Message[RfqExecuted], tx: Any) -> Trade:
        return await self.trades.create_trade_from_execution(event.payload, tx)


def rfq_executed(lab: Lab, rfq: str, quote: str, **fields: Any) -> Message[Any]:
    payload = {"rfqId": rfq, "quoteId": quote, "executedPrice": 99.5, "executedQuantity": 10}
    return lab.message(type="rfq.executed", payload=payload, **fields)


async def test_the_usage_example_creates_one_trade_for_each_quote_of_a_request(lab: Lab) -> None:
    handler = RfqExecutedHandler(await lab.inbox(consumer="trade-service"), TradeService("fx"))
    trades = [await handler.handle(rfq_executed(lab, "r-1", quote)) for quote in ("q-1", "q-2", "q-1", "q-2", "q-1")]
    one, two = Trade("fx-q-1", 995.0), Trade("fx-q-2", 995.0)
    assert trades == [one, two, one, two, one], "a duplicate gets the trade itself, as the type that it was"
    assert handler.skipped == 3
    assert handler.trades.executions == ["q-1", "q-2"]
    assert await lab.effects() == ["fx r-1 q-1", "fx r-1 q-2"]


async def test_the_usage_example_survives_a_failing_trade_service(lab: Lab) -> None:
    class Unlucky(TradeService):
        async def create_trade_from_execution(self, execution: RfqExecuted, tx: Any) -> Trade:
            trade = await super().create_trade_from_execution(execution, tx)
            if len(self.executions) == 1:
                raise ConnectionError("the exchange is closed")
            return trade

    handler = RfqExecutedHandler(await lab.inbox(consumer="trade-service"), Unlucky("fx"))
    with pytest.raises(ConnectionError, match="closed"):
        await handler.handle(rfq_executed(lab, "r-1", "q-1"))
    assert await lab.effects() == []
    assert await handler.handle(rfq_executed(lab, "r-1", "q-1")) == Trade("fx-q-1", 995.0)
    assert await lab.effects() == ["fx r-1 q-1"]


async def test_a_method_runs_on_the_object_that_it_belongs_to(lab: Lab) -> None:
    """Signatures are remembered by function. Two objects of one class share the function and nothing else."""
    inbox = await lab.inbox(consumer="trade-service")
    fx, bonds = RfqExecutedHandler(inbox, TradeService("fx")), RfqExecutedHandler(inbox, TradeService("bonds"))
    assert await fx.handle(rfq_executed(lab, "r-1", "q-1")) == Trade("fx-q-1", 995.0)
    assert await bonds.handle(rfq_executed(lab, "r-1", "q-2")) == Trade("bonds-q-2", 995.0)
    assert (fx.trades.executions, bonds.trades.executions) == (["q-1"], ["q-2"])


async def test_a_method_can_be_registered_for_a_type(lab: Lab) -> None:
    """@OnEvent and @Idempotent in one."""
    inbox, trades = await lab.inbox(consumer="trade-service"), TradeService("fx")
    method = RfqExecutedHandler(inbox, trades).create_trade
    inbox.handler("rfq.executed", key=RfqExecutedHandler.key)(method)
    outcomes = [await inbox.process(rfq_executed(lab, "r-1", "q-1")) for _ in range(2)]
    assert [outcome.kind for outcome in outcomes] == [Kind.PROCESSED, Kind.DUPLICATE]
    assert [outcome.result for outcome in outcomes] == [Trade("fx-q-1", 995.0)] * 2
    assert trades.executions == ["q-1"]


async def test_a_decorated_method_runs_once_for_each_key(lab: Lab) -> None:
    """The decorator of the document, on a method that takes plain arguments."""
    inbox = await lab.inbox(consumer="trade-service")

    class Desk:
        def __init__(self) -> None:
            self.booked: list[str] = []

        @inbox.idempotent(key=("rfq_id", "quote_id"), name="book")
        async def book(self, tx: Any, rfq_id: str, quote_id: str) -> Trade:
            self.booked.append(quote_id)
            await lab.write(tx, f"{rfq_id} {quote_id}")
            return Trade(quote_id, 1.0)

    desk, restarted = Desk(), Desk()
    assert await desk.book("r-1", quote_id="q-1") == Trade("q-1", 1.0)
    assert await desk.book("r-1", "q-2") == Trade("q-2", 1.0)
    assert await restarted.book("r-1", "q-1") == Trade("q-1", 1.0)
    assert (desk.booked, restarted.booked) == (["q-1", "q-2"], [])
    assert await lab.effects() == ["r-1 q-1", "r-1 q-2"]
