"""The queue of a stored inbox on SQLite, as plans. There is one writer, so a step may be several statements: nobody
sees what is between them, and none of them is a trip. What they mean is said in migrations/postgresql/0004_queue.sql.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeAlias

import msgspec

from onceward.errors import HandlerEndedTransaction
from onceward.identity import Identity
from onceward.message import Message, Position, restored
from onceward.queue import (
    LAST,
    BlockedLine,
    BusyLanes,
    DoneLine,
    FailedLine,
    Kept,
    KeptLine,
    LaneClaim,
    LaneEnd,
    Queued,
    QueueLine,
    Share,
    Taken,
    Then,
    TurnClosing,
    Unmet,
)
from onceward.record import Record, State
from onceward.sql.dialect import Dialect
from onceward.sql.plan import Plan, Statement
from onceward.sql.queue_rows import LaneLine, busy_of, lanes_of
from onceward.sql.verbs import discard, moment_of, record_of

Row: TypeAlias = Mapping[str, Any]

_NEW = KeptLine(Kept.NEW)
_LONGEST = 100 * 365 * 86400.0
_ENDS = {Then.RETRY: "retrying", Then.LATER: "later", Then.BLOCKED: "blocked"}


def accept(dialect: Dialect, lines: Sequence[QueueLine], consumer: str, host: str) -> Plan[list[KeptLine]]:
    numbers = yield from _numbers(dialect, "received", len(lines))
    rows = [_row(dialect, line, seq, consumer, host) for line, seq in zip(lines, numbers, strict=True)]
    inserted = yield dialect.each("queue_keep", rows)
    kept = [_NEW] * len(lines)
    if inserted.changed < len(lines):
        for at, row in enumerate(rows):
            kept[at] = yield from _kept(dialect, row)
    joined = [at for at, how in enumerate(kept) if how.how in (Kept.NEW, Kept.PARKED)]
    if joined:
        yield dialect.each("queue_pend", [_pend(dialect, lines[at], rows[at]["seq"], rows[at]["due"]) for at in joined])
        lanes = lanes_of([lines[at] for at in joined])
        yield dialect.each("queue_open", [_open(dialect, lane, consumer) for lane in lanes])
    return kept


def _row(dialect: Dialect, line: QueueLine, seq: int, consumer: str, host: str) -> dict[str, Any]:
    row = msgspec.structs.asdict(line)
    row["identity"] = dialect.digest(bytes.fromhex(line.identity))
    row["consumer"], row["host"], row["seq"] = consumer, host, seq
    row["message_id"] = line.message_id or line.key
    row["occurred_at"] = _moment(dialect, line.occurred_at)
    row["due"] = row["not_before"] = _moment(dialect, line.not_before)
    return row


def _kept(dialect: Dialect, row: dict[str, Any]) -> Plan[KeptLine]:
    """What became of a line, when not all are new. One with our number is."""
    known = (yield dialect("queue_known", row)).rows[0]
    if known["received_position"] == row["seq"]:
        return _NEW
    joined = yield dialect("queue_join", row)
    if not joined.rows:
        return KeptLine(_known(known), known["payload_hash"])
    row["due"] = joined.rows[0]["next_try_at"]
    return KeptLine(Kept.PARKED, known["payload_hash"])


def _known(row: Row) -> Kept:
    match State(row["state"]):
        case State.DEAD | State.DISCARDED:
            return Kept.DEAD
        case State.PROCESSED:
            return Kept.PROCESSED
        case _:
            return Kept.IN_FLIGHT if row["received_position"] is None else Kept.ACCEPTED


def claim_lanes(
    dialect: Dialect, consumer: str, owner: str, *, most: int, lease: float, share: Share | None
) -> Plan[list[LaneClaim]]:
    params = {"consumer": consumer, "owner": owner, "most": most, "lease": _seconds(lease)}
    result = yield _shared(dialect, "queue_claim", params, share)
    return [LaneClaim(row["lane"], row["claims"]) for row in result.rows]


def take_lanes(dialect: Dialect, owner: str, lanes: Sequence[bytes], most: int) -> Plan[Taken]:
    held = yield dialect("queue_hold", _owned(owner, lanes))
    ours = [row["lane"] for row in held.rows]
    found = yield dialect("queue_heads", {"lanes": b"".join(ours), "most": most})
    messages: list[Queued] = []
    recordless: set[bytes] = set()
    for lane, rows in groupby(found.rows, key=itemgetter("lane_id")):
        heads = sorted(rows, key=itemgetter("rank", "seq"))
        tracks = yield from _tracks(dialect, lane, heads)
        read = len(messages)
        for row, behind in _in_order(heads, tracks):
            if row["type"] is None:  # what comes after one that cannot be read waits with it
                if len(messages) == read:
                    recordless.add(lane)
                break
            queued = yield from _queued(dialect, lane, row, behind=behind)
            messages.append(queued)
    return Taken(frozenset(ours), tuple(messages), recordless=frozenset(recordless))


def _tracks(dialect: Dialect, lane: bytes, heads: Sequence[Row]) -> Plan[dict[str, list[Row]]]:
    """Of each track as many of its lowest positions as it has places among the first messages."""
    tracks: dict[str, list[Row]] = {}
    if all(row["track"] is None for row in heads):
        return tracks  # as most often
    for track, places in Counter(row["track"] for row in heads if row["track"] is not None).items():
        found = yield dialect("queue_track", {"lane": lane, "track": track, "most": places})
        tracks[track] = list(found.rows)
    return tracks


def _in_order(heads: Sequence[Row], tracks: Mapping[str, list[Row]]) -> Iterator[tuple[Row, bool]]:
    """In the places of a track its lowest positions, up to one that is set aside; the rest of it is behind that."""
    nth: Counter[str] = Counter()
    for head in heads:
        track = head["track"]
        if track is None:
            yield head, False
            continue
        nth[track] += 1
        first = tracks[track][: nth[track]]
        aside = next((row for row in first if row["aside"]), None)
        if aside is None:
            yield first[-1], False
        elif (aside["place"], aside["seq"]) < (head["place"], head["seq"]):
            yield head, True


def _queued(dialect: Dialect, lane: bytes, row: Row, *, behind: bool) -> Plan[Queued]:
    identity, message = _identity_of(row), _message_of(row)
    unmet = (yield from _unmet(dialect, identity, message)) if message.depends_on else None
    return Queued(
        seq=row["seq"],
        lane=lane,
        identity=identity,
        message=message,
        now=moment_of(row["now"]),
        rank=row["rank"],
        due=None if row["due"] is None else moment_of(row["due"]),
        track=row["track"],
        behind=behind,
        unmet=unmet,
        attempts=row["attempts"],
        started=row["started"],
        origin=row["origin"],
        received_at=moment_of(row["received_at"]),
        payload=row["payload"],
    )


def _identity_of(row: Mapping[str, Any]) -> Identity:
    return Identity.known(row["identity"], row["consumer"], row["tenant"], row["scope"], row["key"])


def _message_of(row: Mapping[str, Any]) -> Message[Any]:
    payload, headers, occurred_at, depends_on = row["payload"], row["headers"], row["occurred_at"], row["depends_on"]
    return restored(
        row["message_id"],
        row["type"],
        None if payload is None else msgspec.json.decode(payload),
        row["source"],
        row["topic"],
        row["tenant"],
        None if headers is None else msgspec.json.decode(headers),
        None if occurred_at is None else moment_of(occurred_at),
        row["stream"],
        row["position"],
        () if depends_on is None else msgspec.json.decode(depends_on, type=tuple[Position, ...]),
        row["body"],
    )


def _unmet(dialect: Dialect, of: Identity, message: Message[Any]) -> Plan[Unmet | None]:
    for needed in message.depends_on:
        tenant = needed.tenant or of.tenant
        found = yield _position(dialect, of.consumer, tenant, needed.stream, needed.position)
        if not found.rows[0]["done"]:
            state = found.rows[0]["state"]
            return Unmet(Position(needed.stream, needed.position, tenant), None if state is None else State(state))
    return None


def hold_lanes(dialect: Dialect, owner: str, lanes: Sequence[bytes]) -> Plan[frozenset[bytes]]:
    result = yield dialect("queue_hold", _owned(owner, lanes))
    return frozenset(row["lane"] for row in result.rows)


def close_lanes(dialect: Dialect, closing: TurnClosing, consumer: str, host: str) -> Plan[None]:
    done, failed = closing.done, closing.failed
    tracks = yield from _gone(dialect, [*(one.seq for one in done), *(one.seq for one in failed if one.dead)])
    if done:
        numbers = yield from _numbers(dialect, "processed", len(done))
        rows = [
            {**_line(dialect, line), "number": number, "host": host} for line, number in zip(done, numbers, strict=True)
        ]
        _check((yield dialect.each("queue_done", rows)).changed, len(rows))
    for line in failed:
        yield from _failed(dialect, line, host)
    for track in tracks:
        yield dialect("queue_next_of_track", track)
    waiting = set()
    for blocked in closing.blocked:
        if (yield from _waits(dialect, blocked, consumer)):
            waiting.add(blocked.seq)
    if closing.behind:
        yield dialect("queue_behind", _seqs(closing.behind))
    yield from _end(dialect, closing.owner, closing.lanes, waiting)


def _gone(dialect: Dialect, seqs: Sequence[int]) -> Plan[Sequence[Row]]:
    """They are in the queue no more. The tracks that they were in."""
    if not seqs:
        return ()
    tracks = yield dialect("queue_tracks", _seqs(seqs))
    _check((yield dialect("queue_gone", _seqs(seqs))).changed, len(seqs))
    return tracks.rows


def _failed(dialect: Dialect, line: FailedLine, host: str) -> Plan[None]:
    delay = None if line.dead or line.delay is None else _seconds(line.delay)
    if not line.dead:
        _check((yield dialect("queue_put_off", {"seq": line.seq, "delay": delay})).changed)
    state = State.DEAD if line.dead else State.FAILED
    params = {**_line(dialect, line), "state": state.value, "counted": int(line.counted), "delay": delay, "host": host}
    _check((yield dialect("queue_failed", params)).changed)


def _check(changed: int, wanted: int = 1) -> None:
    if changed != wanted:
        raise HandlerEndedTransaction("a message is gone: a handler removed it, or changed where tables are found")


def _waits(dialect: Dialect, line: BlockedLine, consumer: str) -> Plan[bool]:
    """False: it need not wait any more."""
    found = yield _position(dialect, consumer, line.tenant, line.stream, line.position)
    if found.rows[0]["done"]:
        return False
    deadline = _moment(dialect, line.deadline)
    lane = bytes.fromhex(line.lane)
    yield dialect(
        "queue_wait", msgspec.structs.asdict(line) | {"consumer": consumer, "lane": lane, "deadline": deadline}
    )
    yield dialect("queue_aside", {"seq": line.seq})
    return True


def _end(dialect: Dialect, owner: str, ends: Sequence[LaneEnd], waiting: set[int]) -> Plan[None]:
    """Lanes without messages go, which most often is all of them."""
    by_content = [bytes.fromhex(end.lane) for end in ends if end.then is Then.NEXT or end.then is Then.WAIT]
    if by_content:
        gone = yield dialect.each("queue_lane_gone", [{"lane": lane, "owner": owner} for lane in by_content])
        if gone.changed < len(by_content):
            left = yield dialect("queue_hold", _owned(owner, by_content))
            for row in left.rows:
                yield from _goes_on(dialect, owner, row["lane"], waiting)
    for end in ends:
        if end.then in _ENDS:
            yield dialect("queue_lane_end", {
                "lane": bytes.fromhex(end.lane),
                "owner": owner,
                "state": _ENDS[end.then],
                "delay": None if end.then is Then.BLOCKED else _seconds(end.delay),
                "blocker": None if end.blocker is None else bytes.fromhex(end.blocker),
            })  # fmt: skip


def _goes_on(dialect: Dialect, owner: str, lane: bytes, waiting: set[int]) -> Plan[None]:
    """It sleeps when nothing in it may run: all are set aside, or the first of its stream waits."""
    first = yield dialect("queue_first", {"lane": lane})
    sleeps = not first.rows or first.rows[0]["seq"] in waiting
    how = {"state": "waiting", "delay": None} if sleeps else {"state": "ready", "delay": _seconds(0.0)}
    yield dialect("queue_lane_end", {"lane": lane, "owner": owner, "blocker": None, **how})


def release(dialect: Dialect, owner: str, lanes: Sequence[bytes], delay: float, *, suspect: bool) -> Plan[None]:
    yield dialect("queue_release", _owned(owner, lanes) | {"delay": _seconds(delay), "forgiven": int(not suspect)})


def extend(dialect: Dialect, owner: str, lanes: Sequence[bytes], lease: float) -> Plan[frozenset[bytes]]:
    result = yield dialect("queue_extend", _owned(owner, lanes) | {"lease": _seconds(lease)})
    return frozenset(row["lane"] for row in result.rows)


def mark_start(dialect: Dialect, owner: str, lane: bytes, identity: Identity) -> Plan[Record | None]:
    result = yield dialect("queue_mark_start", {"owner": owner, "lane": lane, "identity": identity.digest})
    return record_of(result.rows[0]) if result.rows else None


def unmark_start(dialect: Dialect, identity: Identity) -> Plan[None]:
    yield dialect("queue_unmark_start", {"identity": identity.digest})


def busy_lanes(dialect: Dialect, consumer: str, lanes: Sequence[bytes]) -> Plan[BusyLanes]:
    result = yield dialect("queue_busy", {"consumer": consumer, "lanes": b"".join(lanes)})
    return busy_of(result.rows)


def due_in(dialect: Dialect, consumer: str, share: Share | None) -> Plan[float | None]:
    result = yield _shared(dialect, "queue_due_in", {"consumer": consumer}, share)
    return max(0.0, result.rows[0]["seconds"]) if result.rows else None


def wake_overdue(dialect: Dialect, consumer: str) -> Plan[int]:
    late = yield dialect("queue_late", {"consumer": consumer})
    if late.rows:
        seqs = _seqs([row["seq"] for row in late.rows])
        for step in ("queue_late_back", "queue_late_lanes", "queue_late_ended"):
            yield dialect(step, seqs)
    return len(late.rows)


def requeue(dialect: Dialect, identity: Identity, line: QueueLine) -> Plan[bool]:
    seq = yield from _numbers(dialect, "received", 1)
    requeued = yield dialect("queue_requeue", {"identity": identity.digest, "seq": next(seq)})
    if not requeued.rows:
        return False
    row = requeued.rows[0]
    yield dialect("queue_pend", _pend(dialect, line, row["received_position"], None))
    (lane,) = lanes_of([msgspec.structs.replace(line, not_before=None)])
    yield dialect("queue_open", _open(dialect, lane, row["consumer"]))
    yield dialect("queue_unblock", {"lane": bytes.fromhex(line.lane), "identity": identity.digest})
    return True


def drop(dialect: Dialect, identity: Identity, line: QueueLine) -> Plan[bool]:
    if not (yield from discard(dialect, identity)):
        return False
    yield dialect("queue_unblock", {"lane": bytes.fromhex(line.lane), "identity": identity.digest})
    return True


# --- the pieces -----------------------------------------------------------------------------------------------


def _numbers(dialect: Dialect, name: str, many: int) -> Plan[Iterator[int]]:
    """The next numbers of an order. None is given out twice."""
    result = yield dialect("queue_numbers", {"name": name, "many": many})
    last: int = result.rows[0]["value"]
    return iter(range(last - many + 1, last + 1))


def _pend(dialect: Dialect, line: QueueLine, seq: int, due: Any) -> dict[str, Any]:
    """In a track, what has no position comes last."""
    return {
        "seq": seq,
        "identity": dialect.digest(bytes.fromhex(line.identity)),
        "lane": dialect.digest(bytes.fromhex(line.lane)),
        "rank": line.rank,
        "track": line.track,
        "place": LAST if line.position is None and line.track is not None else line.position,
        "due": due,
    }


def _open(dialect: Dialect, lane: LaneLine, consumer: str) -> dict[str, Any]:
    return {
        "lane": dialect.digest(bytes.fromhex(lane.lane)),
        "consumer": consumer,
        "tenant": lane.tenant,
        "name": lane.name,
        "share": lane.share,
        "not_before": _moment(dialect, lane.not_before),
    }


def _position(dialect: Dialect, consumer: str, tenant: str, stream: str, position: int) -> Statement:
    return dialect("queue_position", {"consumer": consumer, "tenant": tenant, "stream": stream, "position": position})


def _line(dialect: Dialect, line: DoneLine | FailedLine) -> dict[str, Any]:
    return msgspec.structs.asdict(line) | {"identity": dialect.digest(bytes.fromhex(line.identity))}


def _moment(dialect: Dialect, moment: Any) -> Any:
    return None if moment is None else dialect.moment(moment)


def _seconds(delay: float) -> str:
    """As a modifier of a time; neither 1e-05 nor a date after the year 9999 would be one."""
    return f"{min(max(delay, 0.0), _LONGEST):.3f} seconds"


def _seqs(seqs: Sequence[int]) -> dict[str, str]:
    return {"seqs": msgspec.json.encode(seqs).decode()}


def _shared(dialect: Dialect, name: str, params: Mapping[str, Any], share: Share | None) -> Statement:
    if share is None:
        return dialect(name, params)
    number, shares = share
    return dialect(f"{name}_share", {**params, "number": number, "shares": shares})


def _owned(owner: str, lanes: Sequence[bytes]) -> dict[str, Any]:
    return {"owner": owner, "lanes": b"".join(lanes)}


def stood(_dialect: Dialect, _taken: Taken) -> Plan[bool | None]:
    """SQLite does not tell what became of a transaction."""
    return None
    yield  # a plan without statements


def call(_dialect: Dialect, _consumer: str) -> Plan[None]:
    """Nobody in another process could be called."""
    return
    yield
