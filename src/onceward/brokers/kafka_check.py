"""What about topics and options endangers what is promised."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from onceward.brokers.kafka_records import key, offset
from onceward.store import Finding

Configs = Mapping[str, Mapping[str, str | None]]
"""The settings of topics, by their names."""

SETTINGS = ("retention.ms", "cleanup.policy")


def horizon(configs: Configs) -> timedelta | None:
    """For how long the topics keep records, and may deliver them again: after a reset of offsets, or when the broker
    has forgotten them. None: that is not known."""
    times = [_kept_for(config) for config in configs.values()]
    known = [time for time in times if time is not None]
    return max(known) if known and len(known) == len(times) else None


def _kept_for(config: Mapping[str, str | None]) -> timedelta | None:
    if "delete" not in (config.get("cleanup.policy") or "delete"):
        return timedelta.max  # compacted only: the last record of each key stays for ever
    said = config.get("retention.ms")
    if said is None:
        return None
    if int(said) < 0:
        return timedelta.max
    try:
        return timedelta(milliseconds=int(said))
    except OverflowError:
        return timedelta.max


def of_topics(configs: Configs, id_: Any) -> list[Finding]:
    compacted = sorted(name for name, config in configs.items() if "compact" in (config.get("cleanup.policy") or ""))
    if not compacted or id_ not in (offset, key):
        return []
    names = ", ".join(compacted)
    if id_ is key:
        return [
            Finding(
                "compacted-key",
                f"{names}: a compacted topic has the latest state of each key, and with id=key only the first one is "
                "run, all later ones are duplicates of it",
                "let the producer give each record an id of its own",
            )
        ]
    return [
        Finding(
            "compacted-offset",
            f"{names}: producers of a compacted topic write the same state again, and with id=offset each is a new "
            "message",
            "let the producer give each record an id of its own",
        )
    ]


def of_options(
    *, offset_reset: str, isolation: str, heartbeat: float, session: float, drain: float, most: float
) -> list[Finding]:
    """Times are in seconds; `most` is for how long a rebalance can be held up."""
    found = []
    if offset_reset == "latest":
        found.append(
            Finding(
                "latest",
                "offset_reset is latest: where the group has no offset, messages that are there already are never run. "
                "The broker forgets offsets too, some time after the last member has left (offsets.retention.minutes)",
                'offset_reset="earliest"; what was run before is a duplicate',
                serious=False,
            )
        )
    if isolation != "read_committed":
        found.append(
            Finding(
                "uncommitted",
                f"the isolation level is {isolation}: messages of transactions that were aborted take effect",
                "leave isolation_level away",
            )
        )
    if heartbeat * 3 > session:
        found.append(
            Finding(
                "heartbeat",
                f"the heartbeat comes every {heartbeat:g} s and the session times out after {session:g} s: one that is "
                "late costs this member its partitions",
                "session_timeout_ms= at least three times heartbeat_interval_ms=",
                serious=False,
            )
        )
    if drain > most:
        found.append(
            Finding(
                "drain",
                f"drain is {drain:g} s, and the group waits for a member only so long that {most:g} s are left: what "
                "is at work for longer when a partition is taken from us comes again somewhere else",
                "a shorter drain=, or a longer max_poll_interval_ms= (aiokafka: rebalance_timeout_ms=)",
                serious=False,
            )
        )
    return found


def unknown(error: object) -> Finding:
    return Finding(
        "unknown",
        f"the broker does not tell the settings of the topics ({error})",
        "allow DescribeConfigs on them, or see to it yourself that records of the inbox are kept for longer than "
        "retention.ms",
        serious=False,
    )
