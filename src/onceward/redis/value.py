"""The string that a record is: what scripts look at, in fixed places, then the rest, packed.

| bytes | what |
|---|---|
| 0 | the state, a letter |
| 1-7 | the fencing token: the server's time of the last claim in microseconds, and larger than the one before |
| 8-14 | a time in microseconds. running: when the lease ends; failed: the next try, 0 if at once; else: when it ended |
| 15-16 | attempts |
| 17-18 | started: claims that never ended, the present one included |
| 19 | processed: 1 if it is kept for a time of its own. Then its columns |
| 19-25 | else: when it was received, in microseconds |
| 26 | and: how long its note is, then the note. Then its columns |

The note is the name of the claim while it runs; of a dead letter, why its commands could not be applied, until that is
among its errors.

Columns are a msgpack array in the order of `COLUMNS`, without the empty ones at its end.

A processed record is what most of the memory is for, so a column that can be told from others is left out: the time of
arrival is the token, a UUID is its bytes, the message id is the key, the tenant is the usual one, the scope is the
source. Of the hash of the payload the first half is kept. Who ran it is known as long as it runs.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from onceward import codec
from onceward.identity import Identity
from onceward.message import Position
from onceward.record import Failure, Record, State
from onceward.retention import milliseconds
from onceward.store import Claims, Closing

LETTERS = {
    State.RUNNING: b"r",
    State.PROCESSED: b"p",
    State.FAILED: b"f",
    State.DEAD: b"d",
    State.DISCARDED: b"x",
    State.ACCEPTED: b"a",
}
STATES = {letter: state for state, letter in LETTERS.items()}
HASH = 16
"""Bytes of the payload's hash that are kept."""
SEEN = 19
"""Bytes that all states have, by which a change is noticed."""
MOST = 65_535
"""Attempts, and starts, that are counted."""

COLUMNS = (
    "key", "payload_hash", "type", "source", "topic", "handler", "tenant", "scope", "message_id", "stream", "position",
    "origin", "received_at", "result", "duration_ms", "keep_ms", "occurred_at", "errors", "extra", "payload", "headers",
    "body", "depends_on", "host",
)  # fmt: skip
(
    KEY, PAYLOAD_HASH, TYPE, SOURCE, TOPIC, HANDLER, TENANT, SCOPE, MESSAGE_ID, STREAM, POSITION,
    ORIGIN, RECEIVED_AT, RESULT, DURATION_MS, KEEP_MS, OCCURRED_AT, ERRORS, EXTRA, PAYLOAD, HEADERS,
    BODY, DEPENDS_ON, HOST,
) = range(len(COLUMNS))  # fmt: skip

Columns = list[Any]

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[Any]).decode
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_USUAL_TENANT = "default"


class Front(NamedTuple):
    """What scripts look at."""

    state: State
    fence: int
    at: int
    attempts: int
    started: int
    received: int
    note: str = ""
    own_time: bool = False


def moment(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)


def micros(when: datetime) -> int:
    return (when - _EPOCH) // _MICROSECOND


# --- columns ------------------------------------------------------------------------------------------------


def columns_of(record: Record) -> Columns:
    """The columns of a draft, or of a record with all of its message."""
    identity = record.identity
    columns = _first_columns(
        identity.key, record.payload_hash, record.type, record.source, record.topic, record.handler, identity.tenant,
        identity.scope, record.message_id,
    )  # fmt: skip
    columns += [
        record.stream,
        record.position,
        record.origin,
        None if record.received_at is None else micros(record.received_at),
        _raw(record.result),
        record.duration_ms,
        milliseconds(record.retention),
        None if record.occurred_at is None else record.occurred_at.isoformat(),
        msgspec.to_builtins(record.errors) or None,
        _raw(record.extra),
        _raw(record.payload),
        _raw(record.headers) if record.headers else None,
        record.body,
        [[one.stream, one.position, one.tenant] for one in record.depends_on] or None,
    ]
    return columns


def _first_columns(  # noqa: PLR0917 - by position: it is called for each message
    key: str, payload_hash: bytes | None, type_: str, source: str, topic: str, handler: str | None, tenant: str,
    scope: str, message_id: str,
) -> Columns:  # fmt: skip
    return [
        _short(key),
        None if payload_hash is None else payload_hash[:HASH],
        type_,
        source or None,
        topic or None,
        handler,
        None if tenant == _USUAL_TENANT else tenant,
        None if scope == f"source:{source}" else scope,
        None if message_id == key else message_id,
    ]


def _short(key: str) -> str | bytes:
    """Most ids are UUIDs, which are less than half as long as bytes."""
    if len(key) == 36 and key[8] == key[13] == key[18] == key[23] == "-":
        letters = key.replace("-", "")
        try:
            digits = bytes.fromhex(letters)
        except ValueError:
            return key
        if len(digits) == 16 and digits.hex() == letters:  # so it comes back to the letter
            return digits
    return key


def _long(key: str | bytes) -> str:
    return key if isinstance(key, str) else str(UUID(bytes=key))


def columns_of_claims(claims: Claims) -> list[Columns]:
    """The drafts of many."""
    rows = []
    for place, key in enumerate(claims.key):
        columns = _first_columns(
            key, claims.payload_hash[place], claims.type[place], claims.source[place], claims.topic[place],
            claims.handler[place], claims.tenant[place], claims.scope[place], claims.message_id[place],
        )  # fmt: skip
        stream, origin, keep, occurred = (
            claims.stream[place], claims.origin[place], claims.keep_ms[place], claims.occurred_at[place],
        )  # fmt: skip
        if not (stream is None and origin is None and keep is None and occurred is None):
            columns += [
                stream, claims.position[place], origin, None, None, None, keep,
                None if occurred is None else occurred.isoformat(),
            ]  # fmt: skip
        rows.append(columns)
    return rows


def closed(columns: Columns, closing: Closing | Record) -> Columns:
    """With what the closing write says."""
    changed = [*columns, *[None] * (len(COLUMNS) - len(columns))]
    changed[RESULT] = _raw(closing.result)
    changed[DURATION_MS] = closing.duration_ms
    if isinstance(closing, Record):
        changed[EXTRA] = _raw(closing.extra)
    return changed


def without_payload(columns: Columns) -> Columns:
    changed = list(columns)
    for column in (PAYLOAD, HEADERS, BODY):
        if column < len(changed):
            changed[column] = None
    return changed


def packed(columns: Columns) -> bytes:
    """Without what is empty at its end."""
    end = len(columns)
    while columns[end - 1] is None:
        end -= 1
    return _pack(columns[:end])


def _raw(value: Any) -> bytes | None:
    """JSON, as bytes."""
    if value is None or isinstance(value, bytes):
        return value
    return bytes(value) if isinstance(value, msgspec.Raw) else codec.encode(value)


# --- back again ---------------------------------------------------------------------------------------------


def front_of(value: bytes) -> Front:
    number = int.from_bytes
    state = STATES[value[:1]]
    fence, at = number(value[1:8], "big"), number(value[8:15], "big")
    attempts, started = number(value[15:17], "big"), number(value[17:19], "big")
    if state is State.PROCESSED:
        return Front(state, fence, at, attempts, started, fence, own_time=bool(value[19]))
    note = value[27 : 27 + value[26]].decode(errors="replace")
    return Front(state, fence, at, attempts, started, number(value[19:26], "big"), note)


def packed_front(front: Front) -> bytes:
    """As scripts write it, without a note."""
    processed = front.state is State.PROCESSED
    parts = (
        LETTERS[front.state],
        front.fence.to_bytes(7, "big"),
        front.at.to_bytes(7, "big"),
        min(front.attempts, MOST).to_bytes(2, "big"),
        min(front.started, MOST).to_bytes(2, "big"),
        bytes([front.own_time]) if processed else front.received.to_bytes(7, "big") + b"\0",
    )
    return b"".join(parts)


def answer_of(value: bytes) -> tuple[bytes | None, bytes | None]:
    """What a duplicate is answered with: the hash of the payload, and the result as JSON."""
    columns = columns_in(value)
    return columns[PAYLOAD_HASH], columns[RESULT] if len(columns) > RESULT else None


def columns_in(value: bytes) -> Columns:
    return _unpack(value[20:] if value[:1] == b"p" else value[27 + value[26] :])


def record_of(consumer: str, value: bytes) -> Record:
    front = front_of(value)
    columns = columns_in(value)
    columns += [None] * (len(COLUMNS) - len(columns))
    key, source = _long(columns[KEY]), columns[SOURCE] or ""
    tenant, scope = columns[TENANT] or _USUAL_TENANT, columns[SCOPE]
    ended = moment(front.at)
    processed, keep = front.state is State.PROCESSED, columns[KEEP_MS]
    waits = front.state in (State.RUNNING, State.FAILED) and front.at
    return Record(
        identity=Identity(consumer, tenant, f"source:{source}" if scope is None else scope, key),
        message_id=columns[MESSAGE_ID] or key,
        type=columns[TYPE],
        state=front.state,
        source=source,
        topic=columns[TOPIC] or "",
        origin=columns[ORIGIN],
        attempts=front.attempts,
        started=front.started,
        errors=_errors(front, columns[ERRORS]),
        result=_json(columns[RESULT]),
        payload=_json(columns[PAYLOAD]),
        body=columns[BODY],
        headers=_json(columns[HEADERS]) or {},
        payload_hash=columns[PAYLOAD_HASH],
        extra=_json(columns[EXTRA]),
        handler=columns[HANDLER],
        host=columns[HOST] or _host(front),
        received_at=moment(columns[RECEIVED_AT] or front.received),
        processed_at=ended if processed else None,
        duration_ms=columns[DURATION_MS],
        occurred_at=None if columns[OCCURRED_AT] is None else datetime.fromisoformat(columns[OCCURRED_AT]),
        expires_at=ended + timedelta(milliseconds=keep) if processed and keep is not None else None,
        next_try_at=ended if waits else None,
        stream=columns[STREAM],
        position=columns[POSITION],
        depends_on=tuple(
            Position(stream, position, tenant_) for stream, position, tenant_ in columns[DEPENDS_ON] or ()
        ),
    )


def _errors(front: Front, known: Any) -> tuple[Failure, ...]:
    errors = msgspec.convert(known or (), tuple[Failure, ...])
    if front.state is State.DEAD and front.note:
        applied, _, said = front.note.partition(" ")
        errors += (Failure("HandlerEndedTransaction", refusal(int(applied), said)),)
    return errors


def refusal(applied: int, said: str) -> str:
    """Why a message is dead whose commands could be applied in part only."""
    return (
        f"command {applied + 1} of the handler failed after {applied} had been applied: {codec.printable(said)}. "
        "A person has to look; the message is kept as a dead letter."
    )


def _host(front: Front) -> str | None:
    """Who has it: the name of a claim begins with that."""
    return front.note.rpartition("/")[0] or None if front.state is State.RUNNING else None


def _json(value: bytes | None) -> Any:
    return None if value is None else codec.decode(value)


# --- its key ------------------------------------------------------------------------------------------------


def key_of(front: bytes, digest: bytes, tag: str | None) -> bytes:
    """The key of a record. What is in braces decides its hash slot."""
    short = urlsafe_b64encode(digest)[:22]
    if tag is None:
        return b"%b{%b}" % (front, short)
    return b"%b{%b}%b" % (front, tag.encode(), short)


def front_of_keys(prefix: str, consumer: str) -> bytes:
    """What the keys of a consumer begin with. No name in it may look like a hash tag, or like a pattern."""
    return f"{prefix}:{_plain(consumer)}:".encode()


def consumer_of(key: bytes, prefix: str) -> str:
    """ValueError: it is no key of ours."""
    name = key.decode()[len(prefix) + 1 :].partition(":")[0]
    return bytes.fromhex(name[1:]).decode() if name.startswith("=") else name


def _plain(name: str) -> str:
    if name.startswith("=") or not _is_plain(name):
        return "=" + name.encode().hex()
    return name


def _is_plain(name: str) -> bool:
    return not set(name) & set(":{}*?[]\\\n\r\0")


def sorted_by_slot(keys: Sequence[bytes], slot: Any) -> dict[int, list[int]]:
    """Their places, by hash slot."""
    found: dict[int, list[int]] = {}
    for place, key in enumerate(keys):
        found.setdefault(slot(key), []).append(place)
    return found
