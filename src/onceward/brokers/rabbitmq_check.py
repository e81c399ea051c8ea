"""What about a queue endangers what is promised, and how that is found out.

AMQP has no way to ask for the settings of a queue. But a broker that is asked to declare one that is there, with other
settings, refuses, and names the first one that differs and its value. So it is asked again and again, on channels of
their own, with what it said; nothing is changed by that. It needs the right to configure the queue, and leaves a line
in the broker's log for each setting that had to be told. **Policies cannot be seen in this way**; the management API,
if its address is given, tells everything.

The findings are pure functions of what was found out.
"""

from __future__ import annotations

import asyncio
import base64
import re
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import msgspec

from onceward.brokers.rabbitmq_driver import AbstractConnection, Channel, wrong
from onceward.retry import RetryPolicy
from onceward.store import Finding

DEFAULT_LIMIT = 20
"""Deliveries after which RabbitMQ 4 gives a message up, in a quorum queue."""
MOST_QUESTIONS = 30
_DIFFERS = re.compile(
    r"inequivalent arg '(?P<name>[^']+)' for queue .* but current is "
    r"(?:(?P<none>none)|'(?P<flag>true|false)'|the value '(?P<value>.*)' of type '(?P<type>\w+)')$",
    re.DOTALL,
)


class Settings(msgspec.Struct, frozen=True):
    durable: bool
    auto_delete: bool
    arguments: Mapping[str, Any]
    """As in a declaration, policies included where they are known."""
    policies: bool
    """Whether they are known."""

    @property
    def quorum(self) -> bool:
        return self.arguments.get("x-queue-type") == "quorum"

    @property
    def dead_letters(self) -> bool:
        return self.arguments.get("x-dead-letter-exchange") is not None


class Unreadable(Exception):
    """Why nothing could be found out."""


# --- finding out --------------------------------------------------------------------------------------------


async def ask_over_amqp(connection: AbstractConnection, queue: str) -> Settings:
    flags = {"durable": True, "auto_delete": False}
    arguments: dict[str, Any] = {"x-queue-type": "quorum"}
    for _ in range(MOST_QUESTIONS):
        said = await _declare(connection, queue, flags, arguments)
        if said is None:
            return Settings(flags["durable"], flags["auto_delete"], arguments, policies=False)
        learn(said, flags, arguments)
    raise Unreadable("the broker does not say what differs")


async def _declare(
    connection: AbstractConnection, queue: str, flags: Mapping[str, bool], arguments: Mapping[str, Any]
) -> str | None:
    """What differs. None: nothing."""
    channel = Channel(connection, publisher_confirms=False)
    await channel.initialize()
    wire = await channel.get_underlay_channel()
    try:
        await wire.queue_declare(
            queue, durable=flags["durable"], auto_delete=flags["auto_delete"], arguments=dict(arguments)
        )
    except wrong.ChannelPreconditionFailed as error:
        return str(error.args[0])
    except wrong.ChannelAccessRefused as error:
        raise Unreadable("this user may not configure the queue") from error
    finally:
        if not channel.is_closed:
            await channel.close()
    return None


def learn(said: str, flags: dict[str, bool], arguments: dict[str, Any]) -> None:
    found = _DIFFERS.search(said)
    if found is None:
        raise Unreadable(f"the broker says: {said}")
    name = found["name"]
    if found["flag"] and name in flags:
        flags[name] = found["flag"] == "true"
    elif found["none"]:
        arguments.pop(name, None)
    else:
        arguments[name] = _value(found["value"] or found["flag"] or "", found["type"] or "")


def _value(text: str, type_: str) -> Any:
    if type_ == "bool":
        return text == "true"
    return int(text) if re.fullmatch(r"-?\d+", text) and type_ not in ("longstr", "binary") else text


async def ask_management(url: str, vhost: str, queue: str) -> Settings:
    try:
        return told(await asyncio.to_thread(_get, f"/api/queues/{quote(vhost, safe='')}/{quote(queue, safe='')}", url))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unreadable(f"the management API does not answer: {error}") from error


def _get(path: str, url: str) -> bytes:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    request = urllib.request.Request(f"{parts.scheme}://{host}{parts.path.rstrip('/')}{path}")  # noqa: S310 - checked
    user = f"{unquote(parts.username or 'guest')}:{unquote(parts.password or 'guest')}"
    request.add_header("Authorization", "Basic " + base64.b64encode(user.encode()).decode())
    with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
        body: bytes = answer.read()
    return body


def told(body: bytes) -> Settings:
    """From what the management API says. The queue's own setting wins over a policy's; of two limits, the lower."""
    said = msgspec.json.decode(body)
    by_policy = {f"x-{name}": value for name, value in (said.get("effective_policy_definition") or {}).items()}
    arguments = by_policy | said["arguments"]
    for name in by_policy.keys() & said["arguments"].keys():
        if isinstance(by_policy[name], int) and isinstance(arguments[name], int):
            arguments[name] = min(by_policy[name], arguments[name])
    arguments.setdefault("x-queue-type", said.get("type", "classic"))
    return Settings(said["durable"], said["auto_delete"], arguments, policies=True)


# --- findings -----------------------------------------------------------------------------------------------


def findings(queue: str, settings: Settings, version: tuple[int, ...]) -> list[Finding]:
    found = [
        _durable(queue, settings),
        _auto_delete(queue, settings),
        _limit(queue, settings, version),
        _drops(queue, settings, "x-message-ttl", "message-ttl", "messages that wait for more than {} ms"),
        _drops(queue, settings, "x-max-length", "max-length", "the oldest messages when there are more than {}"),
    ]
    return [one for one in found if one is not None]


def unknown(queue: str, why: Unreadable) -> Finding:
    return Finding(
        "settings-unknown",
        f"the settings of the queue {queue} cannot be read: {why}",
        "look yourself whether it is durable, and where messages go that reach its delivery limit, its TTL or its "
        "length; or give the address of the management API as management=",
        serious=False,
    )


def _durable(queue: str, settings: Settings) -> Finding | None:
    if settings.durable:
        return None
    return Finding(
        "not-durable",
        f"the queue {queue} is not durable: when the broker restarts, it is gone with all its messages",
        "make a durable queue, best a quorum queue, and move the consumers there",
    )


def _auto_delete(queue: str, settings: Settings) -> Finding | None:
    if not settings.auto_delete:
        return None
    return Finding(
        "auto-delete",
        f"the queue {queue} is deleted with its messages when its last consumer goes, as when this process restarts",
        "make a queue without auto-delete",
    )


def _limit(queue: str, settings: Settings, version: tuple[int, ...]) -> Finding | None:
    default = DEFAULT_LIMIT if version >= (4,) else -1
    limit = settings.arguments.get("x-delivery-limit", default)
    if not settings.quorum or limit < 0:
        return None
    attempts = RetryPolicy().max_attempts or 0
    if not settings.dead_letters:
        return Finding(
            "delivery-limit-drops",
            f"the queue {queue} has no dead-letter exchange{_unless(settings)}, and the broker drops what it delivered "
            f"more than {limit} times: messages are lost without a trace if consumers die over them, or give them back",
            "set a dead-letter-exchange by a policy, or a delivery-limit that is never reached (-1 since RabbitMQ 4)",
        )
    if limit > attempts:
        return None
    return Finding(
        "delivery-limit-low",
        f"the queue {queue} has a delivery limit of {limit}, and a retry policy has {attempts} attempts by default: a "
        "message that kills its process goes to the dead-letter exchange before the inbox keeps it as a dead letter",
        f"set the delivery-limit to more than {attempts}, or max_attempts to less than {limit}",
        serious=False,
    )


def _drops(queue: str, settings: Settings, setting: str, name: str, which: str) -> Finding | None:
    limit = settings.arguments.get(setting)
    if limit is None or settings.dead_letters:
        return None
    if setting == "x-max-length" and str(settings.arguments.get("x-overflow", "")).startswith("reject-publish"):
        return None
    return Finding(
        name,
        f"the queue {queue} has no dead-letter exchange{_unless(settings)}, and the broker drops "
        f"{which.format(limit)}, whether they were processed or not",
        "set a dead-letter-exchange by a policy, or take that limit away",
    )


def _unless(settings: Settings) -> str:
    return "" if settings.policies else " (unless by a policy, which cannot be seen over AMQP)"
