"""Keys, lanes, tenants and handlers: pure functions of the message."""

from __future__ import annotations

import functools
from contextvars import ContextVar
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Any, TypedDict
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceward import Inbox, Message, Router, keys, lanes, tenants
from onceward.errors import InvalidHandler, KeyInvalid, KeyMissing, PayloadUndecodable, TenantMissing, UsageError
from onceward.handlers import handler_of, shape_of
from onceward.identity import Identity, digest


class Colour(Enum):
    RED = "red"


@dataclass
class Inner:
    id: UUID
    price: Decimal
    colour: Colour


class Paid(pydantic.BaseModel):
    order: str
    amount: int


MESSAGE: Message[Any] = Message(
    "m-1",
    "order.paid",
    {"order": {"id": "o-1", "n": 7}, "version": 3, "flag": True, "null": None, "price": 1.5},
    source="shop",
    topic="kafka://orders/order-1",
    headers={"region": "north"},
    stream="order-1",
    position=4,
)


@pytest.mark.parametrize(
    ("strategy", "key", "scope"),
    [
        (keys.message_id, "m-1", "source:shop"),
        (keys.stream_position, '["order-1",4]', "position"),
        (keys.aggregate_version, '["order-1",3]', "type:order.paid"),
        (keys.field("order.id"), '"o-1"', "type:order.paid"),
        (keys.field("order.n"), "7", "type:order.paid"),
        (keys.field("flag"), "true", "type:order.paid"),
        (keys.field("price", name="prices"), "1.5", "name:prices"),
        (keys.field("headers.region"), '"north"', "type:order.paid"),
        (keys.field("topic"), '"kafka://orders/order-1"', "type:order.paid"),
        (keys.fields("order.id", "version", "source"), '["o-1",3,"shop"]', "type:order.paid"),
        (keys.of(lambda message: message.id[:1]), "m", "type:order.paid"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_strategy_gives_its_key_within_its_scope(strategy: keys.Key, key: str, scope: str) -> None:
    assert (strategy(MESSAGE), strategy.scope(MESSAGE)) == (key, scope)


def test_a_payload_hash_is_of_the_content() -> None:
    def hashed(payload: Any, **more: Any) -> str:
        return keys.payload_hash(Message("any", "t", payload, **more))

    assert hashed({"a": 1, "b": 2}) == hashed({"b": 2, "a": 1}) != hashed({"a": 1, "b": 3})
    assert hashed(None, body=b"x") != hashed(None, body=b"y")


def test_a_null_in_the_payload_is_not_looked_up_in_the_envelope() -> None:
    with pytest.raises(KeyMissing, match="'id'"):
        keys.field("id")(Message("m", "t", {"id": None}))
    assert keys.field("id")(Message("m", "t", {})) == '"m"'


def test_fields_of_a_model_are_found() -> None:
    inner = Inner(UUID(int=1), Decimal("1.50"), Colour.RED)
    message: Message[Any] = Message("m", "t", {"inner": inner})
    key = keys.fields("inner.id", "inner.price", "inner.colour")(message)
    assert key == '["00000000-0000-0000-0000-000000000001","1.50","red"]'
    assert keys.field("amount")(Message("m", "t", Paid(order="o", amount=7))) == "7"


def test_a_body_that_is_json_is_looked_into() -> None:
    assert keys.field("order")(Message("m", "t", None, body=b'{"order": "o-1"}')) == '"o-1"'


@pytest.mark.parametrize("strategy", ["order_id", 5])
def test_what_is_no_strategy_is_refused(strategy: Any) -> None:
    with pytest.raises(KeyInvalid, match="key= takes"):
        keys.of(strategy)


@given(st.lists(st.text(), min_size=1, max_size=4), st.lists(st.text(), min_size=1, max_size=4))
def test_no_choice_of_parts_makes_two_identities_meet(one: list[str], two: list[str]) -> None:
    assert (digest(*one) == digest(*two)) == (one == two)


def test_an_identity_with_another_key_is_another_identity() -> None:
    one = Identity("billing", "default", "source:shop", "o-1")
    assert len(one.digest) == 16
    two = msgspec.structs.replace(one, key="o-2")
    assert two == Identity("billing", "default", "source:shop", "o-2")
    assert (str(two), two == one) == (str(Identity("billing", "default", "source:shop", "o-2")), False)
    assert msgspec.to_builtins(one).keys() == {"consumer", "tenant", "scope", "key"}


def test_an_idempotent_function_needs_an_argument_as_key() -> None:
    inbox = Inbox.connect("sqlite://", consumer="c")

    for key in ("nothing", "self.n", "tx"):
        with pytest.raises(KeyInvalid, match="not an argument"):

            @inbox.idempotent(key=key)
            async def refund(self: object, tx: object, order: dict[str, str]) -> None: ...


async def test_an_idempotent_function_names_a_missing_field() -> None:
    async with Inbox.connect("sqlite://", consumer="c") as inbox:

        @inbox.idempotent(key="order.id")
        async def refund(order: dict[str, str]) -> str:
            return order["id"]

        with pytest.raises(KeyMissing, match=r"order\.id"):
            await refund({})
        assert await refund({"id": "1"}) == "1"


def test_lanes() -> None:
    assert lanes.of(None)(MESSAGE) == lanes.by_stream(MESSAGE) == "order-1"
    assert lanes.by_topic(MESSAGE) == "kafka://orders/order-1"
    assert lanes.by_key(MESSAGE, "k") == "k"
    assert lanes.field("order.n")(MESSAGE) == "7"
    assert lanes.field("nothing")(MESSAGE) is None
    assert lanes.of(lambda message: message.type)(MESSAGE) == "order.paid"


def test_tenants() -> None:
    variable: ContextVar[str] = ContextVar("tenant")
    assert tenants.of(None)(MESSAGE) == "default"
    assert tenants.of("fixed")(MESSAGE) == "fixed"
    assert tenants.of(tenants.header("Region"))(MESSAGE) == "north"
    assert tenants.of(lambda message: message.source)(MESSAGE) == "shop"
    with pytest.raises(TenantMissing, match="context variable 'tenant'"):
        tenants.of(variable)(MESSAGE)
    variable.set("south")
    assert tenants.of(variable)(MESSAGE) == "south"
    with pytest.raises(TenantMissing, match=r"header\(x-tenant\)"):
        tenants.of(tenants.header("x-tenant"))(MESSAGE)


# --- handlers --------------------------------------------------------------------------------------------------


class Service:
    async def on_paid(self, message: Message[Paid], tx: object) -> Paid:
        return message.payload

    async def alone(self, message: Message[Any]) -> None: ...

    async def __call__(self, message: Message[Any], tx: object) -> None: ...


async def with_default(message: Message[Any], retries: int = 3) -> None: ...
async def with_optional_tx(message: Message[Any], tx: object = None) -> None: ...
async def with_anything(*args: object) -> None: ...
async def three(client: object, message: Message[Any], tx: object) -> None: ...


@pytest.mark.parametrize(
    ("function", "wants_tx"),
    [
        (Service().on_paid, True),
        (Service().alone, False),
        (Service(), True),
        (with_default, False),
        (with_optional_tx, True),
        (with_anything, True),
        (functools.partial(three, "client"), True),
        (lambda message: None, False),
        (lambda message, tx: None, True),
    ],
)
def test_a_signature_says_whether_tx_is_wanted(function: Any, wants_tx: bool) -> None:
    assert shape_of(function).wants_tx is wants_tx
    assert shape_of(function).wants_tx is wants_tx, "also from the cache"


def test_a_method_and_its_function_are_not_confused() -> None:
    assert shape_of(Service().on_paid).wants_tx
    with pytest.raises(InvalidHandler, match="cannot be called"):
        shape_of(Service.on_paid)


def test_annotations_give_payload_and_result_types() -> None:
    handler = handler_of(Service().on_paid)
    assert handler.payload is Paid
    decoded = handler.decoded(Message("m", "t", {"order": "o", "amount": 7}))
    assert decoded.payload == Paid(order="o", amount=7)
    assert handler.restored({"order": "o", "amount": 7}) == Paid(order="o", amount=7)
    assert handler.restored({"from": "an older version"}) == {"from": "an older version"}


class Typed(TypedDict):
    amount: int


async def on_typed(message: Message[Typed]) -> Typed:
    return message.payload


def test_a_typed_dict_is_a_model() -> None:
    handler = handler_of(on_typed)
    assert handler.decoded(Message("m", "t", {"amount": 7})).payload == {"amount": 7}
    with pytest.raises(PayloadUndecodable, match="does not fit Typed"):
        handler.decoded(Message("m", "t", {"amount": "much"}))
    assert handler.restored({"amount": 7}) == {"amount": 7}


def test_a_type_has_one_handler() -> None:
    router, other = Router(), Router()
    router.handler("t")(with_default)
    with pytest.raises(UsageError, match="already has the handler"):
        router.handler("t")(with_anything)
    other.handler("t")(with_default)
    with pytest.raises(UsageError, match="two handlers"):
        router.include(other)
    with pytest.raises(UsageError, match="message type as a string"):
        router.handler(with_default)  # type: ignore[arg-type]
