"""FastStream in memory, as users test their apps. The real brokers are in test_faststream_kafka and _rabbitmq."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import anyio.from_thread
import asyncpg
import pytest
from aiokafka import ConsumerRecord
from fast_depends.pydantic import PydanticSerializer
from faststream import AckPolicy, BaseMiddleware, Context, Depends, ExceptionMiddleware, Header, Response
from faststream.exceptions import AckMessage, NackMessage, RejectMessage
from faststream.kafka import KafkaBroker, KafkaResponse, KafkaRouter
from faststream.message import encode_message
from faststream.rabbit import ExchangeType, RabbitBroker, RabbitExchange, RabbitQueue, RabbitResponse, RabbitRouter
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from onceward import Inbox, RetryPolicy, TryLater, UsageError, current, events, lanes
from onceward.errors import InboxClosed, StoreUnavailable
from onceward.integrations.faststream import InboxMiddleware, inbox_tx
from onceward.integrations.faststream_kept import keep, kept_of, restore
from onceward.integrations.faststream_passage import Passage
from onceward.message import Message
from onceward.record import Record, State
from onceward.sqlalchemy import SqlAlchemyStore, joining
from onceward.sqlite import SqliteStore
from onceward.testing import PointStore
from onceward.testing.redis_labs import RedisLab
from onceward.testing.waiting import until
from tests.faststream_tools import BROKERS, App, Order, Receipt

AT_ONCE = RetryPolicy(max_attempts=5, base=0.0)
Tx = Annotated[Any, Depends(inbox_tx)]
EACH = pytest.mark.parametrize("kind", BROKERS)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Passage._give_back, "__defaults__", (0.01,))


@pytest.fixture
async def inbox(tmp_path: Path) -> AsyncIterator[Inbox[Any]]:
    inbox = Inbox(SqliteStore(tmp_path / "test.db"), consumer="billing", retry=AT_ONCE)
    async with inbox:
        yield inbox


@pytest.fixture
async def charges(inbox: Inbox[Any]) -> Charges:
    found = Charges(inbox)
    await inbox.process(Message("setup", "setup", None), found.set_up)
    return found


class Charges:
    """A table of what took effect."""

    def __init__(self, inbox: Inbox[Any]) -> None:
        self._inbox = inbox
        self._looks = 0

    async def set_up(self, _message: Message[Any], tx: Any) -> None:
        await tx.execute("CREATE TABLE charges (order_id TEXT, cents INTEGER)")

    async def add(self, tx: Any, order: Order) -> None:
        await tx.execute("INSERT INTO charges VALUES (?, ?)", order.id, order.cents)

    async def all(self) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []

        async def look(_message: Message[Any], tx: Any) -> None:
            rows = await tx.fetch("SELECT order_id, cents FROM charges ORDER BY rowid")
            found.extend((row[0], row[1]) for row in rows)

        self._looks += 1
        await self._inbox.process(Message(f"look-{self._looks}", "look", None), look)
        return found


async def record_of(inbox: Inbox[Any], id_: str) -> Record:
    (found,) = [record for record in await inbox.records() if record.message_id == id_]
    return found


async def _repository(tx: Tx) -> Any:
    return tx


# --- once ---------------------------------------------------------------------------------------------------


@EACH
async def test_a_message_that_comes_twice_takes_effect_once(kind: str, inbox: Inbox[Any], charges: Charges) -> None:
    app = App(kind, inbox)

    @app.broker.subscriber("orders")
    async def on_order(order: Order, tx: Tx) -> None:
        await charges.add(tx, order)

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1")
        await app.send(Order(id="o-1", cents=5), "m-1")
        await app.send(Order(id="o-2", cents=7), "m-2")
    assert await charges.all() == [("o-1", 5), ("o-2", 7)]
    assert app.seen.settled == ["ACKED", "ACKED", "ACKED"]


@EACH
async def test_without_the_middleware_it_takes_effect_twice(kind: str) -> None:
    """That the tests above can fail."""
    ran = []
    broker: Any = (KafkaBroker if kind == "kafka" else RabbitBroker)(ack_policy=AckPolicy.NACK_ON_ERROR)
    app = App.__new__(App)
    app.kind, app.broker = kind, broker

    @broker.subscriber("orders")
    async def on_order(order: Order) -> None:
        ran.append(order.id)

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1")
        await app.send(Order(id="o-1", cents=5), "m-1")
    assert ran == ["o-1", "o-1"]


@EACH
async def test_a_failed_handler_leaves_no_trace_and_is_run_again(
    kind: str, inbox: Inbox[Any], charges: Charges
) -> None:
    app, attempts = App(kind, inbox), []

    @app.broker.subscriber("orders")
    async def on_order(order: Order, tx: Tx) -> None:
        await charges.add(tx, order)
        attempts.append(current().attempt)
        if len(attempts) == 1:
            raise ValueError("after the effect")

    async with app.running():
        with pytest.raises(ValueError, match="after the effect"):
            await app.send(Order(id="o-1", cents=5), "m-1")
        assert await charges.all() == []
        await app.send(Order(id="o-1", cents=5), "m-1")
    assert await charges.all() == [("o-1", 5)]
    assert attempts == [1, 2]
    assert app.seen.settled == ["NACKED", "ACKED"]


@EACH
async def test_the_last_attempt_is_a_dead_letter_and_acknowledged(kind: str, inbox: Inbox[Any]) -> None:
    app = App(kind, inbox)

    @app.broker.subscriber("orders")
    async def on_order(order: Order) -> None:
        raise ValueError("always")

    async with app.running():
        for _ in range(AT_ONCE.max_attempts - 1):
            with pytest.raises(ValueError, match="always"):
                await app.send(Order(id="o-1", cents=5), "m-1")
        await app.send(Order(id="o-1", cents=5), "m-1")
        await app.send(Order(id="o-1", cents=5), "m-1")
    record = await record_of(inbox, "m-1")
    assert record.state is State.DEAD
    assert record.attempts == AT_ONCE.max_attempts
    assert record.body == b'{"id":"o-1","cents":5}'
    assert app.seen.settled == ["NACKED"] * 4 + ["ACKED", "ACKED"]


async def test_without_a_policy_retries_end_too(tmp_path: Path) -> None:
    async with Inbox(SqliteStore(tmp_path / "test.db"), consumer="billing") as inbox:
        app = App("kafka", inbox, hold=0.0)

        @app.broker.subscriber("orders")
        async def on_order(order: Order) -> None:
            raise ValueError("always")

        async with app.running():
            with pytest.raises(ValueError, match="always"):
                await app.send(Order(id="o-1", cents=5), "m-1")
        assert (await record_of(inbox, "m-1")).next_try_at is not None


@EACH
async def test_the_record_says_which_handler_and_where_it_came_from(kind: str, inbox: Inbox[Any]) -> None:
    app = App(kind, inbox, type="order.paid", source="shop")

    @app.broker.subscriber("orders")
    async def on_order(order: Order) -> None: ...

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1")
    record = await record_of(inbox, "m-1")
    assert record.handler is not None
    assert record.handler.startswith(__name__)
    assert record.handler.endswith("on_order")
    assert record.origin is not None
    assert record.origin.startswith("orders/")
    assert (record.type, record.source, record.topic) == ("order.paid", "shop", "orders")


@EACH
async def test_sync_handlers_run_once_too(kind: str, inbox: Inbox[Any], charges: Charges) -> None:
    app, threads = App(kind, inbox), []

    @app.broker.subscriber("orders")
    def on_order(order: Order, tx: Tx) -> None:
        threads.append(threading.current_thread())
        anyio.from_thread.run(charges.add, tx, order)

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1")
        await app.send(Order(id="o-1", cents=5), "m-1")
    assert await charges.all() == [("o-1", 5)]
    assert threads != [threading.main_thread()]


@EACH
async def test_handlers_in_routers_and_of_several_subscribers_run_once(
    kind: str, inbox: Inbox[Any], charges: Charges
) -> None:
    app = App(kind, inbox)
    router: Any = (KafkaRouter if kind == "kafka" else RabbitRouter)(prefix="shop.", ack_policy=AckPolicy.NACK_ON_ERROR)

    @router.subscriber("orders")
    @router.subscriber("orders.retry")
    async def on_order(order: Order, tx: Tx) -> None:
        await charges.add(tx, order)

    app.broker.include_router(router)
    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1", "shop.orders")
        await app.send(Order(id="o-1", cents=5), "m-1", "shop.orders.retry")
        await app.send(Order(id="o-2", cents=5), "m-2", "shop.orders.retry")
    assert await charges.all() == [("o-1", 5), ("o-2", 5)]
    assert (await record_of(inbox, "m-1")).topic == "shop.orders"


@EACH
async def test_a_router_may_have_the_middleware_for_itself(kind: str, inbox: Inbox[Any]) -> None:
    app, ran = App(kind, inbox), []
    broker: Any = (KafkaBroker if kind == "kafka" else RabbitBroker)(ack_policy=AckPolicy.NACK_ON_ERROR)
    router: Any = (KafkaRouter if kind == "kafka" else RabbitRouter)(
        middlewares=[app.once], ack_policy=AckPolicy.NACK_ON_ERROR
    )
    app.broker = broker

    @router.subscriber("orders")
    async def on_order(order: Order) -> None:
        ran.append("order")

    @broker.subscriber("clicks")
    async def on_click(order: Order) -> None:
        ran.append("click")

    broker.include_router(router)
    app.once.check(broker)
    async with app.running():
        for topic in ("orders", "clicks"):
            await app.send(Order(id="o-1", cents=5), "m-1", topic)
            await app.send(Order(id="o-1", cents=5), "m-1", topic)
    assert ran == ["order", "click", "click"]


@EACH
async def test_dependencies_of_dependencies_share_the_transaction(
    kind: str, inbox: Inbox[Any], charges: Charges
) -> None:
    app, given_ = App(kind, inbox), []

    @app.broker.subscriber("orders")
    async def on_order(order: Order, tx: Tx, other: Annotated[Any, Depends(_repository)]) -> None:
        given_.append(tx is other)

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1")
    assert given_ == [True]


async def test_inbox_tx_outside_of_a_handler_says_what_is_missing() -> None:
    with pytest.raises(UsageError, match="InboxMiddleware among its middlewares"):
        await inbox_tx()


# --- what is published --------------------------------------------------------------------------------------


class Wide(BaseModel):
    zulu: int = 1
    alpha: Decimal = Decimal("1.10")
    at: datetime = datetime(2024, 5, 1, 12, 30, tzinfo=UTC)
    later: timedelta = timedelta(seconds=90)
    ratio: float = 0.1 + 0.2
    far: float = 1e22
    none: str | None = None
    text: str = 'ß "quoted" \u2028 \\'
    raw: bytes = b"bytes"
    nested: dict[str, Any] = Field(default={"z": [1, 2.0, {"y": True}], "a": 2**70})


RESULTS: dict[str, Any] = {
    "model": Wide(),
    "dict": {"b": 1, "a": [1.0, None, {"z": 1, "y": 2}]},
    "text": "ünïcode",
    "json as text": '{"b": 1}',
    "bytes": b"\x00\xff",
    "none": None,
    "number": 1.0,
    "list": [Wide(), "text", 3],
    "response": Response({"b": 1, "a": 2}, headers={"x-shop": "7"}, correlation_id="mine"),
}


@EACH
@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS.keys())
async def test_a_publication_is_repeated_byte_for_byte(kind: str, inbox: Inbox[Any], result: Any) -> None:
    app, ran = App(kind, inbox), []

    @app.broker.subscriber("orders")
    @app.broker.publisher("receipts")
    async def on_order(order: Order) -> Any:
        ran.append(order.id)
        return result

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1", correlation_id="c-1")
        await app.send(Order(id="o-1", cents=5), "m-1", correlation_id="c-1")
    first, second = app.seen.published("receipts")
    assert first == second
    assert ran == ["o-1"]


class Chatty(BaseModel):
    said: Any


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    )
)
def test_whatever_json_is_returned_is_encoded_the_same_again(value: Any) -> None:
    serializer = PydanticSerializer()
    for result in (value, Chatty(said=value), {"b": value, "a": 1}):
        kept = keep(result, serializer)
        through = kept_of(_stored(kept))
        assert through == kept
        assert encode_message(restore(kept), serializer) == encode_message(result, serializer)


def _stored(kept: Any) -> Any:
    from onceward import codec

    return codec.decode(codec.encode(kept, "result"))


async def test_a_kafka_response_keeps_its_key(inbox: Inbox[Any]) -> None:
    app = App("kafka", inbox)

    @app.broker.subscriber("orders")
    @app.broker.publisher("receipts")
    async def on_order(order: Order) -> Any:
        return KafkaResponse({"b": 1, "a": 2}, key=b"\xff", headers={"x": "1"}, timestamp_ms=7)

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1")
        await app.send(Order(id="o-1", cents=5), "m-1", headers={"correlation_id": "another"})
    first, second = app.seen.published("receipts")
    assert first == second
    assert first[1]["key"] == b"\xff"
    assert [one.timestamp for one in app.seen.records if one.topic == "receipts"] == [7, 7]


async def test_a_rabbit_response_keeps_its_options(inbox: Inbox[Any]) -> None:
    app = App("rabbit", inbox)

    @app.broker.subscriber("orders")
    @app.broker.publisher("receipts")
    async def on_order(order: Order) -> Any:
        return RabbitResponse(
            {"b": 1},
            priority=3,
            headers={"x": 1},
            expiration=timedelta(seconds=60),
            timestamp=datetime(2024, 1, 1, tzinfo=UTC),
        )

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1")
        await app.send(Order(id="o-1", cents=5), "m-1")
    first, second = [one for one in app.seen.records if one.routing_key == "receipts"]
    assert (first.body, first.headers, first.priority) == (second.body, second.headers, second.priority)
    assert (first.expiration, first.timestamp) == (second.expiration, second.timestamp)
    assert (first.priority, first.message_id) == (3, second.message_id)


async def test_a_batch_publisher_repeats_each_of_its_messages(inbox: Inbox[Any]) -> None:
    app = App("kafka", inbox)

    @app.broker.subscriber("orders")
    @app.broker.publisher("lines", batch=True)
    async def on_order(order: Order) -> Any:
        return Receipt(order="o", cents=1), "text", b"bytes", {"b": 1, "a": 2}

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1", correlation_id="c")
        await app.send(Order(id="o-1", cents=5), "m-1", correlation_id="c")
    batches = [one for one in app.seen.records if isinstance(one, list)]
    first, second = ([(one.value, one.key, one.headers) for one in batch] for batch in batches)
    assert first == second
    assert [value for value, _, _ in first] == [b'{"order":"o","cents":1}', b"text", b"bytes", b'{"b":1,"a":2}']
    assert not any(name == "message_id" for _, _, headers in first for name, _ in headers)


@EACH
async def test_the_next_inbox_knows_a_repeated_publication(kind: str, inbox: Inbox[Any]) -> None:
    app, ran = App(kind, inbox), []

    @app.broker.subscriber("orders")
    @app.broker.publisher("receipts")
    @app.broker.publisher("audit")
    async def on_order(order: Order) -> Receipt:
        return Receipt(order=order.id, cents=order.cents)

    @app.broker.subscriber("receipts")
    async def on_receipt(receipt: Receipt) -> None:
        ran.append(receipt.order)

    async with app.running():
        for id_ in ("m-1", "m-1", "m-2"):
            await app.send(Order(id=f"o-{id_}", cents=5), id_)
    assert ran == ["o-m-1", "o-m-2"]
    name = "message_id" if kind == "kafka" else "id"
    ids = [headers[name] for topic in ("receipts", "audit") for _, headers in app.seen.published(topic)]
    assert len(ids) == 6
    assert len(set(ids)) == 4


@EACH
async def test_an_id_that_the_handler_gives_is_kept(kind: str, inbox: Inbox[Any]) -> None:
    app = App(kind, inbox)

    @app.broker.subscriber("orders")
    @app.broker.publisher("receipts")
    async def on_order(order: Order) -> Any:
        if kind == "kafka":
            return KafkaResponse("r", headers={"message_id": "mine"})
        return RabbitResponse("r", message_id="mine")

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1")
    ((_, headers),) = app.seen.published("receipts")
    assert headers.get("id") == "mine" or headers.get("message_id") == b"mine"


@EACH
async def test_a_result_that_cannot_be_published_is_a_failure_before_the_commit(
    kind: str, inbox: Inbox[Any], charges: Charges
) -> None:
    app = App(kind, inbox)

    @app.broker.subscriber("orders")
    @app.broker.publisher("receipts")
    async def on_order(order: Order, tx: Tx) -> Any:
        await charges.add(tx, order)
        return {"when": object()}

    async with app.running():
        with pytest.raises(Exception, match="FastStream cannot encode"):
            await app.send(Order(id="o-1", cents=5), "m-1")
    assert await charges.all() == []


@EACH
async def test_where_nothing_is_published_nothing_is_kept_of_a_result(kind: str, inbox: Inbox[Any]) -> None:
    app = App(kind, inbox)

    @app.broker.subscriber("orders")
    async def on_order(order: Order) -> Any:
        return {"order": order.id}

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1")
        await app.send(Order(id="o-1", cents=5), "m-1")
    assert (await record_of(inbox, "m-1")).result is None
    assert app.seen.settled == ["ACKED", "ACKED"]


@EACH
async def test_with_skip_a_duplicate_publishes_nothing(kind: str, inbox: Inbox[Any]) -> None:
    app = App(kind, inbox, on_duplicate="skip")

    @app.broker.subscriber("orders")
    @app.broker.publisher("receipts")
    async def on_order(order: Order) -> Receipt:
        return Receipt(order=order.id, cents=order.cents)

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1")
        await app.send(Order(id="o-1", cents=5), "m-1")
    assert len(app.seen.published("receipts")) == 1
    assert (await record_of(inbox, "m-1")).result is None


@EACH
async def test_with_result_a_repeated_request_gets_the_first_answer(kind: str, inbox: Inbox[Any]) -> None:
    app, ran = App(kind, inbox, on_duplicate="result"), []

    @app.broker.subscriber("orders")
    async def on_order(order: Order) -> Receipt:
        ran.append(order)
        return Receipt(order=order.id, cents=len(ran))

    said: Any = {"headers": {"message_id": "m-1"}} if kind == "kafka" else {"message_id": "m-1"}
    async with app.running():
        answers = [await app.broker.request(Order(id="o-1", cents=5), "orders", **said) for _ in range(2)]
    assert [await one.decode() for one in answers] == [{"order": "o-1", "cents": 1}] * 2
    assert [one.body for one in answers] == [b'{"order":"o-1","cents":1}'] * 2


@EACH
async def test_a_reply_is_repeated_to_who_asks_again(kind: str, inbox: Inbox[Any]) -> None:
    app = App(kind, inbox)
    ran = []

    @app.broker.subscriber("orders")
    async def on_order(order: Order) -> Receipt:
        ran.append(order.id)
        return Receipt(order=order.id, cents=1)

    other: Any = (KafkaRouter if kind == "kafka" else RabbitRouter)(ack_policy=AckPolicy.NACK_ON_ERROR)

    @other.subscriber("answers")
    @other.subscriber("answers.again")
    async def on_answer(receipt: Receipt) -> None: ...

    app.broker.include_router(other)
    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1", reply_to="answers", correlation_id="first")
        await app.send(Order(id="o-1", cents=5), "m-1", reply_to="answers.again", correlation_id="second")
    ((body, headers),), ((again, other_headers),) = (app.seen.published(t) for t in ("answers", "answers.again"))
    assert ran == ["o-1"]
    assert body == again
    ids = [h["correlation_id"] for h in (headers, other_headers)]
    assert ids in (["first", "second"], [b"first", b"second"])


@EACH
async def test_no_reply_means_that_nothing_is_kept(kind: str, inbox: Inbox[Any]) -> None:
    app = App(kind, inbox)

    @app.broker.subscriber("orders", no_reply=True)
    async def on_order(order: Order) -> Receipt:
        return Receipt(order=order.id, cents=1)

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1", reply_to="answers")
    assert (await record_of(inbox, "m-1")).result is None


@EACH
async def test_a_duplicate_of_what_other_code_processed_is_acknowledged(kind: str, inbox: Inbox[Any]) -> None:
    app = App(kind, inbox)

    @app.broker.subscriber("orders")
    @app.broker.publisher("receipts")
    async def on_order(order: Order) -> Receipt:
        raise AssertionError

    async def elsewhere(_message: Message[Any]) -> Any:
        return None

    async def with_result(_message: Message[Any]) -> Any:
        return {"order": "o-2"}

    body = b'{"id":"o-1","cents":5}'
    await inbox.process(Message("m-1", "orders", None, body=body), elsewhere)
    await inbox.process(Message("m-2", "orders", None, body=body), with_result)
    async with app.running():
        await app.send(body, "m-1")
        await app.send(body, "m-2")
    assert [body for body, _ in app.seen.published("receipts")] == [b'{"order":"o-2"}']
    assert app.seen.settled[:2] == ["ACKED", "ACKED"]


@EACH
@pytest.mark.parametrize("policy", [AckPolicy.ACK, AckPolicy.REJECT_ON_ERROR, AckPolicy.NACK_ON_ERROR])
@pytest.mark.filterwarnings("ignore:AckPolicy.REJECT_ON_ERROR has the same effect:UserWarning")
async def test_what_could_not_be_published_comes_again_and_is(kind: str, policy: AckPolicy, inbox: Inbox[Any]) -> None:
    """It is committed, so nothing but a redelivery brings the publication."""
    app, tries, ran = App(kind, inbox, policy=policy), [], []

    class Breaks(BaseMiddleware):
        async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
            if cmd.destination == "receipts":
                tries.append(cmd.destination)
                if len(tries) == 1:
                    raise ConnectionError("the broker is away")
            return await call_next(cmd)

    app.broker.add_middleware(Breaks)

    @app.broker.subscriber("orders")
    @app.broker.publisher("receipts")
    async def on_order(order: Order) -> Receipt:
        ran.append(order.id)
        return Receipt(order=order.id, cents=order.cents)

    async with app.running():
        with pytest.raises(ConnectionError):
            await app.send(Order(id="o-1", cents=5), "m-1")
        await app.send(Order(id="o-1", cents=5), "m-1")
    assert ran == ["o-1"]
    assert len(app.seen.published("receipts")) == 1
    assert app.seen.settled[:2] == ["NACKED", "ACKED"]


# --- what is not a message ----------------------------------------------------------------------------------


@EACH
async def test_a_message_that_does_not_fit_the_model_is_a_dead_letter_at_once(kind: str, inbox: Inbox[Any]) -> None:
    app = App(kind, inbox)

    @app.broker.subscriber("orders")
    @app.broker.publisher("receipts")
    async def on_order(order: Order) -> Receipt:
        raise AssertionError

    async with app.running():
        await app.send({"id": "o-1", "cents": "a secret"}, "m-1")
        await app.send({"id": "o-1", "cents": "a secret"}, "m-1")
    record = await record_of(inbox, "m-1")
    assert (record.state, record.attempts, record.body) == (State.DEAD, 1, b'{"id":"o-1","cents":"a secret"}')
    assert "order.cents: Input should be a valid integer" in record.last_error
    assert "secret" not in record.last_error
    assert app.seen.settled == ["ACKED", "ACKED"]
    assert app.seen.published("receipts") == []


MISFITS: dict[str, Any] = {
    "several parameters, one is missing": {"id": "o-1"},
    "several parameters and a scalar": 7,
    "several parameters, one does not fit": {"id": "o-1", "cents": "x"},
}


@EACH
@pytest.mark.parametrize("body", MISFITS.values(), ids=MISFITS.keys())
async def test_parameters_by_name_that_do_not_fit_are_a_dead_letter_too(
    kind: str, inbox: Inbox[Any], body: Any
) -> None:
    app = App(kind, inbox)

    @app.broker.subscriber("orders")
    async def on_order(id: str, cents: int) -> None:  # noqa: A002
        raise AssertionError

    async with app.running():
        await app.send(body, "m-1")
    assert (await record_of(inbox, "m-1")).state is State.DEAD


@EACH
async def test_a_header_that_does_not_fit_is_a_dead_letter_too(kind: str, inbox: Inbox[Any]) -> None:
    app = App(kind, inbox)

    @app.broker.subscriber("orders")
    async def on_order(order: Order, shop: int = Header()) -> None:
        raise AssertionError

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1", headers={"shop": "no number"})
    assert (await record_of(inbox, "m-1")).state is State.DEAD


class NoConnection: ...


async def _parse_reply(order: Order) -> Order:
    return Order.model_validate({"id": "from another service"})


def _failing(name: str, broker: Any) -> None:
    """Handlers whose validation errors are their own fault."""
    if name == "in the handler":

        @broker.subscriber("orders")
        async def in_handler(order: Order) -> None:
            Order.model_validate({})

    elif name == "in a dependency":

        @broker.subscriber("orders")
        async def in_dependency(order: Order, other: Annotated[Order, Depends(_parse_reply)]) -> None: ...

    elif name == "of the result":

        @broker.subscriber("orders")
        async def of_result(order: Order) -> Receipt:
            return {"order": 1}  # type: ignore[return-value]

    else:

        @broker.subscriber("orders")
        async def of_tx(order: Order, tx: Annotated[NoConnection, Depends(inbox_tx)]) -> None: ...


@EACH
@pytest.mark.parametrize("where", ["in the handler", "in a dependency", "of the result", "of a dependency"])
async def test_validation_errors_that_are_not_about_the_message_are_tried_again(
    kind: str, inbox: Inbox[Any], where: str
) -> None:
    app = App(kind, inbox)
    _failing(where, app.broker)
    async with app.running():
        with pytest.raises(ValueError, match="validation error"):
            await app.send(Order(id="o-1", cents=5), "m-1")
    assert (await record_of(inbox, "m-1")).state is State.FAILED


@EACH
async def test_a_body_that_is_not_what_it_says_is_a_dead_letter(kind: str, inbox: Inbox[Any]) -> None:
    app = App(kind, inbox)

    @app.broker.subscriber("orders")
    async def on_order(order: Order) -> None:
        raise AssertionError

    async with app.running():
        if kind == "kafka":
            await app.send(b"{not json", "m-1", headers={"content-type": "application/json"})
        else:
            await app.send(b"{not json", "m-1", content_type="application/json")
    record = await record_of(inbox, "m-1")
    assert (record.state, record.body) == (State.DEAD, b"{not json")
    assert "cannot be decoded" in record.last_error
    assert app.seen.settled == ["ACKED"]


@EACH
@pytest.mark.parametrize("body", [b"\x00\xff", "plain text", '{"a": NaN}', b""], ids=["bytes", "text", "nan", "empty"])
async def test_bodies_that_are_no_json_are_handled_as_they_are(kind: str, inbox: Inbox[Any], body: Any) -> None:
    app, got = App(kind, inbox), []

    @app.broker.subscriber("orders")
    async def on_order(body: Any) -> None:
        got.append(body)

    async with app.running():
        await app.send(body, "m-1")
        await app.send(body, "m-1")
    assert len(got) == 1
    assert (await record_of(inbox, "m-1")).state is State.PROCESSED


async def test_a_message_without_an_id_is_a_dead_letter_that_says_what_to_do(inbox: Inbox[Any]) -> None:
    app = App("kafka", inbox)

    @app.broker.subscriber("orders")
    async def on_order(order: Order) -> None:
        raise AssertionError

    async with app.running():
        await app.send(Order(id="o-1", cents=5), None)
    (record,) = await inbox.records(State.DEAD)
    assert record.body == b'{"id":"o-1","cents":5}'
    assert 'headers={"message_id": ...}' in record.last_error
    assert "raw.place" in record.last_error
    assert app.seen.settled == ["ACKED"]


async def test_a_record_that_faststream_cannot_read_is_a_dead_letter(inbox: Inbox[Any]) -> None:
    app = App("kafka", inbox)

    @app.broker.subscriber("orders")
    async def on_order(order: Order) -> None:
        raise AssertionError

    record = ConsumerRecord(
        "orders", 0, 4, 1, 0, None, b"{}", None, 0, 2, [("message_id", b"m-1"), ("trace", b"\xff\xfe")]
    )
    async with app.running():
        await app.broker.subscribers[0].process_message(record)
    found = await record_of(inbox, "m-1")
    assert (found.state, found.body, found.origin) == (State.DEAD, b"{}", "orders/0/4")
    assert "FastStream cannot read the record" in found.last_error


async def test_an_error_of_a_filter_stays_what_it_is(inbox: Inbox[Any]) -> None:
    app = App("kafka", inbox)
    orders = app.broker.subscriber("orders")

    async def broken(_msg: Any) -> bool:
        raise LookupError("a bug")

    @orders(filter=broken)
    async def on_order(order: Order) -> None: ...

    async with app.running():
        with pytest.raises(LookupError, match="a bug"):
            await app.send(Order(id="o-1", cents=5), "m-1")
    assert await inbox.records() == []


# --- where the parts of a message are -----------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("id_", ["x-event", ("nothing", "x-event"), lambda raw: raw.header("x-event")])
async def test_the_id_is_where_it_is_said_to_be(kind: str, inbox: Inbox[Any], id_: Any) -> None:
    app = App(kind, inbox, id=id_)

    @app.broker.subscriber("orders")
    async def on_order(order: Order) -> None: ...

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "not this", headers={"x-event": "e-1"})
    assert (await record_of(inbox, "e-1")).state is State.PROCESSED


async def test_the_key_of_the_inbox_sees_the_payload(tmp_path: Path) -> None:
    from onceward import keys

    ran = []
    async with Inbox(SqliteStore(tmp_path / "test.db"), consumer="billing", key=keys.field("id")) as inbox:
        app = App("kafka", inbox)

        @app.broker.subscriber("orders")
        async def on_order(order: Order) -> None:
            ran.append(order.id)

        async with app.running():
            await app.send(Order(id="o-1", cents=5), "m-1")
            await app.send(Order(id="o-1", cents=5), "m-2")
            await app.send({"cents": 5}, "m-3")
        (dead,) = await inbox.records(State.DEAD)
    assert ran == ["o-1"]
    assert dead.message_id == "m-3"


async def test_a_cloudevent_has_its_id_in_its_body(inbox: Inbox[Any]) -> None:
    app, ran = App("kafka", inbox), []

    @app.broker.subscriber("orders")
    async def on_order(event: bytes) -> None:
        ran.append(event)

    event = {"specversion": "1.0", "id": "e-1", "source": "/shop", "type": "order.paid", "data": {"order": "o-1"}}
    async with app.running():
        for _ in range(2):
            await app.send(event, None, headers={"content-type": "application/cloudevents+json"})
    assert len(ran) == 1
    record = await record_of(inbox, "e-1")
    assert (record.type, record.source) == ("order.paid", "/shop")


# --- ack policies -------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize(
    ("policy", "said"), [(AckPolicy.ACK_FIRST, "before they are handled"), (AckPolicy.MANUAL, "MANUAL")]
)
async def test_a_subscriber_that_cannot_be_protected_is_refused(
    kind: str, policy: AckPolicy, said: str, inbox: Inbox[Any], caplog: pytest.LogCaptureFixture
) -> None:
    app, ran = App(kind, inbox, policy=policy), []

    @app.broker.subscriber("orders")
    async def on_order(order: Order) -> None:
        ran.append(order)

    with pytest.raises(UsageError, match=said):
        app.once.check(app.broker)
    async with app.running():
        with pytest.raises(UsageError, match=said):
            await app.send(Order(id="o-1", cents=5), "m-1")
    assert ran == []
    assert "NACK_ON_ERROR" in caplog.text
    assert await inbox.records() == []


async def test_the_default_of_kafka_is_refused(inbox: Inbox[Any]) -> None:
    broker = KafkaBroker(middlewares=[once := InboxMiddleware(inbox)])

    @broker.subscriber("orders")
    async def on_order(order: Order) -> None: ...

    with pytest.raises(UsageError, match=r"ack_policy=AckPolicy\.NACK_ON_ERROR"):
        once.check(broker)


async def test_a_router_does_not_take_the_policy_of_its_broker(inbox: Inbox[Any]) -> None:
    """FastStream decides when the subscriber is declared, and the router has not met its broker then."""
    app, router = App("kafka", inbox), KafkaRouter()

    @router.subscriber("orders")
    async def on_order(order: Order) -> None: ...

    app.broker.include_router(router)
    with pytest.raises(UsageError, match="its broker or its router"):
        app.once.check(app.broker)


async def test_batch_subscribers_are_refused(inbox: Inbox[Any]) -> None:
    app = App("kafka", inbox)

    @app.broker.subscriber("orders", batch=True)
    async def on_orders(orders: list[Order]) -> None:
        raise AssertionError

    with pytest.raises(UsageError, match=r"onceward\.brokers\.consume"):
        app.once.check(app.broker)
    async with app.running():
        with pytest.raises(UsageError, match="batch=True"):
            await app.send(Order(id="o-1", cents=5), "m-1")


@EACH
async def test_the_middleware_twice_is_refused(kind: str, inbox: Inbox[Any]) -> None:
    app = App(kind, inbox)
    router: Any = (KafkaRouter if kind == "kafka" else RabbitRouter)(middlewares=[InboxMiddleware(inbox)])

    @router.subscriber("orders")
    async def on_order(order: Order) -> None:
        raise AssertionError

    app.broker.include_router(router)
    with pytest.raises(UsageError, match="twice"):
        app.once.check(app.broker)
    async with app.running():
        with pytest.raises(UsageError, match="twice"):
            await app.send(Order(id="o-1", cents=5), "m-1")


RISKS = [
    ("kafka", AckPolicy.ACK, "is acknowledged"),
    ("kafka", AckPolicy.REJECT_ON_ERROR, "is acknowledged"),
    ("kafka", AckPolicy.NACK_ON_ERROR, None),
    ("rabbit", AckPolicy.ACK, "is acknowledged"),
    ("rabbit", AckPolicy.REJECT_ON_ERROR, "is rejected"),
    ("rabbit", AckPolicy.NACK_ON_ERROR, None),
]


@pytest.mark.parametrize(("kind", "policy", "said"), RISKS)
@pytest.mark.filterwarnings("ignore:AckPolicy.REJECT_ON_ERROR has the same effect:UserWarning")
async def test_a_policy_that_drops_what_fails_is_told_once(
    kind: str, policy: AckPolicy, said: str | None, inbox: Inbox[Any]
) -> None:
    app, told = App(kind, inbox, policy=policy), []
    inbox.subscribe(lambda event: told.append(event.text) if isinstance(event, events.AtRisk) else None)

    @app.broker.subscriber("orders")
    async def on_order(order: Order) -> None: ...

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1")
        await app.send(Order(id="o-1", cents=5), "m-2")
    assert len(told) == (said is not None)
    assert said is None or said in told[0]


async def test_a_dead_letter_exchange_makes_rejecting_safe(inbox: Inbox[Any]) -> None:
    app, told = App("rabbit", inbox, policy=AckPolicy.REJECT_ON_ERROR), []
    inbox.subscribe(lambda event: told.append(event) if isinstance(event, events.AtRisk) else None)

    @app.broker.subscriber(RabbitQueue("orders", arguments={"x-dead-letter-exchange": "dead"}))
    async def on_order(order: Order) -> None: ...

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1")
    assert told == []


@EACH
async def test_the_policy_decides_about_an_error_of_the_handler(kind: str, inbox: Inbox[Any]) -> None:
    app = App(kind, inbox, policy=AckPolicy.ACK)

    @app.broker.subscriber("orders")
    async def on_order(order: Order) -> None:
        raise ValueError("mine")

    async with app.running():
        with pytest.raises(ValueError, match="mine"):
            await app.send(Order(id="o-1", cents=5), "m-1")
    assert app.seen.settled == ["ACKED"]


@EACH
async def test_a_handler_that_acknowledges_by_itself_is_told_of(kind: str, inbox: Inbox[Any]) -> None:
    app, told = App(kind, inbox), []
    inbox.subscribe(lambda event: told.append(event.finding) if isinstance(event, events.AtRisk) else None)

    @app.broker.subscriber("orders")
    async def on_order(order: Order, message: Annotated[Any, Context()]) -> None:
        await message.ack()

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1")
        await app.send(Order(id="o-1", cents=5), "m-2")
    assert told == ["early_ack"]


# --- what handlers say to FastStream ------------------------------------------------------------------------


@EACH
async def test_a_handler_that_says_ack_is_done(kind: str, inbox: Inbox[Any], charges: Charges) -> None:
    app = App(kind, inbox)

    @app.broker.subscriber("orders")
    @app.broker.publisher("receipts")
    async def on_order(order: Order, tx: Tx) -> Receipt:
        await charges.add(tx, order)
        raise AckMessage

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1")
        await app.send(Order(id="o-1", cents=5), "m-1")
    assert await charges.all() == [("o-1", 5)]
    assert app.seen.settled == ["ACKED", "ACKED"]
    assert app.seen.published("receipts") == []


@EACH
async def test_a_handler_that_says_reject_makes_a_dead_letter_and_is_heard(
    kind: str, inbox: Inbox[Any], charges: Charges
) -> None:
    app = App(kind, inbox)

    @app.broker.subscriber("orders")
    async def on_order(order: Order, tx: Tx) -> None:
        await charges.add(tx, order)
        raise RejectMessage

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1")
    assert await charges.all() == []
    assert (await record_of(inbox, "m-1")).state is State.DEAD
    assert app.seen.settled == (["ACKED"] if kind == "kafka" else ["REJECTED"])


@EACH
async def test_a_handler_that_says_nack_has_failed(kind: str, inbox: Inbox[Any], charges: Charges) -> None:
    app = App(kind, inbox, policy=AckPolicy.ACK)

    @app.broker.subscriber("orders")
    async def on_order(order: Order, tx: Tx) -> None:
        await charges.add(tx, order)
        raise NackMessage

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1")
    assert await charges.all() == []
    assert (await record_of(inbox, "m-1")).attempts == 1
    assert app.seen.settled == ["NACKED"]


# --- not now ------------------------------------------------------------------------------------------------


@EACH
async def test_a_handler_that_says_later_is_given_back_whatever_the_policy_says(kind: str, inbox: Inbox[Any]) -> None:
    app = App(kind, inbox, policy=AckPolicy.ACK, hold=0.0)

    @app.broker.subscriber("orders")
    @app.broker.publisher("receipts")
    async def on_order(order: Order) -> Receipt:
        raise TryLater(600)

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1")
        await app.send(Order(id="o-1", cents=5), "m-1")  # its time has not come: it does not run
    assert (await record_of(inbox, "m-1")).attempts == 1
    assert app.seen.settled == ["NACKED", "NACKED"]
    assert app.seen.published("receipts") == []


@EACH
async def test_what_is_due_soon_is_held_and_run(kind: str, inbox: Inbox[Any]) -> None:
    app, tries = App(kind, inbox), []

    @app.broker.subscriber("orders")
    async def on_order(order: Order) -> None:
        tries.append(order.id)
        if len(tries) == 1:
            raise TryLater(0.5)

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1")
        await app.send(Order(id="o-1", cents=5), "m-1")
    assert tries == ["o-1", "o-1"]
    assert app.seen.settled == ["NACKED", "ACKED"]


@EACH
async def test_who_is_stopped_gives_back_what_is_held(kind: str, inbox: Inbox[Any]) -> None:
    app, tries = App(kind, inbox, hold=600.0), []

    @app.broker.subscriber("orders")
    async def on_order(order: Order) -> None:
        tries.append(order.id)
        raise TryLater(500)

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1")
        held = asyncio.create_task(app.send(Order(id="o-1", cents=5), "m-1"))
        await until(lambda: len(app.seen.messages) == 2)
        app.broker.subscribers[0].running = False
        async with asyncio.timeout(30):
            await held
    assert app.seen.settled == ["NACKED", "NACKED"]
    assert tries == ["o-1"]


@EACH
async def test_while_the_store_is_away_a_message_is_held(kind: str, tmp_path: Path) -> None:
    away = [True, True]

    async def reached(point: str) -> None:
        if point == "before claim" and away:
            away.pop()
            raise StoreUnavailable

    async with Inbox(PointStore(SqliteStore(tmp_path / "test.db"), reached), consumer="billing") as inbox:
        app, ran = App(kind, inbox, policy=AckPolicy.ACK), []

        @app.broker.subscriber("orders")
        async def on_order(order: Order) -> None:
            ran.append(order.id)

        async with app.running():
            await app.send(Order(id="o-1", cents=5), "m-1")
    assert ran == ["o-1"]
    assert away == []
    assert app.seen.settled == ["ACKED"]


@EACH
@pytest.mark.parametrize("policy", [AckPolicy.ACK, AckPolicy.REJECT_ON_ERROR, AckPolicy.NACK_ON_ERROR])
@pytest.mark.filterwarnings("ignore:AckPolicy.REJECT_ON_ERROR has the same effect:UserWarning")
async def test_a_message_is_given_back_when_the_store_stays_away(kind: str, policy: AckPolicy, tmp_path: Path) -> None:
    async def reached(point: str) -> None:
        if point == "before commit":
            raise StoreUnavailable

    async with Inbox(PointStore(SqliteStore(tmp_path / "test.db"), reached), consumer="billing") as inbox:
        app = App(kind, inbox, policy=policy, hold=0.0)

        @app.broker.subscriber("orders")
        @app.broker.publisher("receipts")
        async def on_order(order: Order) -> Receipt:
            return Receipt(order=order.id, cents=1)

        async with app.running():
            with pytest.raises(StoreUnavailable):
                await app.send(Order(id="o-1", cents=5), "m-1")
    assert app.seen.settled == ["NACKED"]
    assert app.seen.published("receipts") == []


@EACH
async def test_an_inbox_that_is_not_open_loses_nothing(kind: str, tmp_path: Path) -> None:
    app = App(kind, Inbox(SqliteStore(tmp_path / "test.db"), consumer="billing"), policy=AckPolicy.ACK)

    @app.broker.subscriber("orders")
    async def on_order(order: Order) -> None:
        raise AssertionError

    async with app.running():
        with pytest.raises(InboxClosed):
            await app.send(Order(id="o-1", cents=5), "m-1")
    assert app.seen.settled == ["NACKED"]


async def test_a_handler_that_changed_its_message_gets_it_afresh(ready_dsn: str) -> None:
    """The database asks for another run within one delivery."""
    got = []
    async with Inbox.connect(ready_dsn, consumer="billing") as inbox:
        app = App("kafka", inbox)

        @app.broker.subscriber("orders")
        async def on_order(order: dict[str, Any], msg: Annotated[Any, Context("message")]) -> None:
            raw = await msg.decode()
            got.append(dict(raw))
            raw["cents"] = 99
            if len(got) == 1:
                raise asyncpg.SerializationError("again")

        async with app.running():
            await app.send({"cents": 5}, "m-1")
    assert got == [{"cents": 5}, {"cents": 5}]


# --- two handlers -------------------------------------------------------------------------------------------


async def test_two_handlers_of_one_message_are_found_out(inbox: Inbox[Any]) -> None:
    """Two queues of one exchange: the second handler would never run, and nobody would notice."""
    app, ran = App("rabbit", inbox), []
    shop = RabbitExchange("shop", type=ExchangeType.FANOUT)

    @app.broker.subscriber("billing", shop)
    async def bill(order: Order) -> None:
        ran.append("bill")

    @app.broker.subscriber("audit", shop)
    async def audit(order: Order) -> None:
        ran.append("audit")

    async with app.running():
        with pytest.raises(UsageError, match="would never run for it"):
            await app.broker.publish(Order(id="o-1", cents=5), exchange=shop, message_id="m-1")
    assert len(ran) == 1
    assert sorted(map(str, app.seen.settled)) == ["ACKED", "NACKED"]


async def test_two_groups_of_one_topic_are_found_out_too(inbox: Inbox[Any]) -> None:
    app, ran = App("kafka", inbox), []

    @app.broker.subscriber("orders", group_id="billing")
    async def bill(order: Order) -> None:
        ran.append("bill")

    @app.broker.subscriber("orders", group_id="audit")
    async def audit(order: Order) -> None:
        ran.append("audit")

    async with app.running():
        with pytest.raises(UsageError, match="would never run for it"):
            await app.send(Order(id="o-1", cents=5), "m-1")
    assert len(ran) == 1


async def test_two_handlers_with_a_source_each_both_run(inbox: Inbox[Any]) -> None:
    app, ran = App("rabbit", inbox, source=lambda raw: raw.topic), []
    shop = RabbitExchange("shop", type=ExchangeType.FANOUT)

    @app.broker.subscriber("billing", shop)
    async def bill(order: Order) -> None:
        ran.append("bill")

    @app.broker.subscriber("audit", shop)
    async def audit(order: Order) -> None:
        ran.append("audit")

    async with app.running():
        for _ in range(2):
            await app.broker.publish(Order(id="o-1", cents=5), exchange=shop, message_id="m-1")
    assert sorted(ran) == ["audit", "bill"]


async def test_a_handler_that_was_renamed_is_the_same_work(inbox: Inbox[Any]) -> None:
    ran: list[str] = []

    def app_with(name: str) -> App:
        app = App("kafka", inbox)

        async def handler(order: Order) -> None:
            ran.append(name)

        handler.__qualname__ = name
        app.broker.subscriber("orders")(handler)

        @app.broker.subscriber("others")
        async def other(order: Order) -> None: ...

        return app

    for name in ("before", "after"):
        app = app_with(name)
        async with app.running():
            await app.send(Order(id="o-1", cents=5), "m-1")
    assert ran == ["before"]


# --- parking ------------------------------------------------------------------------------------------------


@EACH
async def test_a_parked_message_is_acknowledged_and_run_by_a_worker(
    kind: str, inbox: Inbox[Any], charges: Charges
) -> None:
    app = App(kind, inbox, policy=AckPolicy.ACK, on_failure="park")

    @app.broker.subscriber("orders")
    async def on_order(order: Order, tx: Tx) -> None:
        await charges.add(tx, order)
        raise ValueError("not today")

    @inbox.handler("orders")
    async def tomorrow(message: Message[Any], tx: Any) -> None:
        await charges.add(tx, Order.model_validate(message.payload))

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1")
        await app.send(Order(id="o-1", cents=5), "m-1")
    assert app.seen.settled == ["ACKED", "ACKED"]
    assert await charges.all() == []
    assert (await record_of(inbox, "m-1")).attempts == 1
    async with inbox.worker():
        await until(lambda: _is_processed(inbox, "m-1"))
    assert await charges.all() == [("o-1", 5)]


async def _is_processed(inbox: Inbox[Any], id_: str) -> bool:
    return await inbox.is_processed(Message(id_, "orders", None))


async def test_what_comes_later_in_the_lane_of_a_parked_message_follows_it(tmp_path: Path) -> None:
    ran = []
    async with Inbox(SqliteStore(tmp_path / "test.db"), consumer="billing", lane=lanes.field("id")) as inbox:
        app = App("kafka", inbox, on_failure="park")

        @app.broker.subscriber("orders")
        async def on_order(order: Order) -> None:
            if order.cents == 1:
                raise ValueError("not today")
            ran.append((order.id, order.cents))

        async with app.running():
            await app.send(Order(id="a", cents=1), "m-1")
            await app.send(Order(id="a", cents=2), "m-2")
            await app.send(Order(id="b", cents=3), "m-3")
        assert ran == [("b", 3)]
        assert (await inbox.queue_stats()).pending == 2


@EACH
async def test_a_handler_that_publishes_is_not_parked(kind: str, inbox: Inbox[Any]) -> None:
    app = App(kind, inbox, on_failure="park")

    @app.broker.subscriber("orders")
    @app.broker.publisher("receipts")
    async def on_order(order: Order) -> Receipt:
        raise ValueError("not today")

    async with app.running():
        with pytest.raises(ValueError, match="not today"):
            await app.send(Order(id="o-1", cents=5), "m-1")
    assert app.seen.settled == ["NACKED"]


# --- options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"on_duplicate": "no"},
        {"on_failure": "no"},
        {"hold": -1},
        {"hold": float("inf")},
        {"hold": "1"},
        {"id": 7},
        {"type": 7},
    ],
)
async def test_options_that_cannot_be_meant_are_refused(inbox: Inbox[Any], options: Any) -> None:
    with pytest.raises(UsageError):
        InboxMiddleware(inbox, **options)


async def test_a_store_without_a_queue_cannot_park(inbox: Inbox[Any]) -> None:
    from onceward.redis import RedisStore

    store = RedisStore("redis://127.0.0.1:1")
    with pytest.raises(UsageError, match="has no queue"):
        InboxMiddleware(Inbox(store, consumer="billing"), on_failure="park")
    with pytest.raises(UsageError, match="takes an Inbox"):
        InboxMiddleware(store)  # type: ignore[arg-type]


# --- others around it ---------------------------------------------------------------------------------------


async def test_publications_of_ones_own_are_left_alone(inbox: Inbox[Any]) -> None:
    app = App("kafka", inbox)

    @app.broker.subscriber("orders")
    async def on_order(order: Order) -> None: ...

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1")
    ((_, headers),) = app.seen.published("orders")
    assert headers["message_id"] == b"m-1"


@pytest.mark.parametrize("place", ["outside", "inside"])
async def test_an_exception_middleware_belongs_outside(place: str, inbox: Inbox[Any], charges: Charges) -> None:
    """As the page on FastStream says: of what it swallows inside, the inbox never hears, and half an effect stands."""
    app, swallow = App("kafka", inbox), ExceptionMiddleware()

    @swallow.add_handler(ValueError, publish=True)
    def sorry() -> str:
        return "sorry"

    if place == "inside":
        app.broker.add_middleware(swallow)
    else:
        app.broker.insert_middleware(swallow)

    @app.broker.subscriber("orders")
    @app.broker.publisher("receipts")
    async def on_order(order: Order, tx: Tx) -> str:
        await charges.add(tx, order)
        raise ValueError("swallowed")

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1")
    assert [body for body, _ in app.seen.published("receipts")] == [b"sorry"]
    state = (await record_of(inbox, "m-1")).state
    assert (state, await charges.all()) == {
        "outside": (State.FAILED, []),
        "inside": (State.PROCESSED, [("o-1", 5)]),
    }[place]


@EACH
async def test_the_subscribers_that_a_testbroker_makes_for_publishers_are_left_alone(
    kind: str, inbox: Inbox[Any]
) -> None:
    app = App(kind, inbox)
    broker: Any = (KafkaBroker if kind == "kafka" else RabbitBroker)(middlewares=[app.seen, app.once])
    app.broker, publisher = broker, broker.publisher("receipts")

    @broker.subscriber("orders", ack_policy=AckPolicy.NACK_ON_ERROR)
    @publisher
    async def on_order(order: Order) -> Receipt:
        return Receipt(order=order.id, cents=order.cents)

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1")
        await app.send(Order(id="o-1", cents=5), "m-1")
        assert publisher.mock.call_count == 2
        on_order.mock.assert_called_once_with({"id": "o-1", "cents": 5})
    assert [record.message_id for record in await inbox.records()] == ["m-1"]


async def test_middlewares_inside_see_the_transaction(inbox: Inbox[Any]) -> None:
    app, got = App("kafka", inbox), []

    class Inner(BaseMiddleware):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            if msg.raw_message.topic == "orders":
                got.append(await inbox_tx())
            return await call_next(msg)

    app.broker.add_middleware(Inner)

    @app.broker.subscriber("orders")
    @app.broker.publisher("receipts")
    async def on_order(order: Order, tx: Tx) -> str:
        got.append(tx)
        return "done"

    async with app.running():
        await app.send(Order(id="o-1", cents=5), "m-1")
        await app.send(Order(id="o-1", cents=5), "m-1")
    assert len(got) == 2
    assert got[0] is got[1]
    assert len(app.seen.published("receipts")) == 2


# --- other stores -------------------------------------------------------------------------------------------


@EACH
async def test_on_redis_a_duplicate_is_skipped_and_published_again(kind: str, redis_lab: RedisLab) -> None:
    ran = []
    async with Inbox(redis_lab.store(), consumer="billing", retry=AT_ONCE) as inbox:
        app = App(kind, inbox)

        @app.broker.subscriber("orders")
        @app.broker.publisher("receipts")
        async def on_order(order: Order, tx: Tx) -> Any:
            ran.append(order.id)
            if len(ran) == 1:
                raise ValueError("not yet")
            return {"b": 1, "a": [1.0]}

        async with app.running():
            with pytest.raises(ValueError, match="not yet"):
                await app.send(Order(id="o-1", cents=5), "m-1")
            for _ in range(2):
                await app.send(Order(id="o-1", cents=5), "m-1", correlation_id="c")
            await app.send({"id": "o-2"}, "m-2")
    first, second = app.seen.published("receipts")
    assert first == second
    assert ran == ["o-1", "o-1"]
    assert app.seen.settled[-1] == "ACKED"


# --- PostgreSQL and repositories ----------------------------------------------------------------------------


class Repository:
    """Opens its own session for each call, and commits it."""

    def __init__(self, sessions: async_sessionmaker[AsyncSession]) -> None:
        self._sessions = sessions

    async def charge(self, order: Order) -> None:
        async with self._sessions() as session:
            await session.execute(text("INSERT INTO effects (what) VALUES (:id)"), {"id": order.id})
            await session.commit()

    async def charged(self) -> list[str]:
        async with self._sessions() as session:
            return [row[0] for row in await session.execute(text("SELECT what FROM effects ORDER BY 1"))]


@EACH
async def test_a_repository_that_opens_its_own_session_joins_the_transaction(kind: str, ready_dsn: str) -> None:
    engine = create_async_engine(ready_dsn.replace("postgresql://", "postgresql+asyncpg://"))
    sessions = async_sessionmaker(engine, expire_on_commit=False)
    repository, tries = Repository(joining(sessions)), []
    async with Inbox(SqlAlchemyStore(sessions), consumer="billing", retry=AT_ONCE) as inbox:
        app = App(kind, inbox)

        @app.broker.subscriber("orders")
        async def on_order(order: Order, tx: Annotated[AsyncSession, Depends(inbox_tx)]) -> None:
            await repository.charge(order)
            tries.append(await tx.scalar(text("SELECT count(*) FROM effects")))
            if len(tries) == 1:
                raise ValueError("after the commit of the repository")

        async with app.running():
            with pytest.raises(ValueError, match="after the commit"):
                await app.send(Order(id="o-1", cents=5), "m-1")
            assert await repository.charged() == []
            await app.send(Order(id="o-1", cents=5), "m-1")
            await app.send(Order(id="o-1", cents=5), "m-1")
        assert await repository.charged() == ["o-1"]
        assert tries == [1, 1]
    await engine.dispose()
