"""Letters: a message as its sender wrote it, and how it is written so that it can make a detour and come back the same.

What fails is put into a queue of ours for a while (`rabbitmq_forward`), and comes back as a new message to the broker.
So it carries with it, as headers that begin with `onceward-`, what the broker would change or act on:

- the exchange and the routing key that it came by, because a detour goes from queue to queue;
- `CC`, by which the broker would send copies to other queues, and what it wrote about dead-lettering;
- the user id, which only the sender may use;
- that it has no message id, because the driver gives one to what has none.

`read` takes all of that away again. What cannot be written so that the same is read, as a float of double precision or
bytes that are no text in a header, makes no detour. All of it is pure.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec

from onceward.brokers.envelope import Raw, headers_of
from onceward.brokers.rabbitmq_driver import Basic, DeliveredMessage, decode, encode

OURS = "onceward-"
WAS = "onceward-was-"
COUNTS = ("x-delivery-count", "x-acquired-count")
"""What the broker says about the delivery, and not about the message."""
_PROPERTIES = (
    "content_type", "content_encoding", "headers", "delivery_mode", "priority", "correlation_id", "reply_to",
    "expiration", "message_id", "timestamp", "message_type", "user_id", "app_id",
)  # fmt: skip
PERSISTENT = 2


class Letter(NamedTuple):
    body: bytes
    properties: Basic.Properties
    """As the sender gave them. One that made a detour has no expiration any more."""
    headers: dict[str, Any]
    exchange: str
    routing_key: str
    redelivered: bool
    given_back: int
    """How often it was given back before, where the queue counts that."""
    detours: int


def read(message: DeliveredMessage) -> Letter:
    properties = message.header.properties
    came = dict(properties.headers or {})
    ours = {name: value for name, value in came.items() if name.startswith(OURS)}
    count, detours = came.get(COUNTS[0]), ours.get(OURS + "detours")
    changes: dict[str, Any] = {"message_id": None} if ours.get(OURS + "no-id") else {}
    changes["user_id"] = ours.get(OURS + "user-id", properties.user_id)
    return Letter(
        body=message.body,
        properties=_changed(properties, **changes) if ours else properties,
        headers=_senders(came, ours),
        exchange=str(ours.get(OURS + "exchange", message.exchange or "")),
        routing_key=str(ours.get(OURS + "routing-key", message.routing_key or "")),
        redelivered=bool(message.redelivered) or bool(count) or "x-death" in came,
        given_back=count if isinstance(count, int) else 0,
        detours=detours if isinstance(detours, int) else 0,
    )


def _senders(came: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    theirs = {name: value for name, value in came.items() if name not in COUNTS}
    if not ours:
        return theirs
    kept = {name: value for name, value in theirs.items() if name not in ours and not _acted_on(name)}
    return kept | {name.removeprefix(WAS): value for name, value in ours.items() if name.startswith(WAS)}


def _acted_on(name: str) -> bool:
    return name in ("CC", "BCC", "x-death") or name.startswith(("x-first-death-", "x-last-death-"))


def raw_of(queue: str, letter: Letter) -> Raw:
    properties = letter.properties
    return Raw(
        topic=queue,
        place=f"{queue}#{properties.message_id or 'sha256:' + _fingerprint(letter)}",
        body=letter.body,
        headers=tuple(letter.headers.items()),
        key=letter.routing_key.encode(),
        id=properties.message_id,
        type=properties.message_type,
        content_type=properties.content_type,
        at=properties.timestamp,
    )


def _fingerprint(letter: Letter) -> str:
    """The same for each delivery of a message, and of its twin that was sent with the same words."""
    given = letter.properties
    words = [
        letter.exchange,
        letter.routing_key,
        given.message_type,
        given.correlation_id,
        given.app_id,
        given.timestamp,
    ]
    told = msgspec.json.encode([words, headers_of(letter.headers.items())], order="sorted")
    return hashlib.sha256(letter.body + b"\0" + told).hexdigest()[:32]


# --- writing ------------------------------------------------------------------------------------------------


def for_a_detour(letter: Letter) -> Basic.Properties | None:
    """None: it would not come back as it is."""
    headers = _carried(letter) | {OURS + "detours": letter.detours + 1}
    if not _survives(headers) or not _survives({"at": letter.properties.timestamp}):
        return None
    return _addressed(letter, headers)


def for_quarantine(letter: Letter, queue: str, error: BaseException | None) -> Basic.Properties:
    """A person will read it: what cannot be written as it is, is written as text."""
    carried = _carried(letter)
    headers = {name: value if _survives({name: value}) else str(value) for name, value in carried.items()}
    why = {
        "queue": queue,
        "error": type(error).__name__ if error is not None else "",
        "reason": str(error)[:1000] if error is not None else "",
    }
    return _addressed(letter, headers | {OURS + name: value for name, value in why.items()})


def _carried(letter: Letter) -> dict[str, Any]:
    headers = {WAS + name if _acted_on(name) else name: value for name, value in letter.headers.items()}
    headers[OURS + "exchange"] = letter.exchange
    headers[OURS + "routing-key"] = letter.routing_key
    if letter.properties.user_id:
        headers[OURS + "user-id"] = letter.properties.user_id
    if not letter.properties.message_id:
        headers[OURS + "no-id"] = True
    return headers


def _addressed(letter: Letter, headers: dict[str, Any]) -> Basic.Properties:
    id_ = letter.properties.message_id or f"{OURS}{uuid4()}"
    return _changed(
        letter.properties, headers=headers, message_id=id_, delivery_mode=PERSISTENT, expiration=None, user_id=None
    )


def _survives(headers: dict[str, Any]) -> bool:
    try:
        return bool(decode.field_table(encode.field_table(headers))[1] == headers)
    except (TypeError, ValueError, OverflowError, ArithmeticError):
        return False


def _changed(properties: Basic.Properties, **changes: Any) -> Basic.Properties:
    return Basic.Properties(**{name: getattr(properties, name) for name in _PROPERTIES} | changes)
