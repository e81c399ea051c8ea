"""What a question is: it opens what it needs, and gives stages to measure or facts to show."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import msgspec

from bench.rounds import Stage


class World(msgspec.Struct, frozen=True, kw_only=True):
    """What is there to measure on, and how much of it."""

    postgres_dsn: str
    """Of a server where databases can be made."""
    folder: Path
    """For files that are thrown away."""
    known: int = 1_000_000
    """Messages that were processed before, where duplicates are measured."""
    pairs: int = 100
    """Messages that are delivered twice at the same moment, where peers are compared."""
    calls: int = 200_000
    """Calls in each round of a micro-benchmark."""
    rounds: int = 7
    bulk: int = 10_000
    """Messages in a very long list."""
    lasting: float = 10.0
    """Seconds for which messages come one by one, where the time until they are handled is measured."""
    full: bool = True
    """How much is in the tables before growth is measured: as much as promised, or a thousandth of it."""


class Facts(msgspec.Struct, frozen=True):
    """Something that was counted, or measured by itself."""

    question: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


Question = Callable[[World], AsyncGenerator[Stage | Facts, None]]
