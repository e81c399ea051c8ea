"""RedisTx: the handler's commands, kept until its message is completed, and applied in that same moment or never."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

from redis.commands import AsyncCoreCommands

from onceward.errors import UsageError

READS = frozenset(
    [
        "BITCOUNT",
        "BITPOS",
        "DBSIZE",
        "DUMP",
        "EXISTS",
        "EXPIRETIME",
        "GEODIST",
        "GEOHASH",
        "GEOPOS",
        "GEOSEARCH",
        "GET",
        "GETBIT",
        "GETRANGE",
        "HEXISTS",
        "HGET",
        "HGETALL",
        "HKEYS",
        "HLEN",
        "HMGET",
        "HRANDFIELD",
        "HSCAN",
        "HSTRLEN",
        "HVALS",
        "KEYS",
        "LINDEX",
        "LLEN",
        "LPOS",
        "LRANGE",
        "MGET",
        "OBJECT",
        "PEXPIRETIME",
        "PFCOUNT",
        "PTTL",
        "RANDOMKEY",
        "SCAN",
        "SCARD",
        "SDIFF",
        "SINTER",
        "SINTERCARD",
        "SISMEMBER",
        "SMEMBERS",
        "SMISMEMBER",
        "SRANDMEMBER",
        "SSCAN",
        "STRLEN",
        "SUBSTR",
        "SUNION",
        "TIME",
        "TTL",
        "TYPE",
        "XINFO",
        "XLEN",
        "XPENDING",
        "XRANGE",
        "XREAD",
        "XREVRANGE",
        "ZCARD",
        "ZCOUNT",
        "ZDIFF",
        "ZINTER",
        "ZINTERCARD",
        "ZLEXCOUNT",
        "ZMSCORE",
        "ZRANDMEMBER",
        "ZRANGE",
        "ZRANGEBYLEX",
        "ZRANGEBYSCORE",
        "ZRANK",
        "ZREVRANGE",
        "ZREVRANGEBYSCORE",
        "ZREVRANK",
        "ZSCAN",
        "ZSCORE",
        "ZUNION",
    ]
)


REFUSED = frozenset([
    "ASKING", "AUTH", "BGREWRITEAOF", "BGSAVE", "BLMOVE", "BLMPOP", "BLPOP", "BRPOP", "BRPOPLPUSH", "BZMPOP",
    "BZPOPMAX", "BZPOPMIN", "CLIENT", "CLUSTER", "CONFIG", "DEBUG", "DISCARD", "EVAL", "EVALSHA", "EVALSHA_RO",
    "EVAL_RO", "EXEC", "FAILOVER", "FCALL", "FCALL_RO", "FUNCTION", "HELLO", "MIGRATE", "MONITOR", "MULTI",
    "PSUBSCRIBE", "PSYNC", "PUNSUBSCRIBE", "QUIT", "READONLY", "READWRITE", "REPLICAOF", "RESET", "SAVE", "SCRIPT",
    "SELECT", "SHUTDOWN", "SLAVEOF", "SSUBSCRIBE", "SUBSCRIBE", "SUNSUBSCRIBE", "SWAPDB", "SYNC", "UNSUBSCRIBE",
    "UNWATCH", "WAIT", "WAITAOF", "WATCH",
])  # fmt: skip
"""Commands that a script may not say, or that would move the record to another place."""
MOST_WORDS = 7_000
"""Of one command: Lua has no room for more."""


class RedisTx(AsyncCoreCommands):
    """A buffer with the commands of redis-py: `tx.incrby("balance:o-1", 700)`.

    They are applied together with the completion of the message, in one script: all of them and the record, or, if the
    lease is lost meanwhile, none. Nothing can be read through it: read with a client, before. On a cluster all keys
    have to be in the slot of the message: `tx.beside("balance")` makes such a name, and the store's `tag=` says what
    else shares a slot.
    """

    _event_dispatcher: Any = None  # redis-py wants to have one

    def __init__(self, tag: str) -> None:
        self._commands: list[list[bytes]] = []
        self._tag = tag
        self._over = False

    def beside(self, name: str) -> str:
        """A key with this name in the slot of the message."""
        return f"{name}:{{{self._tag}}}"

    def execute_command(self, *args: Any, **_options: Any) -> RedisTx:
        """Any command that writes."""
        if self._over:
            raise UsageError("this transaction is over: its handler has returned, or has failed")
        words = [_encoded(arg) for arg in args]
        command = [*words[0].split(), *words[1:]] if words else []
        if not command:
            raise UsageError("execute_command takes a command, such as execute_command('INCR', 'visits')")
        self._check(command)
        self._commands.append(command)
        return self

    def _check(self, command: list[bytes]) -> None:
        name = command[0].decode("ascii", "replace").upper()
        if name in READS:
            raise UsageError(f"{name} reads, and tx is a buffer that is applied at the end; read with a client before")
        if name in REFUSED:
            raise UsageError(f"{name} cannot be applied with the completion of a message; use a client for it")
        if len(command) > MOST_WORDS:
            raise UsageError(
                f"{name} has {len(command)} words, and a command of tx at most {MOST_WORDS}; say it in several commands"
            )

    def __await__(self) -> Generator[Any, Any, RedisTx]:
        """So that `await tx.incr(...)` works as well: there is nothing to wait for."""
        return self
        yield  # which makes it a generator

    def __len__(self) -> int:
        return len(self._commands)

    def __bool__(self) -> bool:
        return True

    # --- for the store --------------------------------------------------------------------------------------

    @property
    def commands(self) -> list[list[bytes]]:
        return self._commands

    def packed(self) -> bytes:
        """As complete.lua reads them."""
        return _array(map(_packed, self._commands)) if self._commands else b""

    def end(self) -> None:
        self._over = True

    def forget(self) -> None:
        """What was said so far is not to be applied."""
        self._commands = []


def _array(items: Iterable[bytes]) -> bytes:
    """msgpack as Redis knows it: it has no bytes, but its texts may be any."""
    listed = list(items)
    return b"\xdd" + len(listed).to_bytes(4, "big") + b"".join(listed)


def _packed(command: list[bytes]) -> bytes:
    return _array(b"\xdb" + len(arg).to_bytes(4, "big") + arg for arg in command)


def _encoded(value: Any) -> bytes:
    """As redis-py does it."""
    match value:
        case bytes():
            return value
        case bytearray() | memoryview():
            return bytes(value)
        case bool() | None:
            raise UsageError(f"{value!r} is no value for Redis: give bytes, text or a number")
        case int() | float():
            return repr(value).encode()
        case str():
            return value.encode()
        case _:
            raise UsageError(f"{type(value).__name__} is no value for Redis: give bytes, text or a number")
