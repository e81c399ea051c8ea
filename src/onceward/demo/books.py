"""The books: the table of charges in a world's database, written by its workers and read by everybody else.

Nothing in the table forbids a second charge for the same order: whether there is one is what the demo is about.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

SCHEMA = """
CREATE TABLE IF NOT EXISTS charges (
    id INTEGER PRIMARY KEY, order_id TEXT NOT NULL, customer TEXT NOT NULL, cents INTEGER NOT NULL
)
"""

TOTALS = """
WITH by_order AS (SELECT customer, count(*) AS times FROM charges GROUP BY order_id, customer)
SELECT coalesce(sum(times), 0), count(DISTINCT customer) FILTER (WHERE times > 1) FROM by_order
"""


class Charge(NamedTuple):
    order_id: str
    customer: str
    cents: int


class Totals(NamedTuple):
    charges: int
    charged_twice: int
    """Customers who paid for an order more than once."""


class Books:
    def __init__(self, path: Path) -> None:
        self.path = path
        with closing(connect(path)) as connection:
            connection.execute(SCHEMA)

    def charges(self) -> list[Charge]:
        with closing(connect(self.path)) as connection:
            rows = connection.execute("SELECT order_id, customer, cents FROM charges ORDER BY id")
            return [Charge(*row) for row in rows]

    def totals(self) -> Totals:
        with closing(connect(self.path)) as connection:
            return Totals(*connection.execute(TOTALS).fetchone())


def connect(path: Path) -> sqlite3.Connection:
    """As safe as onceward's own connection, so that the two worlds differ in nothing but the inbox."""
    connection = sqlite3.connect(path, timeout=30.0, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    return connection
