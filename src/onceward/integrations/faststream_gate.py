"""The gate of an InboxMiddleware: which subscribers may pass, and how a record of FastStream becomes a message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Literal
from weakref import WeakSet

import msgspec
from faststream import AckPolicy

from onceward import codec, events
from onceward.brokers.envelope import Envelope, Raw
from onceward.errors import InvalidMessage, PayloadUndecodable, UsageError
from onceward.inbox import Inbox
from onceward.integrations import faststream_inside as inside
from onceward.message import Message

OnDuplicate = Literal["auto", "result", "skip"]
OnFailure = Literal["raise", "park"]

_ADVICE = "Give it, its broker or its router (which does not ask its broker) ack_policy=AckPolicy.NACK_ON_ERROR."


class Refused(UsageError):
    """A subscriber that the inbox cannot protect. It is stopped before it can lose a message."""


class Gate:
    def __init__(
        self,
        inbox: Inbox[Any],
        envelope: Envelope,
        *,
        on_duplicate: OnDuplicate,
        on_failure: OnFailure,
        hold: float,
        run: Callable[[Message[Any], Any], Awaitable[Any]],
    ) -> None:
        self.inbox = inbox
        self.on_duplicate = on_duplicate
        self.on_failure = on_failure
        self.hold = hold
        self._envelope = envelope
        self._run = run
        self._runners: dict[str, Callable[..., Awaitable[Any]]] = {}
        self._admitted: WeakSet[Any] = WeakSet()
        self._partitions: set[tuple[str, int]] = set()
        self._rewound: set[tuple[str, int]] = set()
        self._stopping: set[asyncio.Future[None]] = set()
        self._told: set[str] = set()

    # --- subscribers ----------------------------------------------------------------------------------------

    def admit(self, subscriber: Any) -> None:
        """Refused: its messages would be lost. What only endangers them is told to those who listen, once."""
        if subscriber in self._admitted:
            return
        text = wrong_with(subscriber)
        if text is not None:
            raise Refused(text)
        self._admitted.add(subscriber)
        risk = self._risk_of(subscriber)
        if risk is not None:
            self._tell("ack_policy", risk)

    def stop(self, subscriber: Any, record: Any) -> None:
        """From a task of its own: a subscriber of Kafka that is stopped by its handler stays in its group."""
        if inside.is_of_kafka(subscriber) and not inside.is_batch(subscriber):
            place = (record.topic, record.partition)
            if place not in self._rewound:  # what comes after it in the partition is refused too
                self._rewound.add(place)
                inside.rewind(subscriber, record)
        if subscriber.running:
            subscriber.running = False
            task = asyncio.ensure_future(subscriber.stop())
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)

    def _risk_of(self, subscriber: Any) -> str | None:
        policy = subscriber.ack_policy
        if self.on_failure == "park" or policy is AckPolicy.NACK_ON_ERROR:
            return None
        about = f"subscriber {inside.name_of_subscriber(subscriber)} has AckPolicy.{policy.name}: "
        if policy is AckPolicy.ACK or inside.is_of_kafka(subscriber):
            text = "a message whose handler fails is acknowledged, and does not come again."
        elif not inside.has_dead_letter_exchange(subscriber):
            text = "a message whose handler fails is rejected, and dropped unless its queue has a dead-letter exchange."
        else:
            return None
        return f"{about}{text} ack_policy=AckPolicy.NACK_ON_ERROR lets it be tried again."

    def note_early_ack(self, name: str) -> None:
        """A handler has settled its message itself: what can be done is to say so."""
        if name not in self._told:
            self._told.add(name)
            advice = "Leave that to FastStream, which does it after."
            self._tell("early_ack", f"{name} acknowledges before its transaction is committed. {advice}")

    def _tell(self, finding: str, text: str) -> None:
        self.inbox.emit(events.AtRisk(consumer=self.inbox.consumer, finding=finding, text=text))

    # --- messages -------------------------------------------------------------------------------------------

    def runner(self, name: str) -> Callable[..., Awaitable[Any]]:
        """What the inbox runs for a handler of FastStream: the same function each time, by the name of the handler."""
        found = self._runners.get(name)
        if found is None:

            async def run(message: Message[Any], tx: Any) -> Any:
                return await self._run(message, tx)

            run.__module__, _, run.__qualname__ = name.rpartition(".")
            found = self._runners[name] = run
        return found

    def may_be_repeated(self, arrived: inside.Arrived) -> bool:
        """Kafka does not tell who comes again. What killed a process is the first that comes after it."""
        if arrived.partition is None:
            return arrived.redelivered
        is_first = arrived.partition not in self._partitions
        self._partitions.add(arrived.partition)
        return is_first

    async def unpacked(self, raw: Raw, msg: Any) -> tuple[Message[Any], Exception | None]:
        """The message, and why no handler can run it. The payload is what FastStream's decoder says."""
        message, problem = self._envelope.open(raw)
        if problem is not None or message.payload is not None or msg is None:
            return message, problem
        try:
            decoded = await msg.decode()
        except ValueError as error:
            return message, PayloadUndecodable(f"the body cannot be decoded: {error}")
        except Exception:  # noqa: BLE001 - the handler will hear it, and it is tried again
            return message, None
        with suppress(InvalidMessage):  # no JSON: the body is kept as it came
            codec.encode(decoded)
            return msgspec.structs.replace(message, payload=decoded), None
        return message, None


def wrong_with(subscriber: Any) -> str | None:
    """Why the inbox cannot protect its messages."""
    about = f"subscriber {inside.name_of_subscriber(subscriber)}"
    if sum(hasattr(one, "is_inbox_middleware") for one in inside.middlewares_of(subscriber)) > 1:
        return f"{about} has InboxMiddleware twice, most likely from its broker and its router. One has to go."
    if inside.is_batch(subscriber):
        return f"{about} has batch=True. {inside.NO_BATCHES}"
    if subscriber.ack_policy is AckPolicy.ACK_FIRST:
        text = "acknowledges messages before they are handled (ACK_FIRST, the default for Kafka), and one is lost when"
        return f"{about} {text} the process dies. {_ADVICE}"
    if subscriber.ack_policy is AckPolicy.MANUAL:
        text = "has AckPolicy.MANUAL. A handler that acknowledges does so before the commit, and nobody else would."
        return f"{about} {text} {_ADVICE}"
    return None
