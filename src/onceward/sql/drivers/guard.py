"""What stands between a handler and its connection, whatever the driver."""

from __future__ import annotations

import asyncio

from onceward.errors import HandlerEndedTransaction, UsageError


class Guard:
    """What a driver's handle for handlers is built on: it notices when the transaction ends, and who still runs."""

    has_ended = False
    """The transaction has, and not by us."""
    _over = False
    used = True
    """Handlers may have said something that has to be reset. A driver that knows better says so."""
    is_lent = False
    """The handler has got a verb of the connection that the handle does not have itself."""
    forgotten = False
    """A statement was never awaited. It was not said."""
    broken = False
    """A savepoint could not be undone, so nobody knows what would be committed."""
    running = 0
    """Verbs that have been called and have not come back."""

    def end_of_run(self) -> bool:
        """Refuse further use. True when the handler had ended the transaction before."""
        self._over = True
        return self.has_ended

    def close_unstarted(self) -> None:
        """What was said and never awaited is not said any more. A driver that knows of such does something here."""

    async def is_idle(self, patience: float = 1.0) -> bool:
        """Whether nothing uses the connection; a task that was left behind gets a moment to end."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        while self.running and loop.time() < deadline:  # noqa: ASYNC110 - no driver tells when a statement is over
            await asyncio.sleep(0.005)
        return not self.running

    def forget(self) -> None:
        """A handler has failed: what it did not get to must not be said in its neighbours' time."""

    def check(self) -> None:
        if self._over:
            raise UsageError("this transaction is over; write only while the handler runs")
        if self.has_ended:
            raise HandlerEndedTransaction

    def enter(self) -> None:
        if self._over or self.has_ended:
            self.check()
        self.running += 1

    def leave(self, *, stands: bool) -> None:
        """A verb has come back; `stands` is what the driver says about the transaction."""
        self.running -= 1
        if not stands:
            self.has_ended = True
            raise HandlerEndedTransaction
