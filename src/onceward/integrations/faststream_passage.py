"""One message on its way through FastStream: into the inbox, and out again as what FastStream understands.

    consume_scope     the handler, as a handler of the inbox; what comes of it is returned to be published, or raised
    publish_scope     each publication of the handler gets an id that is the same each time
    after_processed   what could not be published, and what FastStream could not even read

FastStream makes a middleware of its own for each message, and this is ours.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar
from time import monotonic
from types import TracebackType
from typing import Any
from uuid import UUID, uuid5

from faststream import BaseMiddleware
from faststream.exceptions import AckMessage, FastStreamException, NackMessage, RejectMessage

from onceward.brokers.envelope import ID_HEADERS
from onceward.errors import PayloadUndecodable, Reject, ResultInvalid, StoreError, TryLater, UsageError
from onceward.integrations import faststream_inside as inside
from onceward.integrations.faststream_gate import Gate, Refused
from onceward.integrations.faststream_kept import SILENT, Kept, answer, keep, kept_of, with_correlation
from onceward.message import Message
from onceward.outcome import Kind, Outcome, Verdict, raised

_log = logging.getLogger("onceward")

LONGEST_PAUSE = 5.0
"""Seconds between two tries, where nothing says when the next is due."""
GLANCE = 0.2
"""Seconds. Who waits looks so often whether the subscriber has been stopped."""
PAUSE = 1.0
"""Seconds before a message is given back, so that it does not come again at once."""

_PUBLICATIONS = UUID("4f0c3e0e-6b1b-5f0a-9d0e-7c1b8f5f2a11")
"""The namespace of the ids of what handlers publish."""

_running: ContextVar[Passage | None] = ContextVar("onceward_faststream", default=None)


async def inbox_tx() -> Any:
    """The transaction of the handler: `tx: AsyncSession = Depends(inbox_tx)`."""
    passage = _running.get()
    if passage is None or passage.tx is None:
        raise UsageError("inbox_tx works in handlers whose broker or router has InboxMiddleware among its middlewares")
    return passage.tx


async def run_passage(_message: Message[Any], tx: Any) -> Any:
    """What the inbox calls as the handler."""
    passage = _running.get()
    assert passage is not None  # noqa: S101 - it was set by who called the inbox
    return await passage.run(tx)


class Passage(BaseMiddleware):
    """One message on its way through FastStream, or one publication."""

    def __init__(self, gate: Gate, msg: Any | None, *, context: Any) -> None:
        super().__init__(msg, context=context)
        self._gate = gate
        self._inbox = gate.inbox
        self._message: Message[Any] | None = None
        self._entered = self._answered = False
        self.tx: Any = None

    # --- the way in -----------------------------------------------------------------------------------------

    async def consume_scope(self, call_next: Callable[[Any], Awaitable[Any]], msg: Any) -> Any:
        self._entered = True
        wrapper = inside.wrapper_of(call_next)
        if wrapper is None or inside.is_of_tests(wrapper):
            return await call_next(msg)
        self._call_next, self._msg, self._wrapper = call_next, msg, wrapper
        self._subscriber = self.context.get_local("handler_")
        try:
            await self._begin()
            outcome = await self._settled()
            await self._look_for_twin(outcome)
        except Refused as refused:
            _log.error("%s It is stopped.", refused)
            self._gate.stop(self._subscriber, msg.raw_message)
            await self._give_back(0.0)
            raise
        except Exception:  # not the handler's: that one has an outcome
            await self._give_back()
            raise
        self._answered = outcome.verdict is Verdict.ACK
        return await self._answer(outcome)

    async def _begin(self) -> None:
        self._gate.admit(self._subscriber)
        arrived = inside.arrived(self._msg.raw_message, self._subscriber)
        self._origin, self._redelivered = arrived.origin, self._gate.may_be_repeated(arrived)
        self._message, self._problem = await self._gate.unpacked(arrived.raw, self._msg)
        self._publishes = inside.will_publish(self._wrapper, self._subscriber, self._msg)
        self._keeps = self._gate.on_duplicate == "result" or (self._publishes and self._gate.on_duplicate == "auto")
        self._parks = self._gate.on_failure == "park" and not self._publishes
        self._name = inside.name_of_handler(self._wrapper)
        self._runs = 0
        self._result: Any = None
        self._said: AckMessage | RejectMessage | None = None

    async def _give_back(self, pause: float = PAUSE) -> None:
        """A nack of ours, whatever the ack policy says: FastStream does nothing more to a message that is settled."""
        await asyncio.sleep(pause)
        with suppress(Exception):  # the connection is gone, and the message comes again without it
            await self._msg.nack()

    # --- through the inbox ----------------------------------------------------------------------------------

    async def _settled(self) -> Outcome[Any]:
        """Its outcome. What stands in the way is waited for, as long as the message may be held."""
        until, tries = monotonic() + self._gate.hold, 0
        while True:
            outcome = await self._tried()
            if outcome.verdict is Verdict.ACK or outcome.attempts:
                return outcome
            pause, left = _pause_of(outcome, tries), until - monotonic()
            if not await self._rest(min(pause, left)) or pause >= left:
                return outcome
            tries += 1

    async def _rest(self, seconds: float) -> bool:
        """False: the subscriber has been stopped."""
        until = monotonic() + seconds
        while self._subscriber.running:
            left = until - monotonic()
            if left <= 0:
                return True
            await asyncio.sleep(min(left, GLANCE))
        return False

    async def _tried(self) -> Outcome[Any]:
        try:
            return await self._try()
        except TryLater as later:
            return Outcome(Kind.BUSY, error=later, retry_at=later.retry_at)
        except StoreError as error:
            return Outcome(Kind.BUSY, error=error)

    async def _try(self) -> Outcome[Any]:
        inbox, message, origin = self._inbox, self._message, self._origin
        assert message is not None  # noqa: S101 - there since _begin
        if self._problem is not None:
            return await inbox.bury(message, self._problem, origin=origin)
        if self._parks and await self._waits_in_queue(message):
            return await inbox.accept(message, origin=origin)
        outcome = await self._delivered(message)
        if outcome.verdict is Verdict.REJECT and isinstance(outcome.error, Exception):
            return await inbox.bury(message, outcome.error, origin=origin)
        if self._parks and _can_be_parked(outcome):
            return await inbox.accept(message, origin=origin)
        return outcome

    async def _waits_in_queue(self, message: Message[Any]) -> bool:
        """Others of its lane were parked, and it must not overtake them."""
        lane = self._inbox.lane_of(message)
        return lane is not None and lane in (await self._inbox.queued_lanes([lane])).lanes

    async def _delivered(self, message: Message[Any]) -> Outcome[Any]:
        token = _running.set(self)
        try:
            runner = self._gate.runner(self._name)
            (outcome,) = await self._inbox.deliver(
                [message], runner, redelivered=self._redelivered, origins=[self._origin]
            )
        finally:
            _running.reset(token)
        return outcome

    async def run(self, tx: Any) -> Any:
        """The handler of FastStream, in the transaction of the inbox."""
        self._runs += 1
        if self._runs > 1:
            self._msg.clear_cache()  # what the handler was given the last time, it may have changed
        self.tx, self._said, self._result = tx, None, None
        try:
            self._result = await self._call_next(self._msg)
        except AckMessage as done:  # it is said to be done, so what it wrote stands
            self._said = done
            return SILENT if self._keeps else None
        except RejectMessage as rejected:
            self._said = rejected
            raise Reject("the handler raised RejectMessage") from rejected
        except Exception as error:
            if inside.is_misfit(error, self._wrapper, self._subscriber):
                raise PayloadUndecodable(f"the message does not fit {self._name}: {inside.told(error)}") from error
            raise
        finally:
            self.tx = None
            if self._msg.committed is not None:
                self._gate.note_early_ack(self._name)
        return self._kept() if self._keeps else None

    def _kept(self) -> Kept | None:
        try:
            kept = keep(self._result, inside.serializer_of(self._subscriber))
        except ResultInvalid:
            if self._publishes:
                raise
            return None
        return with_correlation(kept, self._msg.correlation_id)

    # --- the way out ----------------------------------------------------------------------------------------

    async def _answer(self, outcome: Outcome[Any]) -> Any:
        """For FastStream: what to publish; or how to settle it, as an error."""
        if outcome.kind is Kind.PROCESSED:
            if self._said is not None:
                raise self._said
            return self._result
        if outcome.verdict is Verdict.ACK:
            return self._repeated(outcome)
        if isinstance(outcome.error, TryLater) or outcome.error is None:
            raise NackMessage from outcome.error
        if not outcome.attempts:
            await self._give_back()
            raise outcome.error
        raised(outcome)
        raise outcome.error

    def _repeated(self, outcome: Outcome[Any]) -> Any:
        if outcome.kind is Kind.DEAD and self._said is not None:
            raise self._said
        if outcome.kind is Kind.DUPLICATE and self._keeps and outcome.result is not None:
            kept = kept_of(outcome.result)
            if kept is None:
                return outcome.result
            if kept.form != "silent":
                return answer(kept, self._msg.correlation_id if self._msg.reply_to else None)
        if self._publishes:
            raise AckMessage  # FastStream would publish what is returned, also None
        return None

    async def _look_for_twin(self, outcome: Outcome[Any]) -> None:
        """Two handlers of one app that get the same message are two pieces of work. With one inbox the second would
        never run, and nobody would notice."""
        if outcome.kind is Kind.PROCESSED or outcome.verdict is not Verdict.ACK or self._problem is not None:
            return
        others = inside.handlers_of(self.context.get("broker")) - {self._name}
        if not others or self._message is None:
            return
        record = outcome.record or await self._inbox.get_record(self._message)
        if record is not None and record.handler in others:
            raise UsageError(
                f"message {self._message.id!r} from {self._origin} was handled before by {record.handler}, and so "
                f"{self._name} would never run for it. Where both have to, give each an inbox with a consumer= of its "
                "own, as a middleware of its own router. Where it is another message with the same id, let source= "
                "tell them apart: InboxMiddleware(inbox, source=lambda raw: raw.topic). Where it is the same work, let "
                "one function have both subscribers."
            )

    # --- around it ------------------------------------------------------------------------------------------

    async def publish_scope(self, call_next: Callable[[Any], Awaitable[Any]], cmd: Any) -> Any:
        """What a handler publishes has an id that is the same each time, so that its next inbox knows it again."""
        if self._message is not None and self._problem is None and not getattr(cmd, "extra_bodies", ()):
            id_ = str(uuid5(_PUBLICATIONS, f"{self._inbox.identity_of(self._message)}/{cmd.destination}"))
            if hasattr(cmd, "message_options"):
                cmd.message_options = {"message_id": id_, **cmd.message_options}
            elif not any(name in cmd.headers for name in ID_HEADERS):
                cmd.headers = {**cmd.headers, "message_id": id_}
        return await call_next(cmd)

    async def after_processed(
        self,
        exc_type: type[BaseException] | None = None,  # noqa: ARG002 - as FastStream calls it
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,  # noqa: ARG002
    ) -> bool | None:
        if not isinstance(exc_val, Exception) or isinstance(exc_val, FastStreamException):
            return False
        if self._answered:  # it could not be published: it comes again, as a duplicate, and is published then
            await self._give_back()
        subscriber = self.context.get_local("handler_")
        if self._entered or subscriber is None or await inside.parses(subscriber, self.msg):
            return False
        return await self._bury_unread(subscriber, exc_val)

    async def _bury_unread(self, subscriber: Any, error: Exception) -> bool:
        """A record that FastStream cannot even read has no handler, and would be skipped: it becomes a dead letter."""
        arrived = inside.arrived(self.msg, subscriber)
        self._subscriber, self._origin, self._parks = subscriber, arrived.origin, False
        self._message, problem = await self._gate.unpacked(arrived.raw, None)
        self._problem = problem or Reject(f"FastStream cannot read the record: {error!r}")
        outcome = await self._settled()
        if outcome.verdict is not Verdict.ACK:
            inside.rewind(subscriber, self.msg)
        return outcome.verdict is Verdict.ACK


def _can_be_parked(outcome: Outcome[Any]) -> bool:
    """It failed, or its next try is later. Another runner and a busy store have nothing to do with the message."""
    error = outcome.error
    if isinstance(error, TryLater) and error.reason in ("in_flight", "store_busy"):
        return False
    return outcome.verdict is Verdict.RETRY and (outcome.attempts > 0 or isinstance(error, TryLater))


def _pause_of(outcome: Outcome[Any], tries: int) -> float:
    error = outcome.error
    delay = error.delay if outcome.delay is None and isinstance(error, TryLater) else outcome.delay
    if delay is not None:
        return max(0.05, delay)
    return float(min(LONGEST_PAUSE, 0.1 * 2.0 ** min(tries, 10)))
