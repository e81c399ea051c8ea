"""How far long work has come: a bar on a terminal where rich is installed, else a line now and then."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

PAUSE = 2.0
"""Seconds between two lines."""


@contextmanager
def progress(total: int, what: str = "records deleted") -> Iterator[Callable[[int], None]]:
    """Gives what is to be called with the number so far. Everything goes to stderr."""
    bar = _bar(total) if sys.stderr.isatty() else None
    if bar is None:
        yield _lines(total, what)
        return
    with bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def _bar(total: int) -> Any:
    """None where rich is not installed."""
    try:
        from rich.console import Console  # noqa: PLC0415 - an extra
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415
    except ImportError:
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=total == 0)


def _lines(total: int, what: str) -> Callable[[int], None]:
    last = monotonic()

    def tell(done: int) -> None:
        nonlocal last
        if monotonic() - last >= PAUSE:
            last = monotonic()
            print(f"onceward: {done} of {total} {what}" if total else f"onceward: {done} {what}", file=sys.stderr)

    return tell
