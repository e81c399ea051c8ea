"""`onceward stats`: how many records each consumer has."""

from __future__ import annotations

import argparse
import asyncio

import msgspec

from onceward.cli.common import Commands, add_database, command, existing_database, table
from onceward.stats import Stats

_STATS = """\
How many records there are, by consumer, state and age. The age of a record is the time since it was processed, or else
since it was received. Where a consumer has a queue, how many of its messages are pending, and in how many lanes, by
what the lanes do.

examples:
  onceward stats postgresql://app@localhost/shop
  onceward stats sqlite:///shop.db --consumer billing
  onceward stats sqlite:///shop.db --json
"""


_QUEUE = ("pending", "lanes", "ready", "running", "retrying", "later", "waiting", "blocked")


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
            found = [
                msgspec.structs.replace(await unit.stats(name), queue=await unit.queue_stats(name)) for name in names
            ]
    finally:
        await store.close()
    print(msgspec.json.encode(found).decode() if arguments.json else _shown(found))
    return 0


def _shown(found: list[Stats]) -> str:
    names = [name for name in Stats.__struct_fields__ if name != "queue"]
    records = table(
        [name.replace("_", " ") for name in names], [[_cell(getattr(one, name)) for name in names] for one in found]
    )
    queues = [one for one in found if one.queue.lanes]
    if not queues:
        return records
    rows = [[one.consumer, *(getattr(one.queue, name) for name in _QUEUE)] for one in queues]
    return f"{records}\n\n{table(['queue', *_QUEUE], rows)}"


def _cell(value: object) -> object:
    return "-" if value is None else value
