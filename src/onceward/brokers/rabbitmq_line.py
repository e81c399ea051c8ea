"""Line: one channel on which a queue is consumed, from its opening until it is lost.

A delivery tag means something on the channel that brought it, and nowhere else. So a delivery holds on to its line, and
when the line is lost, nothing can be said about it any more: the broker delivers it again, on another line.

A frame that does not fit into the driver's pipe waits until there is room, and for ever if the connection is lost
meanwhile. So nothing is waited for longer than the line lasts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import unquote

from onceward.brokers.rabbitmq_driver import (
    LOST,
    PATIENCE,
    AbstractConnection,
    AbstractRobustConnection,
    Channel,
    Connection,
    DeliveredMessage,
    Wire,
    hushed,
    make_url,
    wrong,
)
from onceward.errors import UsageError


class Dialer:
    """Where connections come from: made of a URL and closed by us, or the user's own, which is left alone."""

    def __init__(
        self, url: str | None, given: AbstractConnection | None, name: str, options: Mapping[str, Any]
    ) -> None:
        self._url = url
        self._given = given
        self._name = name
        self._options = dict(options)

    def connection(self) -> AbstractConnection:
        """Not open yet, if it is ours."""
        if self._given is not None:
            return self._given
        options = {"client_properties": {"connection_name": self._name}} | self._options
        return Connection(make_url(self._url), **options)

    async def connect(self, connection: AbstractConnection) -> None:
        if self._given is None:
            await connection.connect(timeout=PATIENCE)

    async def close(self, connection: AbstractConnection) -> None:
        if self._given is None:
            await connection.close()

    @property
    def is_over(self) -> bool:
        """A connection of the user's that does not come back."""
        if self._given is None:
            return False
        if isinstance(self._given, AbstractRobustConnection):
            return self._given.is_closed
        transport = self._given.transport
        return transport is None or transport.connection.is_closed

    @property
    def vhost(self) -> str:
        url = make_url(self._url) if self._given is None else getattr(self._given, "url", make_url())
        return unquote(url.raw_path.removeprefix("/")) or "/"


class Line:
    def __init__(self, dialer: Dialer, queue: str) -> None:
        self.queue = queue
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Its result is why."""
        self._dialer = dialer
        self._connection = dialer.connection()
        self._channel: Channel | None = None
        self._wire: Wire | None = None
        self._consumer: str | None = None
        self._held: set[asyncio.Task[None]] = set()

    @property
    def alive(self) -> bool:
        return not self.lost.done() and self._wire is not None and not self._wire.is_closed

    @property
    def connection(self) -> AbstractConnection:
        return self._connection

    async def open(
        self,
        deliver: Callable[[Line, DeliveredMessage], None],
        *,
        prefetch: int,
        declare: Mapping[str, Any] | None,
    ) -> None:
        """`deliver` may be called before this has ended."""
        await self._dialer.connect(self._connection)
        # Not connection.channel(): that one of a robust connection would open itself again behind our back.
        self._channel = Channel(self._connection, publisher_confirms=False)
        await self._channel.initialize()
        self._wire = wire = await self._channel.get_underlay_channel()
        wire.closing.add_done_callback(self._closed)
        wire.on_consumer_cancel_callbacks.add(lambda _frame: self._lose("the broker cancelled the consumer"))
        await _declared(wire, self.queue, declare)
        await wire.basic_qos(prefetch_count=prefetch)

        async def hear(message: DeliveredMessage) -> None:
            deliver(self, message)

        self._consumer = (await wire.basic_consume(self.queue, hear)).consumer_tag

    def _closed(self, closing: asyncio.Future[Any]) -> None:
        error = None if closing.cancelled() else closing.exception()
        self._lose(f"{type(error).__name__}: {error}" if error is not None else "the channel was closed")

    def _lose(self, why: str) -> None:
        if not self.lost.done():
            self.lost.set_result(why)

    # --- what is said about a delivery ----------------------------------------------------------------------

    async def ack(self, tag: int) -> None:
        await self._say(lambda wire: wire.basic_ack(tag, wait=False))

    async def give_back(self, tag: int) -> None:
        """The broker delivers it again, to whoever has room."""
        await self._say(lambda wire: wire.basic_nack(tag, requeue=True, wait=False))

    def hold(self, tag: int, seconds: float) -> None:
        """Keep it, unsettled, and give it back then."""
        task = asyncio.ensure_future(self._hold(tag, seconds))
        self._held.add(task)
        task.add_done_callback(self._held.discard)

    async def _hold(self, tag: int, seconds: float) -> None:
        await asyncio.wait({self.lost}, timeout=seconds)
        await self.give_back(tag)

    async def _say(self, words: Callable[[Wire], Awaitable[None]]) -> None:
        """Nothing is raised if the line is lost: then the delivery comes again."""
        wire = self._wire
        if wire is None or not self.alive:
            return
        try:
            if wire.connection.write_queue.full():
                await self._say_waiting(asyncio.ensure_future(words(wire)))
            else:
                await words(wire)
        except LOST:
            pass

    async def _say_waiting(self, said: asyncio.Future[None]) -> None:
        pending: set[asyncio.Future[Any]] = {said, self.lost}
        try:
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        finally:
            said.cancel()
        if said.done() and not said.cancelled():
            said.result()

    # --- its end --------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Nothing more is delivered."""
        if self.alive and self._wire is not None and self._consumer is not None:
            await hushed(self._wire.basic_cancel(self._consumer))

    async def close(self) -> None:
        """What is not settled goes back to the broker."""
        for task in self._held:
            task.cancel()
        await asyncio.gather(*self._held, return_exceptions=True)
        self._lose("it was closed")
        if self._channel is not None and not self._channel.is_closed:
            await hushed(self._channel.close())
        await hushed(self._dialer.close(self._connection))


async def _declared(wire: Wire, queue: str, arguments: Mapping[str, Any] | None) -> None:
    try:
        if arguments is None:
            await wire.queue_declare(queue, passive=True)
        else:
            await wire.queue_declare(queue, durable=True, arguments=dict(arguments))
    except wrong.ChannelNotFoundEntity as error:
        raise UsageError(f"there is no queue {queue!r} on this broker. Make it, or let declare=True make it") from error
    except wrong.ChannelAccessRefused as error:
        raise UsageError(f"the queue {queue!r} cannot be used by this user: {error}") from error
    except wrong.ChannelPreconditionFailed as error:
        raise UsageError(
            f"the queue {queue!r} is there, with other arguments than declare= says: {error}. Without declare= it is "
            "taken as it is"
        ) from error
