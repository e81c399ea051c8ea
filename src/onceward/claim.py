"""Claim: deduplication inside a transaction that the caller opened, for code that is not shaped like a handler."""

from __future__ import annotations

from typing import Any

from onceward.identity import Identity
from onceward.outcome import Outcome
from onceward.record import Record


class Claim:
    """What `inbox.claim` gives. `first` is True when the work is yours to do, now, in this transaction."""

    def __init__(self, identity: Identity, outcome: Outcome[Any] | None, record: Record | None) -> None:
        self.identity = identity
        self.first = outcome is None
        self.outcome = outcome
        """What is known of a message that is not yours to do: DUPLICATE, ACCEPTED or DEAD."""
        self.record = record
        """The record as it was found, if there was one."""
        self.saved: tuple[Any, Any] = (None, None)

    @property
    def result(self) -> Any:
        """What was saved: for a duplicate by the first run."""
        return self.saved[0] if self.outcome is None else self.outcome.result

    @property
    def mismatch(self) -> bool:
        """The same identity came with another payload."""
        return self.outcome is not None and self.outcome.mismatch

    @property
    def idempotency_key(self) -> str:
        """For whatever happens outside of the transaction: the same for every delivery of this message."""
        return str(self.identity)

    def save(self, result: Any = None, *, extra: Any = None) -> None:
        """Keep a result for duplicates, and anything else for people, with the record."""
        self.saved = (result, extra)
