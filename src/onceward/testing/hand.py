"""A worker process as a test sees it: what it says, and what can be done to it."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import suppress
from typing import Any


class Hand:
    """One process of onceward.testing.worker_child."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        """All that it has said so far, as far as somebody listened."""

    @classmethod
    async def start(cls, module: str = "onceward.testing.worker_child", **job: Any) -> Hand:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        hand = cls(process)
        hand._write(json.dumps(job))
        return hand

    def _write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")

    async def hear(self, kind: str, *, times: int = 1, within: float = 30.0) -> dict[str, Any]:
        """Listen until it has said this so many times, and give the last one."""

        async def listen() -> dict[str, Any]:
            assert self.process.stdout is not None
            left = times
            while raw := await self.process.stdout.readline():
                line = json.loads(raw)
                self.lines.append(line)
                left -= line["kind"] == kind
                if not left:
                    found: dict[str, Any] = line
                    return found
            raise AssertionError(f"it ended without {kind!r}: {self.lines}")

        return await asyncio.wait_for(listen(), within)

    def go(self) -> None:
        """Let one message go on that it holds."""
        self._write("go")

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def kill(self) -> int:
        with suppress(ProcessLookupError):
            self.process.kill()
        return await self.ended()

    async def stop(self) -> int:
        """Gracefully."""
        with suppress(ProcessLookupError):
            self.process.terminate()
        return await self.ended()

    async def ended(self, within: float = 40.0) -> int:
        assert self.process.stdout is not None
        rest = await asyncio.wait_for(self.process.stdout.read(), within)
        self.lines += [json.loads(line) for line in rest.splitlines()]
        return await self.process.wait()

    async def clean_up(self) -> None:
        """At the end of a test, whatever has become of it."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
            with suppress(OSError):
                await self.process.stdin.wait_closed()
