"""Plans: store operations as generators that yield statements and return a value.

A plan knows neither driver nor event loop: `run` executes its statements one by one and sends the results back
in. SQL is written with `:name` parameters and compiled once to the driver's style.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import msgspec

T = TypeVar("T")


class Statement(msgspec.Struct, frozen=True, gc=False):
    sql: str
    params: Mapping[str, Any] = {}
    rows: Sequence[Mapping[str, Any]] | None = None
    """Instead of `params`, on SQLite: it is run for each of them, and gives back how many rows it changed in all."""


class Result(msgspec.Struct, frozen=True, gc=False):
    rows: Sequence[Mapping[str, Any]]
    changed: int
    """Rows inserted, updated or given back: the number that decides."""


Plan: TypeAlias = Generator[Statement, Result, T]
Execute: TypeAlias = Callable[[Statement], Awaitable[Result]]


async def run(plan: Plan[T], execute: Execute, *, first: Execute | None = None) -> T:
    """Run a plan. `first` executes its first statement, so that it can ride with BEGIN."""
    try:
        statement = next(plan)
        result = await (first or execute)(statement)
        while True:
            statement = plan.send(result)
            result = await execute(statement)
    except StopIteration as stop:
        value: T = stop.value
        return value
    finally:
        plan.close()


# A parameter is :name, but not the second colon of a ::cast, nor inside 'quotes'.
PARAMETER = re.compile(r"'[^']*'|--[^\n]*|(?<!:):([a-z_]+)")


@lru_cache(maxsize=256)
def numbered(sql: str, mark: str = "$") -> tuple[str, tuple[str, ...]]:
    """`:name` as `$1` or `?1`, and the names in the order of their numbers."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return match[0]
        if name not in names:
            names.append(name)
        return f"{mark}{names.index(name) + 1}"

    return PARAMETER.sub(number, sql), tuple(names)


@lru_cache(maxsize=256)
def gives_rows(sql: str) -> bool:
    return re.match(r"\s*(--[^\n]*\n\s*)*(SELECT|WITH)\b", sql) is not None or "RETURNING" in sql


def inlined(statement: Statement) -> str:
    """The statement with its parameters as literals, for the one trip that a driver sends without parameters."""
    pieces, names = _pieces(statement.sql)
    params = statement.params
    filled = list(pieces)
    filled[1::2] = [literal(params[name]) for name in names]
    return "".join(filled)


def literals(values: Sequence[Any]) -> str:
    """With commas between them. Where all are texts that need no escape, as in a claim, they are said at once."""
    try:
        texts = "', '".join(values)
    except TypeError:
        pass
    else:
        if texts.count("'") == 2 * len(values) - 2 and "\\" not in texts and "\0" not in texts:
            return f"'{texts}'"
    return ", ".join(map(literal, values))


@lru_cache(maxsize=256)
def _pieces(sql: str) -> tuple[list[str], tuple[str, ...]]:
    """The text between the parameters, with a place for each; and their names, in the order of the places."""
    pieces: list[str] = []
    names: list[str] = []
    end = 0
    for match in PARAMETER.finditer(sql):
        if match[1] is not None:
            pieces += (sql[end : match.start()], "")
            names.append(match[1])
            end = match.end()
    return [*pieces, sql[end:]], tuple(names)


def literal(value: object) -> str:
    """A closed encoder: truth, numbers, text, bytes and times. Anything else is refused."""
    if type(value) is str:
        return _text(value)
    if value is None:
        return "NULL"
    if type(value) is bool:
        return "TRUE" if value else "FALSE"
    if type(value) is int:
        return f"({value})"  # -2**63::bigint would negate after the cast, and overflow
    if type(value) is float and math.isfinite(value):
        return f"'{value!r}'"
    if type(value) is bytes:
        return f"E'\\\\x{value.hex()}'"
    if isinstance(value, datetime):
        return f"'{value.isoformat()}'"
    raise TypeError(f"no literal for {type(value).__name__}")


def _text(value: str) -> str:
    if "\0" in value:
        raise ValueError("a text for the database contains NUL")
    doubled = value.replace("'", "''")
    if "\\" not in value:
        return f"'{doubled}'"
    # With E it means the same whether `standard_conforming_strings` is on or off.
    return "E'" + doubled.replace("\\", "\\\\") + "'"
