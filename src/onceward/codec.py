"""JSON in and out, and the few ways in which a value is refused.

msgspec does the work; pydantic models pass through hooks, without importing pydantic. msgspec writes NaN as
null, which would let two different payloads look the same, so NaN is looked for and refused.
"""

from __future__ import annotations

import math
from typing import Any, is_typeddict

import msgspec

from onceward.errors import OncewardError, PayloadInvalid


def _encode_other(value: Any) -> Any:
    """What msgspec does not know: pydantic models, and anything else that can show itself as a dict."""
    dump = getattr(value, "model_dump", None)
    if dump is not None:
        return dump(mode="json")
    raise NotImplementedError(type(value).__qualname__)


def _decode_other(wanted: Any, value: Any) -> Any:
    validate = getattr(wanted, "model_validate", None)
    if validate is not None:
        return validate(value)
    raise NotImplementedError(getattr(wanted, "__qualname__", repr(wanted)))


_sorted = msgspec.json.Encoder(enc_hook=_encode_other, order="sorted")


def encode(value: Any, what: str = "payload", refuse: type[OncewardError] = PayloadInvalid) -> bytes:
    """Sorted-key JSON of any JSON value or model; `refuse` is raised for what cannot be written faithfully."""
    try:
        encoded = _sorted.encode(value)
    except RecursionError as error:
        raise refuse(f"the {what} is nested too deeply to be written as JSON") from error
    except UnicodeEncodeError as error:
        raise refuse(f"the {what} contains a lone surrogate: {error}") from error
    except (NotImplementedError, TypeError, ValueError, OverflowError) as error:
        raise refuse(
            f"the {what} cannot be written as JSON ({error}); use JSON values, dataclasses, msgspec or pydantic models"
        ) from error
    if b"null" in encoded and _has_nan(value):
        raise refuse(f"the {what} contains NaN or Infinity, which JSON cannot hold; use null or a string")
    return encoded


def _has_nan(value: Any) -> bool:
    """Only called when the JSON contains null, which is how msgspec writes NaN."""
    todo = [msgspec.to_builtins(value, enc_hook=_encode_other)]
    while todo:
        one = todo.pop()
        if isinstance(one, float) and not math.isfinite(one):
            return True
        if isinstance(one, dict):
            todo.extend(one.values())
        elif isinstance(one, (list, tuple, set, frozenset)):
            todo.extend(one)
    return False


def decode(data: bytes | str) -> Any:
    """Any JSON value; PayloadInvalid when it is not JSON."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, UnicodeEncodeError) as error:
        raise PayloadInvalid(f"not valid JSON: {error}") from error
    except RecursionError as error:
        raise PayloadInvalid("not valid JSON: nested too deeply") from error


def convert(value: Any, wanted: Any) -> Any:
    """A JSON value as the wanted type. Raises whatever msgspec or the model says does not fit."""
    if isinstance(wanted, type) and not is_typeddict(wanted) and isinstance(value, wanted):
        return value
    return msgspec.convert(value, wanted, dec_hook=_decode_other, strict=False)


def printable(text: str, limit: int = 4000) -> str:
    """Text that any database and any log line can hold: no control characters, no surrogates, bounded."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"
