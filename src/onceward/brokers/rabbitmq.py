"""RabbitMQSource: the messages of one queue, on aio-pika.

    async with RabbitMQSource("orders", url="amqp://guest:guest@localhost/") as source:
        await consume(source, inbox)

The queue is consumed on a line (`rabbitmq_line`), which fills a buffer that is as large as the prefetch window: who
does not receive does not acknowledge, and the broker stops sending. When the line is lost, what it brought is
forgotten, for the broker delivers it again, and another line is opened as soon as that can be done.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from time import monotonic
from types import TracebackType
from typing import Any, Literal, Self

from onceward import codec
from onceward.brokers.envelope import (
    ID_HEADERS,
    SOURCE_HEADERS,
    TYPE_HEADERS,
    Decode,
    Envelope,
    Raw,
    check_pick,
)
from onceward.brokers.rabbitmq_check import Settings, Unreadable, ask_management, ask_over_amqp, findings, unknown
from onceward.brokers.rabbitmq_delivery import RabbitMQDelivery
from onceward.brokers.rabbitmq_driver import LOST, AbstractConnection, DeliveredMessage, bounded, version_of
from onceward.brokers.rabbitmq_forward import Forwarder
from onceward.brokers.rabbitmq_letter import read
from onceward.brokers.rabbitmq_line import Dialer, Line
from onceward.errors import BrokerUnavailable, UsageError
from onceward.shield import finish
from onceward.store import Finding

_log = logging.getLogger("onceward")

Retry = Literal["queues", "memory"]

SHORTEST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds between two tries to open a line."""
STEADY = 10.0
"""Seconds after which a line counts as good, and the next pause as the first one."""
_OPT_INS = (
    "It may be the AMQP property message_id, or one of these headers. If there is something else to know it by, give "
    "RabbitMQSource a function, as id=lambda record: record.header('order-id')."
)


class RabbitMQSource:
    """The messages of a queue.

    `url`, or `connection`: one of yours, best of `aio_pika.connect_robust`, which you close. `prefetch` messages are
    here at most, unsettled. The queue has to be there, unless `declare` is True (a durable quorum queue) or has its
    arguments. `id`, `type` and `source` are names of headers or functions of the record (`Raw`); behind the headers
    come the properties message_id and type. `stream` is a function: messages with the same one run in their order.
    With retry="memory" no queues are made for delays. What cannot be kept goes to the queue `quarantine`.
    `management` is the address of the management API, for `check`. Anything else goes to `aio_pika.Connection`.
    """

    redelivers = True
    assignment: int | None = None
    redelivery_horizon: timedelta | None = None

    def __init__(
        self,
        queue: str,
        *,
        url: str | None = None,
        connection: AbstractConnection | None = None,
        prefetch: int = 100,
        declare: bool | Mapping[str, Any] | None = None,
        id: str | Sequence[str] | Callable[[Raw], str | None] = ID_HEADERS,  # noqa: A002
        type: str | Sequence[str] | Callable[[Raw], str | None] = TYPE_HEADERS,  # noqa: A002
        source: str | Sequence[str] | Callable[[Raw], str | None] = SOURCE_HEADERS,
        decode: Decode | None = codec.decode,
        stream: Callable[[Raw], str | None] | None = None,
        retry: Retry = "queues",
        quarantine: str | None = None,
        management: str | None = None,
        **options: Any,
    ) -> None:
        _check_address(queue, url, connection, options)
        _check_options(prefetch, retry, management)
        for name, pick in (("id", id), ("type", type), ("source", source)):
            check_pick(name, pick)
        self.name = f"rabbitmq:{queue}"
        self._queue = queue
        self._prefetch = prefetch
        self._declare = _arguments(declare)
        self._delays = retry == "queues"
        self._quarantine = quarantine or f"{queue}.quarantine"
        self._management = management
        ids = (id,) if isinstance(id, str) else id
        self._envelope = Envelope(
            id=ids, type=type, source=source, stream=stream, decode=decode, opt_ins=_OPT_INS
        )  # fmt: skip
        self._dialer = Dialer(url, connection, f"onceward {self.name}", options)
        self._forwarder = self._new_forwarder()
        self._buffer: deque[tuple[Line, DeliveredMessage]] = deque()
        self._news = asyncio.Event()
        self._line: Line | None = None
        self._keeper: asyncio.Task[None] | None = None
        """Runs while the source is open."""
        self._why: str | None = None
        self._over: BaseException | None = None

    # --- life -----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._keeper is not None:
            raise UsageError(f"{self.name} is open already")
        self._over = None
        self._forwarder = self._new_forwarder()
        try:
            line = await self._opened()
        except LOST as error:
            raise BrokerUnavailable(f"{self.name} cannot be reached: {type(error).__name__}: {error}") from error
        self._keeper = asyncio.create_task(self._keep(line))
        self._keeper.add_done_callback(self._kept)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await finish(self._close())

    async def _close(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait({keeper})
        if self._line is not None:
            await self._line.stop()
            while self._buffer:
                line, message = self._buffer.popleft()
                await line.give_back(message.delivery_tag or 0)
            await self._line.close()
        await self._forwarder.end()
        self._line = self._why = None
        self._news.set()

    async def _opened(self) -> Line:
        line = Line(self._dialer, self._queue)
        try:
            await bounded(line.open(self._deliver, prefetch=self._prefetch, declare=self._declare))
        except BaseException:
            await finish(line.close())
            raise
        self._line, self._why = line, None
        return line

    async def _keep(self, line: Line) -> None:
        """Whenever the line is lost, open another one."""
        pause = SHORTEST_PAUSE
        while True:
            since = monotonic()
            await asyncio.wait({line.lost})
            self._why = line.lost.result()
            _log.warning("%s is away: %s", self.name, self._why)
            self._forget(line)
            await line.close()
            pause = SHORTEST_PAUSE if monotonic() - since > STEADY else pause
            line, pause = await self._opened_again(pause)
            _log.info("%s is back", self.name)

    async def _opened_again(self, pause: float) -> tuple[Line, float]:
        while not self._dialer.is_over:
            await asyncio.sleep(pause * (0.5 + random.random() / 2))  # noqa: S311
            pause = min(2 * pause, LONGEST_PAUSE)
            try:
                return await self._opened(), pause
            except (*LOST, UsageError) as error:
                self._why = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"{self.name}: the connection that was given is closed, and does not open itself again. Give one of "
            "aio_pika.connect_robust, or url="
        )

    def _kept(self, keeper: asyncio.Task[None]) -> None:
        if not keeper.cancelled():
            self._over = keeper.exception()
            self._news.set()

    def _new_forwarder(self) -> Forwarder:
        return Forwarder(self._dialer, self._queue, self._quarantine, delays=self._delays)

    # --- receiving ------------------------------------------------------------------------------------------

    def _deliver(self, line: Line, message: DeliveredMessage) -> None:
        if line.alive:
            self._buffer.append((line, message))
            self._news.set()

    def _forget(self, lost: Line) -> None:
        """Its tags mean nothing any more, and the broker delivers all of it again."""
        self._buffer = deque((line, message) for line, message in self._buffer if line is not lost)

    async def receive(self, most: int) -> Sequence[RabbitMQDelivery]:
        while not self._buffer:
            if self._over is not None:
                raise self._over
            if self._keeper is None:
                return []
            self._news.clear()
            await self._news.wait()
        return [self._delivery(*self._buffer.popleft()) for _ in range(min(most, len(self._buffer)))]

    def _delivery(self, line: Line, message: DeliveredMessage) -> RabbitMQDelivery:
        return RabbitMQDelivery(line, message.delivery_tag or 0, read(message), self._envelope, self._forwarder)

    async def flush(self) -> None:
        """Everything is said at once."""

    # --- looking --------------------------------------------------------------------------------------------

    async def check(self) -> list[Finding]:
        if self._line is None:
            raise UsageError(f"{self.name} is not open. Use `async with`")
        connection = self._line.connection
        try:
            settings = await self._settings(connection)
        except Unreadable as error:
            return [unknown(self._queue, error)]
        return findings(self._queue, settings, version_of(connection))

    async def _settings(self, connection: AbstractConnection) -> Settings:
        if self._management is not None:
            return await ask_management(self._management, self._dialer.vhost, self._queue)
        if self._declare is not None:
            return Settings(durable=True, auto_delete=False, arguments=self._declare, policies=False)
        try:
            return await bounded(ask_over_amqp(connection, self._queue))
        except LOST as error:
            raise Unreadable(f"{type(error).__name__}: {error}") from error

    def trouble(self) -> str | None:
        return None if self._why is None else f"{self.name} is away: {self._why}"


def _arguments(declare: bool | Mapping[str, Any] | None) -> dict[str, Any] | None:  # noqa: FBT001
    if declare is None or declare is False:
        return None
    return {"x-queue-type": "quorum"} | ({} if declare is True else dict(declare))


def _check_address(
    queue: str, url: str | None, connection: AbstractConnection | None, options: Mapping[str, Any]
) -> None:
    if not queue:
        raise UsageError("RabbitMQSource needs the name of a queue")
    if (url is None) == (connection is None):
        raise UsageError('RabbitMQSource needs url="amqp://..." or connection=, one of them')
    if connection is not None and options:
        raise UsageError(f"{', '.join(options)}: these are for a connection that url= makes, and there is connection=")


def _check_options(prefetch: int, retry: str, management: str | None) -> None:
    if not 1 <= prefetch <= 65_535:
        raise UsageError(f"prefetch={prefetch}: it is how many messages may be here unsettled, from 1 to 65535")
    if retry not in ("queues", "memory"):
        raise UsageError(f'retry={retry!r}: it is "queues" or "memory"')
    if management is not None and not management.startswith(("http://", "https://")):
        raise UsageError("management= is the address of the management API, as http://guest:guest@localhost:15672")
