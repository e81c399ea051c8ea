"""The embedded store: a SQLite file and nothing to start."""

from __future__ import annotations

from os import PathLike, fspath

from onceward.sql.drivers.sqlite import SqliteDriver, Transaction
from onceward.sql.store import SqlStore

__all__ = ["SqliteStore", "Transaction"]


class SqliteStore(SqlStore[Transaction]):
    """`SqliteStore("shop.db")`. Tables are made when it is opened. `":memory:"` lives as long as it is open."""

    def __init__(self, path: str | PathLike[str]) -> None:
        super().__init__(SqliteDriver(fspath(path)))
