"""The commands, one file each. Exit code 0 for done, 1 for an error that is told, 2 for wrong usage."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from onceward import __version__
from onceward.cli import cleanup, consume, doctor, records, stats, tables, worker
from onceward.errors import OncewardError

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code says how it went."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except OncewardError as error:
        print(f"onceward: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="onceward", description="Every message takes effect exactly once.")
    parser.add_argument("--version", action="version", version=f"onceward {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (tables, worker, consume, cleanup, stats, records, doctor):
        module.add(commands)
    return parser
