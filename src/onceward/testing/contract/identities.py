"""Identity: consumer, tenant, scope and key, byte for byte."""

from __future__ import annotations

import unicodedata
from contextvars import ContextVar
from typing import Any

import pytest

from onceward import Message, keys, tenants
from onceward.errors import TenantMissing
from onceward.testing.contract.base import has
from onceward.testing.lab import Lab, Recorder


class IdentityContract:
    async def test_two_consumers_both_process_the_same_message(self, lab: Lab) -> None:
        handler, message = Recorder(lab), lab.message()
        assert (await (await lab.inbox(consumer="billing")).process(message, handler)).processed
        assert (await (await lab.inbox(consumer="shipping")).process(message, handler)).processed

    async def test_two_tenants_may_use_the_same_message_id(self, lab: Lab) -> None:
        handler = Recorder(lab)
        inbox = await lab.inbox(tenant=tenants.header("x-tenant"))
        for tenant in ("north", "south"):
            outcome = await inbox.process(lab.message("m", headers={"X-Tenant": tenant}), handler)
            assert outcome.processed
        again = await inbox.process(lab.message("m", headers={"x-tenant": "south"}), handler)
        assert again.duplicate

    async def test_the_tenant_that_a_strategy_found_is_the_messages(self, lab: Lab) -> None:
        seen = []

        async def on_begin(tx: Any, message: Message[Any]) -> None:
            seen.append(message.tenant)

        async def look(message: Message[Any]) -> None:
            seen.append(message.tenant)

        inbox = await lab.inbox(tenant=tenants.header("x-tenant"), on_begin=on_begin)
        message = lab.message(headers={"x-tenant": "north"})
        await inbox.process(message, look)
        await inbox.get_record(message)
        await inbox.get_record(inbox.identity_of(message))
        assert seen == ["north"] * 4

    async def test_the_tenant_of_a_message_counts_without_a_strategy_too(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)
        assert (await inbox.process(lab.message("m", tenant="north"), handler)).processed
        assert (await inbox.process(lab.message("m", tenant="south"), handler)).processed

    async def test_two_sources_may_use_the_same_message_id(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)
        assert (await inbox.process(lab.message("m", source="shop"), handler)).processed
        assert (await inbox.process(lab.message("m", source="store"), handler)).processed

    async def test_two_types_may_use_the_same_business_key(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(key=keys.field("order")), Recorder(lab)
        paid = lab.message(type="order.paid", payload={"order": "o-1"})
        shipped = lab.message(type="order.shipped", payload={"order": "o-1"})
        assert (await inbox.process(paid, handler)).processed
        assert (await inbox.process(shipped, handler)).processed

    async def test_a_message_that_comes_back_through_another_topic_is_the_same(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)
        assert (await inbox.process(lab.message("m", topic="orders"), handler)).processed
        assert (await inbox.process(lab.message("m", topic="orders.retry"), handler)).duplicate

    async def test_a_name_joins_types_under_one_business_key(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(key=keys.field("order", name="orders")), Recorder(lab)
        payload = {"order": "o-1"}
        assert (await inbox.process(lab.message(type="order.paid", payload=payload), handler)).processed
        assert (await inbox.process(lab.message(type="order.paid.v2", payload=payload), handler)).duplicate

    async def test_a_missing_tenant_is_an_error_and_leaves_nothing(self, lab: Lab) -> None:
        variable: ContextVar[str | None] = ContextVar("tenant", default=None)
        inbox, handler = await lab.inbox(tenant=variable), Recorder(lab)
        with pytest.raises(TenantMissing, match="tenant"):
            await inbox.process(lab.message("m"), handler)
        variable.set("north")
        assert (await inbox.process(lab.message("m"), handler)).processed

    @pytest.mark.parametrize(
        ("one", "two"),
        [
            ("abc", "ABC"),
            ("abc", "abc "),
            ("abc", " abc"),
            ("1", "01"),
            ("1", "1.0"),
            ("straße", "strasse"),
            (unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é")),
            ("a\u200bb", "ab"),
            ("x" * 2000 + "1", "x" * 2000 + "2"),
            ("'; DROP TABLE onceward_records; --", "''; DROP TABLE onceward_records; --"),
            ("a\\'b", "a'b"),
            ("a'b", "a`b"),
            ("%s", ":id"),
            ("$1", "?"),
            ("\U0001f600", "\U0001f601"),
        ],
    )
    async def test_ids_keep_their_bytes(self, lab: Lab, one: str, two: str) -> None:
        handler = Recorder(lab)
        for id_ in (one, two):
            assert (await (await lab.inbox()).process(lab.message(id_), handler)).processed
        for id_ in (one, two):
            inbox = await lab.inbox()
            assert (await inbox.process(lab.message(id_), handler)).duplicate
            record = await inbox.get_record(lab.message(id_))
            assert record is not None
            assert record.message_id == record.key == id_
        assert sorted(await lab.effects()) == sorted([one, two])

    async def test_composite_keys_never_collide(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(key=keys.fields("a", "b")), Recorder(lab)
        payloads: list[dict[str, Any]] = [
            {"a": "1:2", "b": "3"}, {"a": "1", "b": "2:3"}, {"a": 1, "b": "2:3"}, {"a": '1","', "b": "2"},
        ]  # fmt: skip
        for payload in payloads:
            assert (await inbox.process(lab.message(payload=payload), handler)).processed

    async def test_the_record_is_readable(self, lab: Lab) -> None:
        inbox = await lab.inbox(key=keys.stream_position)
        message: Message[Any] = lab.message(
            "m", source="shop", topic="orders", stream="order-1", position=3, tenant="north", type="order.paid"
        )
        await inbox.process(message, Recorder(lab), origin="orders/0/1")
        record = await inbox.get_record(message)
        assert record is not None
        assert (record.consumer, record.tenant, record.scope, record.key) == (
            "billing", "north", "position", '["order-1",3]',
        )  # fmt: skip
        assert (record.source, record.topic, record.origin, record.stream, record.position) == (
            "shop", "orders", "orders/0/1", "order-1", 3,
        )  # fmt: skip
        assert record.handler is not None
        assert record.host is not None or not has(lab, "transactional"), "known as long as it runs"
        assert record.received_at is not None
        assert record.processed_at is not None
        assert record.duration_ms is not None
