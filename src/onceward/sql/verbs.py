"""The verbs of a unit as plans: which statements, in which order, and what their results mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from onceward import codec
from onceward.errors import HandlerEndedTransaction, SchemaMissing, SchemaOutdated, SchemaTooNew
from onceward.identity import Identity, digest
from onceward.message import Position
from onceward.record import Change, Failure, Record, State, from_states
from onceward.retention import milliseconds
from onceward.sql.arrays import array
from onceward.sql.catalog import Migration, migrations
from onceward.sql.dialect import Dialect
from onceward.sql.plan import Plan, Statement
from onceward.store import Claims, Closing, Conflict, Done, Found


def claim(dialect: Dialect, record: Record) -> Statement:
    """What a unit begins with."""
    more = (record.origin, record.occurred_at, record.retention, record.stream, record.position)
    if record.payload_hash is None or more != _NOTHING_MORE:
        return Statement(dialect.statements["claim"], _claim_params(dialect, record))
    params = _described(dialect, record)
    if dialect.sets:
        params["lock"] = str(_lock(record.identity))
    params["payload_hash"] = dialect.digest(record.payload_hash)
    return Statement(dialect.statements["claim_plain"], params)


_NOTHING_MORE = (None,) * 5


def find(dialect: Dialect, identity: Identity) -> Plan[Found | None]:
    result = yield dialect("find", _identity(dialect, identity))
    if not result.rows:
        return None
    row = result.rows[0]
    return Found(record_of(row), moment_of(row["now"]))


def take(dialect: Dialect, found: Record, record: Record) -> Plan[bool]:
    params = _params(dialect, record) | _was(found) | {"unmark": record.started}
    taken = yield dialect("take", params)
    if taken.changed == 1 and found.state is State.DEAD and found.lane is not None:
        lane = digest(found.consumer, found.tenant, "lane", found.lane)
        blocked = {"lane": dialect.digest(lane), "identity": dialect.digest(found.identity.digest)}
        yield dialect("queue_unblock", blocked)  # its lane goes on, if this stands
    return taken.changed == 1


def unmet(dialect: Dialect, of: Identity, depends_on: Sequence[Position]) -> Plan[Position | None]:
    """The first of them that is not processed; without a tenant they mean that of the identity."""
    for needed in depends_on:
        done = yield dialect(
            "position_done",
            {
                "consumer": of.consumer,
                "tenant": needed.tenant or of.tenant,
                "stream": needed.stream,
                "position": needed.position,
            },
        )
        if not done.rows:
            return needed
    return None


def complete(dialect: Dialect, record: Record) -> Plan[None]:
    said = {"result": _json(record.result), "extra": _json(record.extra), "duration_ms": record.duration_ms}
    completed = yield dialect("complete", _identity(dialect, record.identity) | said)
    if completed.changed != 1:
        raise HandlerEndedTransaction("the claim is gone: the handler removed it, or changed where tables are found")


def mark(dialect: Dialect, found: Record | None, record: Record) -> Plan[bool]:
    was = _was(found) if found else {"was_attempts": 0, "was_started": 0}
    params = _params(dialect, record) | was | {"from_states": _joined(from_states(Change.START))}
    marked = yield dialect("mark", params)
    return marked.changed == 1


def unmark(dialect: Dialect, record: Record) -> Plan[bool]:
    unmarked = yield dialect("unmark", _identity(dialect, record.identity))
    return unmarked.changed == 1


def fail(
    dialect: Dialect,
    record: Record,
    failure: Failure,
    *,
    state: State,
    over: tuple[State, ...],
    delay: float | None = None,
    counted: bool = True,
) -> Plan[Record | None]:
    """Keep a failure, unless the record is meanwhile in a state that this must not overwrite."""
    result = yield dialect(
        "fail",
        _params(dialect, record)
        | {
            "state": state.value,
            "error": codec.encode(failure, "error").decode(),
            "delay": None if delay is None else round(delay, 3),
            "counted": int(counted),
            "unmark": record.started,
            "from_states": _joined(over),
        },
    )
    return record_of(result.rows[0]) if result.rows else None


def discard(dialect: Dialect, identity: Identity) -> Plan[bool]:
    discarded = yield dialect("discard", _identity(dialect, identity))
    return discarded.changed == 1


# --- many at once -------------------------------------------------------------------------------------------


class _Closing(msgspec.Struct, gc=False):
    identity: str
    result: str | None
    """JSON in JSON: a text that says \\u0000 must not be understood on its way."""
    duration_ms: float | None


def claim_many(dialect: Dialect, claims: Claims) -> Plan[set[bytes]]:
    """They come sorted by identity. The digests of those that are new."""
    if not dialect.sets:
        return (yield from _claim_each(dialect, claims))
    inserted = yield dialect("claim_many", _columns(claims))
    if inserted.changed == len(claims.digest):
        return set(claims.digest)
    identities = ",".join([digest.hex() for digest in claims.digest])
    ours = yield dialect("claimed_of_many", {"identities": identities, "host": claims.host})
    if len(ours.rows) != inserted.changed:
        raise Conflict  # another transaction of this process began in the same microsecond
    return {bytes(row["digest"]) for row in ours.rows}


_COLUMNS = Claims.__struct_fields__[2:]
_OFTEN_ALIKE = ("tenant", "scope", "type", "source", "topic", "handler")
_SELDOM_THERE = ("origin", "occurred_at", "stream", "position", "keep_ms")


def _columns(claims: Claims) -> dict[str, Any]:
    """What all have in common is said once, the rest as arrays, which the server reads faster than JSON; NULL where
    there is nothing in it."""
    columns: dict[str, Any] = {
        "consumer": claims.consumer,
        "host": claims.host,
        "digests": b"".join([part for pair in zip(claims.digest, claims.payload_hash, strict=True) for part in pair]),
        "keys": array(claims.key),
        "own_message_id": None if claims.message_id == claims.key else array(claims.message_id),
    }
    for name in _OFTEN_ALIKE:
        values = getattr(claims, name)
        alike = values.count(values[0]) == len(values)
        columns[name], columns[f"own_{name}"] = (values[0], None) if alike else (None, array(values))
    for name in _SELDOM_THERE:
        columns[f"own_{name}"] = array(getattr(claims, name))
    return columns


def _claim_each(dialect: Dialect, claims: Claims) -> Plan[set[bytes]]:
    new = set()
    for row in zip(*[getattr(claims, name) for name in _COLUMNS], strict=True):
        line = dict(zip(_COLUMNS, row, strict=True)) | {"consumer": claims.consumer, "host": claims.host}
        line["identity"] = dialect.digest(line["digest"])
        if line["occurred_at"] is not None:
            line["occurred_at"] = dialect.moment(line["occurred_at"])
        inserted = yield dialect("claim", line)
        if inserted.changed == 1:
            new.add(line["digest"])
    return new


def find_done(dialect: Dialect, identities: Sequence[Identity]) -> Plan[dict[bytes, Done]]:
    rows = yield from _rows_of(dialect, "find_done", "find_done", identities)
    return {
        bytes(row["digest"]): Done(row["payload_hash"], None if row["result"] is None else row["result"].encode())
        for row in rows
    }


def find_many(dialect: Dialect, identities: Sequence[Identity]) -> Plan[dict[bytes, Found]]:
    rows = yield from _rows_of(dialect, "find_many", "find", identities)
    found = (Found(record_of(row), moment_of(row["now"])) for row in rows)
    return {one.record.identity.digest: one for one in found}


def _rows_of(dialect: Dialect, many: str, each: str, identities: Sequence[Identity]) -> Plan[list[Mapping[str, Any]]]:
    if dialect.sets:
        result = yield dialect(many, _all(identities))
        return list(result.rows)
    rows: list[Mapping[str, Any]] = []
    for identity in identities:
        result = yield dialect(each, _identity(dialect, identity))
        rows.extend(result.rows)
    return rows


def _all(identities: Sequence[Identity]) -> dict[str, Any]:
    return {"identities": ",".join([identity.digest.hex() for identity in identities])}


def unclaim(dialect: Dialect, identities: Sequence[Identity]) -> Plan[None]:
    if dialect.sets:
        yield dialect("unclaim", _all(identities))
        return
    for identity in identities:
        yield dialect("unclaim", _identity(dialect, identity))


def complete_many(dialect: Dialect, closings: Sequence[Closing]) -> Plan[None]:
    lines = [
        _Closing(one.identity.digest.hex(), None if one.result is None else one.result.decode(), one.duration_ms)
        for one in closings
    ]
    if dialect.sets:
        completed = yield dialect("complete_many", {"closings": msgspec.json.encode(lines).decode()})
        changed = completed.changed
    else:
        changed = 0
        for one, line in zip(closings, lines, strict=True):
            params = {"result": line.result, "extra": None, "duration_ms": line.duration_ms}
            completed = yield dialect("complete", _identity(dialect, one.identity) | params)
            changed += completed.changed
    if changed != len(lines):
        raise HandlerEndedTransaction("a claim is gone: a handler removed it, or changed where tables are found")


def repair(
    dialect: Dialect, remove: Sequence[Identity], close: Sequence[Closing], dead: Sequence[tuple[Record, Failure]]
) -> Plan[None]:
    if remove:
        yield from unclaim(dialect, remove)
    if close:
        yield from complete_many(dialect, close)
    over = (*from_states(Change.FAIL), State.PROCESSED)
    for record, failure in dead:
        yield from fail(dialect, record, failure, state=State.DEAD, over=over, counted=False)


def version(dialect: Dialect) -> Plan[int]:
    result = yield dialect("schema_version")
    found: int = result.rows[0]["version"]
    return found


def check_version(dialect: Dialect) -> Plan[None]:
    found = yield from version(dialect)
    wanted = migrations(dialect.name)[-1].version
    if found == 0:
        raise SchemaMissing
    if found < wanted:
        raise SchemaOutdated(
            f"the tables have version {found}, this onceward needs {wanted}. Run `onceward setup URL`.",
            found=found, wanted=wanted,
        )  # fmt: skip
    if found > wanted:
        since = yield dialect("schema_since", {"known": wanted})
        if since.rows[0]["since"] > wanted:
            raise SchemaTooNew(
                f"the tables have version {found}, this onceward knows {wanted}. Upgrade the package.",
                found=found, wanted=wanted,
            )  # fmt: skip


def token(dialect: Dialect) -> Plan[str]:
    """Which database this is: the same for everyone who is connected to it."""
    result = yield dialect("schema_token")
    return result.rows[0]["token"] if result.rows else ""


def pending_migrations(dialect: Dialect) -> Plan[list[Migration]]:
    """Under a lock that lasts until the end of the transaction: what is still to be applied."""
    yield dialect("schema_lock")
    exists = yield dialect("schema_exists")
    if not exists.rows:
        yield dialect("schema_table")
    found = yield from version(dialect)
    known = migrations(dialect.name)
    if found > known[-1].version:
        yield from check_version(dialect)
    return [migration for migration in known if migration.version > found]


def migrated(dialect: Dialect, migration: Migration) -> Plan[None]:
    applied = {"version": migration.version, "name": migration.name}
    if migration.since == migration.version:  # the column is younger than the first of them
        yield dialect("schema_applied", applied)
    else:
        yield dialect("schema_applied_since", applied | {"since": migration.since})


# --- records and rows ---------------------------------------------------------------------------------------


def _identity(dialect: Dialect, identity: Identity) -> dict[str, Any]:
    return {"identity": dialect.digest(identity.digest), "lock": _lock(identity)}


def _lock(identity: Identity) -> int:
    """The number of its advisory lock: 8 of its 16 bytes, as a signed bigint."""
    return int.from_bytes(identity.digest[:8], "big", signed=True)


def _was(found: Record) -> dict[str, Any]:
    return {"was_state": found.state.value, "was_attempts": found.attempts, "was_started": found.started}


def _joined(states: tuple[State, ...]) -> str:
    return ",".join(state.value for state in states)


def _described(dialect: Dialect, record: Record) -> dict[str, Any]:
    """Who and what it is."""
    identity = record.identity
    return {
        "identity": dialect.digest(identity.digest),
        "consumer": identity.consumer,
        "tenant": identity.tenant,
        "scope": identity.scope,
        "key": identity.key,
        "message_id": record.message_id,
        "type": record.type,
        "source": record.source,
        "topic": record.topic,
        "handler": record.handler,
        "host": record.host,
    }


def _claim_params(dialect: Dialect, record: Record) -> dict[str, Any]:
    """What a claim writes, and nothing of its content."""
    return _described(dialect, record) | {
        "lock": _lock(record.identity),
        "origin": record.origin,
        "payload_hash": record.payload_hash,
        "occurred_at": None if record.occurred_at is None else dialect.moment(record.occurred_at),
        "keep_ms": None if record.retention is None else milliseconds(record.retention),
        "stream": record.stream,
        "position": record.position,
    }


def _params(dialect: Dialect, record: Record) -> dict[str, Any]:
    return _claim_params(dialect, record) | {
        "payload": _json(record.payload),
        "body": record.body,
        "headers": _json(record.headers or None),
        "result": _json(record.result),
        "extra": _json(record.extra),
        "duration_ms": record.duration_ms,
        "depends_on": _json(record.depends_on or None),
    }


def _json(value: Any) -> str | None:
    if isinstance(value, msgspec.Raw):
        return bytes(value).decode()  # encoded and checked before
    return None if value is None else codec.encode(value, "value").decode()


def record_of(row: Mapping[str, Any]) -> Record:
    return Record(
        identity=Identity(row["consumer"], row["tenant"], row["scope"], row["key"]),
        message_id=row["message_id"],
        type=row["type"],
        source=row["source"],
        topic=row["topic"],
        origin=row["origin"],
        state=State(row["state"]),
        attempts=row["attempts"],
        started=row["started"],
        errors=_loaded(row["errors"], tuple[Failure, ...]) or (),
        result=_loaded(row["result"]),
        payload=_loaded(row["payload"]),
        body=row["body"],
        headers=_loaded(row["headers"]) or {},
        payload_hash=row["payload_hash"],
        extra=_loaded(row["extra"]),
        handler=row["handler"],
        host=row["host"],
        received_at=_moment_of(row["received_at"]),
        processed_at=_moment_of(row["processed_at"]),
        duration_ms=row["duration_ms"],
        occurred_at=_moment_of(row["occurred_at"]),
        expires_at=_moment_of(row["expires_at"]),
        next_try_at=_moment_of(row["next_try_at"]),
        stream=row["stream"],
        position=row["position"],
        depends_on=_loaded(row["depends_on"], tuple[Position, ...]) or (),
        received_position=row["received_position"],
        processed_position=row["processed_position"],
        lane=row["lane"],
    )


def _loaded(text: str | None, wanted: Any = Any) -> Any:
    return None if text is None else msgspec.json.decode(text, type=wanted)


def moment_of(value: datetime | str) -> datetime:
    return datetime.fromisoformat(value) if isinstance(value, str) else value


def _moment_of(value: datetime | str | None) -> datetime | None:
    return None if value is None else moment_of(value)
