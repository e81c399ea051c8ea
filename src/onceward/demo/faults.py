"""What goes wrong, decided by the seed alone: both worlds suffer the same, and a run can be had again.

Each question is answered from its own random numbers, seeded with what it is about, so that an answer does not depend
on who asked first. Only the bank and the clock are left to chance.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import cycle
from random import Random

import msgspec

ORDERS_PER_KILL = 70


class Moment(StrEnum):
    """When a worker is killed."""

    AT_WORK = "at work"
    BEFORE_ACK = "before the ack"


class Faults(msgspec.Struct, frozen=True):
    """Chances for each message or delivery, and times in seconds."""

    seed: int
    repeated: float = 0.10
    repeated_within: float = 1.5
    ack_lost: float = 0.05
    shuffled_within: float = 0.25

    def delay(self, message_id: str) -> float:
        """How late the first delivery is. It puts the messages out of order."""
        return self._chance("delay", message_id).random() * self.shuffled_within

    def repeat(self, message_id: str) -> float | None:
        """When the broker delivers the message once more for no reason, or None."""
        chance = self._chance("repeat", message_id)
        return chance.random() * self.repeated_within if chance.random() < self.repeated else None

    def loses_ack(self, message_id: str, times: int) -> bool:
        """Of the n-th delivery of the message."""
        return self._chance("ack", message_id, times).random() < self.ack_lost

    def kills(self, orders: int) -> dict[int, Moment]:
        """After which order a worker is killed, and at which moment of its work. Spread over the run."""
        count = max(3, orders // ORDERS_PER_KILL)
        chance = self._chance("kills", orders)
        after = [int((n + chance.random()) / count * orders) + 1 for n in range(count)]
        return dict(zip(after, cycle(Moment), strict=False))

    def _chance(self, *about: object) -> Random:
        return Random("/".join(map(str, (self.seed, *about))))
