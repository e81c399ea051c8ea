"""What the parts of the suite share."""

from __future__ import annotations

from collections.abc import Callable
from random import random
from typing import Any

import pytest

from onceward.retry import RetryPolicy
from onceward.store import Features
from onceward.testing.lab import Lab


class Longest(RetryPolicy, frozen=True):
    """Every delay is the longest that it can be: once in some thousand times a random one is over at once."""

    def delay(self, attempt: int, chance: Callable[[], float] = random) -> float:
        return self.ceiling(attempt)


SOON = RetryPolicy(max_attempts=3, base=0.0)
LATER = Longest(max_attempts=3, base=600.0, cap=600.0)


def needs(lab: Lab, feature: str) -> None:
    """Leave a case out for a store that does not have the feature, visibly."""
    features: Features = lab.store().features
    has = getattr(features, feature, None)
    if has is None:
        has = getattr(lab, feature)
    if not has:
        pytest.skip(f"{type(lab).__name__} does not have {feature}")


class Listener(list[Any]):
    """Collects events."""

    def __call__(self, event: Any) -> None:
        self.append(event)

    def names(self) -> list[str]:
        return [type(event).__name__ for event in self]
