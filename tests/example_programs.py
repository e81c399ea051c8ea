"""Running the programs in examples/ as a person does."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
LONG = 60.0
"""Seconds that anything may take on a busy machine."""


class Program:
    """One that runs. What it says on standard output is kept as lines, and what it logs as text."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.lines: list[str] = []
        self.log = ""
        self._reading = asyncio.gather(self._read_lines(), self._read_log())

    async def _read_lines(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.lines.append(line.decode().rstrip())

    async def _read_log(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self.log += line.decode()

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def ended(self) -> int:
        async with asyncio.timeout(LONG):
            code = await self._process.wait()
            await self._reading
        return code

    async def stop(self) -> int:
        """As Kubernetes does."""
        assert self.running, self.log
        self._process.send_signal(signal.SIGTERM)
        return await self.ended()


@asynccontextmanager
async def program(name: str, *arguments: str) -> AsyncIterator[Program]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLES / name), *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    running = Program(process)
    try:
        yield running
    finally:
        if running.running:
            process.kill()
        await running.ended()
