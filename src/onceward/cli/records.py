"""`onceward records`: dead letters, what is stuck, or anything else."""

from __future__ import annotations

import argparse
import asyncio

import msgspec

from onceward.cli.common import Commands, add_database, command, duration, existing_database, table
from onceward.inbox import Inbox
from onceward.record import Record, State

_RECORDS = """\
List records, the oldest first. Payloads are left out unless you ask for them.

examples:
  onceward records postgresql://app@localhost/shop --consumer billing --state dead
  onceward records sqlite:///shop.db --consumer billing --state running --state failed --older-than 5m
  onceward records sqlite:///shop.db --consumer billing --state dead --json --payload
"""


def add(commands: Commands) -> None:
    parser = command(commands, "records", "list dead letters, what is stuck, or other records", _RECORDS)
    add_database(parser)
    parser.add_argument("--consumer", metavar="NAME", required=True, help="whose records")
    parser.add_argument(
        "--state", action="append", choices=[state.value for state in State], help="may be repeated (default: any)"
    )
    parser.add_argument("--older-than", metavar="AGE", type=duration, help="30d, 12h, 45m, 90s")
    parser.add_argument("--limit", metavar="N", type=int, default=100, help="at most so many (default: 100)")
    parser.add_argument("--json", action="store_true", help="as a JSON array with an object for each record")
    parser.add_argument("--payload", action="store_true", help="with --json: payload, body and headers too")
    parser.set_defaults(run=lambda arguments: asyncio.run(_run(arguments)))


async def _run(arguments: argparse.Namespace) -> int:
    states = [State(state) for state in arguments.state or ()]
    async with Inbox(existing_database(arguments), consumer=arguments.consumer, listeners=()) as inbox:
        found = await inbox.records(*states, older_than=arguments.older_than, limit=arguments.limit)
    if arguments.json:
        print(msgspec.json.encode([_told(record, payload=arguments.payload) for record in found]).decode())
    else:
        print(_shown(found))
    return 0


def _told(record: Record, *, payload: bool) -> dict[str, object]:
    left_out = {"identity", "retention"} | (set() if payload else {"payload", "body", "headers"})
    identity = {name: getattr(record, name) for name in ("consumer", "tenant", "scope", "key")}
    return identity | {name: getattr(record, name) for name in Record.__struct_fields__ if name not in left_out}


def _shown(found: list[Record]) -> str:
    head = ("state", "received", "attempts", "crashes", "type", "message", "last error")
    return table(head, [
        (record.state.value, f"{record.received_at:%Y-%m-%d %H:%M:%S}", record.attempts, record.started, record.type,
         record.message_id, record.last_error)
        for record in found
    ])  # fmt: skip
