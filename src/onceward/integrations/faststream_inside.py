"""All that is known about the insides of FastStream, in one place. Compared with 0.7.0 to 0.7.8.

A message goes through `subscriber.process_message`: the parser, then the `consume_scope` of each middleware around the
handler (`HandlerCallWrapper.call_wrapped`), then the publishers, and at last the middleware that acknowledges. What a
middleware is given is the next call, a chain of partials that ends at the handler, and a context with the subscriber.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from inspect import unwrap
from traceback import walk_tb
from typing import Any, NamedTuple

from onceward.brokers.envelope import Raw
from onceward.errors import UsageError
from onceward.handlers import name_of

_VALIDATORS = ("pydantic", "pydantic_core", "msgspec", "contextlib")


NO_BATCHES = (
    "InboxMiddleware takes one message at a time. Leave batch= away, or read the topic with onceward.brokers.consume, "
    "where many messages share a transaction."
)


class Arrived(NamedTuple):
    """A record of a broker, as far as it matters here."""

    raw: Raw
    origin: str
    redelivered: bool = False
    partition: tuple[str, int] | None = None


def arrived(record: Any, subscriber: Any) -> Arrived:
    """UsageError: it is of a broker that is not known here."""
    if isinstance(getattr(record, "offset", None), int):
        return _from_kafka(record)
    if hasattr(record, "delivery_tag"):
        return _from_rabbitmq(record, subscriber)
    if isinstance(record, (list, tuple)):
        raise UsageError(NO_BATCHES)
    raise UsageError(f"InboxMiddleware knows KafkaBroker (aiokafka) and RabbitBroker, not {type(record).__module__}")


def _from_kafka(record: Any) -> Arrived:
    place = f"{record.topic}/{record.partition}/{record.offset}"
    raw = Raw(
        topic=record.topic,
        place=place,
        body=record.value,
        headers=tuple(record.headers),
        key=record.key or None,
        content_type=next((_text(value) for name, value in record.headers if name == "content-type"), None),
        at=None if record.timestamp is None else datetime.fromtimestamp(record.timestamp / 1000, UTC),
    )
    return Arrived(raw, place, partition=(record.topic, record.partition))


def _from_rabbitmq(record: Any, subscriber: Any) -> Arrived:
    """AMQP has no name for a delivery that lasts. Where there is no id, the body is one."""
    queue, headers, at = getattr(subscriber, "queue", None), dict(record.headers or {}), record.timestamp
    name = record.routing_key or "" if queue is None else f"{subscriber._outer_config.prefix}{queue.name}"  # noqa: SLF001
    raw = Raw(
        topic=name,
        place=f"{name}#{record.message_id or 'sha256:' + hashlib.sha256(record.body).hexdigest()[:32]}",
        body=record.body,
        headers=tuple(headers.items()),
        key=(record.routing_key or "").encode(),
        id=record.message_id,
        type=record.type,
        content_type=record.content_type,
        at=at.replace(tzinfo=at.tzinfo or UTC) if isinstance(at, datetime) else None,
    )
    repeated = bool(record.redelivered) or bool(headers.get("x-delivery-count")) or "x-death" in headers
    return Arrived(raw, f"{name}/{record.delivery_tag}", repeated)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")


# --- handlers and subscribers -------------------------------------------------------------------------------


def wrapper_of(call_next: Any) -> Any:
    """The handler at the end of the chain. None: it is `get_one`, or the answer to a request, that comes in."""
    while isinstance(call_next, partial):
        call_next = call_next.args[0]
    found = getattr(call_next, "__self__", None)
    return found if hasattr(found, "call_wrapped") else None


def name_of_handler(wrapper: Any) -> str:
    return name_of(unwrap(wrapper._original_call))  # noqa: SLF001


def is_of_tests(wrapper: Any) -> bool:
    """TestBroker subscribes to what handlers publish, with a function of its own."""
    return name_of_handler(wrapper).startswith("faststream.")


def will_publish(wrapper: Any, subscriber: Any, msg: Any) -> bool:
    return bool(wrapper._publishers) or bool(msg.reply_to and not getattr(subscriber, "_no_reply", False))  # noqa: SLF001


def serializer_of(subscriber: Any) -> Any:
    """What publishers encode with."""
    return subscriber._outer_config.fd_config._serializer  # noqa: SLF001


def handlers_of(broker: Any) -> set[str]:
    """The names of all handlers that are registered with a broker, in its routers too."""
    calls = (call for subscriber in getattr(broker, "subscribers", ()) for call in subscriber.calls)
    return {name_of_handler(call.handler) for call in calls}


def name_of_subscriber(subscriber: Any) -> str:
    """For people: its handlers."""
    names = [name_of_handler(call.handler) for call in subscriber.calls]
    return ", ".join(names) or type(subscriber).__name__


def middlewares_of(subscriber: Any) -> Sequence[Any]:
    """Of its broker and of its routers."""
    found: Sequence[Any] = subscriber._outer_config.broker_middlewares  # noqa: SLF001
    return found


def is_batch(subscriber: Any) -> bool:
    return type(subscriber).__name__ == "BatchSubscriber"


def is_of_kafka(subscriber: Any) -> bool:
    return hasattr(subscriber, "group_id")


def has_dead_letter_exchange(subscriber: Any) -> bool:
    """As far as the declaration says; a policy of the server may give it one too."""
    return "x-dead-letter-exchange" in (getattr(subscriber.queue, "arguments", None) or {})


async def parses(subscriber: Any, record: Any) -> bool:
    """Whether FastStream's own parser can read it. It cannot acknowledge what it cannot read."""
    try:
        await subscriber._parser(record)  # noqa: SLF001
    except Exception:  # noqa: BLE001 - whatever it is, it cannot be read
        return False
    return True


def rewind(subscriber: Any, record: Any) -> None:
    """Where only the position says what was read: this record is read again, and not committed."""
    consumer = getattr(record, "consumer", None) or getattr(subscriber, "consumer", None)
    if consumer is not None and hasattr(consumer, "seek"):
        place = import_module("aiokafka").TopicPartition(record.topic, record.partition)
        with suppress(Exception):  # the partition is not ours any more: who has it reads the record
            consumer.seek(place, record.offset)


# --- errors -------------------------------------------------------------------------------------------------


def is_misfit(error: Exception, wrapper: Any, subscriber: Any) -> bool:
    """Whether the message does not fit the parameters of the handler.

    pydantic raises the same error there and in the handler itself, so it is told by where it was raised: by FastDepends
    on the way in. Not on the way out, which is the handler's fault, and not about a parameter that has a Depends.
    """
    calls = list(_callers(error))
    if not calls:
        return False
    module, name = calls[0]
    if module.startswith("faststream.") and name == "decode_wrapper":
        return isinstance(error, ValueError)  # a scalar, and the handler has several parameters
    if not module.startswith("fast_depends.") or not _is_validation(error):
        return False
    names = [name for module, name in calls if module.startswith("fast_depends.")]
    if "_cast_response" in names:
        return False
    places = _places(error)
    return not places or not places <= set(_provided(wrapper, subscriber))


def told(error: Any) -> str:
    """What a misfit is about, without the values: they stay out of logs."""
    original = getattr(error, "original_error", error)
    if not hasattr(original, "errors"):
        return str(original)
    places = ((".".join(map(str, one["loc"])), one["msg"]) for one in original.errors(include_input=False))
    return "; ".join(f"{place}: {said}" for place, said in places)


def _callers(error: Exception) -> Iterator[tuple[str, str]]:
    """Module and function, the innermost first, from the one that called the validation."""
    frames = [(frame.f_globals.get("__name__", ""), frame.f_code.co_name) for frame, _ in walk_tb(error.__traceback__)]
    while frames and frames[-1][0].partition(".")[0] in _VALIDATORS:
        frames.pop()
    for module, name in reversed(frames):
        if not module.startswith(("fast_depends.", "faststream.", "contextlib")):
            return
        yield module, name


def _is_validation(error: Exception) -> bool:
    return any(kind.__name__ == "ValidationError" for kind in type(error).__mro__)


def _places(error: Any) -> set[Any]:
    """The parameters that it is about."""
    original = getattr(error, "original_error", error)
    listed = original.errors() if hasattr(original, "errors") else ()
    return {one["loc"][0] for one in listed if one.get("loc")}


def _provided(wrapper: Any, subscriber: Any) -> Collection[str]:
    for call in subscriber.calls:
        if call.handler is wrapper:
            return getattr(call.dependant, "dependencies", None) or ()
    return ()
