"""What is counted while it happens, and the last few things worth telling. The view reads it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass
class Tally:
    deliveries: int = 0
    repeated: int = 0
    acks_lost: int = 0
    failed: int = 0
    killed: int = 0
    skipped: int = 0


class Event(NamedTuple):
    at: float
    world: str
    text: str


@dataclass
class News:
    """The last events of both worlds, with the seconds since the start."""

    began: float = field(default_factory=time.monotonic)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=20))

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def tell(self, world: str, text: str) -> None:
        self.events.append(Event(self.elapsed, world, text))
