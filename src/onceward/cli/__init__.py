"""The command `onceward`."""

from onceward.cli.main import main

__all__ = ["main"]
