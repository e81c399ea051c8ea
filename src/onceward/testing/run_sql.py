"""One spelling of SQL for every kind of tx: parameters are $1, $2 in their order, rows are tuples."""

from __future__ import annotations

import re
from typing import Any


async def run_sql(tx: Any, sql: str, *params: Any) -> list[tuple[Any, ...]]:
    if getattr(tx, "fetch", None) is None:  # psycopg
        cursor = await tx.execute(re.sub(r"\$\d", "%s", sql), params or None)
        return list(await cursor.fetchall()) if cursor.description else []
    if sql.startswith("SELECT"):  # asyncpg, and SQLite's handle
        return [tuple(row) for row in await tx.fetch(sql, *params)]
    await tx.execute(sql, *params)  # several statements at once are possible here only
    return []
