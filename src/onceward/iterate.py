"""`async for work in inbox`: messages of the queue, handled where the caller stands instead of in a handler.

    async for work in inbox:
        async with work as (message, tx):
            ...

The turn runs in a task of its own, whose handler waits until the block is left; so all that holds for handlers holds
for the block.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from contextvars import ContextVar, Token, copy_context
from typing import Any

from onceward.crew import Crew, Options
from onceward.errors import UsageError
from onceward.leaving import leaves_loop
from onceward.message import Message
from onceward.outcome import Kind
from onceward.shield import finish
from onceward.slot import Slot


class StoredWork:
    """One message that is ours to do. Enter it once, with `async with work as (message, tx)`."""

    def __init__(self, given: Given) -> None:
        self._given = given
        self._tokens: list[tuple[ContextVar[Any], Token[Any]]] | None = None

    @property
    def message(self) -> Message[Any]:
        found: Message[Any] = self._given.message
        return found

    async def __aenter__(self) -> tuple[Message[Any], Any]:
        if self._tokens is not None or self._given.over:
            raise UsageError("this work was entered before; take the next one")
        # The block is where a handler would be: the inbox and its store know by these variables what goes on.
        self._tokens = [(variable, variable.set(value)) for variable, value in self._given.context]
        return self._given.message, self._given.tx

    def __aexit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: object
    ) -> Awaitable[None]:
        """Done when the block ends; undone when it leaves the loop, by an error, `break` or `return`."""
        for variable, token in reversed(self._tokens or ()):
            with suppress(ValueError):  # in a generator, which may be ended by another task
                variable.reset(token)
        if error is None and leaves_loop(sys._getframe(1)):  # noqa: SLF001 - see there
            return self._given.abandon()
        return self._given.end(error)


class Given:
    """A message on its way through a turn, which waits for the caller's block to end."""

    def __init__(self, crew: Crew, options: Options) -> None:
        loop = asyncio.get_running_loop()
        self._entered: asyncio.Future[None] = loop.create_future()
        self._left: asyncio.Future[None] = loop.create_future()
        self.message: Any = None
        self.tx: Any = None
        self.context: list[tuple[ContextVar[Any], Any]] = []
        """What is set for a handler."""
        self._outside = copy_context()
        one = Options(given=self._handle, share=options.share, poll_interval=options.poll_interval)
        self._task: asyncio.Task[Slot | None] = asyncio.ensure_future(crew.dispatch(one))

    @property
    def over(self) -> bool:
        return self._left.done() or self._task.done()

    async def _handle(self, message: Message[Any], tx: Any) -> None:
        if self._entered.done():
            raise UsageError("a block runs once")
        outside = self._outside
        self.message, self.tx = message, tx
        self.context = [
            (variable, value)
            for variable, value in copy_context().items()
            if variable not in outside or outside[variable] is not value
        ]
        self._entered.set_result(None)
        await self._left

    async def begin(self) -> bool:
        """Whether there is a message."""
        try:
            either: list[asyncio.Future[Any]] = [self._entered, self._task]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.abandon()
            raise
        if self._entered.done():
            return True
        self._task.result()
        return False

    async def end(self, error: BaseException | None) -> None:
        """Commit, or undo. It is over when this returns."""
        if self._left.done():
            return
        if error is not None and not isinstance(error, Exception):
            await self.abandon()
            return
        if error is None:
            self._left.set_result(None)
        else:
            self._left.set_exception(error)
        try:
            slot = await asyncio.shield(self._task)
        except asyncio.CancelledError:
            await finish(self._wait())
            raise
        outcome = None if slot is None else slot.outcome
        if error is None and outcome is not None and outcome.kind in (Kind.FAILED, Kind.DEAD) and outcome.error:
            raise outcome.error

    async def abandon(self) -> None:
        """Undo it, and count nothing."""
        self._task.cancel()
        if not self._left.done():
            self._left.cancel()
        await finish(self._wait())

    async def _wait(self) -> None:
        with suppress(asyncio.CancelledError, Exception):
            await self._task


async def works(crew: Crew, options: Options, stop: asyncio.Event) -> AsyncIterator[StoredWork]:
    """Wait for messages and give them out, until told to stop."""
    ear = crew.bell.ear()
    try:
        while not stop.is_set():
            crew.check_open()
            ear.clear()
            given = Given(crew, options)
            if not await given.begin():
                await _rest(ear, stop, options.poll_interval)
                continue
            try:
                yield StoredWork(given)
            finally:
                if not given.over:  # the caller did not enter it, or left it in a way that nobody told us
                    await given.abandon()
    finally:
        crew.bell.forget(ear)


async def _rest(ear: asyncio.Event, stop: asyncio.Event, seconds: float) -> None:
    waiting = [asyncio.ensure_future(ear.wait()), asyncio.ensure_future(stop.wait())]
    try:
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            one.cancel()
