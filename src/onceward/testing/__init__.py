"""For people who test with onceward, and for people who write a store.

`StoreContract` is the conformance suite: subclass it, give it a `lab` fixture, and pytest runs every rule against your
store; `JoinedContract` does so for transactions of the caller's, `QueueContract` for the stored inbox. `PointStore`
stops a run at a named point, to kill or cancel it there. It needs pytest.
"""

from onceward.testing.contract import JoinedContract, QueueContract, StoreContract
from onceward.testing.lab import Lab
from onceward.testing.labs import AiosqliteLab, PostgresLab, PsycopgLab, SqlAlchemyPostgresLab, SqliteLab, SqlLab
from onceward.testing.points import POINTS, PointStore
from onceward.testing.proxy import Proxy

__all__ = [
    "POINTS",
    "AiosqliteLab",
    "JoinedContract",
    "Lab",
    "PointStore",
    "PostgresLab",
    "Proxy",
    "PsycopgLab",
    "QueueContract",
    "SqlAlchemyPostgresLab",
    "SqlLab",
    "SqliteLab",
    "StoreContract",
]
