"""The conformance suite of sources, over those that have no broker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, BinaryIO
from zlib import crc32

import msgspec
import pytest

from onceward import Message
from onceward.brokers import MemorySource, NdjsonSource
from onceward.brokers.envelope import Envelope, Raw
from onceward.brokers.memory import MemoryDelivery, Settled
from onceward.outcome import Verdict
from onceward.testing import Lab, SqliteLab
from onceward.testing.sources import BrokerLab, Sent, SourceContract


class RememberedSource(MemorySource):
    """What was settled is known to the broker."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(open=True)
        self._broker = broker

    def settle(self, delivery: MemoryDelivery, settled: Settled) -> None:
        super().settle(delivery, settled)
        if settled.verdict is not Verdict.RETRY:
            self._broker.settled.add(id(delivery.message))


class MemoryBroker(BrokerLab):
    def __init__(self) -> None:
        self.kept: list[tuple[Message[Any], str, Exception | None]] = []
        self.settled: set[int] = set()
        self._source: RememberedSource | None = None

    def source(self, *, port: int | None = None) -> RememberedSource:
        self._source = RememberedSource(self)
        for message, partition, problem in self.kept:
            if id(message) not in self.settled:
                self._source.put(message, partition=partition, problem=problem, redelivered=True)
        return self._source

    async def send(self, *records: Sent) -> None:
        for record in records:
            raw = Raw(
                topic="orders",
                place=f"orders/{len(self.kept)}",
                body=record.bytes,
                id=record.id,
                type=record.type,
                key=None if record.key is None else record.key.encode(),
            )
            envelope = Envelope(stream=lambda raw: None if raw.key is None else raw.key.decode())
            message, problem = envelope.open(raw)
            self.kept.append((message, str(crc32((record.key or "").encode()) % 3), problem))
            if self._source is not None:
                self._source.put(message, partition=self.kept[-1][1], problem=problem)

    async def unsettled(self) -> int:
        return len(self.kept) - len(self.settled)

    def job(self) -> Any:
        pytest.skip("what is in memory dies with its process")


class TestMemory(SourceContract):
    @pytest.fixture
    def broker(self) -> MemoryBroker:
        return MemoryBroker()

    @pytest.fixture
    def lab(self, sqlite_lab: SqliteLab) -> Lab:
        return sqlite_lab


class PipedLines(BrokerLab):
    """As `producer | onceward consume --from -`; whoever reads it again begins at the beginning."""

    remembers = False

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._pipes: list[BinaryIO] = []
        self._sources: list[tuple[NdjsonSource, BinaryIO]] = []

    def source(self, *, port: int | None = None) -> NdjsonSource:
        read, write = os.pipe()
        pipe = os.fdopen(write, "wb", buffering=0)
        self._pipes.append(pipe)
        for line in self._lines:
            pipe.write(line)
        file = os.fdopen(read, "rb")
        self._sources.append((NdjsonSource("-", stream=file), file))
        return self._sources[-1][0]

    async def send(self, *records: Sent) -> None:
        for record in records:
            fields: dict[str, Any] = {"type": record.type, "stream": record.key}
            if record.id is not None:
                fields["id"] = record.id
            line = record.bytes if record.body and record.id else msgspec.json.encode(fields)
            self._lines.append(line + b"\n")
            for pipe in self._pipes:
                pipe.write(self._lines[-1])

    async def unsettled(self) -> int:
        raise NotImplementedError

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for source, file in self._sources:
            source._reader.join()
            file.close()


class TestNdjson(SourceContract):
    @pytest.fixture
    def broker(self) -> Iterator[PipedLines]:
        broker = PipedLines()
        yield broker
        broker.close()

    @pytest.fixture
    def lab(self, sqlite_lab: SqliteLab) -> Lab:
        return sqlite_lab
