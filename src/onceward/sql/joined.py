"""Which kinds of transaction of a caller's can be joined, and by what.

Any handle of the store's database will do, whatever driver the store itself uses. What a joined session does is in
drivers/joined.py, and what is special about a driver beside it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from onceward.errors import TransactionUnusable, UsageError
from onceward.sql.drivers.joined import ELSEWHERE, JoinedSession

# By the name of its class: no driver is imported for asking.
_KINDS = {
    "asyncpg.connection.Connection": "postgresql.JoinedAsyncpg",
    "asyncpg.pool.PoolConnectionProxy": "postgresql.JoinedAsyncpg",
    "onceward.sql.drivers.asyncpg_guard.GuardedConnection": "postgresql.JoinedAsyncpg",
    "psycopg.AsyncConnection": "postgresql.JoinedPsycopg",
    "onceward.sql.drivers.psycopg.GuardedConnection": "postgresql.JoinedPsycopg",
    "sqlite3.Connection": "sqlite.JoinedSqlite",
    "aiosqlite.core.Connection": "sqlite.JoinedSqlite",
    "onceward.sql.drivers.sqlite.Transaction": "sqlite.JoinedHandler",
    "sqlalchemy.ext.asyncio.session.AsyncSession": "sqlalchemy.JoinedOrmSession",
    "sqlalchemy.ext.asyncio.engine.AsyncConnection": "sqlalchemy.JoinedConnection",
}


async def joined(tx: Any, dialect: str, *, read_only: bool = False) -> JoinedSession:
    """A session in the caller's transaction."""
    if type(tx).__name__ == "async_scoped_session":
        tx = tx()
    session: JoinedSession = _kind_of(tx)(tx, read_only=read_only)
    await session.prepare()
    if session.dialect != dialect:
        raise TransactionUnusable(ELSEWHERE)
    return session


def _kind_of(tx: Any) -> Any:
    for base in type(tx).__mro__:
        known = _KINDS.get(f"{base.__module__}.{base.__qualname__}")
        if known is not None:
            module, _, name = known.partition(".")
            return getattr(import_module(f"onceward.sql.drivers.joined_{module}"), name)
    raise UsageError(
        "tx= takes an asyncpg connection, a psycopg AsyncConnection, an SQLAlchemy AsyncSession or AsyncConnection, a "
        "sqlite3 or aiosqlite connection, or the tx of a handler, not "
        f"{type(tx).__module__}.{type(tx).__qualname__}"
    )
