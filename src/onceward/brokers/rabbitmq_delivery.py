"""RabbitMQDelivery: one message that was received, and what is told to the broker about it.

    ACK         basic.ack, on the line that brought it
    RETRY       after a delay: it waits in a delay queue of the broker's (`rabbitmq_forward`), or, if it cannot be put
                there, here in memory; at once: it is given back
    REJECT      into the quarantine queue, with the reason, and acknowledged when it is there

`basic.reject` is not used for the last one: whether the queue has a dead-letter exchange is not always known here, and
without one the broker would drop the message.
"""

from __future__ import annotations

import logging
from typing import Any

from onceward.brokers.envelope import Envelope
from onceward.brokers.rabbitmq_forward import Forwarder
from onceward.brokers.rabbitmq_letter import Letter, for_a_detour, for_quarantine, raw_of
from onceward.brokers.rabbitmq_line import Line
from onceward.errors import UsageError
from onceward.message import Message
from onceward.outcome import Outcome, Verdict

_log = logging.getLogger("onceward")

SHORTEST_HOLD, LONGEST_HOLD = 1.0, 600.0
"""Seconds that a message waits in memory. The broker closes the channel of who settles nothing for half an hour."""
REJECTED_HOLD = 60.0
"""Seconds until the next try to put something into quarantine."""
OFTEN = 3
"""What was given back so often is sent on instead. Then the broker's count, which may have a limit, begins anew."""


class RabbitMQDelivery:
    __slots__ = ("_forwarder", "_letter", "_line", "_tag", "message", "origin", "problem", "redelivered")

    partition: str | None = None

    def __init__(self, line: Line, tag: int, letter: Letter, envelope: Envelope, forwarder: Forwarder) -> None:
        self._line = line
        self._tag = tag
        self._letter = letter
        self._forwarder = forwarder
        unpacked = envelope.open(raw_of(line.queue, letter))
        self.message: Message[Any] = unpacked.message
        self.problem: Exception | None = unpacked.problem
        self.redelivered = letter.redelivered
        by = f" by {letter.exchange}/{letter.routing_key}" if letter.exchange else ""
        self.origin = f"amqp://{line.queue}#{tag}{by}"

    def begin(self) -> bool:
        return self._line.alive

    def put_back(self) -> None: ...

    async def settle(self, verdict: Verdict, *, delay: float = 0.0, outcome: Outcome[Any] | None = None) -> None:
        if not self._line.alive:  # it comes again
            return
        if verdict is Verdict.ACK:
            await self._line.ack(self._tag)
        elif verdict is Verdict.REJECT:
            await self._reject((outcome.error if outcome is not None else None) or self.problem)
        elif verdict is not Verdict.RETRY:
            raise UsageError(f"{verdict} cannot be told to a broker")
        elif delay > 0 or self._letter.given_back >= OFTEN:
            await self._delay(delay)
        else:
            await self._line.give_back(self._tag)

    async def _delay(self, delay: float) -> None:
        properties = for_a_detour(self._letter)
        if properties is not None and await self._forwarder.delay(self._letter.body, properties, delay):
            await self._line.ack(self._tag)
        else:
            self._line.hold(self._tag, min(max(delay, SHORTEST_HOLD), LONGEST_HOLD))

    async def _reject(self, error: BaseException | None) -> None:
        properties = for_quarantine(self._letter, self._line.queue, error)
        if await self._forwarder.quarantine(self._letter.body, properties):
            await self._line.ack(self._tag)
        else:
            _log.error("%s cannot be put into quarantine, and is tried again: %s", self.origin, error)
            self._line.hold(self._tag, REJECTED_HOLD)
