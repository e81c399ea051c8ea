"""Handlers: the user's functions, looked at once, and the Router that finds one by message type."""

from __future__ import annotations

import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from onceward import codec, keys
from onceward.current import BulkRun, enter, leave
from onceward.errors import InvalidHandler, PayloadUndecodable, ResultInvalid, UsageError
from onceward.keys import Key, KeyLike
from onceward.message import Message, payload_of
from onceward.retention import check_retention
from onceward.retry import RetryPolicy

F = TypeVar("F", bound=Callable[..., Any])


class Shape(msgspec.Struct, frozen=True):
    """What the signature of a function says."""

    name: str
    wants_tx: bool
    payload: Any = None
    """The payload type of `message: Message[P]`, or None."""
    result: Any = None
    """The annotated return type, or None where it says nothing."""
    item: Any = None
    """The payload type of `messages: list[Message[P]]`, or None."""
    wants_lease: bool = False
    """There is a second parameter called lease."""


class Handler(msgspec.Struct, frozen=True):
    """A function with everything the inbox has to know to run it."""

    function: Callable[..., Any]
    shape: Shape
    payload: Any = None
    key: Key | None = None
    retry: RetryPolicy | None = None
    retention: timedelta | None = None
    concurrency: int | None = None
    """How many of the queue's turns in this process run it at the same time."""
    timeout: float | None = None
    """Seconds until a run from the queue is cancelled and counts as failed."""
    lease: float | None = None
    """Seconds. From the queue it runs without a transaction, as handler(message, lease)."""

    @property
    def name(self) -> str:
        return self.shape.name

    @property
    def to_call(self) -> Callable[[Message[Any], Any], Any]:
        """`call`, or the function itself where that would do nothing else."""
        is_plain = self.lease is None and self.payload is None and self.shape.wants_tx
        return self.function if is_plain else self.call

    def call(self, message: Message[Any], tx: Any) -> Any:
        """What the function gives: an awaitable, or a result. PayloadUndecodable: the payload does not fit its model.

        Not a coroutine: it would be one more for each message, around the handler's own.
        """
        if self.lease is not None:
            raise UsageError(f"{self.name} runs with a lease, which only the queue gives: accept the message")
        if self.payload is not None:
            message = self.decoded(message)
        return self.function(message, tx) if self.shape.wants_tx else self.function(message)

    def call_with(self, message: Message[Any], lease: Any) -> Any:
        """As `call`, without a transaction."""
        if self.payload is not None:
            message = self.decoded(message)
        wants_two = self.shape.wants_tx or self.shape.wants_lease
        return self.function(message, lease) if wants_two else self.function(message)

    def decoded(self, message: Message[Any]) -> Message[Any]:
        """The message with its payload as the handler's model; PayloadUndecodable when it does not fit."""
        if self.payload is None:
            return message
        try:
            payload = codec.convert(payload_of(message), self.payload)
        except Exception as error:
            wanted = getattr(self.payload, "__name__", self.payload)
            raise PayloadUndecodable(f"the payload does not fit {wanted}: {error}") from error
        return message if payload is message.payload else msgspec.structs.replace(message, payload=payload)

    def restored(self, result: Any) -> Any:
        """A stored result as the annotated return type; as plain JSON where the type has changed since."""
        if self.shape.result is None or result is None:
            return result
        try:
            return codec.convert(result, self.shape.result)
        except Exception:  # noqa: BLE001 - an old result must not make a duplicate fail
            return result


class Router:
    """Handlers by message type. Give it to an inbox: `Inbox(store, consumer=..., handlers=[router])`."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    def handler(
        self,
        type: str,  # noqa: A002 - the word of the domain
        *,
        payload: Any = None,
        key: KeyLike | None = None,
        retry: RetryPolicy | None = None,
        retention: timedelta | None = None,
        concurrency: int | None = None,
        timeout: float | None = None,
        lease: float | None = None,
    ) -> Callable[[F], F]:
        """Register a function for a message type. The function stays as it is.

        For messages from the queue: `concurrency` bounds how many workers of this process run it at the same time,
        `timeout` (seconds) how long it may take, and with `lease` (seconds) it runs without a transaction, as
        handler(message, lease); see docs/workers.md.
        """
        if not isinstance(type, str) or not type:
            raise UsageError("handler(type) takes the message type as a string: @router.handler('order.paid')")

        def register(function: F) -> F:
            if type in self._handlers:
                raise UsageError(f"{type!r} already has the handler {self._handlers[type].name!r}")
            self._handlers[type] = handler_of(
                function, payload=payload, key=key, retry=retry, retention=retention,
                concurrency=concurrency, timeout=timeout, lease=lease,
            )  # fmt: skip
            return function

        return register

    def include(self, other: Router) -> None:
        for type_, handler in other._handlers.items():
            if type_ in self._handlers:
                raise UsageError(f"{type_!r} has two handlers: {self._handlers[type_].name!r} and {handler.name!r}")
            self._handlers[type_] = handler

    def find(self, type: str) -> Handler | None:  # noqa: A002
        return self._handlers.get(type)


def handler_of(
    function: Callable[..., Any],
    *,
    payload: Any = None,
    key: KeyLike | None = None,
    retry: RetryPolicy | None = None,
    retention: timedelta | None = None,
    concurrency: int | None = None,
    timeout: float | None = None,
    lease: float | None = None,
) -> Handler:
    shape = shape_of(function)
    model = payload if payload is not None else shape.payload
    if retention is not None:
        check_retention(retention)
    if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
        raise UsageError(f"concurrency={concurrency!r}: it is a number of runs, at least 1, or left away")
    for name, value in (("timeout", timeout), ("lease", lease)):
        if value is not None and (type(value) not in (int, float) or not 0 < value < math.inf):
            raise UsageError(f"{name}={value!r}: it is a number of seconds, above 0, or left away")
    if retry is not None and not isinstance(retry, RetryPolicy):
        raise UsageError(f"retry={retry!r}: it is a RetryPolicy, such as RetryPolicy(max_attempts=5)")
    if lease is None and shape.wants_lease:
        raise InvalidHandler(
            f"{shape.name} wants a lease: register it with lease=, in seconds, or call its parameter tx"
        )
    found = None if key is None else keys.of(key)
    return Handler(function, shape, model, found, retry, retention, concurrency, timeout, lease)


# A bound method is a new object at each access, but the function behind it is not.
_functions: WeakKeyDictionary[Any, Shape] = WeakKeyDictionary()
_methods: WeakKeyDictionary[Any, Shape] = WeakKeyDictionary()


def shape_of(function: Callable[..., Any]) -> Shape:
    """Cached: looking at a signature costs more than a duplicate."""
    bound = inspect.ismethod(function)
    cache, seen = (_methods, getattr(function, "__func__", function)) if bound else (_functions, function)
    try:
        found = cache.get(seen)
        if found is None:
            found = cache[seen] = _look(function)
    except TypeError:  # not hashable, or not weakly referable
        return _look(function)
    return found


def _look(function: Callable[..., Any]) -> Shape:
    if not callable(function):
        raise InvalidHandler(f"{function!r} is not callable; a handler is a function (message) or (message, tx)")
    name = name_of(function)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise InvalidHandler(f"the signature of {name} cannot be read: {error}") from error
    hints = _hints(function)
    first = next(iter(signature.parameters), "")
    wanted = hints.get(first)
    item = _payload_type(_item_of(wanted))
    names = list(signature.parameters)
    wants_lease = len(names) > 1 and names[1] == "lease"
    return Shape(name, _wants_tx(name, signature), _payload_type(wanted), result_type(function), item, wants_lease)


def name_of(function: Callable[..., Any]) -> str:
    plain = function.func if isinstance(function, functools.partial) else function
    qualified = getattr(plain, "__qualname__", type(plain).__qualname__)
    return f"{getattr(plain, '__module__', '?')}.{qualified}"


def _wants_tx(name: str, signature: inspect.Signature) -> bool:
    positional = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    keyword_only = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
    if keyword_only or len(required) > 2 or (not positional and not takes_any):
        raise InvalidHandler(
            f"{name}{signature} cannot be called as handler(message) or handler(message, tx). "
            "Wrap it in functools.partial or a small function."
        )
    second = positional[1] if len(positional) > 1 else None
    return len(required) == 2 or (second is not None and second.name == "tx") or (takes_any and second is None)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    plain = function.func if isinstance(function, functools.partial) else function
    if not inspect.isroutine(plain):
        plain = getattr(plain, "__call__", plain)  # noqa: B004 - an object that is called
    try:
        return typing.get_type_hints(plain)
    except Exception:  # noqa: BLE001 - names that exist only for type checkers
        return {}


def _payload_type(annotation: Any) -> Any:
    """P of Message[P], where P is a model and not just Any or a plain container."""
    if typing.get_origin(annotation) is Message:
        (payload,) = typing.get_args(annotation)
        return payload if _is_model(payload) else None
    return None


class BulkHandler(msgspec.Struct, frozen=True):
    """A function (messages, tx) or (messages), which gets a list and gives None or a list of results."""

    function: Callable[..., Any]
    shape: Shape

    async def run(self, messages: list[Message[Any]], tx: Any) -> Sequence[Any]:
        given = self.function(messages, tx) if self.shape.wants_tx else self.function(messages)
        size = len(messages)
        results = await given if inspect.isawaitable(given) else given
        if results is None:
            return (None,) * size
        if not isinstance(results, (list, tuple)) or len(results) != size:
            told = f"{len(results)} results" if isinstance(results, (list, tuple)) else type(results).__name__
            raise ResultInvalid(f"{self.shape.name} got {size} messages and gave {told}; give None, or one for each")
        return results

    async def run_one(self, message: Message[Any], tx: Any) -> Any:
        token = enter(BulkRun(self.shape.name))
        try:
            return (await self.run([message], tx))[0]
        finally:
            leave(token)

    def of_one(self, registered: Handler | None) -> Handler:
        """As a handler of single messages, with what is registered for their type: key, retries and retention."""
        shape = Shape(self.shape.name, wants_tx=True, payload=self.shape.payload, result=self.shape.result)
        if registered is None:
            return Handler(self.run_one, shape, shape.payload)
        return Handler(self.run_one, shape, shape.payload, registered.key, registered.retry, registered.retention)


def bulk_handler_of(function: Callable[..., Any]) -> BulkHandler:
    shape = shape_of(function)
    return BulkHandler(function, Shape(shape.name, shape.wants_tx, shape.item, _item_of(shape.result)))


def _item_of(annotation: Any) -> Any:
    """X of list[X], also of `list[X] | None`."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next((one for one in typing.get_args(annotation) if one is not type(None)), None)
    if typing.get_origin(annotation) in (list, tuple, Sequence):
        return next((one for one in typing.get_args(annotation) if one is not Any), None)
    return None


def result_type(function: Callable[..., Any]) -> Any:
    """The annotated return type, or None where it says nothing that could be restored."""
    annotation = _hints(function).get("return")
    return None if annotation in (None, type(None), Any) or isinstance(annotation, TypeVar) else annotation


def _is_model(annotation: Any) -> bool:
    return (
        hasattr(annotation, "model_validate")
        or hasattr(annotation, "__struct_fields__")
        or hasattr(annotation, "__dataclass_fields__")
        or typing.is_typeddict(annotation)
    )
