"""The scripts: each is a file in `lua/`, behind `record.lua` or `ages.lua`, and known to the server by its hash."""

from __future__ import annotations

from hashlib import sha1
from importlib import resources
from typing import NamedTuple

_FOLDER = resources.files("onceward.redis") / "lua"
_RECORD = (_FOLDER / "record.lua").read_text()
_AGES = (_FOLDER / "ages.lua").read_text()


class Script(NamedTuple):
    name: str
    text: str
    sha: str


def _load(name: str, front: str = _RECORD) -> Script:
    text = f"{front}\n{(_FOLDER / f'{name}.lua').read_text()}"
    return Script(name, text, sha1(text.encode(), usedforsecurity=False).hexdigest())


CLAIM = _load("claim")
TAKE = _load("take")
HEARTBEAT = _load("heartbeat")
COMPLETE = _load("complete")
FAIL = _load("fail")
RELEASE = _load("release")
EXPLAIN = _load("explain")
DISCARD = _load("discard")
LOOK = _load("look")
SCAN = _load("scan", _AGES)
COUNT = _load("count", _RECORD + _AGES)
SWEEP = _load("sweep", _AGES)
NAMES = _load("names", "")
