"""The store for PostgreSQL through asyncpg."""

from __future__ import annotations

from typing import Any, Literal

import asyncpg

from onceward.sql.drivers.asyncpg import AsyncpgDriver
from onceward.sql.drivers.pool_watch import SecondConnectionWarning
from onceward.sql.store import SqlStore

__all__ = ["AsyncpgStore", "SecondConnectionWarning"]


class AsyncpgStore(SqlStore["asyncpg.Connection"]):
    """`AsyncpgStore(dsn="postgresql://...")` makes a pool of its own when it is opened, `pool=` uses yours.

    `schema` is where the tables are (default: by the search path). `second_connection` says what happens when a
    handler takes another connection from the same pool: "warn", "raise" or "allow". Further options go to
    `asyncpg.create_pool`.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        pool: asyncpg.Pool | None = None,
        schema: str | None = None,
        second_connection: Literal["warn", "raise", "allow"] = "warn",
        **pool_options: Any,
    ) -> None:
        self.driver = AsyncpgDriver(
            dsn=dsn, pool=pool, schema=schema, second_connection=second_connection, **pool_options
        )
        super().__init__(self.driver)

    @property
    def pool(self) -> asyncpg.Pool:
        """The pool in use, while the store is open."""
        return self.driver.pool
