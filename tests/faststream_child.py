"""The example app in a process of its own, which kills itself with SIGKILL at a point that KILL_AT names.

| point | where |
|---|---|
| handler | the handler has returned, and nothing is committed |
| committed | its transaction is committed, and nothing is published |
| published | its receipt is published, and nothing is acknowledged |
"""

from __future__ import annotations

import asyncio
import os
import runpy
import signal
from pathlib import Path
from typing import Any

from faststream import BaseMiddleware

EXAMPLE = Path(__file__).parent.parent / "examples" / "faststream_app.py"
POINTS = ("handler", "committed", "published")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Inner(BaseMiddleware):
    """Between the inbox and the handler."""

    async def consume_scope(self, call_next: Any, msg: Any) -> Any:
        result = await call_next(msg)
        die()
        return result


class Outer(BaseMiddleware):
    """Around the inbox. FastStream acknowledges around this."""

    async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
        if os.environ["KILL_AT"] == "committed":
            die()
        return await call_next(cmd)

    async def after_processed(self, *_error: Any) -> bool:
        if os.environ["KILL_AT"] == "published":
            die()
        return False


def main() -> None:
    app = runpy.run_path(str(EXAMPLE))
    for subscriber in app["broker"].subscribers:
        if hasattr(subscriber, "group_id"):  # so that Kafka does not wait ten seconds for one that was killed
            subscriber._connection_args |= {"session_timeout_ms": 4000, "heartbeat_interval_ms": 1000}
    point = os.environ.get("KILL_AT", "")
    if point == "handler":
        app["broker"].add_middleware(Inner)
    elif point:
        app["broker"].insert_middleware(Outer)
    asyncio.run(app["app"].run())


if __name__ == "__main__":
    main()
