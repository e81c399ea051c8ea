"""`onceward setup` and `onceward schema`. Exit code 0 for done, 1 for an error that is told, 2 for wrong usage."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from onceward import __version__
from onceward.connect import store_from_url
from onceward.errors import OncewardError
from onceward.sql.store import schema

_SETUP = """\
Make the tables of onceward, or upgrade them. Safe to run at any time and from many places at once.

examples:
  onceward setup sqlite:///shop.db
  onceward setup postgresql://app@localhost/shop
  onceward setup postgresql://app@localhost/shop --schema inbox
"""
_SCHEMA = """\
Print the SQL that `onceward setup` would run, for people who apply it with their own migrations.

examples:
  onceward schema postgresql
  onceward schema sqlite > onceward.sql
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code says how it went."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except OncewardError as error:
        print(f"onceward: {error}", file=sys.stderr)
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="onceward", description="Every message takes effect exactly once.")
    parser.add_argument("--version", action="version", version=f"onceward {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    setup = _command(commands, "setup", "make or upgrade the tables", _SETUP)
    setup.add_argument("url", metavar="URL", help="the database, such as sqlite:///shop.db")
    setup.add_argument("--schema", metavar="NAME", help="the PostgreSQL schema for the tables (default: search path)")
    setup.set_defaults(run=_run_setup)
    printing = _command(commands, "schema", "print the tables as SQL", _SCHEMA)
    printing.add_argument("dialect", choices=("postgresql", "sqlite"), help="whose SQL")
    printing.set_defaults(run=_run_schema)
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, short: str, long: str
) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=short, description=long, formatter_class=argparse.RawDescriptionHelpFormatter)


def _run_setup(arguments: argparse.Namespace) -> int:
    store = store_from_url(arguments.url, schema=arguments.schema)
    asyncio.run(store.setup())
    print("onceward: the tables are up to date")
    return 0


def _run_schema(arguments: argparse.Namespace) -> int:
    print(schema(arguments.dialect), end="")
    return 0
