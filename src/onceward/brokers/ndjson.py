"""NdjsonSource: a file, or standard input, with a message on each line.

A line is a JSON object: a CloudEvent (it has `specversion`), or the fields of a Message, of which `id` and `type` are
needed. Nothing is written to the file; read it again, and what took effect before is a duplicate.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgspec

from onceward import codec
from onceward.errors import InvalidMessage, OncewardError, PayloadUndecodable, Reject
from onceward.message import Message, Position
from onceward.outcome import Outcome, Verdict
from onceward.store import Finding

AHEAD = 1000
"""Lines that are read before they are asked for."""
_NAMES = {field.name for field in msgspec.structs.fields(Message)} - {"body"}


class NdjsonDelivery:
    redelivered = False

    def __init__(self, message: Message[Any], origin: str, partition: str, problem: Exception | None) -> None:
        self.message = message
        self.origin = origin
        self.partition = partition
        self.problem = problem

    def begin(self) -> bool:
        return True

    def put_back(self) -> None: ...

    async def settle(self, verdict: Verdict, *, delay: float = 0.0, outcome: Outcome[Any] | None = None) -> None: ...


class NdjsonSource:
    """`NdjsonSource("events.ndjson")`, or `NdjsonSource("-")` for standard input."""

    redelivers = False
    assignment: int | None = 0
    redelivery_horizon: timedelta | None = None

    def __init__(self, path: str | Path, *, stream: BinaryIO | None = None) -> None:
        self.name = "standard input" if str(path) == "-" else str(path)
        self._path = path
        self._file: BinaryIO | None = stream
        self._own = stream is None and str(path) != "-"
        self._lines: asyncio.Queue[bytes] = asyncio.Queue()
        self._room = threading.Semaphore(AHEAD)
        self._ended = self._closed = False
        self._line = 0
        self.bytes_read = 0

    async def __aenter__(self) -> Self:
        if self._file is None:
            self._file = Path(self._path).open("rb") if self._own else sys.stdin.buffer  # noqa: SIM115, ASYNC230
        reading = (self._file, asyncio.get_running_loop())
        self._reader = threading.Thread(target=self._read, args=reading, name="onceward-ndjson", daemon=True)
        self._reader.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._room.release()
        if self._own and self._file is not None:
            await asyncio.to_thread(self._reader.join)
            self._file.close()
            self._file = None

    async def receive(self, most: int) -> Sequence[NdjsonDelivery]:
        deliveries: list[NdjsonDelivery] = []
        while len(deliveries) < most and not self._ended:
            if deliveries and self._lines.empty():
                break
            line = await self._lines.get()
            self._room.release()
            self._ended = not line
            self._line += 1
            self.bytes_read += len(line)
            if line.strip():
                deliveries.append(self._delivery(self._line, line))
        return deliveries

    def _read(self, file: BinaryIO, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread of its own that nobody waits for: standard input may say nothing for ever."""
        line = b"."
        while line and not self._closed:
            line = file.readline()
            self._room.acquire()
            with suppress(RuntimeError):  # the loop is closed, and nobody listens
                loop.call_soon_threadsafe(self._lines.put_nowait, line)

    def _delivery(self, number: int, line: bytes) -> NdjsonDelivery:
        origin = f"{self.name}:{number}"
        try:
            return NdjsonDelivery(message_of(line), origin, self.name, None)
        except OncewardError as error:
            mark = hashlib.sha256(line).hexdigest()[:16]
            stand_in = Message(id=f"{self.name[-400:]}#{mark}", type="unreadable", payload=None, body=line)
            return NdjsonDelivery(stand_in, origin, self.name, Reject(f"line {number}: {error}"))

    async def flush(self) -> None: ...

    async def check(self) -> list[Finding]:
        return []

    def trouble(self) -> str | None:
        return None


def message_of(line: bytes) -> Message[Any]:
    """InvalidMessage: it is none, and why."""
    try:
        fields = codec.decode(line)
    except Exception as error:
        raise PayloadUndecodable(f"it is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidMessage("it is not a JSON object")
    if "specversion" in fields:
        return Message.from_cloudevent(fields)
    unknown = sorted(set(fields) - _NAMES)
    if unknown:
        raise InvalidMessage(f"a message has no {', '.join(unknown)}; it has {', '.join(sorted(_NAMES))}")
    return Message(**{"id": None, "type": None, "payload": None} | fields | _typed(fields))


def _typed(fields: dict[str, Any]) -> dict[str, Any]:
    try:
        return {
            "depends_on": msgspec.convert(fields.get("depends_on") or (), tuple[Position, ...]),
            "occurred_at": msgspec.convert(fields.get("occurred_at"), datetime | None),
        }
    except msgspec.ValidationError as error:
        raise InvalidMessage(str(error)) from error
