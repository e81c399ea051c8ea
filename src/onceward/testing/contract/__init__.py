"""The conformance suite: every rule of docs/guarantees.md as a named test that fails when the rule is broken.

It is derived from the decision table. Cases that a store cannot meet ask `Features` and say so when they skip.
"""

from onceward.testing.contract.batches import BatchContract
from onceward.testing.contract.crashes import CrashContract
from onceward.testing.contract.failures import FailureContract
from onceward.testing.contract.identities import IdentityContract
from onceward.testing.contract.inputs import InputContract
from onceward.testing.contract.joined import JoinedContract
from onceward.testing.contract.processing import ProcessingContract
from onceward.testing.contract.queue import QueueContract
from onceward.testing.contract.racing import RacingContract
from onceward.testing.contract.retention import RetentionContract
from onceward.testing.contract.transactions import TransactionContract
from onceward.testing.contract.upkeep import UpkeepContract


class StoreContract(
    ProcessingContract,
    IdentityContract,
    FailureContract,
    TransactionContract,
    RacingContract,
    CrashContract,
    InputContract,
    RetentionContract,
    UpkeepContract,
    BatchContract,
):
    """Subclass it with a fixture `lab` that gives a Lab on an empty database."""


__all__ = ["JoinedContract", "QueueContract", "StoreContract"]
