"""Tenant strategies: whose message it is. The tenant is part of every identity.

A strategy is a fixed value, `header(name)`, a ContextVar or any function of the message. An inbox that has one
raises TenantMissing where it finds nothing. An inbox without takes `message.tenant`, else `default`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeAlias

from onceward.errors import InvalidMessage, TenantMissing
from onceward.message import Message, check_text

DEFAULT = "default"

Tenant: TypeAlias = Callable[[Message[Any]], "str | None"]
TenantLike: TypeAlias = "str | ContextVar[str] | ContextVar[str | None] | Tenant"


def of(strategy: TenantLike | None) -> Callable[[Message[Any]], str]:
    """One function for every kind of strategy; it gives a tenant or raises TenantMissing."""
    if strategy is None:
        return lambda message: message.tenant or DEFAULT
    if isinstance(strategy, str):
        fixed = check_text("tenant", strategy)
        return lambda _message: fixed
    if isinstance(strategy, ContextVar):
        variable = strategy
        return lambda message: _required(variable.get(None), message, f"the context variable {variable.name!r}")
    if not callable(strategy):
        raise InvalidMessage(f"tenant= takes a string, a ContextVar or a function, not {strategy!r}")
    function = strategy
    return lambda message: _required(function(message), message, getattr(function, "__qualname__", "the strategy"))


def header(name: str) -> Tenant:
    """From a header, whatever the case of its name."""

    def header_tenant(message: Message[Any]) -> str | None:
        for found, value in message.headers.items():
            if found.lower() == name.lower():
                return value.decode() if isinstance(value, bytes) else value
        return None

    header_tenant.__qualname__ = f"header({name})"
    return header_tenant


def _required(tenant: object, message: Message[Any], where: str) -> str:
    if tenant is None or tenant == "":
        raise TenantMissing(f"message {message.id!r} of type {message.type!r} has no tenant ({where} gave none)")
    return check_text("tenant", tenant)
