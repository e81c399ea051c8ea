"""`onceward doctor`: what about a database endangers what is promised."""

from __future__ import annotations

import argparse
import asyncio
import textwrap

import msgspec

from onceward.cli.common import Commands, add_database, command, existing_database
from onceward.store import Finding

_DOCTOR = """\
Look whether a database can keep what onceward promises on it: is it there, do its tables fit, would it forget records.
Exit code 1 when something serious is found: messages may take effect twice.

examples:
  onceward doctor redis://localhost:6379
  onceward doctor redis+cluster://localhost:7000
  onceward doctor postgresql://app@localhost/shop
  onceward doctor redis://localhost:6379 --json
"""


def add(commands: Commands) -> None:
    parser = command(commands, "doctor", "what endangers the promise on this database", _DOCTOR)
    add_database(parser)
    parser.add_argument("--json", action="store_true", help="as a JSON array with an object for each finding")
    parser.set_defaults(run=lambda arguments: asyncio.run(_run(arguments)))


async def _run(arguments: argparse.Namespace) -> int:
    store = existing_database(arguments)
    await store.open()  # which finds out whether it is there, and whether its tables fit
    try:
        found = await store.check()
    finally:
        await store.close()
    print(msgspec.json.encode(found).decode() if arguments.json else _shown(found))
    return 1 if any(one.serious for one in found) else 0


def _shown(found: list[Finding]) -> str:
    if not found:
        return "nothing found that endangers what is promised"
    return "\n\n".join(map(_told, found))


def _told(finding: Finding) -> str:
    head = f"{'SERIOUS' if finding.serious else 'note'}: {finding.name}"
    lines = (finding.text, f"What to do: {finding.advice}.")
    return "\n".join([head, *(textwrap.indent(textwrap.fill(line, 100), "  ") for line in lines)])
