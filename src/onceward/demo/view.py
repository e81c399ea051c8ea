"""What the demo shows: a live table in a terminal, one line a second elsewhere, and the account at the end.

The counters come from the broker and the workers' reports, the charges from the database itself. A view draws when it
is told to, from the event loop, so that no frame shows half of an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from onceward.demo.audit import Account, damage, verdict
from onceward.demo.world import Demo

TITLE = "A shop, a broker that repeats itself, and workers that get killed."
LABEL, NUMBER, BAR = 36, 20, 40
HEIGHT = 18
"""Of the frame without the news."""


class View(NamedTuple):
    period: float
    draw: Callable[[], None]


@contextmanager
def watching(demo: Demo, console: Console, *, plain: bool) -> Iterator[View]:
    """The live view where there is a terminal that can show it."""
    if plain or not console.is_terminal or console.is_dumb_terminal or console.height < HEIGHT:
        yield View(1.0, lambda: console.print(line(demo), markup=False, soft_wrap=True))
        return
    with Live(frame(demo), console=console, auto_refresh=False) as live:
        yield View(0.2, lambda: live.update(frame(demo, lines=console.height - HEIGHT), refresh=True))
        live.update(frame(demo), refresh=True)


def line(demo: Demo) -> str:
    parts = [f"{demo.news.elapsed:2.0f} s {demo.sent:>4} sent"]
    for world in demo.worlds:
        totals = world.books.totals()
        parts.append(f"{world.name} {totals.charges:>4} charges {totals.charged_twice:>3} twice")
    return "  ".join(parts)


def frame(demo: Demo, *, lines: int = 0) -> RenderableType:
    parts: list[RenderableType] = [Text(TITLE, "dim"), Text(), progress(demo), Text(), table(demo)]
    if lines > 1:
        parts += [Text(), news(demo, min(lines - 1, 8))]
    return Padding(Group(*parts), (1, 0, 0, 1))


def progress(demo: Demo) -> Table:
    total = len(demo.orders)
    bar = ProgressBar(total, demo.sent, width=BAR, complete_style="cyan", finished_style="cyan")
    grid = Table.grid(padding=(0, 2))
    grid.add_row("orders sent", bar, f"{demo.sent:>{len(str(total))}} of {total}", f"{demo.news.elapsed:>3.0f} s")
    return grid


def table(demo: Demo) -> Table:
    tallies = [world.tally for world in demo.worlds]
    totals = [world.books.totals() for world in demo.worlds]
    grid = Table.grid()
    grid.add_column(width=LABEL)
    for _world in demo.worlds:
        grid.add_column(width=NUMBER, justify="right")
    grid.add_row("", *(Text(world.title, "bold") for world in demo.worlds))
    grid.add_row("deliveries", *(str(tally.deliveries) for tally in tallies))
    grid.add_row("  repeated by the broker", *(str(tally.repeated) for tally in tallies))
    grid.add_row("  acks lost", *(str(tally.acks_lost) for tally in tallies))
    grid.add_row("  failed and tried again", *(str(tally.failed) for tally in tallies))
    grid.add_row("workers killed", *(str(tally.killed) for tally in tallies))
    grid.add_row("duplicates skipped", str(tallies[0].skipped), Text("-", "dim"))
    grid.add_row()
    grid.add_row("charges in the database", *(str(total.charges) for total in totals))
    grid.add_row("customers charged twice", *(_alarming(total.charged_twice) for total in totals))
    return grid


def _alarming(number: int) -> Text:
    return Text(str(number), "bold red" if number else "bold green")


def news(demo: Demo, lines: int) -> Table:
    grid = Table.grid(padding=(0, 2))
    for event in list(demo.news.events)[-lines:]:
        grid.add_row(*(Text(cell, "dim") for cell in (f"{event.at:4.1f}", event.world, event.text)))
    return grid


def show_account(console: Console, demo: Demo, ours: Account, theirs: Account) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_row(Text(demo.onceward.title, "bold"), Text(str(ours), "bold green" if ours.exact else "bold red"))
    for sentence in verdict(ours):
        grid.add_row("", sentence)
    grid.add_row(Text(demo.plain.title, "bold"), Text(str(theirs), "" if theirs.exact else "bold red"))
    for sentence in damage(theirs):
        grid.add_row("", sentence)
    console.print(Padding(grid, (1, 0, 1, 1), expand=False))
