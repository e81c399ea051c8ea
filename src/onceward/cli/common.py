"""What the commands share: their shape, the database they are told, durations, and tables of text."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

from onceward.codec import printable
from onceward.connect import store_from_url
from onceward.errors import UsageError
from onceward.store import Store

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001 - it has no other name

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def command(commands: Commands, name: str, short: str, long: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=short, description=long, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_database(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the database, such as sqlite:///shop.db or redis://localhost:6379")
    parser.add_argument("--schema", metavar="NAME", help="the PostgreSQL schema of the tables (default: search path)")


def database(arguments: argparse.Namespace) -> Store[Any]:
    return store_from_url(arguments.url, schema=arguments.schema)


def existing_database(arguments: argparse.Namespace) -> Store[Any]:
    """The same, but SQLite would make a new file where a name is misspelt."""
    store = database(arguments)
    parts = urlsplit(arguments.url)
    if parts.scheme.startswith("sqlite") and not Path(unquote(parts.path)[1:]).is_file():
        raise UsageError(f"there is no database at {arguments.url}; `onceward setup` makes one")
    return store


def duration(text: str) -> timedelta:
    """30d, 12h, 45m, 90s."""
    found = re.fullmatch(r"(\d{1,8})([smhdw])", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration, such as 30d, 12h, 45m or 90s")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns of text, numbers to the right, control characters escaped."""
    cells = [list(head), *([printable(str(cell), 80) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [bool(rows) and all(isinstance(row[n], int) for row in rows) for n in range(len(head))]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if aligned else cell.ljust(width)
            for cell, width, aligned in zip(row, widths, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join(map(line, cells))
