"""Labs whose stores go through PgBouncer in transaction mode; what is looked up from outside does not."""

from __future__ import annotations

from typing import Any

from onceward.asyncpg import AsyncpgStore
from onceward.psycopg import PsycopgStore
from onceward.store import Store
from onceward.testing import PostgresLab, PsycopgLab

NO_PREPARING = {"prepare_threshold": None}


class BouncedAsyncpgLab(PostgresLab):
    def __init__(self, direct: str, bounced: str) -> None:
        super().__init__(bounced)
        self.direct = direct
        self.bounced = bounced
        self.url = f"{bounced}?pgbouncer=true"

    def store(self, **options: Any) -> Store[Any]:
        return AsyncpgStore(self.bounced, statement_cache_size=0, **options)

    def store_behind(self, port: int) -> Store[Any]:
        behind = self.bounced.replace(f":{self.address[1]}/", f":{port}/")
        return AsyncpgStore(behind, statement_cache_size=0, max_size=2)

    async def query(self, sql: str) -> list[tuple[Any, ...]]:
        return await PostgresLab(self.direct).query(sql)


class BouncedPsycopgLab(PsycopgLab):
    def __init__(self, direct: str, bounced: str) -> None:
        super().__init__(bounced)
        self.direct = direct
        self.url = f"{self.url}?pgbouncer=true"

    def store(self, **options: Any) -> Store[Any]:
        return PsycopgStore(self.dsn, kwargs=NO_PREPARING, **options)

    def store_behind(self, port: int) -> Store[Any]:
        behind = self.dsn.replace(f":{self.address[1]}/", f":{port}/")
        return PsycopgStore(behind, kwargs=NO_PREPARING, max_size=2)

    async def query(self, sql: str) -> list[tuple[Any, ...]]:
        return await PostgresLab(self.direct).query(sql)
