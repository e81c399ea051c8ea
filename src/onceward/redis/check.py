"""What would make a server forget records. A record that is lost is a message that takes effect again."""

from __future__ import annotations

from typing import Any

from onceward.errors import StoreError
from onceward.redis.servers import Servers
from onceward.store import Finding

KEEPING = ("noeviction",)


async def findings(servers: Servers) -> list[Finding]:
    """Of all primaries; what they have in common is said once."""
    found: dict[str, Finding] = {}
    for node in await servers.primaries():
        for one in await _of_one(servers, node):
            found.setdefault(one.name, one)
    return list(found.values())


async def _of_one(servers: Servers, node: Any) -> list[Finding]:
    try:
        info = {**await _info(servers, node, "persistence"), **await _info(servers, node, "memory")}
    except StoreError as error:
        return [_unknown(error)]
    policy, aof = _text(info.get("maxmemory_policy")), _text(info.get("aof_enabled")) == "1"
    saves = await _config(servers, node, "save")
    fsync = await _config(servers, node, "appendfsync")
    most = _text(info.get("maxmemory"))
    found = (_evicts(policy, most), _persists(saves, aof=aof), _syncs(fsync, aof=aof))
    return [one for one in found if one is not None]


def _evicts(policy: str, most: str) -> Finding | None:
    if not policy or policy in KEEPING:
        return None
    later = "" if most not in ("", "0") else " (there is no limit now, so nothing is evicted yet)"
    return Finding(
        "eviction",
        f"maxmemory-policy is {policy}: when memory is full the server deletes records{later}, and their messages take "
        "effect again",
        "CONFIG SET maxmemory-policy noeviction, or a server of its own for records",
    )


def _persists(saves: str | None, *, aof: bool) -> Finding | None:
    if aof or saves is None:
        return None
    if not saves:
        return Finding(
            "no-persistence",
            "the server keeps nothing on disk: when it restarts, all records are gone and messages take effect again",
            "CONFIG SET appendonly yes, and appendfsync always where no acknowledged completion may be lost",
        )
    return Finding(
        "snapshots-only",
        f"the server only writes snapshots (save {saves}): when it crashes, the records since the last one are gone",
        "CONFIG SET appendonly yes",
    )


def _syncs(fsync: str | None, *, aof: bool) -> Finding | None:
    if not aof or fsync in (None, "always"):
        return None
    return Finding(
        "fsync",
        f"appendfsync is {fsync}: when the machine crashes, about the last second of completions is gone",
        "CONFIG SET appendfsync always, if that second matters",
        serious=False,
    )


def _unknown(error: Exception) -> Finding:
    return Finding(
        "unknown",
        f"the server does not say how it keeps data ({error})",
        "ask whoever runs it for persistence, and for the policy noeviction",
        serious=False,
    )


async def _info(servers: Servers, node: Any, section: str) -> dict[str, Any]:
    info: dict[str, Any] = await servers.ask(node, "INFO", section)
    return info


async def _config(servers: Servers, node: Any, name: str) -> str | None:
    """None: it may not be asked, as with many hosted servers."""
    try:
        found = await servers.ask(node, "CONFIG GET", name)
    except StoreError:
        return None
    if isinstance(found, dict):
        return _text(next(iter(found.values()), None))
    return _text(found[1]) if len(found) > 1 else None


def _text(value: Any) -> str:
    return "" if value is None else value.decode() if isinstance(value, bytes) else str(value)
