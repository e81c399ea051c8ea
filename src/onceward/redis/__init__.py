"""The store for Redis and Valkey, on one server or a cluster: `RedisStore`.

A record is one string under one key, so that every script touches one hash slot. What is told apart by scripts stands
in front of it in fixed places (`value.py`, `lua/record.lua`); the rest is packed by Python and opaque to them.

It has no transactions. A claim is a lease by the server's clock with a fencing token, one runner at a time; after a
crash a message may run again. Exactly once are only the commands that a handler puts into its `tx` (`tx.py`): they are
applied by the script that completes the message, and only if the lease is still its own.
"""

from onceward.redis.store import RedisStore
from onceward.redis.tx import RedisTx

__all__ = ["RedisStore", "RedisTx"]
