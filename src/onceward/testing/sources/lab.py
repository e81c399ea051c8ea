"""A broker under test, as the conformance suite of sources needs it: one topic or queue, and one group of consumers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec

from onceward.brokers.base import Source
from onceward.testing.proxy import Proxy


class Sent(msgspec.Struct, frozen=True):
    """A record that a producer sends."""

    id: str | None
    key: str | None = None
    type: str = "order.paid"
    body: bytes | None = None

    @property
    def bytes(self) -> bytes:
        return msgspec.json.encode({"id": self.id}) if self.body is None else self.body


class Job(msgspec.Struct, frozen=True):
    """A source that another process can make: `module:Class`, with what it is called with."""

    source: str
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = {}


class ConsumerJob(msgspec.Struct, kw_only=True):
    """What a consumer process does, see `child`."""

    url: str
    source: Job
    consumer: str = "billing"
    kill_at: str = ""
    """A crash point, or "handler" or "effect": before or after the effect is written."""
    kill_on: str = ""
    """Only while this message id is in its handler; "poison": it dies with each try."""
    kill_within: float = 0.0
    """At a random moment of so many seconds, or not at all."""
    max_attempts: int = 10
    mode: Any = "inline"
    on_failure: Any = None
    batch: int = 100
    concurrency: int = 4
    lag: float = 0.0
    """Seconds that a handler takes."""


class BrokerLab(ABC):
    remembers = True
    """The broker knows what was settled, and delivers the rest again. A file does not."""
    ordered = True
    """Messages of one key come in their order, and one that is held back holds up the later ones of its key."""
    members = False
    """Several consumers share partitions, which move when one comes or goes."""
    competing = False
    """Several consumers take messages of the same queue."""
    restarts = False
    """The broker can be killed and started again: `restart`."""
    network = False
    """It is behind a connection that can be cut: `proxy` and `source(port=...)`."""

    @abstractmethod
    def source(self, *, port: int | None = None) -> Source:
        """A new consumer of the group, through the proxy on this port if there is one."""

    def job(self) -> Job:
        """The same, for another process."""
        raise NotImplementedError

    @abstractmethod
    async def send(self, *records: Sent) -> None:
        """Durable when it returns."""

    @abstractmethod
    async def unsettled(self) -> int:
        """How many the broker would deliver again if all consumers died now."""

    async def restart(self) -> None:
        """Kill the broker and start it again. Its data stays."""
        raise NotImplementedError

    def proxy(self) -> AbstractAsyncContextManager[Proxy]:
        raise NotImplementedError
