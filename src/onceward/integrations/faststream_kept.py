"""What a handler returned, kept so that FastStream publishes the same bytes again.

A record keeps JSON with sorted keys, and a publication is bytes: the order of keys, the kind of a value (bytes, text, a
model) and the headers of a Response belong to it. So a result is kept as what FastStream's own serializer makes of it,
as text, beside what kind of thing it was. To publish it again, that text is read, and goes the same way as the first.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from importlib import import_module
from typing import Any, Literal

import msgspec
from faststream import Response
from faststream.message import encode_message

from onceward.errors import ResultInvalid

Form = Literal["nothing", "json", "text", "bytes", "list", "silent"]


class Kept(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kept", tag="faststream"):
    """`silent`: the handler said AckMessage, and nothing was published."""

    form: Form
    body: str = ""
    items: list[Kept] = []
    response: Literal["", "plain", "kafka", "rabbit"] = ""
    """The kind of Response that it was in."""
    correlation_id: str | None = None
    headers: dict[str, Any] = {}
    options: dict[str, Any] = {}
    """What else that Response said."""


SILENT = Kept("silent")


def keep(value: Any, serializer: Any) -> Kept:
    """ResultInvalid: it could not be published again."""
    if isinstance(value, Response):
        return _keep_response(value, serializer)
    if isinstance(value, (list, tuple)):  # each by itself, as a batch publisher does
        return Kept("list", items=[keep(one, serializer) for one in value])
    if value is None:
        return Kept("nothing")
    if isinstance(value, (bytes, bytearray)):
        return Kept("bytes", base64.b64encode(value).decode())
    if isinstance(value, str):
        return Kept("text", value)
    try:
        encoded, _ = encode_message(value, serializer)
        return Kept("json", encoded.decode())
    except Exception as error:
        kind = type(value).__name__
        raise ResultInvalid(
            f"the handler returned a {kind}, which FastStream cannot encode ({error}), so it could not be published"
        ) from error


def restore(kept: Kept) -> Any:
    """What FastStream encodes to the same bytes as the first time."""
    if kept.response:
        return _restore_response(kept)
    match kept.form:
        case "json":
            return json.loads(kept.body)
        case "text":
            return kept.body
        case "bytes":
            return base64.b64decode(kept.body)
        case "list":
            return [restore(one) for one in kept.items]
        case _:
            return None


def kept_of(result: Any) -> Kept | None:
    """None: this result was stored by somebody else."""
    try:
        return msgspec.convert(result, Kept)
    except msgspec.ValidationError:
        return None


def answer(kept: Kept, correlation_id: str | None) -> Response:
    """For FastStream to publish: with the correlation id of the first time, unless another is given."""
    found = restore(kept)
    response = found if isinstance(found, Response) else Response(found)
    response.correlation_id = correlation_id or kept.correlation_id
    return response


def with_correlation(kept: Kept, correlation_id: str | None) -> Kept:
    return msgspec.structs.replace(kept, correlation_id=kept.correlation_id or correlation_id)


def _keep_response(response: Response, serializer: Any) -> Kept:
    body = keep(response.body, serializer)
    kind, options = _options_of(response)
    return msgspec.structs.replace(
        body,
        response=kind,
        correlation_id=response.correlation_id,
        headers=_plain(dict(response.headers), "headers"),
        options={name: _plain(value, name) for name, value in options.items() if value is not None},
    )


def _options_of(response: Any) -> tuple[Literal["plain", "kafka", "rabbit"], dict[str, Any]]:
    if hasattr(response, "timestamp_ms"):
        key = None if response.key is None else base64.b64encode(response.key).decode()
        return "kafka", {"timestamp_ms": response.timestamp_ms, "key": key}
    if hasattr(response, "message_options"):
        exchange = None if response.exchange is None else response.exchange.name
        return "rabbit", {**response.message_options, **response.publish_options, "exchange": exchange}
    return "plain", {}


def _restore_response(kept: Kept) -> Response:
    body = restore(msgspec.structs.replace(kept, response=""))
    headers, options = dict(kept.headers), dict(kept.options)
    if kept.response == "kafka":
        if "key" in options:
            options["key"] = base64.b64decode(options["key"])
        made: Response = import_module("faststream.kafka").KafkaResponse(body, headers=headers, **options)
    elif kept.response == "rabbit":
        made = import_module("faststream.rabbit").RabbitResponse(body, headers=headers, **options)
    else:
        made = Response(body, headers=headers)
    return made


def _plain(value: Any, name: str) -> Any:
    """As JSON keeps it without a change."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, datetime) and name == "timestamp":
        return value.timestamp()
    if isinstance(value, Mapping):
        return {str(key): _plain(one, str(key)) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one, name) for one in value]
    raise ResultInvalid(f"{name} of the Response is a {type(value).__name__}; give text or a number, which can be kept")
