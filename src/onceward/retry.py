"""RetryPolicy: how often, and how long until the next time. Exponential, full jitter, capped."""

from __future__ import annotations

from collections.abc import Callable
from random import random

import msgspec

from onceward.errors import UsageError


class RetryPolicy(msgspec.Struct, frozen=True):
    """Times are in seconds. After `max_attempts` tries, errors and crashes together, a message is dead."""

    max_attempts: int = 10
    base: float = 1.0
    factor: float = 2.0
    cap: float = 3600.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1 or self.base < 0 or self.factor < 1 or self.cap < 0:
            raise UsageError(f"max_attempts and factor must be at least 1, base and cap not negative: {self}")

    def ceiling(self, attempt: int) -> float:
        """The longest delay after this attempt (the first is 1)."""
        # The exponent is bounded so that a large attempt number cannot overflow.
        return float(min(self.cap, self.base * self.factor ** min(attempt - 1, 1000 if self.factor < 2 else 64)))

    def delay(self, attempt: int, chance: Callable[[], float] = random) -> float:
        """A random delay up to the ceiling, so that many failures do not come back together."""
        return chance() * self.ceiling(attempt)

    def exhausted(self, attempts: int) -> bool:
        return attempts >= self.max_attempts
