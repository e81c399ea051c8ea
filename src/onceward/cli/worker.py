"""`onceward worker`: work on the queue of an inbox until a signal says stop."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import logging
import os
import signal
import sys
from inspect import isfunction, signature
from typing import Any

from onceward.cli.common import Commands, command
from onceward.crew import LARGEST
from onceward.errors import UsageError
from onceward.inbox import Inbox

_WORKER = """\
Work on what an inbox has accepted, with its registered handlers, until SIGTERM or SIGINT. Then no more is taken, what
was begun has --grace seconds to end, and the rest is undone and left to other workers. Run as many as you like, on as
many machines as you like.

APP is a module and a name in it: an Inbox, or a function that gives one.

examples:
  onceward worker shop.main:inbox
  onceward worker shop.main:inbox --concurrency 8 --grace 60
  onceward worker shop.main:inbox --share 0/3          one of three fixed shares of the lanes
"""


def add(commands: Commands) -> None:
    parser = command(commands, "worker", "work on what an inbox has accepted", _WORKER)
    parser.add_argument("app", metavar="APP", help="module:name of the inbox, such as shop.main:inbox")
    parser.add_argument("--concurrency", metavar="N", type=int, default=1, help="workers in this process (default: 1)")
    parser.add_argument(
        "--batch",
        metavar="N",
        type=int,
        default=LARGEST,
        help=f"messages per transaction, at most (default: {LARGEST})",
    )
    parser.add_argument("--share", metavar="K/N", type=_share, help="a fixed share of the lanes, such as 0/3")
    parser.add_argument("--grace", metavar="SECONDS", type=float, default=25.0, help="to end in (default: 25)")
    parser.add_argument(
        "--poll-interval", metavar="SECONDS", type=float, default=1.0,
        help="between two looks when nobody calls (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--log-level", metavar="LEVEL", type=str.upper, choices=["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"],
        default="INFO", help="of the log on stderr: DEBUG, INFO, WARNING, ERROR or CRITICAL (default: INFO)",
    )  # fmt: skip
    parser.set_defaults(run=_run)


def _share(text: str) -> tuple[int, int]:
    try:
        number, shares = map(int, text.split("/"))
    except ValueError:
        number, shares = 0, 0
    if not 0 <= number < shares:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share: 0/3, 1/3 and 2/3 are all of three")
    return number, shares


def inbox_of(app: str) -> Inbox[Any]:
    """UsageError: there is none, and why."""
    module_name, _, name = app.partition(":")
    if not module_name or not name:
        raise UsageError(f"{app!r}: name the module and the inbox in it, such as shop.main:inbox")
    if os.getcwd() not in sys.path:  # noqa: PTH109 - as `python -m` does
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UsageError(f"there is no module {error.name!r}; looked from {os.getcwd()}") from error  # noqa: PTH109
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{module_name} has no {name!r}")
        found = getattr(found, part)
    if isfunction(found):
        try:
            signature(found).bind()
        except TypeError as error:
            raise UsageError(f"{app} cannot be called without arguments to give an Inbox: {error}") from error
        found = found()
    if not isinstance(found, Inbox):
        raise UsageError(f"{app} is a {type(found).__name__}, not an Inbox")
    return found


def _run(arguments: argparse.Namespace) -> int:
    logging.basicConfig(level=arguments.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    inbox = inbox_of(arguments.app)
    asyncio.run(_work(inbox, arguments))
    return 0


async def _work(inbox: Inbox[Any], arguments: argparse.Namespace) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    log = logging.getLogger("onceward")

    def told(name: str) -> None:
        log.info("%s: taking no more, %g s to end what was begun", name, arguments.grace)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C interrupts
            loop.add_signal_handler(number, told, number.name)
    async with inbox:
        log.info("working on %s with %d workers", inbox.consumer, arguments.concurrency)
        await inbox.run(
            concurrency=arguments.concurrency,
            stop=stop,
            grace=arguments.grace,
            share=arguments.share,
            poll_interval=arguments.poll_interval,
            batch=arguments.batch,
        )
        log.info("stopped")
