"""One spelling of SQL for every kind of tx: parameters are $1, $2 in their order, rows are tuples."""

from __future__ import annotations

import re
from typing import Any


async def run_sql(tx: Any, sql: str, *params: Any) -> list[tuple[Any, ...]]:
    fetch = getattr(tx, "fetch", None)
    if fetch is not None:  # asyncpg, and SQLite's handle
        return [tuple(row) for row in await fetch(sql, *params)]
    cursor = await tx.execute(re.sub(r"\$\d", "%s", sql), params or None)  # psycopg
    return list(await cursor.fetchall()) if cursor.description else []
