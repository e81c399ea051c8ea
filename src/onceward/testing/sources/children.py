"""Consumer processes, started and killed by tests."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from typing import Any

import msgspec

from onceward.testing.sources.lab import ConsumerJob


class Consumer:
    """One process. `lines` is what it said so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.lines: list[dict[str, Any]] = []
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, job: ConsumerJob) -> Consumer:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "onceward.testing.sources.child",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(job) + b"\n")
        await process.stdin.drain()
        process.stdin.close()
        return cls(process)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.lines.append(json.loads(line))

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    def said(self, kind: str) -> list[str]:
        return [line.get("id", "") for line in self.lines if line["kind"] == kind]

    async def ended(self) -> int:
        """How it ended: 0, or minus the number of the signal that killed it."""
        code = await self._process.wait()
        await self._reading
        return code

    async def stop(self) -> int:
        """As Kubernetes does."""
        if self.running:
            self._process.send_signal(signal.SIGTERM)
        return await self.ended()

    async def kill(self) -> None:
        if self.running:
            self._process.kill()
        await self.ended()
