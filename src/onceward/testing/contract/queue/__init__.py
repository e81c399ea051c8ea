"""The conformance suite of the stored inbox: keep first, work later, in order, on as many workers as you like.

It is derived from the decision table and from rules 12 to 18 and 20 of docs/guarantees.md.
"""

from onceward.testing.contract.queue.accepting import AcceptContract
from onceward.testing.contract.queue.depending import DependencyContract
from onceward.testing.contract.queue.dispatching import DispatchContract
from onceward.testing.contract.queue.fleets import FleetContract
from onceward.testing.contract.queue.iterating import IterateContract
from onceward.testing.contract.queue.leasing import LeaseContract
from onceward.testing.contract.queue.ordering import OrderContract
from onceward.testing.contract.queue.working import WorkContract


class QueueContract(
    AcceptContract,
    DispatchContract,
    OrderContract,
    DependencyContract,
    WorkContract,
    IterateContract,
    LeaseContract,
    FleetContract,
):
    """Subclass it with a fixture `lab` that gives a Lab on an empty database whose store has a queue."""


__all__ = ["QueueContract"]
