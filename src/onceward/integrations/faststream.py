"""FastStream: every message takes effect exactly once, with one more line.

    broker = KafkaBroker("localhost:9092", ack_policy=AckPolicy.NACK_ON_ERROR, middlewares=[InboxMiddleware(inbox)])

    @broker.subscriber("orders", group_id="billing")
    @broker.publisher("receipts")
    async def on_order(order: Order, tx: AsyncSession = Depends(inbox_tx)) -> Receipt: ...

FastStream calls the middlewares around the handler, then the publishers, and then it acknowledges. This middleware runs
the handler as a handler of the inbox, so that its transaction is committed before anything is published or
acknowledged. What a handler returns is kept with the record where it will be published: should the process die between
the commit and the acknowledgement, the message comes again as a duplicate, and the same bytes are published again.

**Nothing is acknowledged that is neither processed nor kept.** What FastStream does with a handler's own error is said
by its ack policy; all else that stands in the way (another runner has the message, its next try is later, the database
is away) is waited for, here, for up to `hold` seconds, and then the message is given back, whatever the policy says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from onceward.brokers.envelope import ID_HEADERS, SOURCE_HEADERS, TYPE_HEADERS, Envelope, Raw, check_pick
from onceward.errors import UsageError
from onceward.inbox import Inbox
from onceward.integrations import faststream_inside as inside
from onceward.integrations.faststream_gate import Gate, OnDuplicate, OnFailure, wrong_with
from onceward.integrations.faststream_passage import Passage, inbox_tx, run_passage

__all__ = ["InboxMiddleware", "inbox_tx"]

HOLD = 60.0
"""Seconds. Kafka takes a consumer out of its group that does not ask for more within five minutes."""

_OPT_INS = (
    'Publish with headers={"message_id": ...} (Kafka) or message_id= (RabbitMQ). Where the producer cannot be changed, '
    "InboxMiddleware(inbox, id=...) takes a function of the record: lambda raw: raw.place is its place in the topic of "
    'Kafka, and an event that was produced twice is two messages; id="correlation_id" is for producers that give each '
    "message its own, and all messages of one id are one message."
)


class InboxMiddleware:
    """For `middlewares=` of a KafkaBroker or RabbitBroker, or of one of their routers.

    `on_duplicate`: with "auto" the first result is kept and given back where FastStream publishes it, by a publisher or
    to a reply_to; with "result" always; with "skip" a duplicate is acknowledged and nothing more. `on_failure`: with
    "raise" the ack policy of FastStream decides about a handler's error; with "park" the message goes to the queue of
    the inbox, for `inbox.run`. `id`, `type` and `source` say where in a record these are, as names of headers or as
    functions of the record (`onceward.brokers.envelope.Raw`); `stream` is a function that names what has to stay in
    order. `hold` is how many seconds a message may be held here until its next try is due or the database is back.
    """

    is_inbox_middleware = True
    """So that two for one subscriber are found."""

    def __init__(
        self,
        inbox: Inbox[Any],
        *,
        on_duplicate: OnDuplicate = "auto",
        on_failure: OnFailure = "raise",
        id: str | Sequence[str] | Callable[[Raw], str | None] = ID_HEADERS,  # noqa: A002 - the word of the domain
        type: str | Sequence[str] | Callable[[Raw], str | None] = TYPE_HEADERS,  # noqa: A002
        source: str | Sequence[str] | Callable[[Raw], str | None] = SOURCE_HEADERS,
        stream: Callable[[Raw], str | None] | None = None,
        hold: float = HOLD,
    ) -> None:
        _check_options(inbox, on_duplicate, on_failure, hold)
        for name, pick in (("id", id), ("type", type), ("source", source)):
            check_pick(name, pick)
        ids = (id,) if isinstance(id, str) else id
        envelope = Envelope(id=ids, type=type, source=source, stream=stream, decode=None, opt_ins=_OPT_INS)
        self._gate = Gate(inbox, envelope, on_duplicate=on_duplicate, on_failure=on_failure, hold=hold, run=run_passage)

    def __call__(self, msg: Any | None, /, *, context: Any) -> Passage:
        """As FastStream calls it: once for each message, and for each publication with None."""
        return Passage(self._gate, msg, context=context)

    def check(self, broker: Any) -> None:
        """UsageError: a subscriber of this broker, or of its routers, cannot be protected. For the start of an app."""
        for subscriber in broker.subscribers:
            if self in inside.middlewares_of(subscriber):
                text = wrong_with(subscriber)
                if text is not None:
                    raise UsageError(text)


def _check_options(inbox: object, on_duplicate: object, on_failure: object, hold: object) -> None:
    if not isinstance(inbox, Inbox):
        raise UsageError(f"InboxMiddleware takes an Inbox, not {type(inbox).__name__}: InboxMiddleware(inbox)")
    if on_duplicate not in ("auto", "result", "skip"):
        raise UsageError(f'on_duplicate={on_duplicate!r}: it is "auto", "result" or "skip"')
    if on_failure not in ("raise", "park"):
        raise UsageError(f'on_failure={on_failure!r}: it is "raise" or "park"')
    if on_failure == "park" and not inbox.store.features.queue:
        raise UsageError(f'on_failure="park": {type(inbox.store).__name__} has no queue where a message could wait')
    if isinstance(hold, bool) or not isinstance(hold, (int, float)) or not 0 <= hold < math.inf:
        raise UsageError(f"hold={hold!r}: it is a number of seconds")
