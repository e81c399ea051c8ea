"""The figures: as tables on the terminal, and as JSON."""

from __future__ import annotations

import os
import platform
import sqlite3
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.questions import Facts
from bench.rounds import Figure, Measured

PACKAGES = (
    "onceward",
    "msgspec",
    "asyncpg",
    "psycopg",
    "sqlalchemy",
    "sagaz",
    "exactly-once",
    "ascetic-ddd",
    "pgqueuer",
)


class Report(msgspec.Struct, frozen=True):
    """All of one run."""

    at: str
    machine: dict[str, Any]
    options: dict[str, Any]
    stages: list[Measured]
    facts: list[Facts]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")


def machine(postgres: dict[str, str]) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.machine()}",
        "processors": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "postgresql": postgres,
        "sqlite": sqlite3.sqlite_version,
        "packages": dict(_versions()),
    }


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "not installed"


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def show_machine(console: Console, about: dict[str, Any]) -> None:
    postgres = about["postgresql"]
    server = f"PostgreSQL {postgres['server_version'].split()[0]} (fsync {postgres['fsync']}), " if postgres else ""
    console.print(
        f"Python {about['python']}, {server}SQLite {about['sqlite']}, {about['processors']} processors, "
        f"load {about['load']} at the start",
        style="dim",
        highlight=False,
    )


def show_stage(console: Console, measured: Measured) -> None:
    """A line for each comparison."""
    has_server = any(one.server_us for one in measured.figures)
    table = _table()
    table.add_column("variant", no_wrap=True)
    for name in ("per s", "own us", *["server"] * has_server, "ratio", "quartiles"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("of", no_wrap=True)
    for one in measured.figures:
        style = "bold" if one.name.startswith(("onceward", "process_")) else ""
        for line in _lines(one, has_server=has_server):
            table.add_row(*line, style=style)
    console.print(_title(measured), style="bold", soft_wrap=True)
    console.print(table)
    console.print()


def _table() -> Table:
    """Narrow: a terminal may have 80 columns."""
    return Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)


def _title(measured: Measured) -> str:
    return f"{measured.title}, {measured.workers} {'worker' if measured.workers == 1 else 'workers'}"


def _lines(one: Figure, *, has_server: bool) -> Iterator[tuple[str, ...]]:
    server = ("-" if one.server_us is None else f"{one.server_us.middle:,.0f}",) if has_server else ()
    if one.rate is None or one.cpu_us is None:
        yield (one.name, "-", "-", *server, "-", "-", one.missing)
        return
    start = (one.name, f"{one.rate.middle:,.0f}", f"{one.cpu_us.middle:,.0f}", *server)
    for floor, spread in one.ratios.items():
        yield (*start, f"{spread.middle:.2f}", f"{spread.low:.2f}-{spread.high:.2f}", floor)
        start = ("",) * len(start)
    if not one.ratios:
        yield start


def show_facts(console: Console, facts: Facts) -> None:
    table = _table()
    for number, column in enumerate(facts.columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in facts.rows:
        table.add_row(*row)
    console.print(facts.title, style="bold", soft_wrap=True)
    console.print(table)
    if facts.note:
        console.print(facts.note, style="dim", highlight=False)
    console.print()


READING = (
    "A ratio is the rate divided by the floor's in the same round: the median of all rounds, and their quartiles. "
    "Own us and server: microseconds of processor time for each message, of this process and of the database server."
)
