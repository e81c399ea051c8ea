"""`@inbox.idempotent`: any async function, once per key. A call becomes a message, its arguments the payload."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from onceward import codec, keys
from onceward.errors import InvalidHandler, KeyInvalid
from onceward.handlers import Handler, Shape, name_of, result_type
from onceward.message import Message

Run = Callable[[Message[Any], Handler], Awaitable[Any]]


class Idempotent(msgspec.Struct, frozen=True):
    key: str | tuple[str, ...] | Callable[..., str]
    name: str | None = None

    def wrap(self, function: Callable[..., Awaitable[Any]], run: Run) -> Callable[..., Awaitable[Any]]:
        if not inspect.iscoroutinefunction(function):
            raise InvalidHandler(f"{name_of(function)} is not an async function, which @inbox.idempotent needs")
        signature = inspect.signature(function)
        visible = signature.replace(parameters=[p for n, p in signature.parameters.items() if n != "tx"])
        name = self.name or name_of(function)
        self._check(name, visible)
        shape = Shape(name, wants_tx=True, result=result_type(function))
        key = keys.Key(f"idempotent({name})", lambda message: message.id, lambda _message: f"name:{name}")

        @functools.wraps(function)
        async def once(*args: Any, **kwargs: Any) -> Any:
            bound = visible.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = {n: v for n, v in bound.arguments.items() if n not in ("self", "cls")}

            async def call(_message: Message[Any], tx: Any) -> Any:
                given = {n: tx if n == "tx" else bound.arguments[n] for n in signature.parameters}
                full = inspect.BoundArguments(signature, given)
                return await function(*full.args, **full.kwargs)

            message = Message(id=self._key_of(arguments), type=name, payload=arguments)
            return await run(message, Handler(call, shape, None, key))

        once.__signature__ = visible  # type: ignore[attr-defined]
        return once

    def _names(self) -> tuple[str, ...]:
        if callable(self.key):
            return ()
        return (self.key,) if isinstance(self.key, str) else self.key

    def _check(self, name: str, visible: inspect.Signature) -> None:
        for path in self._names():
            first = path.split(".")[0]
            if first not in visible.parameters or first in ("self", "cls"):
                raise KeyInvalid(f"key={path!r} is not an argument of {name}{visible}")

    def _key_of(self, arguments: dict[str, Any]) -> str:
        if callable(self.key):
            return keys.check(self.key(**arguments))
        values = [keys.scalar(keys.walk(arguments, path.split(".")), path) for path in self._names()]
        return codec.encode(values[0] if isinstance(self.key, str) else values, "key").decode()
