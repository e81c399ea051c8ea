"""SettledPrefix: how far a partition may be committed.

A committed offset says that everything below it is settled. Messages are settled in any order, so what counts is the
**prefix**: up to the first that is not settled yet, however many above it are.

    delivered   10  11  14  15  16         offsets have gaps: compaction, markers of transactions
    settled      x   x       x
                        ^ committable: 14

Nothing is known about offsets that were never delivered, so they must be given in growing order, and a source that
goes back begins a new prefix.
"""

from __future__ import annotations

from collections import deque


class SettledPrefix:
    """Of one partition, for as long as it is ours."""

    __slots__ = ("_open", "_order", "_passed")

    def __init__(self) -> None:
        self._order: deque[int] = deque()
        """All from the first that is open, in their order."""
        self._open: set[int] = set()
        """Those that are not settled."""
        self._passed: int | None = None
        """The last one of the prefix."""

    def deliver(self, offset: int) -> None:
        """It is given to somebody."""
        self._order.append(offset)
        self._open.add(offset)

    def settle(self, offset: int) -> None:
        """It is processed or kept. A second time says nothing new."""
        self._open.discard(offset)
        while self._order and self._order[0] not in self._open:
            self._passed = self._order.popleft()

    @property
    def committable(self) -> int | None:
        """The first offset that is not settled; behind the last one if all are. None: nothing was delivered."""
        if self._order:
            return self._order[0]
        return None if self._passed is None else self._passed + 1

    @property
    def unsettled(self) -> int:
        return len(self._open)

    @property
    def ahead(self) -> int:
        """How many are settled and cannot be committed, as one before them is not."""
        return len(self._order) - len(self._open)
