"""Labs whose stores go through PgBouncer in transaction mode; what is looked up from outside does not."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from onceward.asyncpg import AsyncpgStore
from onceward.psycopg import PsycopgStore
from onceward.store import Store
from onceward.testing import PostgresLab


class BouncedLab(PostgresLab):
    scheme: str
    settings: ClassVar[dict[str, Any]]
    """What docs/postgresql.md says that this store needs behind PgBouncer."""

    def __init__(self, direct: str, bounced: str) -> None:
        super().__init__(bounced)
        self.direct = direct
        self.bounced = bounced
        self.url = bounced.replace("postgresql", self.scheme, 1) + "?pgbouncer=true"

    @abstractmethod
    def make(self, dsn: str, **options: Any) -> Store[Any]: ...

    def store(self, **options: Any) -> Store[Any]:
        return self.make(self.bounced, **self.settings | options)

    def careless_store(self, **options: Any) -> Store[Any]:
        """Without the settings."""
        return self.make(self.bounced, **options)

    def store_behind(self, port: int) -> Store[Any]:
        return self.make(self.bounced.replace(f":{self.address[1]}/", f":{port}/"), **self.settings, max_size=2)

    async def query(self, sql: str) -> list[tuple[Any, ...]]:
        return await PostgresLab(self.direct).query(sql)


class BouncedAsyncpgLab(BouncedLab):
    scheme = "postgresql"
    settings: ClassVar = {"statement_cache_size": 0}

    def make(self, dsn: str, **options: Any) -> Store[Any]:
        return AsyncpgStore(dsn, **options)


class BouncedPsycopgLab(BouncedLab):
    scheme = "postgresql+psycopg"
    settings: ClassVar = {"kwargs": {"prepare_threshold": None}}

    def make(self, dsn: str, **options: Any) -> Store[Any]:
        return PsycopgStore(dsn, **options)

    def second_connection(self, store: Any) -> Any:
        return store.pool.connection()
