"""Parking: a message that failed goes to the queue of its inbox, and the later ones of its lane follow it there.

A lane that has messages in the queue must not be worked on from the broker: what comes later would overtake them. So
before a message runs inline, it is asked whether its lane is in the queue. That costs a trip, which is saved where it
is known that the queue was empty and nobody else can have put something into these lanes since.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onceward.brokers.base import Source
from onceward.brokers.ruling import Ruling, Step, rule
from onceward.brokers.tracks import Item, Lane
from onceward.inbox import Inbox


class Parking:
    def __init__(self, inbox: Inbox[Any], source: Source) -> None:
        self._inbox = inbox
        self._source = source
        self._empty_since: int | None = None
        """The assignment of the source during which the queue was found empty; None: it may not be."""

    async def lanes_of(self, items: Sequence[Item]) -> frozenset[Lane]:
        """Those of their lanes that have messages in the queue."""
        lanes = {item.lane for item in items if item.lane is not None}
        assignment = self._source.assignment
        if not lanes or (assignment is not None and assignment == self._empty_since):
            return frozenset()
        self._empty_since = None
        found = await self._inbox.queued_lanes(lanes)
        if not found.any and self._empty_since is None:
            self._empty_since = assignment
        return found.lanes

    async def park(self, items: Sequence[Item]) -> list[Ruling]:
        """The first of each lane before the others: if another runner has it, nothing behind it may be kept first."""
        first, behind, seen = [], [], set()
        for item in items:
            if item.lane is not None and item.lane in seen:
                behind.append(item)
            else:
                seen.add(item.lane)
                first.append(item)
        rulings = await self._keep(first)
        kept = {ruling.item.lane for ruling in rulings if ruling.step is not Step.AGAIN}
        later = [item for item in behind if item.lane not in kept]
        rulings += await self._keep([item for item in behind if item.lane in kept])
        outcomes = {ruling.item.lane: ruling.outcome for ruling in rulings if ruling.step is Step.AGAIN}
        return rulings + [Ruling(item, Step.AGAIN, outcomes[item.lane]) for item in later]

    async def _keep(self, items: Sequence[Item]) -> list[Ruling]:
        if not items:
            return []
        self._empty_since = None
        messages, origins = [item.delivery.message for item in items], [item.delivery.origin for item in items]
        outcomes = await self._inbox.accept(messages, origins=origins)
        self._empty_since = None  # it may have been asked meanwhile
        return rule(items, outcomes, parks=False)
