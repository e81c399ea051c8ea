"""Arrays as PostgreSQL writes them, for statements that take a column of many rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

_QUOTED = str.maketrans({"\\": "\\\\", '"': '\\"'})


def array(values: Sequence[Any]) -> str | None:
    """Texts, numbers and times. None where there is nothing in it."""
    first, number = values[0] if values else None, len(values)
    if (first is None or type(first) in (str, float)) and values.count(first) == number:  # all the same, or none
        return None if first is None else f"{{{','.join([_item(first)] * number)}}}"
    if type(first) is str and None not in values:  # all at once, where nothing needs an escape
        texts = '","'.join(values)
        if texts.count('"') == 2 * number - 2 and "\\" not in texts:
            return f'{{"{texts}"}}'
    return f"{{{','.join([_item(value) for value in values])}}}"


def _item(value: Any) -> str:
    if value is None:
        return "NULL"
    if type(value) is not str:
        return f'"{value.isoformat()}"' if isinstance(value, datetime) else str(value)
    return f'"{value}"' if "\\" not in value and '"' not in value else f'"{value.translate(_QUOTED)}"'
