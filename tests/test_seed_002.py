"""What document 002 of the seeds asks for: an inbox inside a session that the service already has.

Each part names the section it comes from. The traps of its code (look-then-act, a primary key without the tenant) are
sprung with a copy of its pair as a control, and nobody is in them here.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from onceward import Inbox, Message, State
from onceward.errors import AlreadyProcessed
from onceward.testing import Lab, SqliteLab


@pytest.fixture(params=["postgres", "sqlite"])
def lab(request: pytest.FixtureRequest) -> Lab:
    found: Lab = request.getfixturevalue(f"{request.param}_lab")
    return found


@pytest.fixture
async def sessions(lab: Lab) -> AsyncIterator[async_sessionmaker[AsyncSession]]:
    url = f"sqlite+aiosqlite:///{lab.path}" if isinstance(lab, SqliteLab) else lab.url.replace("://", "+asyncpg://", 1)
    engine = create_async_engine(url)
    yield async_sessionmaker(engine)
    await engine.dispose()


async def write_order(session: AsyncSession, what: str) -> None:
    await session.execute(text("INSERT INTO effects VALUES (:what)"), {"what": what})


# --- 002, "Usage", 1: in a message handler --------------------------------------------------------------------------


class OrderEventHandler:
    """The class of the document. It owns the session, and commits it."""

    def __init__(self, session: AsyncSession, inbox: Inbox[Any]) -> None:
        self.session = session
        self.inbox = inbox

    async def handle_order_created(self, event_id: str, payload: dict[str, Any]) -> str:
        message = Message(event_id, "OrderCreated", payload, source="order-service")
        if await self.inbox.is_processed(message, tx=self.session):
            return "skipped"
        await write_order(self.session, payload["order"])
        await self.inbox.mark_processed(message, tx=self.session)
        await self.session.commit()
        return "handled"


async def test_the_handler_of_the_document_works_as_it_is(lab: Lab, sessions: Any) -> None:
    inbox, said = await lab.inbox(consumer="shipping"), []
    for event_id in ("e-1", "e-1", "e-2", "e-1"):
        async with sessions() as session:
            handler = OrderEventHandler(session, inbox)
            said.append(await handler.handle_order_created(event_id, {"order": f"order of {event_id}"}))
    assert said == ["handled", "skipped", "handled", "skipped"]
    assert await lab.effects() == ["order of e-1", "order of e-2"]


async def test_business_data_and_inbox_record_are_committed_together_or_not_at_all(lab: Lab, sessions: Any) -> None:
    """ "Design principles", 1: the same transaction."""
    inbox, message = await lab.inbox(), lab.message("e-1")
    async with sessions() as session:
        await write_order(session, "order")
        await inbox.mark_processed(message, tx=session)
        await session.rollback()
    assert await lab.effects() == []
    assert not await inbox.is_processed(message)
    async with sessions() as session:
        await inbox.mark_processed(message, tx=session)
        await write_order(session, "order")
        await session.commit()
    assert await lab.effects() == ["order"]
    assert await inbox.is_processed(message)


# --- 002, "Usage", 2: with an envelope ------------------------------------------------------------------------------


async def test_an_envelope_is_a_message(lab: Lab, sessions: Any) -> None:
    """`handle_message(envelope, inbox)`: the envelope has the id, the type and the payload, and that is a Message."""

    async def handle_message(envelope: Message[Any], inbox: Inbox[Any], session: AsyncSession) -> bool:
        async with inbox.claim(envelope, tx=session) as claim:
            if claim.first:
                await write_order(session, envelope.payload["order"])
        return claim.first

    inbox, envelope = await lab.inbox(), Message("e-1", "OrderCreated", {"order": "o-1"})
    for first in (True, False):
        async with sessions() as session, session.begin():
            assert await handle_message(envelope, inbox, session) is first
    assert await lab.effects() == ["o-1"]


# --- the trap of both usages: look, act, then insert ----------------------------------------------------------------


class PairOfTheDocument:
    """Its two verbs over its table, as a control."""

    def __init__(self, session: AsyncSession, tenant: str = "default") -> None:
        self.session = session
        self.tenant = tenant

    async def is_processed(self, message_id: str) -> bool:
        found = await self.session.execute(
            text("SELECT 1 FROM inbox WHERE message_id = :id AND tenant_id = :tenant"),
            {"id": message_id, "tenant": self.tenant},
        )
        return found.first() is not None

    async def mark_processed(self, message_id: str) -> None:
        await self.session.execute(
            text("INSERT INTO inbox (message_id, tenant_id) VALUES (:id, :tenant)"),
            {"id": message_id, "tenant": self.tenant},
        )


async def make_table_of_the_document(lab: Lab) -> None:
    await lab.query("CREATE TABLE inbox (message_id VARCHAR(36) PRIMARY KEY, tenant_id VARCHAR(64) NOT NULL)")


async def test_control_the_pair_of_the_document_acts_twice_when_two_deliveries_meet(lab: Lab, sessions: Any) -> None:
    """Both look before either has marked. One of them is told by the primary key, after it has done the work."""
    await make_table_of_the_document(lab)
    both_have_looked, mails = asyncio.Barrier(2), []

    async def deliver() -> str:
        async with sessions() as session:
            inbox = PairOfTheDocument(session)
            seen = await inbox.is_processed("e-1")
            await session.rollback()  # SQLite would refuse to write after what it has read
            await both_have_looked.wait()
            if seen:
                return "skipped"
            mails.append("your order is on its way")
            try:
                await inbox.mark_processed("e-1")
                await session.commit()
            except IntegrityError:
                return "too late"
            return "handled"

    assert sorted(await asyncio.gather(deliver(), deliver())) == ["handled", "too late"]
    assert len(mails) == 2, "the control no longer shows the trap"


async def test_with_a_claim_the_work_is_done_once_when_two_deliveries_meet(lab: Lab, sessions: Any) -> None:
    inbox, message = await lab.inbox(wait=30), lab.message("e-1")
    together, mails = asyncio.Barrier(2), []

    async def deliver() -> bool:
        async with sessions() as session, session.begin():
            await together.wait()
            async with inbox.claim(message, tx=session) as claim:
                if claim.first:
                    mails.append("your order is on its way")
                    await write_order(session, "order")
            return claim.first

    assert sorted(await asyncio.gather(deliver(), deliver())) == [False, True]
    assert len(mails) == 1
    assert await lab.effects() == ["order"]


async def test_the_explicit_pair_never_doubles_what_it_writes(lab: Lab, sessions: Any) -> None:
    """Everybody who keeps to the pair looks first too. The mark decides, and the loser's order is rolled back."""
    inbox, message, both_have_looked = await lab.inbox(wait=30), lab.message("e-1"), asyncio.Barrier(2)

    async def deliver(name: str) -> str:
        async with sessions() as session:
            seen = await inbox.is_processed(message, tx=session)
            await session.rollback()
            await both_have_looked.wait()
            assert not seen
            try:
                await inbox.mark_processed(message, tx=session)
                await write_order(session, name)
            except AlreadyProcessed:
                await session.rollback()
                return "too late"
            await session.commit()
            return "handled"

    assert sorted(await asyncio.gather(deliver("a"), deliver("b"))) == ["handled", "too late"]
    assert len(await lab.effects()) == 1


# --- 002, "Table" and "Design principles", 3: tenants ---------------------------------------------------------------


async def test_control_a_primary_key_without_the_tenant_loses_the_second_tenants_message(
    lab: Lab, sessions: Any
) -> None:
    await make_table_of_the_document(lab)
    for tenant, works in (("north", True), ("south", False)):
        async with sessions() as session:
            inbox = PairOfTheDocument(session, tenant)
            assert not await inbox.is_processed("e-1")
            if works:
                await inbox.mark_processed("e-1")
                await session.commit()
                continue
            with pytest.raises(IntegrityError):
                await inbox.mark_processed("e-1")


async def test_two_tenants_may_use_the_same_message_id(lab: Lab, sessions: Any) -> None:
    for tenant in ("north", "south"):
        inbox = await lab.inbox(tenant=tenant)
        async with sessions() as session, session.begin():
            assert not await inbox.is_processed(lab.message("e-1"), tx=session)
            await inbox.mark_processed(lab.message("e-1"), tx=session)
            await write_order(session, tenant)
    assert await lab.effects() == ["north", "south"]
    record = await (await lab.inbox(tenant="north")).get_record(lab.message("e-1"))
    assert record is not None
    assert record.tenant == "north"
    assert await (await lab.inbox(tenant="default")).get_record(lab.message("e-1")) is None


async def test_ids_longer_than_the_column_of_the_document_are_told_apart(lab: Lab, sessions: Any) -> None:
    """VARCHAR(36) is a UUID, and not a topic with partition and offset."""
    inbox, long = await lab.inbox(), "orders/" + "0" * 40
    async with sessions() as session, session.begin():
        for message_id in (f"{long}1", f"{long}2"):
            await inbox.mark_processed(lab.message(message_id), tx=session)
    assert await inbox.is_processed(lab.message(f"{long}2"))
    assert not await inbox.is_processed(lab.message(f"{long}3"))


# --- 002, "Design principles", 4: audit, and "API": get_record ------------------------------------------------------


async def test_the_record_has_what_an_audit_needs(lab: Lab, sessions: Any) -> None:
    inbox = await lab.inbox(consumer="shipping")
    message = Message("e-1", "OrderCreated", {"b": 1, "a": 2}, source="order-service")
    async with sessions() as session, session.begin():
        assert await inbox.get_record(message, tx=session) is None
        await inbox.mark_processed(message, tx=session, result={"order": 7}, extra={"operator": "ann"})
        record = await inbox.get_record(message, tx=session)
    assert record is not None
    assert (record.message_id, record.type, record.source) == ("e-1", "OrderCreated", "order-service")
    assert (record.state, record.tenant) == (State.PROCESSED, "default")
    assert record.payload_hash == hashlib.sha256(b'{"a":2,"b":1}').digest()
    assert record.extra == {"operator": "ann"}
    assert record.processed_at is not None
    assert await inbox.get_record(message) == record


async def test_the_same_id_with_another_payload_is_noticed(lab: Lab, sessions: Any) -> None:
    """There the hash is "for debugging". Here it is compared."""
    inbox = await lab.inbox()
    async with sessions() as session, session.begin():
        await inbox.mark_processed(lab.message("e-1", payload={"amount": 1}), tx=session)
        async with inbox.claim(lab.message("e-1", payload={"amount": 2}), tx=session) as claim:
            assert (claim.first, claim.mismatch) == (False, True)


# --- 002, "Cleanup" -------------------------------------------------------------------------------------------------


async def test_old_records_are_cleaned_up_by_age(lab: Lab, sessions: Any) -> None:
    inbox, old, new = await lab.inbox(), lab.message("old"), lab.message("new")
    async with sessions() as session, session.begin():
        for message in (old, new):
            await inbox.mark_processed(message, tx=session)
    await lab.make_older("old", days=31)
    assert await inbox.cleanup(older_than=timedelta(days=30)) == 1
    assert not await inbox.is_processed(old)
    assert await inbox.is_processed(new)
