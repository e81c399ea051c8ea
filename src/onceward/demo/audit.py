"""The audit: what is in the database against what is in the ledger, order by order.

It knows nothing about inboxes, brokers or workers, and it does not believe the counters of the view.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onceward.demo.books import Charge
from onceward.demo.shop import Order, euros


@dataclass(frozen=True)
class Account:
    """The findings. An order is in at most one of the lists."""

    orders: int
    charges: int
    lost: tuple[Order, ...]
    doubled: tuple[tuple[Order, int], ...]
    """With how often each was charged."""
    wrong: tuple[Order, ...]
    """Charged once, but another amount or another customer."""
    unknown: tuple[Charge, ...]
    """Charges for orders that were never sent."""

    @property
    def exact(self) -> bool:
        return not (self.lost or self.doubled or self.wrong or self.unknown)

    @property
    def overcharged(self) -> int:
        """Cents."""
        return sum(order.cents * (times - 1) for order, times in self.doubled)

    @property
    def victims(self) -> int:
        return len({order.customer for order, _times in self.doubled})

    def __str__(self) -> str:
        line = f"{self.orders} orders, {self.charges} charges, {len(self.lost)} lost, {len(self.doubled)} doubled"
        line += f", {len(self.wrong)} wrong" if self.wrong else ""
        return line + (f", {len(self.unknown)} never ordered" if self.unknown else "")


def audit(ledger: Sequence[Order], charges: Iterable[Charge]) -> Account:
    found: defaultdict[str, list[Charge]] = defaultdict(list)
    for charge in charges:
        found[charge.order_id].append(charge)
    sent = {order.id for order in ledger}
    return Account(
        orders=len(ledger),
        charges=sum(map(len, found.values())),
        lost=tuple(order for order in ledger if order.id not in found),
        doubled=tuple((order, len(found[order.id])) for order in ledger if len(found.get(order.id, ())) > 1),
        wrong=tuple(order for order in ledger if _is_wrong(order, found.get(order.id, []))),
        unknown=tuple(charge for order_id, group in found.items() if order_id not in sent for charge in group),
    )


def _is_wrong(order: Order, charges: Sequence[Charge]) -> bool:
    return len(charges) == 1 and charges[0] != Charge(order.id, order.customer, order.cents)


def verdict(account: Account) -> list[str]:
    """What an inbox is measured by."""
    if account.exact:
        return ["Every order was charged exactly once."]
    named = {
        "lost": [order.id for order in account.lost],
        "doubled": [order.id for order, _times in account.doubled],
        "wrong": [order.id for order in account.wrong],
        "never ordered": [charge.order_id for charge in account.unknown],
    }
    return [f"{finding}: {', '.join(ids[:8])}{' ...' * (len(ids) > 8)}" for finding, ids in named.items() if ids]


def damage(account: Account) -> list[str]:
    """What the lack of one did to the customers."""
    if account.exact:
        return ["No customer was charged twice this time. That was luck."]
    if not account.doubled:
        return verdict(account)
    order, times = max(account.doubled, key=lambda double: double[0].cents * (double[1] - 1))
    who = "1 customer was" if account.victims == 1 else f"{account.victims} customers were"
    return [
        f"{who} charged twice, {euros(account.overcharged)} too much.",
        f"{order.customer} paid {euros(order.cents * times)} for an order of {euros(order.cents)}.",
    ]
