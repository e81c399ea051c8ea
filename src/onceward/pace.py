"""How much a worker takes at once: little when it is quiet, so that others have something to do too; more under
backlog, less where handlers are slow.

Where a turn may not be larger (`batch=1`), a worker still claims the lanes of several turns at once under backlog: the
claim is a transaction of its own, and for a quick message it would be as dear as the message itself.
"""

from __future__ import annotations

from time import monotonic

from onceward.queue import Claiming

LONG = 0.5
"""Seconds. After a turn that took longer, the next one is smaller; after a quick one that was full it is larger."""


AHEAD = 8
"""Messages that the turns of one claim may come to, where it is for more than one."""


class Pace:
    SMALL = 1
    PAUSE = 16
    """Turns until long lanes are looked for again."""

    def __init__(self, largest: int) -> None:
        self._largest = max(1, largest)
        self.size = min(self.SMALL, self._largest)
        self._depth = 1
        """Messages of one lane. Of long lanes fewer are taken, and more of each: a lane costs as much as a message."""
        self._pause = 0
        self._turns = 1
        """That one claim is for."""
        self._began = 0.0

    @property
    def lanes(self) -> int:
        """Of one turn."""
        return max(1, self.size // self._depth)

    @property
    def ahead(self) -> int:
        """To claim at once, where a worker can begin one turn in the trip that ends another."""
        return self.lanes * self._turns

    def begin(self) -> None:
        self._began = monotonic()

    def went(self, lanes: int, messages: int, *, full: bool, again: bool) -> None:
        """What there was in a turn. `full`: as much as was asked for; `again`: it had to be done a second time."""
        full, seconds = full or lanes >= self.lanes, monotonic() - self._began
        self._fit_depth(lanes, messages)
        if seconds > LONG or again:  # where some fail, little is done again
            self.size = max(1, self.size // 2)
        elif full and seconds < LONG / 4:
            self.size = min(self._largest, self.size * 4)
        self._claim_ahead(seconds, fits=full and not again and self.size == self._largest)

    def _claim_ahead(self, seconds: float, *, fits: bool) -> None:
        """For more turns, while all of them together are over in a moment."""
        if not fits or seconds * self._turns > LONG / 4:
            self._turns = 1
        elif seconds * self._turns < LONG / 16:
            self._turns = max(1, min(AHEAD // self.size, self._turns * 2))

    def claimed(self, lanes: int, claiming: Claiming) -> None:
        """What a claim came to. Where there was less than was asked for, the others have nothing to do."""
        if not claiming.spare and lanes < claiming.lanes:
            self._turns = 1

    def _fit_depth(self, lanes: int, messages: int) -> None:
        if messages >= lanes * self._depth:
            if self._pause:
                self._pause -= 1
            else:
                self._depth = min(self._largest, self._depth * 2)
        elif messages * 2 <= lanes * self._depth:
            self._depth, self._pause = max(1, self._depth // 2), self.PAUSE

    def idle(self) -> None:
        self.size, self._turns = min(self.SMALL, self._largest), 1
