"""One spelling of SQL for every kind of tx: parameters are $1, $2 in their order, rows are tuples. And one of an
effect, which is no SQL where there are no tables.
"""

from __future__ import annotations

import re
import sqlite3
from typing import Any


async def write_effect(tx: Any, effect: str) -> None:
    """The effect of a handler: a row of the table `effects`; without tables, an entry of a list beside the record."""
    if hasattr(tx, "beside"):  # Redis: it is written when the message is completed
        tx.rpush(tx.beside("effects"), effect)
    else:
        await run_sql(tx, "INSERT INTO effects VALUES ($1)", effect)


async def run_sql(tx: Any, sql: str, *params: Any) -> list[tuple[Any, ...]]:
    if hasattr(tx, "begin_nested"):  # SQLAlchemy
        return await _run_sqlalchemy(tx, sql, *params)
    if isinstance(tx, sqlite3.Connection):
        return [tuple(row) for row in tx.execute(_question_marks(sql), params).fetchall()]
    if type(tx).__module__.startswith("aiosqlite"):
        return [tuple(row) for row in await tx.execute_fetchall(_question_marks(sql), params)]
    if getattr(tx, "fetch", None) is None:  # psycopg
        return await _run_psycopg(tx, sql, *params)
    if sql.startswith("SELECT"):  # asyncpg, and SQLite's handle
        return [tuple(row) for row in await tx.fetch(sql, *params)]
    await tx.execute(sql, *params)  # several statements at once are possible here only
    return []


def _question_marks(sql: str) -> str:
    return re.sub(r"\$(\d)", r"?\1", sql)


async def _run_psycopg(tx: Any, sql: str, *params: Any) -> list[tuple[Any, ...]]:
    cursor = await tx.execute(re.sub(r"\$\d", "%s", sql), params or None)
    rows = await cursor.fetchall() if cursor.description else []
    return [tuple(row.values() if isinstance(row, dict) else row) for row in rows]


async def _run_sqlalchemy(tx: Any, sql: str, *params: Any) -> list[tuple[Any, ...]]:
    from sqlalchemy import text  # noqa: PLC0415 - an extra

    values = {f"p{number}": value for number, value in enumerate(params, 1)}
    result = await tx.execute(text(re.sub(r"\$(\d)", r":p\1", sql)), values)
    return [tuple(row) for row in result.all()] if result.returns_rows else []
