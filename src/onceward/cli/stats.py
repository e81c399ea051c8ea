"""`onceward stats`: how many records each consumer has."""

from __future__ import annotations

import argparse
import asyncio

import msgspec

from onceward.cli.common import Commands, add_database, command, existing_database, table
from onceward.stats import Stats

_STATS = """\
How many records there are, by consumer, state and age. The age of a record is the time since it was processed, or else
since it was received.

examples:
  onceward stats postgresql://app@localhost/shop
  onceward stats sqlite:///shop.db --consumer billing
  onceward stats sqlite:///shop.db --json
"""


def add(commands: Commands) -> None:
    parser = command(commands, "stats", "how many records there are", _STATS)
    add_database(parser)
    parser.add_argument("--consumer", metavar="NAME", help="only this one (default: all)")
    parser.add_argument("--json", action="store_true", help="as a JSON array with an object for each consumer")
    parser.set_defaults(run=lambda arguments: asyncio.run(_run(arguments)))


async def _run(arguments: argparse.Namespace) -> int:
    store = existing_database(arguments)
    await store.open()
    try:
        async with store.unit(read_only=True) as unit:
            names = await unit.consumers() if arguments.consumer is None else [arguments.consumer]
            found = [await unit.stats(name) for name in names]
    finally:
        await store.close()
    print(msgspec.json.encode(found).decode() if arguments.json else _shown(found))
    return 0


def _shown(found: list[Stats]) -> str:
    head = [name.replace("_", " ") for name in Stats.__struct_fields__]
    return table(head, [[_cell(getattr(one, name)) for name in Stats.__struct_fields__] for one in found])


def _cell(value: object) -> object:
    return "-" if value is None else value
