"""Bad input: its own clear error, nothing half-written, and the next message works."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from enum import Enum, StrEnum
from typing import Any

import pytest

from onceward import Inbox, InvalidMessage, Message, Verdict, keys
from onceward.errors import (
    InboxClosed,
    InvalidHandler,
    KeyInvalid,
    KeyMissing,
    OncewardError,
    PayloadInvalid,
    PayloadTooLarge,
    ResultInvalid,
    SchemaMissing,
    SchemaOutdated,
    SchemaTooNew,
    StoreUnavailable,
    UsageError,
)
from onceward.outcome import verdict_of
from onceward.testing.contract.base import needs
from onceward.testing.lab import Lab, Recorder

_deep: Any = []
for _ in range(10_000):
    _deep = [_deep]
_circle: list[Any] = []
_circle.append(_circle)

NOISE = "".join(chr(0x4E00 + number * 7919 % 20_000) for number in range(1000))
"""A text that cannot be compressed."""
EARLY = datetime.min.replace(tzinfo=timezone(timedelta(hours=5)))

BAD_MESSAGES: dict[str, tuple[dict[str, Any], type[OncewardError], str]] = {
    "empty id": ({"id": ""}, InvalidMessage, "id is empty"),
    "missing id": ({"id": None}, InvalidMessage, "id is missing"),
    "id that is a number": ({"id": 17}, InvalidMessage, "int, not a string"),
    "id that is bytes": ({"id": b"m"}, InvalidMessage, "bytes, not a string"),
    "id of 10 kB": ({"id": "x" * 10_240}, InvalidMessage, "10240 bytes"),
    "NUL in the id": ({"id": "a\0b"}, InvalidMessage, "NUL"),
    "lone surrogate in the id": ({"id": "a\ud800"}, InvalidMessage, "surrogate"),
    "missing type": ({"type": None}, InvalidMessage, "type is missing"),
    "NUL in the type": ({"type": "a\0"}, InvalidMessage, "type contains a NUL"),
    "position without sense": ({"stream": "s", "position": -1}, InvalidMessage, "position is -1"),
    "source that is None": ({"source": None}, InvalidMessage, "source is missing"),
    "topic that is a number": ({"topic": 5}, InvalidMessage, "topic is a int"),
    "headers that are None": ({"headers": None}, InvalidMessage, "headers is not a mapping"),
    "headers with numbers as names": ({"headers": {1: "a"}}, InvalidMessage, "string keys"),
    "NaN in a header": ({"headers": {"a": float("nan")}}, PayloadInvalid, "headers"),
    "an object in a header": ({"headers": {"a": object()}}, PayloadInvalid, "headers"),
    "body of text": ({"body": "text"}, InvalidMessage, "body is a str"),
    "NaN beside a body": ({"payload": float("nan"), "body": b"x"}, PayloadInvalid, "NaN"),
    "time that is a text": ({"occurred_at": "today"}, InvalidMessage, "time zone"),
    "time out of range": ({"occurred_at": EARLY}, InvalidMessage, "years"),
    "payload of bytes": ({"payload": b"{}"}, InvalidMessage, "body="),
    "NaN": ({"payload": {"amount": float("nan")}}, PayloadInvalid, "NaN"),
    "Infinity": ({"payload": [None, float("inf")]}, PayloadInvalid, "Infinity"),
    "lone surrogate": ({"payload": {"name": "\ud800"}}, PayloadInvalid, "surrogate"),
    "depth 10,000": ({"payload": _deep}, PayloadInvalid, "too deep"),
    "a circle": ({"payload": _circle}, PayloadInvalid, "too deep"),
    "an object that is no JSON": ({"payload": {"x": object()}}, PayloadInvalid, "JSON"),
    "20 MB": ({"payload": "x" * 20_000_000}, PayloadTooLarge, "16777216 are allowed"),
    "20 MB of bytes": ({"payload": None, "body": b"x" * 20_000_000}, PayloadTooLarge, "16777216 are allowed"),
}

BAD_KEYS: dict[str, tuple[Any, type[OncewardError], str]] = {
    "missing": (keys.field("order.id"), KeyMissing, "'order.id' is missing"),
    "null": (keys.field("nothing"), KeyMissing, "'nothing' is missing"),
    "empty": (keys.field("empty"), KeyMissing, "'empty' is empty"),
    "list": (keys.field("list"), KeyInvalid, "list"),
    "object": (keys.fields("amount", "nested"), KeyInvalid, "dict"),
    "function gives None": (lambda _message: None, KeyInvalid, "NoneType"),
    "function gives nothing": (lambda _message: "", KeyMissing, "empty"),
    "too long": (lambda _message: "x" * 9000, KeyInvalid, "9000 bytes"),
    "NUL": (lambda _message: "a\0", KeyInvalid, "NUL"),
    "no stream": (keys.stream_position, KeyMissing, "stream"),
    "no version": (keys.aggregate_version, KeyMissing, "stream"),
}


def _message(**fields: Any) -> Message[Any]:
    defaults: dict[str, Any] = {"id": "m", "type": "order.paid", "payload": 1}
    return Message(**defaults | fields)


async def _too_many(message: Any, tx: Any, more: Any) -> None: ...
async def _none() -> None: ...
async def _keyword(message: Any, *, tx: Any) -> None: ...


class InputContract:
    @pytest.mark.parametrize("name", BAD_MESSAGES)
    async def test_a_message_that_cannot_be_kept_is_refused(self, lab: Lab, name: str) -> None:
        fields, error, text = BAD_MESSAGES[name]
        inbox, handler = await lab.inbox(), Recorder(lab)
        with pytest.raises(error, match=text) as caught:
            await inbox.process(_message(**fields), handler)
        assert verdict_of(caught.value) is Verdict.REJECT
        assert handler.runs == []
        assert await lab.kept() == []
        assert (await inbox.process(lab.message(), handler)).processed

    async def test_a_stream_that_no_index_could_hold_is_refused(self, lab: Lab) -> None:
        """Each name is allowed by itself. Together they are too long, and could not be kept however often they come."""
        inbox, handler = await lab.inbox(), Recorder(lab)
        longest = lab.message("a", stream=NOISE[:600], position=1, tenant=NOISE[600:833])
        assert (await inbox.process(longest, handler)).processed
        long = lab.message("b", stream=NOISE[:600], position=1, tenant=NOISE[600:900])
        with pytest.raises(InvalidMessage, match="together") as caught:
            await inbox.process(long, handler)
        assert verdict_of(caught.value) is Verdict.REJECT
        outcomes = await inbox.process_many([lab.message("c"), long, lab.message("d")], handler)
        assert [outcome.verdict for outcome in outcomes] == [Verdict.ACK, Verdict.REJECT, Verdict.ACK]

    async def test_a_stream_that_no_index_could_hold_is_not_accepted(self, lab: Lab) -> None:
        needs(lab, "queue")
        with pytest.raises(InvalidMessage, match="together") as caught:
            await (await lab.inbox()).accept(lab.message(stream=NOISE[:600], position=1, tenant=NOISE[600:900]))
        assert verdict_of(caught.value) is Verdict.REJECT

    async def test_enums_and_other_strings_are_the_strings_they_are(self, lab: Lab) -> None:
        class Kinds(StrEnum):
            PAID = "order.paid"

        class Old(str, Enum):  # noqa: UP042 - as many code bases still have it
            NORTH = "north"

        message = lab.message(Kinds.PAID, type=Kinds.PAID, tenant=Old.NORTH, source=Old.NORTH, body=bytearray(b"x"))
        inbox = await lab.inbox(key=lambda message: Kinds.PAID)
        assert (await inbox.process(message, Recorder(lab), origin=Old.NORTH)).processed
        record = await inbox.get_record(message)
        assert record is not None
        assert (record.message_id, record.type, record.tenant, record.key) == (
            "order.paid", "order.paid", "north", "order.paid",
        )  # fmt: skip

    @pytest.mark.parametrize("name", BAD_KEYS)
    async def test_a_key_that_cannot_be_used_is_refused(self, lab: Lab, name: str) -> None:
        strategy, error, text = BAD_KEYS[name]
        payload = {"amount": 7, "nothing": None, "empty": "", "list": [1], "nested": {"a": 1}, "id": "x"}
        inbox, handler = await lab.inbox(key=strategy), Recorder(lab)
        with pytest.raises(error, match=text):
            await inbox.process(lab.message(payload=payload), handler)
        assert handler.runs == []
        assert await lab.kept() == []
        assert (await (await lab.inbox()).process(lab.message(), handler)).processed

    @pytest.mark.parametrize("handler", [17, "charge", _too_many, _none, _keyword])
    async def test_a_handler_that_cannot_be_called_is_refused(self, lab: Lab, handler: Any) -> None:
        inbox, message = await lab.inbox(), lab.message()
        with pytest.raises(InvalidHandler, match=r"callable|called"):
            await inbox.process(message, handler)
        with pytest.raises(InvalidHandler):
            inbox.handler("order.paid")(handler)
        assert await inbox.get_record(message) is None

    async def test_strange_but_valid_payloads_come_back_to_the_letter(self, lab: Lab) -> None:
        payloads: list[Any] = [
            None, True, 0, -1, 1.5, 2**53 + 1, 2**63 - 1, "", "a\0b", "\u2028 \x7f é 😀",
            [], {}, {"": {"": []}}, [None],
            {"nested": [1, "2", {"three": 3.0}]}, "null", "x" * 100_000,
        ]  # fmt: skip
        inbox = await lab.inbox()
        for payload in payloads:
            message = lab.message(payload=payload, headers={"h": "a\0é"})
            with pytest.raises(ValueError, match="keep it"):
                await inbox.process(message, Recorder(lab, error=ValueError("keep it")))
            record = await inbox.get_record(message)
            assert record is not None
            assert record.payload == payload
            assert record.headers == {"h": "a\0é"}
            assert not (await inbox.process(message, Recorder(lab))).mismatch

    async def test_a_body_is_kept_to_the_byte(self, lab: Lab) -> None:
        inbox, body = await lab.inbox(), bytes(range(256))
        message = lab.message(payload=None, body=body)
        with pytest.raises(ValueError, match="keep it"):
            await inbox.process(message, Recorder(lab, error=ValueError("keep it")))
        record = await inbox.get_record(message)
        assert record is not None
        assert record.body == body

    async def test_a_result_that_is_no_json_fails_the_message(self, lab: Lab) -> None:
        async def odd(message: Message[Any], tx: Any) -> Any:
            await lab.write(tx, message.id)
            return object()

        inbox, message = await lab.inbox(), lab.message()
        with pytest.raises(ResultInvalid, match="result") as caught:
            await inbox.process(message, odd)
        assert verdict_of(caught.value) is Verdict.RETRY
        assert await lab.effects() == []
        assert (await inbox.process(message, Recorder(lab))).processed

    async def test_an_inbox_that_is_not_open_says_so(self, lab: Lab) -> None:
        inbox = await lab.inbox()
        await inbox.close()
        with pytest.raises(InboxClosed, match="async with"):
            await inbox.process(lab.message(), Recorder(lab))
        with pytest.raises(InboxClosed):
            await inbox.get_record(lab.message())

    async def test_a_database_that_is_not_there_is_told(self, lab: Lab) -> None:
        inbox = Inbox(lab.unreachable(), consumer="billing")
        for _ in range(2):
            with pytest.raises(StoreUnavailable) as caught:
                await inbox.open()
            assert verdict_of(caught.value) is Verdict.PAUSE
        with pytest.raises(InboxClosed):
            await inbox.process(lab.message(), Recorder(lab))

    async def test_something_that_is_no_message_is_refused(self, lab: Lab) -> None:
        inbox: Any = await lab.inbox()
        with pytest.raises(UsageError, match="takes a Message"):
            await inbox.process({"id": "m"}, Recorder(lab))

    async def test_a_newer_schema_is_refused(self, lab: Lab) -> None:
        needs(lab, "tables")
        await lab.query("INSERT INTO onceward_schema (version, name) VALUES (9999, 'from the future')")
        with pytest.raises(SchemaTooNew, match="Upgrade the package"):
            await lab.inbox()
        with pytest.raises(SchemaTooNew):
            await lab.store().setup()

    async def test_a_newer_schema_that_knows_this_version_is_used(self, lab: Lab) -> None:
        """As an instance meets it that is started again in a rolling deploy, after `setup` and before its own turn."""
        needs(lab, "tables")
        [[known]] = await lab.query("SELECT max(version) FROM onceward_schema")
        for version, since in ((9998, known - 1), (9999, known)):
            await lab.query(
                f"INSERT INTO onceward_schema (version, name, since) VALUES ({version}, 'from the future', {since})"  # noqa: S608
            )
        await lab.store().setup()
        inbox = await lab.inbox()
        assert (await inbox.process(lab.message(), Recorder(lab))).processed
        await lab.query("INSERT INTO onceward_schema (version, name) VALUES (10000, 'and this one does not')")
        with pytest.raises(SchemaTooNew):
            await lab.inbox()
        assert (await inbox.process(lab.message(), Recorder(lab))).processed, "who is open goes on"

    async def test_an_older_schema_is_upgraded_or_refused(self, lab: Lab) -> None:
        needs(lab, "tables")
        inbox = await lab.inbox()
        await inbox.process(lab.message("before"), Recorder(lab))
        await inbox.close()
        for version in (1, 2, 3):
            await lab.back_to(version)
            if not lab.store().features.automatic_setup:
                with pytest.raises(SchemaOutdated, match="onceward setup"):
                    await lab.inbox()
                await lab.store().setup()
            inbox = await lab.inbox(cache=0)
            assert (await inbox.process(lab.message("before"), Recorder(lab))).duplicate
            assert (await inbox.process(lab.message(), Recorder(lab))).processed
            await inbox.close()

    async def test_a_missing_schema_says_what_to_run(self, lab: Lab) -> None:
        needs(lab, "tables")
        needs(lab, "network")
        await lab.query("DROP TABLE onceward_schema")
        with pytest.raises(SchemaMissing, match="onceward setup"):
            await lab.inbox()

    async def test_a_table_that_vanishes_says_what_to_run(self, lab: Lab) -> None:
        needs(lab, "tables")
        inbox = await lab.inbox()
        await lab.query("DROP TABLE onceward_records")
        with pytest.raises(SchemaMissing, match="onceward setup"):
            await inbox.process(lab.message(), Recorder(lab))
