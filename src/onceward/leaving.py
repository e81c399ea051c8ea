"""How a block was left: Python tells a context manager of an error, and not of a `break` or a `return`.

Those say, in the block of `async with work`, that the caller is done with the loop and not with the message; so the
message must be undone. The compiler writes a call of `__aexit__` for each way out of a block, and behind one that
leaves the loop it drops the loop's iterator. That is looked up here, in the code of the caller, once for each place.
What is not understood is taken for the ordinary end of the block.
"""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType, FrameType

# What stands between the call of __aexit__ and the place where its result is dropped.
_AWAITING = {
    "CACHE", "GET_AWAITABLE", "LOAD_CONST", "SEND", "YIELD_VALUE", "RESUME", "JUMP_BACKWARD_NO_INTERRUPT", "END_SEND",
    "CLEANUP_THROW", "PRECALL", "CALL",
}  # fmt: skip
_NOTHING = {"NOP", "CACHE", "NOT_TAKEN"}


def leaves_loop(caller: FrameType) -> bool:
    """Asked by a plain function `__aexit__`, with the frame that called it."""
    return _leaves_loop(caller.f_code, caller.f_lasti)


@lru_cache(maxsize=1024)
def _leaves_loop(code: CodeType, at: int) -> bool:
    steps = [one for one in dis.get_instructions(code) if one.opname not in _NOTHING]
    place = next((n for n, one in enumerate(steps) if one.offset == at), None)
    if place is None:
        return False
    lines = {_line(steps[place]), None}
    while True:
        place = _after_exit(steps, place)
        if place is None:
            return False
        following = steps[place]
        if following.opname == "SWAP":  # below what is returned
            following = steps[place + 1]
        if following.opname in {"POP_TOP", "POP_ITER"}:  # the iterator; a `break` after the block has its own line
            return _line(following) in lines
        if not _is_exit(steps, place):  # of a block around ours
            return False
        lines.add(_line(steps[place]))
        place += 3


def _after_exit(steps: list[dis.Instruction], place: int) -> int | None:
    """Where it goes on after a call of __exit__ or __aexit__."""
    for n in range(place, len(steps)):
        if steps[n].opname == "POP_TOP":
            return n + 1 if n + 1 < len(steps) else None
        if steps[n].opname not in _AWAITING:
            return None
    return None


def _is_exit(steps: list[dis.Instruction], place: int) -> bool:
    """None, None, None, call."""
    nones = steps[place : place + 3]
    return len(nones) == 3 and all(one.opname == "LOAD_CONST" and one.argval is None for one in nones)


def _line(step: dis.Instruction) -> int | None:
    return step.positions.lineno if step.positions is not None else None
