"""`onceward cleanup`: delete what is old, once."""

from __future__ import annotations

import argparse
import asyncio
from datetime import timedelta

from onceward.cli.common import Commands, add_database, command, duration, existing_database
from onceward.cli.progress import progress
from onceward.inbox import Inbox

_CLEANUP = """\
Delete the records of messages that were processed long ago, and those whose own time has come. What failed or is dead
is never touched. Records are deleted in small transactions that no traffic waits for; while another process cleans up
the same consumer, this one leaves it to that. For a cron job; in a service of yours, onceward.Janitor does it.

A message whose record is gone is new when it comes again: keep records longer than your broker can deliver again.

examples:
  onceward cleanup postgresql://app@localhost/shop --consumer billing
  onceward cleanup postgresql://app@localhost/shop --consumer billing --older-than 14d
  onceward cleanup sqlite:///shop.db --consumer billing --dry-run
"""


def add(commands: Commands) -> None:
    parser = command(commands, "cleanup", "delete the records of what was processed long ago", _CLEANUP)
    add_database(parser)
    parser.add_argument("--consumer", metavar="NAME", required=True, help="whose records")
    parser.add_argument(
        "--older-than", metavar="AGE", type=duration, default=timedelta(days=30),
        help="30d, 12h, 45m, 90s (default: 30d)",
    )  # fmt: skip
    parser.add_argument("--batch", metavar="N", type=int, default=1000, help="records per transaction (default: 1000)")
    parser.add_argument("--dry-run", action="store_true", help="only tell how many there are")
    parser.set_defaults(run=lambda arguments: asyncio.run(_run(arguments)))


async def _run(arguments: argparse.Namespace) -> int:
    async with Inbox(existing_database(arguments), consumer=arguments.consumer, listeners=()) as inbox:
        found = await inbox.sweepable(arguments.older_than)
        if arguments.dry_run:
            print(f"{found} records would be deleted")
            return 0
        with progress(found) as told:
            deleted = await inbox.cleanup(arguments.older_than, batch=arguments.batch, progress=told)
    print(f"{deleted} records deleted")
    return 0
