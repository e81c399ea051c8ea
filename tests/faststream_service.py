"""The example app as a service: its process, its database, and what tests ask about them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg

ROOT = Path(__file__).parent.parent


class Service:
    """Started as often as a test likes; all of its processes have the same name and database."""

    def __init__(self, dsn: str, broker: str, log: Path) -> None:
        self.name = f"billing-{uuid4().hex[:8]}"
        self.orders = f"{self.name}.orders"
        self.receipts = f"{self.name}.receipts"
        self._dsn = dsn
        self._broker = broker
        self._log = log

    @asynccontextmanager
    async def running(self, kill_at: str = "") -> AsyncIterator[asyncio.subprocess.Process]:
        """Asked to end afterwards, as an orchestrator does, if it has not ended before."""
        database = self._dsn.replace("postgresql://", "postgresql+asyncpg://")
        said = {"DATABASE": database, "BROKER": self._broker, "NAME": self.name, "KILL_AT": kill_at}
        with self._log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.faststream_child",
                cwd=ROOT, env=os.environ | said, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            yield process
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(60):
                    assert await process.wait() == 0, self._log.read_text()
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    async def killed(self, kill_at: str) -> None:
        """A process of it runs until it has killed itself."""
        async with self.running(kill_at) as process, asyncio.timeout(60):
            assert await process.wait() == -signal.SIGKILL, self._log.read_text()

    async def query(self, sql: str) -> list[Any]:
        connection = await asyncpg.connect(self._dsn)
        try:
            return list(await connection.fetch(sql))
        except asyncpg.UndefinedTableError:  # not started yet
            return []
        finally:
            await connection.close()

    async def charged(self) -> list[str]:
        return [row[0] for row in await self.query("SELECT order_id FROM charges ORDER BY number")]

    async def states(self) -> dict[str, str]:
        """Of the messages that it knows, by their ids."""
        rows = await self.query("SELECT message_id, state FROM onceward_records")
        return {row[0]: row[1] for row in rows}
