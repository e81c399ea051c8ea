"""KafkaDelivery: one record that was received, until it is settled or somebody else has its partition."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from onceward.brokers.kafka_partitions import Partition
from onceward.brokers.kafka_records import Fetched
from onceward.message import Message
from onceward.outcome import Kind, Outcome, Verdict

log = logging.getLogger("onceward.kafka")


class Keeper(Protocol):
    """Where a delivery comes from."""

    def settled(self, delivery: KafkaDelivery) -> None:
        """Its offset counts."""

    def buried(self, delivery: KafkaDelivery, error: BaseException | None) -> bool:
        """It goes to the dead topic, and is closed when it is there. False: there is no such topic."""


class KafkaDelivery:
    __slots__ = ("_at_work", "_keeper", "message", "problem", "record", "redelivered", "where")

    def __init__(
        self,
        keeper: Keeper,
        where: Partition,
        record: Fetched,
        message: Message[Any],
        problem: Exception | None,
        *,
        redelivered: bool,
    ) -> None:
        self._keeper = keeper
        self.where = where
        self.record = record
        self.message = message
        self.problem = problem
        self.redelivered = redelivered
        self._at_work = False

    @property
    def origin(self) -> str:
        return f"kafka://{self.record.place}"

    @property
    def partition(self) -> str:
        return self.where.name

    def begin(self) -> bool:
        if not self._at_work:
            self._at_work = self.where.begin()
        return self._at_work

    def put_back(self) -> None:
        if self._at_work:
            self._at_work = False
            self.where.end()

    async def settle(self, verdict: Verdict, *, delay: float = 0.0, outcome: Outcome[Any] | None = None) -> None:  # noqa: ARG002
        """With RETRY it stays as it is, uncommitted: who called keeps it, and the broker has it all the same."""
        if verdict is Verdict.RETRY or self.where.gone:  # who has the partition now gets it too, and settles it
            self.put_back()
        elif verdict is Verdict.REJECT or (outcome is not None and outcome.kind is Kind.DEAD):
            self._bury(verdict, (outcome.error if outcome is not None else None) or self.problem)
        else:
            self.close()

    def _bury(self, verdict: Verdict, error: BaseException | None) -> None:
        if self._keeper.buried(self, error):
            return
        if verdict is Verdict.REJECT:
            log.error(
                "%s cannot be kept, and is passed over: %r. Kafka has it until its retention ends; dead_topic= would "
                "keep it",
                self.origin,
                error,
            )
        self.close()

    def close(self) -> None:
        """It counts as settled."""
        self._keeper.settled(self)
        self.put_back()
