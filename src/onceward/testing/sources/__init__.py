"""`SourceContract`: the conformance suite of sources, against their real brokers. Subclass it, and give it the fixtures
`broker`, a BrokerLab, and `lab`, a Lab of a store with a queue."""

from onceward.testing.sources.contract import SourceContract
from onceward.testing.sources.lab import BrokerLab, Sent

__all__ = ["BrokerLab", "Sent", "SourceContract"]
