"""`onceward setup`, `onceward schema` and `onceward stamp`: the tables."""

from __future__ import annotations

import argparse
import asyncio

from onceward.cli.common import Commands, add_database, command, database, existing_database
from onceward.errors import UsageError
from onceward.sql.store import SqlStore, schema

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
_STAMP = """\
Mark the tables as up to date. For tables that another tool has made, such as Alembic: this notes all versions as
applied and makes what such tools leave out: the table onceward_schema, functions, triggers and sequences. The other
tables must be there; they are not changed. After a schema was renamed, this tells the functions.

examples:
  onceward stamp postgresql://app@localhost/shop
"""


def add(commands: Commands) -> None:
    setup = command(commands, "setup", "make or upgrade the tables", _SETUP)
    add_database(setup)
    setup.set_defaults(run=_run_setup)
    printing = command(commands, "schema", "print the tables as SQL", _SCHEMA)
    printing.add_argument("dialect", choices=("postgresql", "sqlite"), help="whose SQL")
    printing.set_defaults(run=_run_schema)
    stamp = command(commands, "stamp", "mark tables that another tool has made as up to date", _STAMP)
    add_database(stamp)
    stamp.set_defaults(run=_run_stamp)


def _run_setup(arguments: argparse.Namespace) -> int:
    store = database(arguments)
    asyncio.run(store.setup())
    print("onceward: " + ("the tables are up to date" if store.features.tables else "there are no tables to make here"))
    return 0


def _run_schema(arguments: argparse.Namespace) -> int:
    print(schema(arguments.dialect), end="")
    return 0


def _run_stamp(arguments: argparse.Namespace) -> int:
    store = existing_database(arguments)
    if not isinstance(store, SqlStore):
        raise UsageError(f"{arguments.url} has no tables to stamp")
    asyncio.run(store.stamp())
    print("onceward: the tables are marked as up to date")
    return 0
