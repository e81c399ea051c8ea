"""The store for services that have an SQLAlchemy engine or session factory, and what makes the two get along.

`joining(sessionmaker)` is for repositories that open their own sessions: inside a handler such a session joins the
handler's transaction, outside it is an ordinary one.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

from onceward.errors import UsageError
from onceward.sql.drivers.aiosqlite import SqlAlchemySqliteDriver
from onceward.sql.drivers.pool_watch import SecondConnectionWarning, held_of
from onceward.sql.drivers.sqlalchemy import SqlAlchemyPostgresDriver
from onceward.sql.drivers.sqlalchemy_shared import shared
from onceward.sql.models import InboxRecord, add_tables, include_object
from onceward.sql.store import SqlStore

__all__ = ["InboxRecord", "SecondConnectionWarning", "SqlAlchemyStore", "add_tables", "include_object", "joining"]

S = TypeVar("S", bound=AsyncSession)


class SqlAlchemyStore(SqlStore[AsyncSession]):
    """`SqlAlchemyStore(engine)`, `SqlAlchemyStore(sessionmaker)`, or a URL, for which it makes an engine of its own.

    The driver is the engine's: asyncpg, psycopg or aiosqlite. Handlers get an AsyncSession, made by your sessionmaker
    where you give one. `schema` is where the tables are (default: by the search path); `second_connection` says what
    happens when a handler takes another connection of the engine: "warn", "raise" or "allow". Further options go to
    `create_async_engine`.
    """

    def __init__(
        self,
        bind: AsyncEngine | async_sessionmaker[Any] | str,
        *,
        schema: str | None = None,
        second_connection: Literal["warn", "raise", "allow"] = "warn",
        **engine_options: Any,
    ) -> None:
        engine, make_session = _engine_of(bind)
        if engine is not None and engine_options:
            raise UsageError(f"the engine exists already; it cannot be given {', '.join(engine_options)}")
        url = make_url(bind) if isinstance(bind, str) else engine.url  # type: ignore[union-attr]
        given: dict[str, Any] = {
            "engine": engine,
            "url": bind if isinstance(bind, str) else None,
            "make_session": make_session,
            "second_connection": second_connection,
            **engine_options,
        }
        self.driver: SqlAlchemyPostgresDriver | SqlAlchemySqliteDriver
        if url.get_backend_name() == "postgresql":
            self.driver = SqlAlchemyPostgresDriver(schema=schema, **given)
        elif url.get_backend_name() == "sqlite":
            if schema is not None:
                raise UsageError("SQLite has no schemas; leave schema= away")
            self.driver = SqlAlchemySqliteDriver(**given)
        else:
            raise UsageError(f"SqlAlchemyStore knows PostgreSQL and SQLite, not {url.get_backend_name()}")
        super().__init__(self.driver)

    @property
    def engine(self) -> AsyncEngine:
        """The engine in use, while the store is open."""
        engine: AsyncEngine = self.driver.pool
        return engine


def _engine_of(bind: Any) -> tuple[AsyncEngine | None, Any]:
    if isinstance(bind, str):
        return None, async_sessionmaker(expire_on_commit=False)
    if isinstance(bind, AsyncEngine):
        return bind, async_sessionmaker(expire_on_commit=False)
    if isinstance(bind, async_sessionmaker):
        engine = bind.kw.get("bind")
        if isinstance(engine, AsyncEngine):
            return engine, bind
        raise UsageError("the sessionmaker has no engine: async_sessionmaker(engine)")
    raise UsageError(f"SqlAlchemyStore takes an AsyncEngine, an async_sessionmaker or a URL, not {type(bind).__name__}")


class JoiningSessionmaker(async_sessionmaker[S]):
    """Made by `joining`."""

    def __call__(self, **local_kw: Any) -> S:
        engine = local_kw.get("bind", self.kw.get("bind"))
        if isinstance(engine, AsyncEngine):
            held = held_of(engine.sync_engine.pool)
            if held is not None:
                local_kw["bind"] = shared(held)
        return super().__call__(**local_kw)


def joining(sessionmaker: async_sessionmaker[S]) -> async_sessionmaker[S]:
    """A sessionmaker whose sessions join the transaction of the handler that they are opened in.

    Their `commit()` then ends a savepoint, and what they wrote is committed, or undone, with the message. Outside of
    a handler, and for another engine than the inbox's, they are what they were.
    """
    if not isinstance(sessionmaker, async_sessionmaker):
        raise UsageError("joining takes an async_sessionmaker")
    joined: JoiningSessionmaker[S] = JoiningSessionmaker.__new__(JoiningSessionmaker)
    joined.__dict__.update(sessionmaker.__dict__)
    return joined
