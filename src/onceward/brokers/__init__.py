"""Brokers in front of an inbox: `consume` takes what a source delivers through it, exactly once.

Each source is in the module of its broker: onceward.brokers.kafka, .confluent, .rabbitmq, .ndjson, .memory.
"""

from onceward.brokers.base import Delivery, Source
from onceward.brokers.consume import consume
from onceward.brokers.memory import MemorySource
from onceward.brokers.ndjson import NdjsonSource

__all__ = ["Delivery", "MemorySource", "NdjsonSource", "Source", "consume"]
