"""`onceward consume`: a file of JSON lines, or standard input, through an inbox."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from onceward import events
from onceward.brokers import NdjsonSource, consume
from onceward.cli.common import Commands, command
from onceward.cli.progress import progress
from onceward.cli.worker import inbox_of
from onceward.errors import UsageError
from onceward.inbox import Inbox

_CONSUME = """\
Let each message of a file take effect exactly once, with the registered handlers of an inbox. A line is a JSON object:
a CloudEvent, or the fields of a Message, of which id and type are needed:

  {"id": "evt-1", "type": "order.paid", "payload": {"order": "o-1", "cents": 1250}}

Nothing is written to the file. Run it again, and what took effect is a duplicate. A line that is no message becomes a
dead letter; a message that fails is tried again, and is a dead letter after its last attempt.

APP is a module and a name in it: an Inbox, or a function that gives one.

examples:
  onceward consume shop.main:inbox --from events.ndjson
  tail -f events.ndjson | onceward consume shop.main:inbox --from -
  onceward consume shop.main:inbox --from events.ndjson --mode accept     keep them, for `onceward worker`
"""

KINDS = ("processed", "accepted", "duplicate", "dead", "ignored")
"""What is told at the end."""


def add(commands: Commands) -> None:
    parser = command(commands, "consume", "a file of JSON lines through an inbox", _CONSUME)
    parser.add_argument("app", metavar="APP", help="module:name of the inbox, such as shop.main:inbox")
    parser.add_argument("--from", dest="path", metavar="FILE", required=True, help="the file, or - for standard input")
    parser.add_argument("--mode", choices=["inline", "accept"], default="inline", help="work on them, or keep them")
    parser.add_argument("--batch", metavar="N", type=int, default=100, help="messages per transaction (default: 100)")
    parser.add_argument("--grace", metavar="SECONDS", type=float, default=25.0, help="to end in (default: 25)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    logging.basicConfig(level="WARNING", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    size = 0
    if arguments.path != "-":
        path = Path(arguments.path)
        if not path.is_file():
            raise UsageError(f"there is no file {arguments.path}")
        size = path.stat().st_size
    inbox = inbox_of(arguments.app)
    count = asyncio.run(_consume(inbox, arguments, size))
    told = [
        f"{count[kind]} {kind}" for kind in ("processed", "accepted", "duplicate", "dead", "ignored") if count[kind]
    ]
    print(", ".join(told) or "nothing")
    return 0


async def _consume(inbox: Inbox[Any], arguments: argparse.Namespace, size: int) -> Counter[str]:
    stop, loop, count = asyncio.Event(), asyncio.get_running_loop(), Counter[str]()

    def told(event: events.Event) -> None:
        if isinstance(event, events.InboxEvent):
            count[type(event).__name__.lower()] += 1

    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C interrupts
            loop.add_signal_handler(number, stop.set)
    inbox.subscribe(told)
    async with inbox, NdjsonSource(arguments.path) as source:
        hold: Literal["hold"] = "hold"  # whoever reads a file waits for its end
        with progress(size, "bytes read") as tell:
            showing = asyncio.ensure_future(_show(source, tell))
            try:
                await consume(
                    source, inbox, mode=arguments.mode, on_failure=hold, batch=arguments.batch, workers=0, stop=stop,
                    grace=arguments.grace,
                )  # fmt: skip
            finally:
                showing.cancel()
                tell(source.bytes_read)
    if stop.is_set():
        print("onceward: stopped before the end; run it again to go on", file=sys.stderr)
    return count


async def _show(source: NdjsonSource, tell: Any) -> None:
    while True:
        tell(source.bytes_read)
        await asyncio.sleep(0.2)
