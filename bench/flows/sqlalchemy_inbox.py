"""A documented inbox over SQLAlchemy: is_processed, the work, mark_processed and commit, in one AsyncSession.

Written from its description: the message id alone is the primary key, beside tenant, type, source, a payload hash and
extra data. Two that look at the same moment both run; the primary key stops the second one at its commit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

from sqlalchemy import JSON, DateTime, Index, String, column, func, insert, select, table
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from bench.flows.base import Handler, Process
from bench.messages import charge_of
from onceward import Message

NAME = "SQLAlchemy inbox"


class Base(DeclarativeBase):
    pass


class InboxRecord(Base):
    __tablename__ = "inbox"
    __table_args__ = (
        Index("ix_inbox_tenant_event", "tenant_id", "event_type"),
        Index("ix_inbox_processed_at", "processed_at"),
    )

    message_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64))
    event_type: Mapped[str] = mapped_column(String(128))
    source: Mapped[str | None] = mapped_column(String(128))
    processed_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())
    payload_hash: Mapped[str | None] = mapped_column(String(64))
    extra_data: Mapped[Any | None] = mapped_column(JSON(none_as_null=True))


# The table of effects, which is there already.
CHARGES = table("charges", column("message_id"), column("order_id"), column("cents"))


class SqlAlchemyInbox:
    def __init__(self, session: AsyncSession, tenant_id: str = "default") -> None:
        self._session = session
        self._tenant = tenant_id

    async def is_processed(self, message_id: str) -> bool:
        query = select(InboxRecord.message_id).where(
            InboxRecord.message_id == message_id, InboxRecord.tenant_id == self._tenant
        )
        return (await self._session.execute(query)).first() is not None

    async def mark_processed(self, message_id: str, event_type: str, payload: dict[str, Any], source: str) -> None:
        digest = hashlib.sha256(json.dumps(payload, sort_keys=True).encode()).hexdigest()
        self._session.add(
            InboxRecord(
                message_id=message_id,
                tenant_id=self._tenant,
                event_type=event_type,
                source=source,
                payload_hash=digest,
            )
        )
        await self._session.flush()


def _engine(dsn: str, connections: int) -> Any:
    url = dsn.replace("postgresql://", "postgresql+asyncpg://")
    return create_async_engine(url, pool_size=connections, max_overflow=0)


async def set_up(dsn: str) -> None:
    engine = _engine(dsn, 1)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    await engine.dispose()


@asynccontextmanager
async def consumer(dsn: str, connections: int) -> AsyncIterator[Process]:
    engine = _engine(dsn, connections)
    sessions = async_sessionmaker(engine)

    async def process(message: Message[Any], handler: Handler) -> None:
        async with sessions() as session:
            inbox = SqlAlchemyInbox(session)
            if await inbox.is_processed(message.id):
                return

            async def write(message: Message[Any]) -> None:
                id_, order, cents = charge_of(message)
                await session.execute(insert(CHARGES).values(message_id=id_, order_id=order, cents=cents))

            await handler(message, write)
            await inbox.mark_processed(message.id, message.type, message.payload, message.source)
            await session.commit()

    try:
        yield process
    finally:
        await engine.dispose()
