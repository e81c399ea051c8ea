"""The store for PostgreSQL through psycopg 3."""

from __future__ import annotations

from typing import Any, Literal

import psycopg
from psycopg_pool import AsyncConnectionPool

from onceward.sql.drivers.pool_watch import SecondConnectionWarning
from onceward.sql.drivers.psycopg import PsycopgDriver
from onceward.sql.store import SqlStore

__all__ = ["PsycopgStore", "SecondConnectionWarning"]


class PsycopgStore(SqlStore[psycopg.AsyncConnection[Any]]):
    """`PsycopgStore("postgresql://...")` makes a pool of its own when it is opened, `pool=` uses yours.

    The options are those of AsyncpgStore; further ones go to `psycopg_pool.AsyncConnectionPool`.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        pool: AsyncConnectionPool[Any] | None = None,
        schema: str | None = None,
        second_connection: Literal["warn", "raise", "allow"] = "warn",
        **pool_options: Any,
    ) -> None:
        self.driver = PsycopgDriver(
            conninfo=dsn, pool=pool, schema=schema, second_connection=second_connection, **pool_options
        )
        super().__init__(self.driver)

    @property
    def pool(self) -> AsyncConnectionPool[Any]:
        """The pool in use, while the store is open."""
        pool: AsyncConnectionPool[Any] = self.driver.pool
        return pool
