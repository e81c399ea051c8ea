"""onceward: every message takes effect exactly once, in the database you already have.

    async with Inbox.connect("sqlite:///shop.db", consumer="billing") as inbox:
        outcome = await inbox.process(message, charge)

If `process` returns, acknowledge; if it raises, do not.
"""

from onceward import keys, lanes, tenants
from onceward.claim import Claim
from onceward.current import Current, current
from onceward.errors import (
    AlreadyProcessed,
    AttemptsExhausted,
    BrokerUnavailable,
    BulkError,
    CommandFailed,
    CommitNotApplied,
    CommitUnknown,
    DependencyCycle,
    DependencyDead,
    DependencyMissing,
    HandlerCancelled,
    HandlerEndedTransaction,
    HandlerNotFound,
    HandlerTimeout,
    InboxClosed,
    InvalidHandler,
    InvalidMessage,
    KeyInvalid,
    KeyMissing,
    LeaseLost,
    MessageDead,
    MissingDriver,
    NestedProcess,
    NotDead,
    OncewardError,
    PayloadInvalid,
    PayloadMismatch,
    PayloadTooLarge,
    PayloadUndecodable,
    RecordNotFound,
    Reject,
    ResultInvalid,
    SchemaMissing,
    SchemaOutdated,
    SchemaTooNew,
    SecondConnection,
    StoreError,
    StoreReadOnly,
    StoreUnavailable,
    TenantMissing,
    TransactionUnusable,
    TryLater,
    UnknownScheme,
    UsageError,
)
from onceward.handlers import Router
from onceward.identity import Identity
from onceward.inbox import Inbox
from onceward.janitor import Janitor
from onceward.lease import Lease
from onceward.message import Message, Position, stream_of
from onceward.outcome import Kind, Outcome, Verdict, outcome_of, verdict_of
from onceward.record import Failure, Record, State
from onceward.retry import RetryPolicy
from onceward.stats import LaneStats, QueueStats, Stats
from onceward.stored import Health

__version__ = "0.1.0"

__all__ = [
    "AlreadyProcessed",
    "AttemptsExhausted",
    "BrokerUnavailable",
    "BulkError",
    "Claim",
    "CommandFailed",
    "CommitNotApplied",
    "CommitUnknown",
    "Current",
    "DependencyCycle",
    "DependencyDead",
    "DependencyMissing",
    "Failure",
    "HandlerCancelled",
    "HandlerEndedTransaction",
    "HandlerNotFound",
    "HandlerTimeout",
    "Health",
    "Identity",
    "Inbox",
    "InboxClosed",
    "InvalidHandler",
    "InvalidMessage",
    "Janitor",
    "KeyInvalid",
    "KeyMissing",
    "Kind",
    "LaneStats",
    "Lease",
    "LeaseLost",
    "Message",
    "MessageDead",
    "MissingDriver",
    "NestedProcess",
    "NotDead",
    "OncewardError",
    "Outcome",
    "PayloadInvalid",
    "PayloadMismatch",
    "PayloadTooLarge",
    "PayloadUndecodable",
    "Position",
    "QueueStats",
    "Record",
    "RecordNotFound",
    "Reject",
    "ResultInvalid",
    "RetryPolicy",
    "Router",
    "SchemaMissing",
    "SchemaOutdated",
    "SchemaTooNew",
    "SecondConnection",
    "State",
    "Stats",
    "StoreError",
    "StoreReadOnly",
    "StoreUnavailable",
    "TenantMissing",
    "TransactionUnusable",
    "TryLater",
    "UnknownScheme",
    "UsageError",
    "Verdict",
    "current",
    "keys",
    "lanes",
    "outcome_of",
    "stream_of",
    "tenants",
    "verdict_of",
]
