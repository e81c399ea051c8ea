"""Messages, positions, CloudEvents and the names of streams."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from onceward import InvalidMessage, Message, Position, stream_of
from onceward.errors import PayloadInvalid

EVENT = {
    "specversion": "1.0",
    "id": "e-1",
    "source": "/shop",
    "type": "order.paid",
    "subject": "o-1",
    "time": "2026-01-02T03:04:05.678Z",
    "datacontenttype": "application/json",
    "traceparent": "00-abc",
    "data": {"order": "o-1"},
}


@pytest.mark.parametrize("form", [dict, json.dumps, lambda event: json.dumps(event).encode()])
def test_a_cloudevent_becomes_a_message(form: object) -> None:
    message = Message.from_cloudevent(form(EVENT), topic="orders")  # type: ignore[operator]
    assert (message.id, message.source, message.type, message.topic) == ("e-1", "/shop", "order.paid", "orders")
    assert message.payload == {"order": "o-1"}
    assert message.occurred_at == datetime(2026, 1, 2, 3, 4, 5, 678000, UTC)
    assert message.headers == {"subject": "o-1", "datacontenttype": "application/json", "traceparent": "00-abc"}


def test_binary_data_of_a_cloudevent_is_the_body() -> None:
    event = {name: value for name, value in EVENT.items() if name != "data"} | {"data_base64": "AAEC"}
    message = Message.from_cloudevent(event)
    assert (message.payload, message.body) == (None, b"\x00\x01\x02")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"specversion": "0.3"}, "specversion is '0.3'"),
        ({"specversion": None}, "version 1.0"),
        ({"id": ""}, "id is empty"),
        ({"id": None}, "id is missing"),
        ({"source": None}, "source is missing"),
        ({"type": 5}, "type is a int"),
        ({"time": "yesterday"}, "RFC 3339"),
        ({"time": "2026-01-02T03:04:05"}, "time zone"),
        ({"data_base64": "§"}, "base64"),
    ],
)
def test_a_broken_cloudevent_says_what_is_wrong(change: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidMessage, match=text):
        Message.from_cloudevent(EVENT | change)


@pytest.mark.parametrize("text", ["", "{", "[1]", b"\xff\xfe", "[" * 10_000 + "]" * 10_000, "NaN"])
def test_a_cloudevent_that_is_no_json_object_is_refused(text: str | bytes) -> None:
    with pytest.raises((InvalidMessage, PayloadInvalid), match="JSON"):
        Message.from_cloudevent(text)


def test_a_stream_name_does_not_depend_on_the_order_of_keys() -> None:
    assert stream_of("Order", {"a": 1, "b": 2}) == stream_of("Order", {"b": 2, "a": 1})
    assert stream_of("Order", "1") != stream_of("Order", 1)
    assert stream_of("Order", "o-1") == '["Order","o-1"]'


def test_a_message_is_frozen() -> None:
    message = Message("m", "order.paid", {})
    with pytest.raises(AttributeError):
        message.id = "other"  # type: ignore[misc]


def test_a_message_cannot_depend_on_itself() -> None:
    with pytest.raises(InvalidMessage, match="its own position"):
        Message("m", "t", None, stream="s", position=1, depends_on=(Position("s", 1),))
    Message("m", "t", None, tenant="a", stream="s", position=1, depends_on=(Position("s", 1, tenant="b"),))


@pytest.mark.parametrize("position", [-1, True, 1.5, "1", 2**63])
def test_a_position_is_a_number_that_fits(position: object) -> None:
    with pytest.raises(InvalidMessage, match="position"):
        Position("s", position)  # type: ignore[arg-type]


def test_a_time_without_zone_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="time zone"):
        Message("m", "t", None, occurred_at=datetime(2026, 1, 1))  # noqa: DTZ001
